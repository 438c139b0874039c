"""What a training job would be on a cluster: its groups, batches, memory and messages. `--plan` prints it.

No GPU, no process group and no weights are needed: the arithmetic is the job's own, and memory is counted on tensors
that are but shapes (torch's meta device).
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from phalanx.cli import PLAN_SECONDS
from phalanx.config import ConfigError
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.config.lm import LMRLConfig, LMRunConfig
from phalanx.config.run import RLConfig
from phalanx.plan.blueprint import family_name, fetch, tidy
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.lm import FILES
from phalanx.plan.pace import Gpu
from phalanx.plan.roles import describe_roles
from phalanx.plan.schedules import given_seconds, schedules
from phalanx.plan.split import Split
from phalanx.plan.tables import listed
from phalanx.plan.text import describe, roles_on, sizes
from phalanx.telemetry.flops import known_gpus, named_peak_flops
from phalanx.training import block_diffusion, flow_matching, flow_rl, lm_rl


@tidy()
def plan_job(cfg: FlowRunConfig | LMRunConfig, words: Mapping[str, str]) -> str:
    """The plan as text. `words` may hold nnodes, nproc_per_node (or nproc), gpu, gpu_memory_gb, gpu_hour_price and the
    seconds of phases; what is missing comes from train.sh's variables, and from the GPU that is here.

    Of several sizes the largest that works is described. Raises ValueError, with one line, where the job itself would
    be refused, or the model folder cannot be read.
    """
    asked, gpu = clusters(words, os.environ), gpu_of(words)
    cfg = deepcopy(cfg)
    cfg.trainer.output_dir = "."  # that of the cluster need not be here
    if isinstance(cfg, LMRunConfig):
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision, FILES)
    else:
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision)
        cfg.model.family = family_name(cfg.model)
    refused: dict[Cluster, str] = {}
    for cluster in asked:
        try:
            check(cfg, cluster)
        except ConfigError as error:
            refused[cluster] = str(error)
    if len(refused) == len(asked):
        none = f"no number of nodes from {asked[0].nodes} to {asked[-1].nodes} works: " if len(asked) > 1 else ""
        raise ConfigError(none + refused[asked[0]])
    largest = [cluster for cluster in asked if cluster not in refused][-1]
    text = _described(cfg, largest, gpu, words)
    return text if len(asked) == 1 else f"{sizes(cfg, asked, refused)}\n\n{text}"


def _described(cfg: FlowRunConfig | LMRunConfig, cluster: Cluster, gpu: Gpu, words: Mapping[str, str]) -> str:
    """The plan of one size."""
    roles = roles_on(cfg, cluster)
    numbers = {
        name: _number(name, words, "seconds of the phase if all ranks did it, such as 30") for name in PLAN_SECONDS
    }
    given = given_seconds({name: number for name, number in numbers.items() if number is not None}, cfg, roles)

    def refusal(schedule: str, split: Split) -> str | None:
        assert isinstance(cfg, LMRLConfig | FlowRLConfig), "only samples are drawn elsewhere"
        staleness = max(cfg.rollout.max_staleness, schedule == "one_step_off")
        rollout: Any = replace(cfg.rollout, schedule=schedule, max_staleness=staleness)
        placement = {role: f"{ranks} ranks" for role, ranks in split.items()}
        try:
            with patch.dict(os.environ, NNODES=""):  # what an elastic job may become is not asked
                check(replace(cfg, rollout=rollout, placement=placement), cluster)
        except ConfigError as error:
            return str(error)
        return None

    if not roles.collocated:
        assert isinstance(cfg, RLConfig), "only samples are drawn elsewhere"
        return describe_roles(cfg, cluster, roles, gpu, given, refusal)
    text = describe(planned(cfg, cluster), gpu)
    if given is not None:
        assert isinstance(cfg, RLConfig), "given_seconds looks"
        title, rows = schedules(cfg, roles, given, refusal, gpu)
        text = "\n".join([text, "", title, *listed(rows)])
    return text


def clusters(words: Mapping[str, str], env: Mapping[str, str]) -> list[Cluster]:
    """The sizes to plan: one, or each of a range of nodes such as 2:4. Raises ConfigError for what is no number."""
    given = {"NNODES": env.get("NNODES", "1"), "NPROC_PER_NODE": env.get("NPROC_PER_NODE", "1"), **words}
    name = "nnodes" if "nnodes" in words else "NNODES"
    first, _, last = given[name].partition(":")
    last = last or first
    if not (_positive(first) and _positive(last) and int(first) <= int(last)):
        raise ConfigError(f"{name}={given[name]}: expected a whole number such as 4, or a range such as 2:4")
    name = next(key for key in ("nproc_per_node", "nproc", "NPROC_PER_NODE") if key in given)
    if not _positive(given[name]):
        raise ConfigError(f"{name}={given[name]}: expected a whole number, such as 8")
    return [Cluster(nodes, int(given[name])) for nodes in range(int(first), int(last) + 1)]


def _positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


def gpu_of(words: Mapping[str, str]) -> Gpu:
    """The GPU to plan for: the one that `words` name, or the one that is here. Its memory and price may be among them.

    Raises ConfigError for a word that cannot be used.
    """
    name = words.get("gpu")
    if name is not None and named_peak_flops(name, torch.bfloat16) is None:
        raise ConfigError(f"gpu={name}: expected a name with one of {', '.join(known_gpus())} in it")
    size = _number("gpu_memory_gb", words, "GB (10^9 bytes) of a GPU, such as 80")
    price = _number("gpu_hour_price", words, "the price of a GPU for an hour, such as 2.5")
    memory = None if size is None else int(size * 1e9)
    if name is None and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        name, memory = found.name, memory or found.total_memory
    return Gpu(name, memory, price)


def _number(name: str, words: Mapping[str, str], expected: str) -> float | None:
    """A word that is a number above 0; None without it."""
    if name not in words:
        return None
    text = words[name]
    if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
        raise ConfigError(f"{name}={text}: expected {expected}")
    return float(text)


def check(cfg: FlowRunConfig | LMRunConfig, cluster: Cluster) -> None:
    """What the job itself checks before it starts, on this cluster; raises its ConfigError."""
    with patch.dict(os.environ, WORLD_SIZE=str(cluster.ranks), LOCAL_WORLD_SIZE=str(cluster.per_node)):
        if isinstance(cfg, LMRLConfig):
            lm_rl.check(cfg, installed=False)
        elif isinstance(cfg, FlowRLConfig):
            flow_rl.check(cfg)
        elif isinstance(cfg, BlockDiffusionTaskConfig):
            block_diffusion.check(cfg)
        else:
            assert isinstance(cfg, FlowMatchingTaskConfig)
            flow_matching.check(cfg)
