"""Values from the environment in a configuration reach the job, but no file, log or tracker."""

import hashlib
from pathlib import Path

import pytest

from phalanx.config.flow import FlowRLConfig
from phalanx.config.load import save
from phalanx.config.secrets import public
from phalanx.run.rules import load_config
from tests.faults.jobs import Job
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import run_ranks

SECRET = "s3cret-of-the-test"
REWARD = """
import hashlib

def needs_key(images, prompts, metadata, key):
    assert hashlib.sha256(key.encode()).hexdigest() == {digest!r}, "another key"
    return [float(i) for i in range(len(images))]
"""


@pytest.mark.quick("'${oc.create:\"{key: Bearer ${oc.env:PHALANX_TEST_KEY}}\"}'")
@pytest.mark.parametrize(
    "kwargs",
    ["{key: 'Bearer ${oc.env:PHALANX_TEST_KEY}'}", "'${oc.create:\"{key: Bearer ${oc.env:PHALANX_TEST_KEY}}\"}'"],
)
def test_no_output_of_a_run_holds_a_secret(
    kwargs: str, sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_TEST_KEY", SECRET)
    monkeypatch.setenv("WANDB_MODE", "offline")
    digest = hashlib.sha256(f"Bearer {SECRET}".encode()).hexdigest()
    (tmp_path / "reward.py").write_text(REWARD.format(digest=digest))
    function = f"{{path: '{tmp_path}/reward.py:needs_key', kwargs: {kwargs}}}"
    steps = ("trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.logger=[console,tensorboard,wandb]")
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *steps, f"reward.functions=[{function}]"))
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl"} <= {file.name for file in files}
    assert any("tfevents" in file.name for file in files) and any(file.suffix == ".wandb" for file in files)
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file
    assert "Bearer ${oc.env:PHALANX_TEST_KEY}" in (tmp_path / "out" / "config.yaml").read_text()


LEAKS = """
def leaks(completions, prompts, metadata, key):
    raise ValueError(f"no such server: https://me:{key}@host")
"""


@pytest.mark.full
def test_the_error_of_a_reward_holds_no_secret(lm_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "leaks.py").write_text(LEAKS)
    reward = (
        f"reward.functions=[{{path: '{tmp_path}/leaks.py:leaks', kwargs: {{key: '${{oc.env:PHALANX_TEST_KEY}}'}}}}]"
    )
    env = {"PHALANX_TEST_KEY": SECRET, "PHALANX_TRACEBACK": "1"}
    with Job(lm_folder, tmp_path, reward, env=env, lm=True) as job:
        assert job.wait() == 1
        printed = job.said
    assert "https://me:${oc.env:PHALANX_TEST_KEY}@host" in printed
    assert SECRET not in printed


def test_references_are_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TEST_KEY", SECRET)
    overrides = [
        "trainer.project_name=${oc.env:PHALANX_TEST_KEY}",
        "trainer.experiment_name=a ${trainer.project_name}",
        "trainer.output_dir=out/${model.path}",
        "model.path=base",
    ]
    cfg = load_config(FlowRLConfig, None, overrides)
    assert cfg.trainer.experiment_name == f"a {SECRET}"
    shown = public(cfg)["trainer"]
    assert shown["project_name"] == "${oc.env:PHALANX_TEST_KEY}"
    assert shown["experiment_name"] == "a ${trainer.project_name}"
    assert shown["output_dir"] == "out/base"  # nothing to hide
    save(cfg, tmp_path / "config.yaml")
    assert load_config(FlowRLConfig, str(tmp_path / "config.yaml"), []) == cfg
