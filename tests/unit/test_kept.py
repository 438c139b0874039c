"""A process whose job is built again keeps frozen reward models, text encoders and embeddings, and no others do."""

from pathlib import Path

import pytest
import torch

from phalanx import kept
from phalanx.config.flow import FlowRewardFunctionConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow import family
from phalanx.models.flow.embeds import EmbedsCache
from phalanx.models.flow.policy import load_family
from phalanx.models.flow.registry import family_of
from phalanx.rewards.registry import build_terms

REWARD = """
from pathlib import Path

from phalanx.rewards.base import DeviceReward


class Model(DeviceReward):
    def __init__(self, device: str, size: int = 1) -> None:
        with Path(__file__).with_name("loads").open("a") as file:
            file.write(f"{size} ")

    def __call__(self, images, prompts, metadata):
        return [0.0] * len(images)
"""


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_parts", {})
    monkeypatch.setattr(kept, "_keeps", False)
    kept.keep()


def reward_loads(folder: Path) -> list[str]:
    """The arguments of each time that the models of a job with two rewards were loaded, in two builds of the job."""
    path = folder / "reward.py"
    path.write_text(REWARD)
    sizes = {"size": 1}, {"size": 2}
    entries = []
    for name, kwargs in zip("ab", sizes, strict=True):
        entries.append(FlowRewardFunctionConfig(name=name, path=f"{path}:Model", kwargs=kwargs))
    first, second = build_terms(entries, "cpu"), build_terms(entries, "cpu")
    assert first[0].function is not first[1].function and second[0].function is not second[1].function
    return (folder / "loads").read_text().split()


def test_a_reward_model_is_loaded_once(keeps: None, tmp_path: Path) -> None:
    assert reward_loads(tmp_path) == ["1", "2"]


def test_other_processes_load_again(tmp_path: Path) -> None:
    assert reward_loads(tmp_path) == ["1", "2", "1", "2"]


def test_a_text_encoder_is_loaded_once(keeps: None, sd3_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, load = [], family.load_text_encoder
    monkeypatch.setattr(family, "load_text_encoder", lambda *args: loads.append(args[1]) or load(*args))
    config = FlowModelConfig(path=str(sd3_folder), dtype="float32")
    first, second = (load_family(family_of(config), config, torch.float32, torch.float32) for _ in range(2))
    assert first.text_encoders and first.text_encoders == second.text_encoders
    assert len(loads) == len(set(loads)) == len(first.text_encoders)
    assert first.transformer is not second.transformer
    load_family(family_of(config), config, torch.bfloat16, torch.float32)
    assert len(loads) == 2 * len(first.text_encoders), "another dtype"


def test_embeddings_are_computed_once(keeps: None) -> None:
    calls: list[str] = []

    def encode(texts: list[str]) -> list[dict[str, torch.Tensor]]:
        calls.extend(texts)
        return [{"prompt_embeds": torch.full((1, 2), float(len(text)))} for text in texts]

    for identity in ("a", "a", "b"):
        (embeds,) = EmbedsCache(encode, identity, None)(["words"])
        assert embeds["prompt_embeds"].tolist() == [[5.0, 5.0]]
    assert calls == ["words"] * 2
    assert EmbedsCache(encode, "a", None)._bytes == 8
