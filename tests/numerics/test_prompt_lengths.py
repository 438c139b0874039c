"""Prompts that are too long for a text encoder are found by token counts that agree with the embeddings."""

import logging
from pathlib import Path

import pytest
import torch

from phalanx.config.flow import FlowDataConfig, FlowRunConfig
from phalanx.data.prompts import DataError
from phalanx.distributed.mesh import World
from phalanx.run.flow_components import fitting
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.policies import make_policy

LIMIT = 64
FAMILIES = (
    *("sd3_folder", "sd3_t5_folder", "qwen_folder", "qwen_21_folder", "z_image_folder", "flux_folder", "flux2_folder"),
    *("flux2_klein_folder", "wan_folder", "hunyuan_folder", "ltx2_folder"),
)
SHORT = Prompt("a cat", 0, {})


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_cut_where_the_count_says_so(family: str, world: World, request: pytest.FixtureRequest) -> None:
    model = make_policy(world, request.getfixturevalue(family), max_prompt_length=LIMIT).model

    def same(first: str, second: str) -> bool:
        """Whether all embeddings of two texts are equal."""
        one, other = model.encode([first, second], torch.device("cpu"), LIMIT)
        return all(one[name].shape == other[name].shape and torch.equal(one[name], other[name]) for name in one)

    words = 1
    while True:  # find the longest text of this form that is read as a whole
        text = "x " * words
        _, (tokens, longer), limit = model.text_tokens([text + "b", text + "x b"], LIMIT)
        if len(longer) > limit:
            break
        words += 1
    assert len(tokens) <= limit and not same(text + "b", text + "c")
    text = "x " * (words + 2 * limit)
    _, overlong, _ = model.text_tokens([text + "b", text + "c"], LIMIT)
    assert min(map(len, overlong)) > limit and same(text + "b", text + "c")


def rows(
    model_folder: Path, world: World, caplog: pytest.LogCaptureFixture, setting: str, given: list[Prompt]
) -> list[Prompt]:
    model = make_policy(world, model_folder, max_prompt_length=LIMIT).model
    data = FlowDataConfig(max_prompt_length=LIMIT, overlong_prompts=setting)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "phalanx.run.flow_components"):
        return fitting(given, "data.train_files", model, FlowRunConfig(data=data), first=True)


def test_settings(flux_folder: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    long = Prompt("x " * 100 + 'that reads "BOOKS"', 0, {"ground_truth": "BOOKS"})
    model = make_policy(world, flux_folder, max_prompt_length=LIMIT).model
    _, (tokens,), _ = model.text_tokens([long.text], LIMIT)
    count = f"data.train_files: 1 of 2 prompts have more than {LIMIT} tokens"
    remedy = f"data.max_prompt_length={len(tokens)} holds all"
    assert rows(flux_folder, world, caplog, "truncate", [SHORT, long]) == [SHORT, long]
    (message,) = caplog.messages
    assert message.startswith(f"{count} and are cut there, first prompt 1 (") and message.endswith(f"; {remedy}")
    assert "; the ground truth of 1 of them is in the part that is cut off; " in message
    assert rows(flux_folder, world, caplog, "filter", [SHORT, long]) == [SHORT]
    (message,) = caplog.messages
    assert message.startswith(f"{count} and are left out, first prompt 1 (") and message.endswith(f"; {remedy}")
    with pytest.raises(DataError) as error:
        rows(flux_folder, world, caplog, "error", [SHORT, long])
    assert str(error.value).startswith(f"{count}, first prompt 1 (")
    assert str(error.value).endswith(f"; {remedy}, or set data.overlong_prompts to filter or truncate")
    alone = f"data.train_files: 1 of 1 prompts have more than {LIMIT} tokens"
    with refused(f"{alone}, and data.overlong_prompts=filter leaves none; {remedy}", DataError):
        rows(flux_folder, world, caplog, "filter", [long])
    assert rows(flux_folder, world, caplog, "error", [SHORT]) == [SHORT] and caplog.messages == []


def test_clip_reads_77_tokens(sd3_folder: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Without T5, no data.max_prompt_length allows more."""
    model = make_policy(world, sd3_folder, max_prompt_length=256).model
    with caplog.at_level(logging.WARNING, "phalanx.run.flow_components"):
        fitting([Prompt("x " * 300, 0, {})], "data.train_files", model, FlowRunConfig(), first=True)
    (message,) = caplog.messages
    assert "1 of 1 prompts have more than 77 tokens and are cut there" in message
    assert message.endswith("; the text encoders of model.path read no more than 77")
    cfg = FlowRunConfig(data=FlowDataConfig(overlong_prompts="error"))
    cfg.model.rename_keys("painter.model")
    with pytest.raises(DataError, match=r"the text encoders of painter\.model\.path read no more than 77, or set"):
        fitting([Prompt("x " * 300, 0, {})], "data.train_files", model, cfg, first=True)
