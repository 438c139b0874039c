"""Plans for tests, and parts of their output."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.run.rules import load_config
from phalanx.tools.plan import text
from phalanx.tools.plan.blueprint import family_name
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import Memory, Phase, count
from phalanx.tools.plan.rehearsal import Rehearsal
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import ROOT, launch_environment

QUICKSTART = str(ROOT / "configs" / "flowgrpo" / "quickstart.yaml")
GB = 10**9
ONE = Cluster(1, 1)


def plan_of(cfg: FlowRunConfig, cluster: Cluster = ONE) -> Rehearsal:
    cfg.model.family = family_name(cfg.model)
    return planned(cfg, cluster)


def memory_of(cfg: FlowRunConfig, gpu: int | None = None) -> Memory:
    return count(plan_of(cfg, Cluster(1, 4)), gpu)


def describe(plan: Rehearsal, gpu_memory: int | None = None) -> str:
    """The text of a job whose ranks all do everything."""
    return text.describe(plan.policy.layout.cluster, [plan], gpu_memory)


def phases_of(memory: Memory) -> dict[str, Phase]:
    return {phase.name: phase for phase in memory.phases}


def section(text: str, title: str) -> list[str]:
    """The lines of the section below `title`."""
    (found,) = [part.split("\n") for part in text.split("\n\n") if part.startswith(title)]
    return [line.strip() for line in found[1:]]


def quickstart(*overrides: str) -> FlowRLConfig:
    return load_config(FlowRLConfig, QUICKSTART, [f"model.path={ROOT / 'assets' / 'digits' / 'base'}", *overrides])


def judged(sd3_folder: Path, folder: Path, judge: Path | str, *keys: str) -> FlowRLConfig:
    model = [f"reward.model.path={judge}", "reward.model.tensor_parallel_size=2"]
    return tiny_config(sd3_folder, folder / "job", *model, *keys)


def described(cfg: FlowRLConfig, gpu: int | None = None) -> str:
    return describe(plan_of(cfg, Cluster(1, 4)), gpu)


def flow_matching_config(model: Path, *overrides: str) -> FlowMatchingTaskConfig:
    keys = ["data.train_files=[pictures.jsonl]", "data.train_batch_size=64", "rollout.height=32", "rollout.width=32"]
    return load_config(
        FlowMatchingTaskConfig, None, [f"model.path={model}", *keys, "trainer.total_epochs=2", *overrides]
    )


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def run(*words: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=launch_environment(env), capture_output=True, text=True, timeout=120, check=False
    )
