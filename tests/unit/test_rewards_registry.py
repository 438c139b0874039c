"""Building rewards from the configuration, and errors about rewards that cannot be built."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardFunctionConfig
from phalanx.config.reward import RewardFunctionConfig
from phalanx.rewards.registry import build_terms
from tests.helpers.rewards import BUILT_IN, entry, rewards, told
from tests.unit.test_rewards import HERE, Stateful, mine, some

FORMS = "module:function or path/to/file.py:function"


def test_terms_their_names_and_weights(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def length(images, prompts, metadata):\n    return [len(p) for p in prompts]\n")
    made = Stateful.made
    reward = rewards(
        mine("brightness", weight=2.0, scale=10.0),
        mine("Stateful", weight=-1.0, term="shift", offset=0.25),
        entry(path=f"{tmp_path}/own.py:length", weight=0.5),
    )
    assert [term.name for term in reward.terms] == ["brightness", "shift", "length"]
    reward.submit(*some("ab", "abcd", value=0.5))
    reward.submit(*some("a", value=1.0))
    terms = reward.collect()
    assert {name: t.tolist() for name, t in terms.items()} == {
        "brightness": [5.0, 5.0, 10.0],
        "shift": [0.25, 0.25, 0.25],
        "length": [2.0, 4.0, 1.0],
    }
    assert all(t.dtype == torch.float32 for t in terms.values())
    assert reward.weighted(terms).tolist() == [10.75, 11.75, 20.25]
    assert Stateful.made == made + 1  # once, not at each call


def bad_configurations() -> list[tuple[list[FlowRewardFunctionConfig], str]]:
    return [
        (
            [],
            "reward.functions is empty: nothing to optimise; give at least one entry, e.g. {name: ocr}; "
            f"built in: {BUILT_IN}",
        ),
        (
            [mine("brightness"), entry("_runner")],
            f"reward.functions[1].name='_runner' is not a built-in reward; built in: {BUILT_IN}; or give path: {FORMS}",
        ),
        (
            [entry("jpeg_compressibility"), mine("brightness"), entry("jpeg_compressibility", weight=2.0)],
            "reward.functions[0] and reward.functions[2] are both named 'jpeg_compressibility'; give one of them another "
            f"name and say with path which reward it is ({FORMS})",
        ),
    ]


def bad_entries(tmp_path: Path) -> list[tuple[FlowRewardFunctionConfig, str]]:
    """The error about each of them as the first entry."""
    file = tmp_path / "own.py"
    file.write_text("x = 1\ndef score(images, prompts, metadata, power=1):\n    return [0.0]\n")
    arguments, keyword = "images, prompts, metadata, **kwargs", "got an unexpected keyword argument"
    no_module = f"no module 'no_such_module' on the Python path; expected {FORMS}"
    near = f"did you mean ocr? built in: {BUILT_IN}; or give path: {FORMS}"
    return [
        (entry(), f" has neither name nor path; give name (built in: {BUILT_IN}) or path ({FORMS})"),
        (entry("orc"), f".name='orc' is not a built-in reward; {near}"),
        (entry(path=str(file)), f".path='{file}' names no function; expected {FORMS}"),
        (entry(path=f"{tmp_path}/no.py:f"), f".path: '{tmp_path}/no.py': no such file"),
        (entry(path=f"{file}:scor"), f".path='{file}:scor': {file} has no 'scor'; did you mean score?"),
        (entry(path="no_such_module.sub:f"), f".path='no_such_module.sub:f': {no_module}"),
        (mine("zzz"), f".path='{HERE}:zzz': {HERE} has no 'zzz'"),
        (mine("NUMBER"), f".path='{HERE}:NUMBER' is of type int; expected a function or a class"),
        (mine("brightness", scal=2), f".kwargs: brightness({arguments}): {keyword} 'scal'; its kwargs: scale"),
        (
            mine("two_arguments"),
            f".kwargs: two_arguments({arguments}): too many positional arguments; its kwargs: none",
        ),
        (
            entry("ocr", detekt=False),
            f".kwargs: ocr(**kwargs): {keyword} 'detekt'; its kwargs: detect, contains, threads, exact, recall, column",
        ),
        (
            mine("Stateful"),
            ".kwargs: Stateful(**kwargs): missing a required argument: 'offset'; its kwargs: offset, sign",
        ),
        (mine("Stateful", term="s", offset=1, sign=3), " (s): sign=3 is neither 1 nor -1"),
        (mine("NoCall"), ": NoCall is a class without __call__; expected __call__(images, prompts, metadata)"),
        (mine("OnDevice", scale=1), f".kwargs: OnDevice(**kwargs): {keyword} 'scale'; its kwargs: factor"),
        (mine("nap", term="mean"), ": 'mean' is the name of another metric; give the term another name"),
    ]


def test_bad_configurations(tmp_path: Path) -> None:
    for functions, message in bad_configurations():
        assert told(ValueError, rewards, *functions) == message
    for first, message in bad_entries(tmp_path):
        assert told(ValueError, rewards, first) == f"reward.functions[0]{message}"


OPTIONS = [
    ("gsm8k", {"method": "loose"}, "method='loose' should be 'strict' or 'flexible'"),
    ("math", {"equivalence": "sympy"}, "equivalence='sympy' should be 'math_verify' or 'string'"),
    ("length", {"unit": "tokens"}, "unit='tokens' should be 'characters' or 'words'"),
    ("length", {"target": 0}, "target=0 should be greater than 0"),
    ("iou", {"threshold": 2}, "threshold=2 should be less than or equal to 1"),
    ("iou", {"coordinates": "inches"}, "coordinates='inches' should be 'pixels', 'unit' or 'thousand'"),
    ("geo3k", {"format_weight": 2}, "format_weight=2 should be less than or equal to 1"),
    ("overlong", {"overlong_buffer_len": 0}, "overlong_buffer_len=0 should be greater than 0"),
    ("llm_judge", {"read": "first"}, "read='first' should be 'score' or 'last'"),
    ("vlm_ocr", {"recall": "letters"}, "recall='letters' should be 'words' or 'characters'"),
    ("ocr", {"recall": "letters"}, "recall='letters' should be 'words' or 'characters'"),
    ("geneval", {"max_objects": 0}, "max_objects=0 should be greater than 0"),
    ("hps_v3", {"model": "m", "dtype": "int8"}, "dtype='int8' should be 'bfloat16', 'float16' or 'float32'"),
    ("edit_reward", {"model": "m", "micro_batch_size": 0}, "micro_batch_size=0 should be greater than 0"),
    ("video_align", {"model": "m", "fps": 0}, "fps=0 should be greater than 0"),
]


@pytest.mark.parametrize(("name", "kwargs", "message"), OPTIONS)
def test_an_option_outside_its_annotation(name: str, kwargs: dict[str, Any], message: str) -> None:
    """It is refused before the reward is made, which may load a model."""
    texts = name in ("gsm8k", "math", "length", "iou", "geo3k", "overlong", "llm_judge")
    functions = [RewardFunctionConfig(name=name, kwargs=kwargs)]
    assert told(ConfigError, build_terms, functions, "cpu", 0.0, "completions" if texts else "images") == (
        f"reward.functions[0].kwargs: {name}: {message}"
    )


BROKEN_MODULES = [
    ("import not_there\n", "{file}:1: No module named 'not_there'"),
    ("def f(:\n", "{file}:1: invalid syntax"),
    ("x = 1\n1 / 0\n", "{file}:2: ZeroDivisionError: division by zero"),
    ("import sys\nsys.exit(0)\n", "SystemExit: 0 at {file}:2"),
    (
        "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n",
        "{file}:3: E: (its str() raised ZeroDivisionError)",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_MODULES)
def test_a_module_that_cannot_be_imported(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the place in the user's file, and the traceback follows; by file and by dotted name."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"broken_{abs(hash(text))}.py"
    file.write_text(text)
    for path in (f"{file}:f", f"{file.stem}:f"):
        with pytest.raises(ConfigError) as error:
            rewards(entry(path=path))
        assert str(error.value) == f"reward.functions[0].path: {message.format(file=file)}"
        assert error.value.__cause__ is not None
