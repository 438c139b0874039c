"""Values of expressions and shell words in files of other trainers."""

import pytest

from phalanx.tools.foreign_values import Unknown, expanded, formula, shell_value


def test_values_are_computed_without_running_anything() -> None:
    assert formula("int(48 / (32 * n / 24)) // 2 if a.b > 1 else -1", {"n": 9, "a.b": 4}) == 2
    assert formula("[f'{x}/train', torch.bfloat16]", {"x": "data"}) == ["data/train", "bfloat16"]
    for text in ("open('x')", "2 ** 9", "'a' * 9", "unknown", "1 / 0", "x.__class__", "1e18 * 9", "x + x"):
        with pytest.raises(Unknown):
            formula(text, {"x": "a" * 6000})
    assert expanded("${A:-$B}/${C}", {"B": "b", "C": "c"}) == "b/c"
    assert shell_value(["1e-6", "[a,'b']", "x # y"], {}) == [1e-6, ["a", "b"], "x # y"]
    assert shell_value(["{a: 1}", "Observation:", "Q: what?", "- a"], {}) == [
        {"a": 1},
        "Observation:",
        "Q: what?",
        "- a",
    ]
    for word in ("$A", "${A%x}", "${A}"):
        with pytest.raises(Unknown):
            expanded(word, {"A": None})
