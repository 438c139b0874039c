"""The records of an evaluation, and their statistics, tables and pages."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config.lm import LMDataConfig, LMTurnRunConfig
from phalanx.config.tasks import EvaluateConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.functional.statistics import mean_interval
from phalanx.rewards.base import GivesAnswers
from phalanx.run.exporting import Trained
from phalanx.run.rules import load_config
from phalanx.tools import candidate
from phalanx.tools.board.evaluation import Wanted, result_of, table
from phalanx.tools.board.evaluation_files import Records, read_records
from phalanx.tools.board.evaluation_page import Side, write_page
from phalanx.tools.candidate import read_baseline, read_candidate
from phalanx.zoo.rewards.text.dapo import Dapo
from phalanx.zoo.rewards.text.gsm8k import Gsm8k
from phalanx.zoo.rewards.text.math import Math
from tests.helpers.pages import Page

HEAD: dict[str, Any] = {"model": "models/tiny", "baseline": None, "arguments": {"n": 2}}


def record(index: int, sample: int, reward: float | None, **beside: Any) -> dict[str, Any]:
    row = {
        "set": "test",
        "index": index,
        "sample": sample,
        "prompt": f"<b>prompt {index}</b>",
        "text": f"text {sample}",
    }
    return row | {"reward": reward, "scores": {"exact": reward}, "columns": {"level": index % 2}} | beside


def records(*prompts: list[float | None]) -> list[dict[str, Any]]:
    return [record(i, j, reward) for i, rewards in enumerate(prompts) for j, reward in enumerate(rewards)]


def value(result: dict[str, Any], statistic: str, score: str = "exact") -> float:
    estimate: float = result["sets"]["test"]["scores"][score][statistic]["value"]
    return estimate


def test_statistics_of_marks() -> None:
    result = result_of(records([1.0, 0.0], [0.0, 0.0], [1.0, 1.0]), Wanted(), HEAD)
    assert (value(result, "mean"), value(result, "pass@1"), value(result, "pass@2")) == (0.5, 0.5, 2 / 3)
    assert list(result["sets"]["test"]["scores"]["exact"]) == ["mean", "avg@2", "pass@1", "pass@2"]
    assert result["sets"]["test"]["scores"]["exact"]["mean"]["count"] == 3


def test_statistics_of_other_scores() -> None:
    rows = records([0.2, 0.9], [0.6, 0.4])
    result = result_of(rows, Wanted(k=[1, 2]), HEAD)
    assert list(result["sets"]["test"]["scores"]["exact"]) == ["mean", "avg@2", "best@2"]
    assert value(result, "best@2") == pytest.approx(0.75)
    # at the threshold 0.5, one sample of each prompt passes
    passed = result_of(rows, Wanted(k=[1, 2], threshold=0.5), HEAD)
    assert (value(passed, "pass@1"), value(passed, "pass@2")) == (0.5, 1.0)


def test_majority_of_answers() -> None:
    rows = []
    for sample, (answer, reward) in enumerate([("7", 1.0), ("7", 1.0), ("8", 0.0), (None, 0.0)]):
        rows.append(record(0, sample, reward, answers={"exact": answer}))
    assert value(result_of(rows, Wanted(), HEAD), "majority@4") == 1.0


def test_samples_without_a_score_are_left_out() -> None:
    result = result_of(records([1.0, None], [0.0, 0.0], [None, None]), Wanted(), HEAD)
    assert (value(result, "mean"), value(result, "pass@2")) == (0.5, 0.0)
    counts = {name: row["count"] for name, row in result["sets"]["test"]["scores"]["exact"].items()}
    assert counts == {"mean": 2, "avg@2": 1, "pass@1": 2, "pass@2": 1}


def test_groups_of_values_that_look_the_same() -> None:
    """A number and its text form one group. Numbers are sorted numerically."""

    def of(*levels: Any) -> dict[str, Any]:
        rows = [record(i, 0, 1.0, columns={"level": level}) for i, level in enumerate(levels)]
        result = result_of(rows, Wanted(group_by="level"), HEAD)
        assert "\x1b" not in table(result) and len(table(result).splitlines()) == 5 + len(set(map(str, levels)))
        return {name: group["prompts"] for name, group in result["sets"]["test"]["groups"].items()}

    assert of(1, "1", 1, True, "a\x1b[31m\nb") == {"1": 3, "True": 1, "a\x1b[31m\nb": 1}
    assert list(of(10, 9, -1.5)) == ["-1.5", "9", "10"]


def test_the_mean_of_groups_gives_each_the_same_weight() -> None:
    """Groups of three and two prompts have the means 1.5 and 0.5: the mean of groups is 1, that of prompts 1.1."""
    now = [record(i, 0, mean, columns={"level": int(i > 2)}) for i, mean in enumerate([1.0, 1.5, 2.0, 0.5])]
    now.append(record(4, 0, 0.5, columns={"level": 1}))
    before = [row | {"reward": 0.5, "scores": {"exact": 0.5}} for row in now]
    result = result_of(now, Wanted(group_by="level"), HEAD | {"baseline": "base"}, before)
    part = result["sets"]["test"]
    mean = part["mean_of_groups"]["scores"]["exact"]["mean"]
    # the first group: Student's t with two degrees of freedom, 4.303 x 0.5 / sqrt 3; the second has zero width
    assert value(result, "mean") == pytest.approx(1.1) and (mean["value"], mean["count"]) == (1.0, 5)
    assert [mean["low"], mean["high"]] == pytest.approx([1 - 1.2421 / 2, 1 + 1.2421 / 2], abs=1e-3)
    difference = part["baseline"]["mean_of_groups"]["differences"]["exact"]["mean"]
    assert [difference["value"], difference["low"]] == pytest.approx([0.5, 0.5 - 1.2421 / 2], abs=1e-3)
    shown = [line for line in table(result).splitlines() if line.startswith("  mean of 2 groups exact")]
    assert len(shown) == 1 and "1.0000 [" in shown[0] and "0.5000 [" in shown[0]


def test_no_interval_leaves_the_range_of_the_score() -> None:
    """A score that reaches 0 or 1 and never leaves them is in 0..1, as its differences are in -1..1."""
    now, before = records(*[[1.0, 0.9]] * 4, [1.0, 0.0]), records(*[[0.0, 0.1]] * 4, [0.0, 1.0])
    part = result_of(now, Wanted(group_by="level"), HEAD | {"baseline": "base"}, before)["sets"]["test"]
    for scores in (part["scores"], part["mean_of_groups"]["scores"], part["baseline"]["scores"]):
        for estimate in scores["exact"].values():
            assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1
    for scores in (part["baseline"]["differences"], part["baseline"]["mean_of_groups"]["differences"]):
        for estimate in scores["exact"].values():
            assert -1 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1


def test_a_group_of_one_prompt_leaves_their_mean_without_bounds() -> None:
    result = result_of(records([1.0], [0.5], [0.0]), Wanted(group_by="level"), HEAD)
    mean = result["sets"]["test"]["mean_of_groups"]["scores"]["exact"]["mean"]
    assert mean == {"value": 0.5, "low": None, "high": None, "count": 3}


def test_bounds_at_the_ends_have_no_sign() -> None:
    for count in range(1, 30):
        shown = table(result_of(records(*[[0.0]] * count), Wanted(), HEAD))
        assert "-0.0000" not in shown and "[0.0000, " in shown
        assert ", 1.0000]" in table(result_of(records(*[[1.0]] * count), Wanted(), HEAD))


def test_a_baseline_is_paired_by_prompt_and_seed() -> None:
    now, before = records([1.0, 1.0], [0.0, 0.0], [0.0, 1.0]), records([0.0, 1.0], [0.0, 0.0], [1.0, 1.0])
    result = result_of(list(reversed(now)), Wanted(group_by="level"), HEAD | {"baseline": "base"}, before)
    compared = result["sets"]["test"]["baseline"]
    assert compared["differences"]["exact"]["mean"]["value"] == 0.0
    assert compared["better_equal_worse"]["exact"] == {"prompts": (1, 1, 1), "samples": (1, 4, 1)}
    changed = [(change["index"], change["before"], change["now"]) for change in compared["changed_most"]]
    assert changed == [(0, 0.5, 1.0), (2, 1.0, 0.5)]
    assert compared["groups"]["1"]["differences"]["exact"]["mean"]["value"] == 0.0
    assert result["sets"]["test"]["groups"]["0"]["scores"]["exact"]["mean"]["value"] == 0.75
    lines = table(result).splitlines()
    assert lines[-1] == "  prompts: 1 better, 1 equal, 1 worse than the baseline"
    assert re.search(r"^  exact +mean +0\.5000 \[", "\n".join(lines), re.M)


def test_a_table_is_short() -> None:
    lines = table(result_of(records([0.25, 0.25], [0.75, 0.75]), Wanted(k=[2]), HEAD)).splitlines()
    assert lines[0] == "test: 2 prompts x 2, 95 % intervals over prompts"
    # Student's t with one degree of freedom: 12.706 x 0.25
    assert lines[2].split() == ["exact", "mean", "0.5000", "[-2.6766,", "3.6766]"]


def test_a_cut_file_is_kept_to_its_last_whole_chunk(tmp_path: Path) -> None:
    file, rows = Records(tmp_path), records([1.0, 0.0], [0.0, 0.0])
    assert file.keep([2, 2]) == 0
    file.add(rows[:3])
    with (tmp_path / "records.jsonl").open("a") as stream:
        stream.write('{"set": "te')
    assert file.keep([2, 2]) == 1
    file.add(rows[2:])
    assert read_records(tmp_path) == rows
    (tmp_path / "records.jsonl").write_text(json.dumps(rows[0]) + "\n{}\n" + json.dumps(rows[1]) + "\n")
    with pytest.raises(ValueError, match=r"records\.jsonl:2: not a record of an evaluation"):
        file.keep([2, 2])


def test_rewards_give_answers_that_are_the_same_text() -> None:
    gsm8k, maths, dapo = Gsm8k(), Math("string"), Dapo()
    assert all(isinstance(reward, GivesAnswers) for reward in (gsm8k, maths, dapo))
    assert gsm8k.answer("#### 18.0") == gsm8k.answer("so #### $18") == "18"
    assert maths.answer(r"\boxed{\frac12}") == maths.answer(r"\boxed{0.50}") == "1/2"
    assert maths.answer(r"\boxed{x = 2\sqrt2}") == maths.answer(r"\boxed{2\sqrt{2}}")
    assert dapo.answer("Answer: 1,000") == dapo.answer("**Answer:** 1000") == "1000"
    assert dapo.answer("Answer: 1e3") == "1000"
    assert (gsm8k.answer("18"), maths.answer("18"), dapo.answer("18")) == (None, None, None)


def test_a_page_that_needs_no_scripts(tmp_path: Path) -> None:
    now, before = records([1.0, 1.0], [0.0, 0.0]), records([0.0, 1.0], [0.0, 0.0])
    result = result_of(now, Wanted(group_by="level"), HEAD | {"baseline": "base"}, before)
    page = Page(write_page(tmp_path, result, Side(now, tmp_path), Side(before, tmp_path / "baseline")))
    assert "<b>prompt 0</b>" in page.text and "Evaluation of tiny" in page.text
    assert len(page.all("script")) == 3  # the curves, uPlot and ours
    for words in ("Student's t", "mean before", "Highest rewards", "By group", "against base"):
        assert words in page.text


def test_the_page_has_a_row_for_each_number_and_curves_over_k(tmp_path: Path) -> None:
    rows = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0] * 4]
    now, before = records(*rows), records(*[[0.0, 0.0, 1.0, 0.0]] * 3)
    result = result_of(now, Wanted(), HEAD | {"baseline": "base"}, before)
    page = Page(write_page(tmp_path, result, Side(now, tmp_path), Side(before, tmp_path)))
    words = page.words()
    assert "statistic value baseline difference prompts mean = avg@4 = pass@1 0.3333 [" in words
    assert "pass@1" not in words.replace("avg@4 = pass@1", "") and words.count("mean = avg@4") == 1
    assert words.count("Wilson's") == words.count("Tango's") == 1
    chart = page.charts()[0]
    assert chart["axis"] == "k" and [series["label"] for series in chart["series"]] == ["this model", "baseline"]
    for series, samples in zip(chart["series"], (rows, [[0.0, 0.0, 1.0, 0.0]] * 3), strict=True):
        assert series["x"] == [1, 2, 4]
        for k, value, half, low in zip(series["x"], series["y"], series["band"], series["low"], strict=True):
            passes = []  # of all choices of k samples, those with one that passes
            for row in samples:
                passes += [[max(chosen) for chosen in itertools.combinations(row, k)]]
            rates = np.array([np.mean(each) for each in passes])
            estimate = mean_interval(rates, unit=True)
            bounds = (estimate.low, estimate.high)
            assert value == pytest.approx(rates.mean(), abs=1e-5) and (low, low + 2 * half) == pytest.approx(
                bounds, abs=1e-5
            )
    kinds = [tag.get("class", "") for tag in page.all("td")]
    assert "better" not in kinds and "worse" not in kinds and "tie" in kinds


def test_a_difference_beyond_its_interval_is_better(tmp_path: Path) -> None:
    now, before = records(*[[1.0, 1.0]] * 30), records(*[[0.0, 0.0]] * 30)
    for one, two, kind in ((now, before, "better"), (before, now, "worse")):
        result = result_of(one, Wanted(), HEAD | {"baseline": "base"}, two)
        page = Page(write_page(tmp_path, result, Side(one, tmp_path), Side(two, tmp_path)))
        assert f"tile {kind}" in [tag.get("class") for tag in page.all("div")]
        assert {tag["class"] for tag in page.all("td") if tag.get("data-name") == "difference"} == {kind}


def test_a_conversation_is_shown_whole(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "prompt 0"}]
    for turn in range(40):
        messages += [
            {"role": "assistant", "content": f"call {turn}"},
            {"role": "tool", "content": f"{'x' * 200} {turn}"},
        ]
    rows = [record(i, 0, float(i)) | {"messages": messages} for i in range(2)]
    for row in rows:
        row |= {"turns": 40, "tool_calls": 40, "ended": "done", "turn_rewards": [], "columns": {"ground_truth": "<7>"}}
    page = Page(write_page(tmp_path, result_of(rows, Wanted(), HEAD), Side(rows, tmp_path), None))
    assert all(f"assistant call {turn} tool {'x' * 200} {turn}" in page.words() for turn in range(40))
    assert "40 turns; 40 calls; ended: done" in page.words() and "ground truth: <7>" in page.words()
    assert "damaged" not in page.words()


def test_a_baseline_folder_has_whole_weights(lm_folder: Path) -> None:
    words = [f"model.path={lm_folder}", "model.lora_rank=4", "model.quantization=nf4", f"baseline={lm_folder}"]
    files = ["data.val_files=[assets/words/test.jsonl]", "reward.functions=[{name: gsm8k}]"]
    cfg = load_config(EvaluateConfig, None, [*words, *files])
    model = read_baseline(cfg, read_candidate(cfg)).run.model
    assert (model.lora_rank, model.quantization) == (0, None)


def test_a_score_that_no_sample_has_leaves_the_others(tmp_path: Path) -> None:
    rows = [record(i, 0, 0.5, scores={"exact": 0.5, "judge": None}) for i in range(2)]
    result = result_of(rows, Wanted(), HEAD)
    page = Page(write_page(tmp_path, result, Side(rows, tmp_path), None))
    assert "Mean · exact" in page.words() and "Mean · judge" not in page.words()
    assert "judge" not in table(result)


@pytest.mark.parametrize(
    ("words", "date"), [([], "2026-01-31"), (["data.chat_template_date=2026-02-28"], "2026-02-28")]
)
def test_the_tasks_date_precedes_that_of_the_run(
    words: list[str], date: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LMTurnRunConfig(LMModelConfig(path="base"), data=LMDataConfig(chat_template_date="2026-01-31"))
    monkeypatch.setattr(candidate, "_open_checkpoint", lambda *_: Trained(tmp_path, run, "model", {}))
    given = ["checkpoint=run", "data.val_files=[held_out.jsonl]", "reward.functions=[{name: gsm8k}]", *words]
    assert read_candidate(load_config(EvaluateConfig, None, given)).run.data.chat_template_date == date
