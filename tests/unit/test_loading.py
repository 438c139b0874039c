"""Model folders of others: no code of theirs runs, and nobody is asked on the terminal whether it should."""

import ast
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.flow import FlowDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import FlowModelConfig, LMModelConfig
from phalanx.engines.loading import FOREIGN
from phalanx.engines.transformers import load_processor
from phalanx.engines.transformers import load_tokenizer as load_judge
from phalanx.models.flow.policy import build_policy
from phalanx.models.lm.load_folder import load_model, load_tokenizer
from phalanx.models.lm.model import DTYPES
from tests.helpers.policies import one_rank

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "phalanx"
LOADERS = ("from_pretrained", "from_config", "LLM")
# receivers that read no class from a folder, so that they do not know the argument
CONCRETE = {
    ("models/flow/folder.py", "kind"): "diffusers' class of the family's transformer",
    ("models/flow/family.py", "kind"): "the same, without files",
    ("models/lora.py", "PeftConfig"): "settings in JSON",
    ("tools/plan/blueprint.py", "self.transformer_class"): "diffusers' class of the family's transformer",
    ("tools/plan/blueprint.py", "module"): "diffusers' classes, of the libraries that headers.LIBRARIES lists",
    ("tools/plan/blueprint.py", "module.config_class"): "settings in JSON",
}


def loads(source: str) -> Iterator[tuple[str, bool]]:
    """The receiver of each call that loads a class which a folder may name, and whether it refuses the folder's code."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        receiver, _, name = ast.unparse(function).rpartition(".")
        if name in LOADERS:
            said = {word.arg: ast.unparse(word.value) for word in node.keywords}
            yield receiver or name, said.get("trust_remote_code") == "False"


def test_every_loader_refuses_code_of_a_folder() -> None:
    unused = dict(CONCRETE)
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        for receiver, refuses in loads(file.read_text(encoding="utf-8")):
            unused.pop((name, receiver), None)
            assert refuses or (name, receiver) in CONCRETE, f"{name}: {receiver} lacks trust_remote_code=False"
    assert not unused, f"no longer there: {unused}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("AutoModel.from_pretrained(p)", [("AutoModel", False)]),
        ("AutoModel.from_pretrained(p, trust_remote_code=True)", [("AutoModel", False)]),
        ("AutoModel.from_pretrained(p, trust_remote_code=trusted)", [("AutoModel", False)]),
        ("AutoModel.from_pretrained(p, trust_remote_code=False)", [("AutoModel", True)]),
        ("a.b.from_config(c)", [("a.b", False)]),
        ("LLM(p)", [("LLM", False)]),
    ],
)
def test_the_check_sees_a_loader_that_would_ask(source: str, expected: list[tuple[str, bool]]) -> None:
    assert list(loads(source)) == expected


def with_code(folder: Path, *files: str) -> Path:
    """Have these JSON files of a folder name a class of a Python file beside them."""
    for name in files:
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        kinds = ("AutoProcessor", "AutoConfig", "AutoImageProcessor", "AutoModel", "AutoModelForCausalLM")
        content["auto_map"] = dict.fromkeys(kinds, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", None]}
        content |= {"processor_class": "Evil", "model_type": "evil"} if "model_type" in content else {}
        if name.startswith("tokenizer"):
            content["tokenizer_class"] = "Evil"
        file.write_text(json.dumps(content))
        (file.parent / "evil.py").write_text(f"open({str(folder / 'RAN')!r}, 'w')\nclass Evil: pass\n")
    return folder


def reading(folder: Path) -> Any:
    with_code(folder, "processor_config.json", "tokenizer_config.json", "config.json")
    return load_processor(str(folder))


def judging(folder: Path) -> Any:
    return load_judge(str(with_code(folder, "tokenizer_config.json", "config.json")))


def tokenizing(folder: Path) -> Any:
    return load_tokenizer(LMModelConfig(path=str(with_code(folder, "tokenizer_config.json", "config.json"))))


def training(folder: Path) -> Any:
    return load_model(LMModelConfig(path=str(with_code(folder, "config.json"))), DTYPES["float32"], chunk=1)


def painting(folder: Path) -> Any:
    shutil.copytree(ROOT / "assets/digits/base", folder, dirs_exist_ok=True)
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder"] = ["transformers", "AutoModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with_code(folder, "text_encoder/config.json")
    config, parallel = FlowModelConfig(path=str(folder), dtype="float32"), ParallelConfig()
    with one_rank() as world:
        return build_policy(config, parallel, FlowDataConfig(), world, seed=0, detach_uncond=False)


@pytest.mark.parametrize(
    ("base", "load"),
    [("reading", reading), ("words", judging), ("words", tokenizing), ("words", training), ("digits", painting)],
    ids=["processor", "judge", "tokenizer", "model", "pipeline"],
)
def test_code_of_a_model_folder_never_runs(
    base: str, load: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def consent(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", consent)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = Path(shutil.copytree(ROOT / "assets" / base / "base", tmp_path / "m"))
    with pytest.raises(ValueError) as refusal:
        load(folder)
    line = str(refusal.value)
    assert line.endswith(FOREIGN) and str(folder) in line and "\n" not in line
    assert not asked
    assert not (folder / "RAN").exists()


def test_a_folder_whose_class_transformers_has_is_read_without_its_code(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ROOT / "assets/words/base", tmp_path / "m"))
    with_code(folder, "tokenizer_config.json")  # as folders from before transformers had their class
    assert load_tokenizer(LMModelConfig(path=str(folder))).encode("a")
    assert not (folder / "RAN").exists()
