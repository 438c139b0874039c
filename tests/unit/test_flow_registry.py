"""Families of models by the pipelines of diffusers."""

import sys

import diffusers
import pytest

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.registry import FAMILIES, families, family_of, known_family
from tests.helpers.checks import refused


def test_a_family_that_is_newer_than_diffusers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"qwen_image", "qwen_image_21"} <= families().keys()
    name = "QwenImage21Transformer2DModel"
    monkeypatch.delitem(diffusers._class_to_module, name)
    monkeypatch.delitem(vars(diffusers), name, raising=False)
    monkeypatch.delitem(sys.modules, f"{FAMILIES}.qwen_image_21")
    assert "qwen_image" in families() and "qwen_image_21" not in families()


def test_a_pipeline_that_diffusers_lacks_is_told() -> None:
    with pytest.raises(ValueError) as error:
        known_family("folder", {"_class_name": "TomorrowPipeline"})
    version = diffusers.__version__
    begin = (
        f"model.path: 'folder' is a TomorrowPipeline, which diffusers {version} does not have; supported: Flux2Klein"
    )
    assert str(error.value).startswith(begin)


@pytest.mark.parametrize("family", ["wan", "ltx2"])
def test_a_family_that_is_not_the_folders_is_told(family: str) -> None:
    base = "assets/digits/base"
    assert family_of(FlowModelConfig(path=base, family="sd3")) is family_of(FlowModelConfig(path=base))
    message = f"{family} has no SD3Transformer2DModel, which {base!r} has; leave it out, or name another"
    with refused(f"model.family: {message}"):
        family_of(FlowModelConfig(path=base, family=family))
