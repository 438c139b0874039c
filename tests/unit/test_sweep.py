"""The runs of a sweep: their settings and names, and keys and values that a sweep cannot have."""

from pathlib import Path

import pytest

from phalanx.config.flow import FlowRLConfig
from phalanx.config.messages import ConfigError
from phalanx.run.rules import load_config

LORA = ("model.path=x", "model.lora_rank=4", "trainer.output_dir=out", "trainer.experiment_name=e")


def test_each_run_has_the_settings_of_its_point(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    # a key of the file that refers to a swept one follows it
    file.write_text("sweep: {optim.lr: [1e-4, 0.01], rollout: {n: [4]}}\nalgorithm: {clip_ratio: '${optim.lr}'}\n")
    cfg = load_config(FlowRLConfig, str(file), [*LORA, "sweep.trainer.seed=[7,8]"])
    assert list(cfg.runs) == [
        "optim.lr=0.0001,rollout.n=4,trainer.seed=7",
        "optim.lr=0.0001,rollout.n=4,trainer.seed=8",
        "optim.lr=0.01,rollout.n=4,trainer.seed=7",
        "optim.lr=0.01,rollout.n=4,trainer.seed=8",
    ]
    for name, run in cfg.runs.items():
        assert name == f"optim.lr={run.optim.lr},rollout.n={run.rollout.n},trainer.seed={run.trainer.seed}"
        assert run.algorithm.clip_ratio == run.optim.lr
        assert (run.trainer.output_dir, run.trainer.experiment_name) == (f"out/{name}", f"e/{name}")
        assert not run.sweep and not run.runs


MISTAKES = {
    "sweep.model.lora_rank=[2,4]": "sweep.model.lora_rank: all runs of a sweep share the model, the ranks and the data",
    "sweep.parallel.fsdp_size=[1]": "sweep.parallel.fsdp_size: all runs of a sweep share the model",
    "sweep.trainer.output_dir=[a,b]": "sweep.trainer.output_dir: all runs of a sweep share the model",
    "sweep.rollout.engine=[policy]": "sweep.rollout.engine: what all runs of a sweep share depends on it",
    "sweep.algorithm.name=[awm]": "sweep.algorithm.name: what all runs of a sweep share depends on it",
    "sweep.optim.lrr=[1]": "sweep: optim.lrr=1: unknown key optim.lrr; did you mean optim.lr?",
    "sweep.optim.lr=[x]": "sweep: optim.lr=\"x\": optim.lr: expected a number, got 'x'",
    "sweep.algorithm.clip_ratio=[0.1,-1]": "sweep: algorithm.clip_ratio=-1: algorithm.clip_ratio: expected more than 0",
    "sweep.optim.lr=[]": "sweep.optim.lr: expected a list of values, got []",
    "sweep.optim.lr=1e-3": "sweep.optim.lr: expected a list of values, got 0.001",
    "sweep=[1]": "sweep: expected a section",
    "sweep.optim.lr=[1e-3,0.001]": "sweep: two runs are named optim.lr=0.001; expected different values",
    f"sweep.trainer.seed={list(range(65))}": "sweep: 65 combinations; expected at most 64",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_one_line(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(FlowRLConfig, None, [*LORA, word])
    assert str(error.value).startswith(MISTAKES[word]) and "\n" not in str(error.value)
