"""The reward model in vLLM over several ranks: its answers are right, and the same whatever the placement."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.reward import RewardModelConfig
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.judged import RAGGED, ask, converted, expected, mistake, refused
from tests.helpers.judged_text import BASE, COMPLETION, SHARES, SHOWN, asked_about_texts, plain, plainly
from tests.helpers.judged_text import ask as ask_texts
from tests.helpers.ranks import run_ranks


def section(model: Path, **settings: Any) -> RewardModelConfig:
    return RewardModelConfig(path=str(model), dtype="float32", **{"max_model_len": 512, "max_tokens": 40, **settings})


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {}),
        (2, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 2}),
        (4, {"tensor_parallel_size": 4}),
        (4, {"placement": "ranks 2-3", "tensor_parallel_size": 2}),
        (4, {"placement": "ranks 1-2"}),
    ],
)
def test_answers_are_right_wherever_the_model_stands(judge_model: Path, world: int, settings: dict[str, Any]) -> None:
    shares = {1: [list(range(15))], 2: [list(range(15)), []], 4: RAGGED}[world]
    got = run_ranks(ask, world, section(judge_model, **settings), shares, timeout=200)
    for answers, share in zip(got, shares, strict=True):
        assert answers == [expected(share)] * 2


@pytest.mark.parametrize(("world", "settings"), [(2, {"tensor_parallel_size": 2}), (3, {"placement": "ranks 1-1"})])
def test_a_judge_of_texts_answers_wherever_it_stands(world: int, settings: dict[str, Any]) -> None:
    """As the same language model does in transformers, by itself."""
    got = run_ranks(ask_texts, world, section(BASE, max_tokens=8, **settings), SHARES[world], timeout=200)
    assert [answer for share in got for answer in share] == plain(BASE)


@pytest.mark.parametrize(("world", "settings"), [(2, {"tensor_parallel_size": 2}), (3, {"placement": "ranks 1-1"})])
def test_a_judge_of_texts_sees_the_images_of_a_prompt(judge_model: Path, world: int, settings: dict[str, Any]) -> None:
    """Of any sizes, formats and numbers; a text cannot show one itself."""
    ranks = {2: [[0, 1, 2, 3, 4, 5], []], 3: [[0, 1], [], [2, 3, 4, 5]]}[world]
    question = VlmOcr.template + " < |image_pad|>< |im_end|>"
    wanted = [text for shown in SHOWN for text in [plainly(judge_model, shown, question)] * 2]
    got = run_ranks(asked_about_texts, world, section(judge_model, **settings), COMPLETION, ranks, timeout=200)
    assert [answer for answers, _ in got for answer in answers] == wanted
    assert not any(warnings for _, warnings in got)


def test_sampled_answers_depend_on_the_question_and_the_seed_alone(judge_model: Path) -> None:
    """At a temperature that makes answers differ: not on the ranks, not on the neighbours in a batch."""
    shares = [[3, 0, 3], [7, 3]]
    hot = {"temperature": 2.0, "max_tokens": 12}
    batch = run_ranks(ask, 1, section(judge_model, **hot), [[*shares[0], *shares[1]]], timeout=200)[0]
    both = run_ranks(ask, 2, section(judge_model, tensor_parallel_size=2, **hot), shares, timeout=200)
    assert batch[0] == batch[1] == both[0][0] + both[1][0] == both[0][1] + both[1][1]
    pairs = [tuple(batch[0][2 * i : 2 * i + 2]) for i in range(5)]
    assert pairs[0] == pairs[2] == pairs[4] and len(set(pairs)) == 3
    assert batch[0] != expected([*shares[0], *shares[1]])
    alone = run_ranks(ask, 1, section(judge_model, **hot), [[3]], timeout=200)[0]
    assert alone == [list(pairs[0])] * 2
    other = run_ranks(ask, 1, section(judge_model, seed=1, **hot), [[3]], timeout=200)[0]
    assert other[0] == other[1] != alone[0]


def test_a_question_that_is_too_long_is_told_on_all_ranks(judge_model: Path) -> None:
    cfg = section(judge_model, max_model_len=32, max_tokens=8, placement="ranks 1-1")
    question = UnifiedReward.template.format(prompt=" ".join("x" * 30))
    got = run_ranks(refused, 2, cfg, [[1], []], (VlmOcr.template, question), timeout=200)
    assert got[0] == got[1]
    assert got[0].startswith("reward.model: ") and " 32 tokens" in got[0] and "\n" not in got[0]


def test_pictures_are_made_of_the_images_that_are_asked_about(judge_model: Path) -> None:
    assert run_ranks(converted, 1, section(judge_model), 7, [5, 2], timeout=200) == [(expected([5, 2]), 2)]


@pytest.mark.parametrize(
    ("config", "settings"),
    [(None, {"temperature": 3.0}), ("{", {}), ('{"model_type": "no_such_model"}', {})],
    ids=["temperature", "no JSON", "unknown model"],
)
def test_what_vllm_does_not_take_is_told_in_one_line(
    judge_model: Path, tmp_path: Path, config: str | None, settings: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(judge_model, folder)
    if config is not None:
        (folder / "config.json").write_text(config)
    (message,) = run_ranks(mistake, 1, section(folder, **settings), timeout=200)
    assert message.startswith(f"reward.model: vLLM rejects {str(folder)!r} as configured: ")
    assert "\n" not in message


def test_cut_weights_are_told_in_one_line(judge_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(judge_model, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (message,) = run_ranks(mistake, 1, section(folder), timeout=200)
    assert message.startswith(f"reward.model: vLLM rejects {str(folder)!r} as configured: Error while deserializing")
    assert "\n" not in message
