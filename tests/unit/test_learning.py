"""What the tables of learning say of few seeds: intervals, and differences that they do not tell apart."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from learning import Subject, difference, finished, table, validated, with_interval, with_paths


def run(name: str, seed: int, value: float, scores: list[float] | None = None) -> dict[str, Any]:
    result = {"name": name, "seed": seed, "after": {"test": value}, "curve": [[0, 0.1, 0.0], [5, value, 9.0]]}
    return result if scores is None else result | {"scores": scores}


def subject(**keys: Any) -> Subject:
    of_all = dict.fromkeys(("name", "task", "config", "page", "picture", "mark", "scale"), "")
    numbers = {"samples": 10, "steps": 5, "test_freq": 5, "target": 0.75}
    columns = {"validation": "val/test/reward/mean", "noun": "samples", "spreads": {"test": "test"}, "means": {}}
    return Subject(**of_all | numbers | columns | {"fixed": [], "base": dict, "after": dict} | keys)


@pytest.mark.parametrize(
    ("values", "text"), [([0.9, 0.8, 0.85], "0.850±0.124"), ([0.9, 0.8], "0.850±0.635"), ([0.9], "0.900")]
)
def test_an_interval_is_students(values: list[float], text: str) -> None:
    """t of 2 and 1 degrees of freedom are 4.3027 and 12.706."""
    assert with_interval(values) == text


def test_runs_are_paired_by_seed() -> None:
    """Seeds differ by 0.2, and the pairs by 0.10, 0.11 and 0.12; a seed without a partner is left out."""
    runs = [run("b", 2, 0.92), run("b", 0, 0.60), run("b", 1, 0.71), run("b", 7, 0.0)]
    others = [run("a", 0, 0.5), run("a", 1, 0.6), run("a", 2, 0.8)]
    apart = difference(runs, others, "test")
    assert apart.told_apart and apart.prompts is None
    assert str(apart) == "+0.110±0.025"
    assert (apart.seeds.count, apart.seeds.low) == (3, pytest.approx(0.11 - 4.302653 * 0.01 / 3**0.5, abs=1e-6))


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(0.9, 0.7), (0.8, 0.8), (0.85, 0.75)], "+0.100±0.248 ≈"),
        ([(0.9, 0.7)], "+0.200 ≈"),
        ([(0.9, 0.9), (0.8, 0.8), (0.7, 0.7)], "+0.000±0.000 ≈"),
    ],
)
def test_an_interval_that_holds_zero_tells_nothing_apart(pairs: list[tuple[float, float]], text: str) -> None:
    runs = [run("b", seed, value) for seed, (value, _) in enumerate(pairs)]
    others = [run("a", seed, value) for seed, (_, value) in enumerate(pairs)]
    assert str(difference(runs, others, "test")) == text


def test_prompts_must_agree_with_the_seeds() -> None:
    """Of few prompts the interval is Student's, of the means over the seeds."""
    better, alike = [0.6, 0.7, 0.8, 0.9], [0.0, 1.0, 0.0, 1.0]
    others = [run("a", seed, 0.5, [0.5, 0.6, 0.7, 0.72]) for seed in (0, 1)]
    runs = [run("b", seed, 0.6 + seed / 500, better) for seed in (0, 1)]
    apart = difference(runs, others, "test")
    assert apart.prompts is not None
    assert (apart.prompts.value, apart.prompts.count) == (pytest.approx(0.12), 4)
    assert apart.prompts.low == pytest.approx(0.12 - 3.1824 * 0.04 / 2, abs=1e-4)
    assert str(apart) == "+0.101±0.013"
    runs = [run("b", seed, 0.6 + seed / 500, alike) for seed in (0, 1)]
    assert str(difference(runs, others, "test")).endswith("≈")
    assert str(difference(runs, others, "test", scored=False)) == "+0.101±0.013"


def test_a_table_compares_with_its_first_row() -> None:
    results = [run("a", 0, 0.7), run("a", 1, 0.8), run("b", 0, 0.80), run("b", 1, 0.901), run("c", 0, 0.5)]
    assert table(subject(), {"test": 0.1}, results)[2:] == [
        "|the base||0.100||||",
        "|`a`|2|0.750±0.635||50, 1 of 2|9, 1 of 2|",
        "|`b`|2|0.851±0.642|+0.101±0.006|50|9|",
        "|`c`|1|0.500|-0.200 ≈|never|never|",
    ]
    heading, *_, last = table(subject(), {"test": 0.1}, results[:4])
    assert heading.startswith("|recipe, 2 seeds|test|")
    assert last == "|`b`|0.851±0.642|+0.101±0.006|50|9|"


def test_scores_are_those_of_the_last_validation(tmp_path: Path) -> None:
    for step, reward in ((5, 0.25), (10, 0.75)):
        folder = tmp_path / "samples/test" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        row = {"reward": reward, "scores": {"gsm8k": 1 - reward}}
        (folder / "index.jsonl").write_text(json.dumps(row) + "\n")
    assert validated(tmp_path, "val/test/reward/mean") == [0.75]
    assert validated(tmp_path, "val/test/reward/gsm8k") == [0.25]


def test_a_result_of_another_recipe_is_none(tmp_path: Path) -> None:
    (tmp_path / "a_b-0").mkdir()
    known = {"name": "a b", "recipe": ["x=1"], "seed": 0, "steps": 5}
    (tmp_path / "a_b-0/result.json").write_text(json.dumps(known))
    assert finished(tmp_path, "a b", ["x=1"], 0, 5) == known
    assert finished(tmp_path, "a b", ["x=2"], 0, 5) is None
    assert finished(tmp_path, "a b", ["x=1"], 1, 5) is None


def test_a_name_in_braces_is_a_path(tmp_path: Path) -> None:
    paths = {"sums": lambda output: output / "s", "products": lambda output: output / "p"}
    keys = with_paths(subject(paths=paths), tmp_path, "teachers={sums: {sums}, products: {products}}")
    assert keys == f"teachers={{sums: {tmp_path}/s, products: {tmp_path}/p}}"
