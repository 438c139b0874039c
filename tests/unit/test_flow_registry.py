"""Families of models by the pipelines of diffusers."""

import sys

import diffusers
import pytest

from phalanx.models.flow.registry import FAMILIES, families, known_family


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
