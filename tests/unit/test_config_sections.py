"""Sections that a job need not have, and keys that have moved into them."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from phalanx.config import ConfigError, save
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRLConfig, LMRunConfig, PartialRolloutConfig
from phalanx.config.load import load
from phalanx.config.sources import changed
from phalanx.config.tasks import read_run

OLD = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=4", "rollout.over_sampling_batch_size=64")


def partial(*overrides: str) -> PartialRolloutConfig | None:
    return load(LMRLConfig, None, ["model.path=x", *overrides]).rollout.partial_rollout


def test_a_section_is_switched_by_a_word_or_by_its_keys() -> None:
    assert partial() is None
    assert partial("rollout.partial_rollout=true") == PartialRolloutConfig()
    assert partial("rollout.partial_rollout={}") == PartialRolloutConfig()
    assert partial("rollout.partial_rollout.tokens=4") == PartialRolloutConfig(tokens=4)
    assert partial("rollout.partial_rollout.tokens=4", "rollout.partial_rollout=true") == PartialRolloutConfig(tokens=4)
    assert partial("rollout.partial_rollout.tokens=4", "rollout.partial_rollout=false") is None
    given = partial("rollout.partial_rollout={tokens: '${data.train_batch_size}'}")
    assert given == PartialRolloutConfig(tokens=32)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.partial_rollout=3", "rollout.partial_rollout: expected a section, true or false, got 3; its keys: "),
        ("rollout.partial_rollout.tokens=0", "rollout.partial_rollout.tokens: expected at least 1, got 0"),
        ("rollout.partial_rollout.token=1", "unknown key rollout.partial_rollout.token; did you mean rollout.partial_"),
        ("rollout.partial_rollout_tokens=x", "rollout.partial_rollout_tokens: 'x' is now rollout.partial_rollout.tok"),
    ],
)
def test_mistakes_in_a_section(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        partial(override)
    assert str(error.value).startswith(message)


def test_a_section_that_is_none_is_named_beside_old_keys_too() -> None:
    with pytest.raises(ConfigError) as error:
        partial("rollout.partial_rollout=maybe", *OLD[1:])
    assert str(error.value).startswith("rollout.partial_rollout: expected a section, true or false, got 'maybe'; its k")


def test_old_names_are_read_and_answered_with_the_new(caplog: pytest.LogCaptureFixture) -> None:
    assert partial(*OLD) == PartialRolloutConfig(over_sampling_batch_size=64, tokens=4)
    assert sorted(caplog.messages) == [
        "rollout.over_sampling_batch_size is now rollout.partial_rollout.over_sampling_batch_size",
        "rollout.partial_rollout_tokens is now rollout.partial_rollout.tokens",
    ]
    joint = load(JointConfig, None, ["writer.model.path=x", "painter.model.path=y", *(f"writer.{key}" for key in OLD)])
    assert joint.writer.rollout.partial_rollout == PartialRolloutConfig(over_sampling_batch_size=64, tokens=4)


@pytest.mark.parametrize("on", [True, False])
def test_the_saved_configuration_of_an_earlier_version_is_read(
    on: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has all keys under their old names, those of a section that was off at their defaults."""
    file = tmp_path / "config.yaml"
    cfg = load(LMRLConfig, None, ["model.path=x", *(OLD if on else ())])
    save(cfg, file)
    content = OmegaConf.load(file)
    content.rollout.partial_rollout = on
    content.rollout.over_sampling_batch_size = 64 if on else None
    content.rollout.partial_rollout_tokens = 4 if on else 512
    caplog.clear()
    OmegaConf.save(content, file)
    assert load(LMRLConfig, str(file), []) == cfg
    assert read_run(file, LMRunConfig).rollout == cfg.rollout
    assert changed(file, cfg) == []
    assert bool(caplog.messages) is on
