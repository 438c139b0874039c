"""Sections of a configuration know their dotted names, which are no part of their values."""

import copy
import inspect
import pickle
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.joint import JointConfig
from phalanx.config.load import load, save
from phalanx.config.run import OptimConfig
from phalanx.config.section import copy_with, reported_by
from phalanx.types import JobError


def joint() -> JointConfig:
    return load(JointConfig, None, ["writer.model.path=x", "painter.model.path=y", "writer.optim.lr=0.5"])


def test_a_section_knows_its_dotted_name() -> None:
    cfg = joint()
    writer, painter = cfg.of_writer(), cfg.of_painter()
    assert f"{writer.optim:lr} {painter.optim:lr} {OptimConfig():lr}" == "writer.optim.lr painter.optim.lr optim.lr"
    assert f"{writer.optim:lr=} {writer.optim:lr:}" == "writer.optim.lr=0.5 writer.optim.lr: 0.5"
    assert f"{painter.rollout.val:n} {painter.model:.rollout.n}" == "painter.rollout.val.n painter.rollout.n"
    assert f"{painter.data:max_prompt_length} {painter.data:seed}" == "data.max_rewrite_length data.seed"
    assert f"{writer.optim}" == str(writer.optim)


def test_a_name_is_no_part_of_the_value(tmp_path: Path) -> None:
    """It survives copies, and neither files, comparisons nor signatures have it."""
    cfg = joint()
    section = cfg.of_writer().optim
    for other in (copy.copy(section), copy.deepcopy(section), pickle.loads(pickle.dumps(section))):
        assert f"{other:lr}" == "writer.optim.lr" and other == section
    assert f"{copy_with(section, lr=1.0):lr=}" == "writer.optim.lr=1.0"
    assert section == OptimConfig(lr=0.5) and repr(section) == repr(OptimConfig(lr=0.5))
    assert vars(section) == vars(OptimConfig(lr=0.5))
    assert [*inspect.signature(OptimConfig).parameters] == [field.name for field in fields(OptimConfig)]
    save(cfg, tmp_path / "config.yaml")
    assert load(JointConfig, str(tmp_path / "config.yaml"), []).writer.optim == section
    assert "_names" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ("model.path: '/model.b/c': no such folder", "painter.model.path: '/model.b/c': no such folder"),
        ("data.max_prompt_length: 3 is short", "data.max_rewrite_length: 3 is short"),
        ("painter.model.path: x", "painter.model.path: x"),
        ("reward.functions: none", "reward.functions: none"),
        ("see model.path: x", "see model.path: x"),
        ("no key", "no key"),
    ],
)
def test_an_error_begins_with_the_name_in_its_sections(message: str, reported: str) -> None:
    """Values in a message, such as paths, are as the user wrote them."""
    sections = vars(joint().of_painter())
    with pytest.raises(ConfigError) as error, reported_by(sections):
        raise ValueError(message)
    assert str(error.value) == reported
    with pytest.raises(JobError, match=r"^painter\.optim\.lr: a$"), reported_by(sections, JobError, JobError):
        raise JobError("optim.lr: a")
