"""Whole evaluations, exports and generations of folders as an attacker, or a damaged disk, may leave them.

Each must end, well or by one line: without a traceback, a hang or much memory, without running code, and without
reading or writing outside. The cases of a test share a fork, whose model libraries are loaded.
"""

import json
import os
import pickle
import shutil
import struct
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from phalanx.config.tasks import EvaluateConfig, ExportConfig, GenerateConfig
from phalanx.exit import Stopped
from phalanx.run import rl
from phalanx.run.rules import load_config
from phalanx.tools.evaluate import Evaluation
from phalanx.tools.export import Export
from phalanx.tools.generate import Generation
from phalanx.types import JobError
from tests.helpers.hostile import (
    BOMB,
    SECRET,
    Change,
    digest,
    fifo,
    in_child,
    in_place_of,
    linked,
    remove,
    replaced,
    sparse,
)
from tests.helpers.lm import REWARD, tiny_lm, tiny_lm_config
from tests.helpers.ranks import before_forks, run_ranks

MOST_MEMORY = 500 << 20  # bytes beside those of an ordinary job
ORDINARY = 700 << 20  # of address space, most of it libraries' code
STEP = "out/checkpoints/step_000001"


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def train(base: Path, folder: Path, *words: str) -> None:
    words = ("trainer.total_training_steps=1", "trainer.save_freq=1", f"trainer.output_dir={folder / 'out'}", *words)
    trainer: Any = rl.build(tiny_lm_config(base, folder, *words))
    trainer.fit()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, and a run that trained a LoRA on it, `out`."""
    folder = tmp_path_factory.mktemp("good")
    tiny_lm(folder / "base")
    run_ranks(train, 1, folder / "base", folder, "model.lora_rank=4")
    (folder / "reward.py").write_text(REWARD)
    return folder


def configured(**changes: Any) -> Change:
    """Keys of the run's config.yaml such as `model__path` with other values."""

    def change(folder: Path) -> None:
        file = folder / "out" / "config.yaml"
        content = yaml.safe_load(file.read_text())
        for key, value in changes.items():
            section, _, name = key.partition("__")
            content[section][name] = (
                value.replace("{outside}", str(folder.parent / "outside")) if isinstance(value, str) else value
            )
        file.write_text(yaml.safe_dump(content))

    return change


def meta(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / STEP / "meta.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def sealed(*changes: Change) -> Change:
    """Changes of a checkpoint's files with a meta.json that fits."""

    def change(folder: Path) -> None:
        for each in changes:
            each(folder)
        files = {}
        for file in (folder / STEP).iterdir():
            if file.name != "meta.json":
                large = file.stat().st_size > 1 << 30
                files[file.name] = (file.stat().st_size, 0 if large else zlib.crc32(file.read_bytes()))
        meta(files=files)(folder)

    return change


def settings(name: str, **changes: Any) -> Change:
    """Keys of a JSON file of the model with other values."""

    def change(folder: Path) -> None:
        file = folder / "base" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edited(name: str, edit: Callable[[bytes], bytes]) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(edit((folder / name).read_bytes()))

    return change


def pickled(folder: Path) -> None:
    """Weights as a pickle that runs a program, in place of safetensors."""
    remove(folder / "base" / "model.safetensors")
    torch.save({"model.norm.weight": Evil()}, folder / "base" / "pytorch_model.bin")


def coded(folder: Path) -> None:
    """A model of a class in a file of its folder."""
    (folder / "base" / "evil.py").write_text("import os\nos.system('touch PWNED')\n")
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    for name in ("config.json", "tokenizer_config.json"):
        settings(name, auto_map=dict.fromkeys(kinds, "evil.Evil"), model_type="evil")(folder)


def weights(**tensors: tuple[list[int], bytes]) -> Change:
    """A safetensors file with these tensors, whatever their size."""
    head, data = {}, b""
    for name, (shape, content) in tensors.items():
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    written = json.dumps(head).encode()
    return replaced("base/model.safetensors", struct.pack("<Q", len(written)) + written + data)


HUGE = 1 << 40
RUNS: dict[str, Change] = {
    "nothing": lambda _: None,
    "a pipe as config.yaml": fifo("out/config.yaml"),
    "a pipe as meta.json": fifo(f"{STEP}/meta.json"),
    "a pipe as metadata": fifo(f"{STEP}/.metadata"),
    "a pipe as tensors": fifo(f"{STEP}/__0_0.distcp"),
    "a folder as tensors": in_place_of(f"{STEP}/__0_0.distcp"),
    "a folder as meta.json": in_place_of(f"{STEP}/meta.json"),
    "a link to a configuration": linked("out/config.yaml", "{outside}/secret"),
    "a link to meta.json": linked(f"{STEP}/meta.json", "{outside}/secret"),
    "a link to metadata": sealed(linked(f"{STEP}/.metadata", "{outside}/secret")),
    "tensors of a device": linked(f"{STEP}/__0_0.distcp", "/dev/zero"),
    "a link as a checkpoint": linked(STEP, "/proc/self"),
    "a link as checkpoints": linked("out/checkpoints", "{outside}"),
    "a link where output goes": linked("out/export", "{outside}"),
    "a link where records go": linked("out/evaluation", "{outside}"),
    "links in a circle": linked(STEP, "step_000001"),
    "a sparse configuration": sparse("out/config.yaml"),
    "a sparse meta.json": sparse(f"{STEP}/meta.json"),
    "sparse metadata": sealed(sparse(f"{STEP}/.metadata")),
    "sparse tensors": sealed(sparse(f"{STEP}/__0_0.distcp")),
    "half of the tensors": sealed(edited(f"{STEP}/__0_0.distcp", lambda data: data[: len(data) // 2])),
    "half of the metadata": sealed(edited(f"{STEP}/.metadata", lambda data: data[: len(data) // 2])),
    "other bytes": edited(f"{STEP}/__0_0.distcp", lambda data: bytes(len(data))),
    "zeros": sealed(edited(f"{STEP}/__0_0.distcp", lambda data: bytes(len(data)))),
    "a program as metadata": sealed(replaced(f"{STEP}/.metadata", pickle.dumps(Evil()))),
    "a program as tensors": sealed(edited(f"{STEP}/__0_0.distcp", lambda data: pickle.dumps(Evil()) + data)),
    "a deep pickle": sealed(replaced(f"{STEP}/.metadata", b"(" * 1_000_000 + b"t" * 1_000_000 + b".")),
    "a pickle of many bytes": sealed(replaced(f"{STEP}/.metadata", b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x.")),
    "no checkpoint": lambda folder: shutil.rmtree(folder / STEP),
    "meta.json of another type": replaced(f"{STEP}/meta.json", "[1]"),
    "deep JSON": replaced(f"{STEP}/meta.json", '{"files": ' + "[" * 100_000),
    "files of another type": meta(files=[1]),
    "files elsewhere": meta(files={"../../../outside/secret": [9, 0]}),
    "progress of another type": meta(progress={"step": "one"}),
    "a huge step": meta(progress={"step": 10**400}),
    "a signature of another type": meta(signature=None),
    "strange names": lambda folder: [(folder / "out/checkpoints" / f"step_{n}").mkdir() for n in ("x", "\n", "9" * 99)],
    "nested aliases": replaced("out/config.yaml", BOMB + "trainer: {experiment_name: *a7}\nmodel: {path: *a7}\n"),
    "a list as configuration": replaced("out/config.yaml", "- 1\n"),
    "code in YAML": replaced("out/config.yaml", "model: !!python/object/apply:os.system ['touch PWNED']\n"),
    "not UTF-8": replaced("out/config.yaml", b"\xff\xfe\x00\x80"),
    "a reward of code": configured(reward__functions=[{"path": "{outside}/evil.py:score"}]),
    "an environment of code": configured(environment__path="evil:E", environment__tools=["evil:f"]),
    "an engine of code": configured(rollout__engine="{outside}/evil.py:Engine"),
    "a variable": configured(model__path="${oc.env:SECRET}"),
    "a model elsewhere": configured(model__path="/proc/self"),
    "a model at a device": configured(model__path="/dev/zero"),
    "a model of no name": configured(model__path="\n\x00"),
    "another family": configured(model__path="https://x.org/evil"),
    "NaN": configured(rollout__temperature=float("nan"), rollout__top_p=float("nan")),
    "an infinite alpha": configured(model__lora_alpha=float("inf")),
    "another rank": configured(model__lora_rank=8),
    "a huge rank": configured(model__lora_rank=10**9),
    "huge lengths": configured(data__max_prompt_length=10**15, data__max_response_length=10**15),
    "many responses": configured(rollout__n=10**12),
    "other layers": configured(model__target_modules=["(a+)+$" * 9]),
}
MODELS: dict[str, Change] = {
    "nothing": lambda _: None,
    "code": coded,
    "a pickle": pickled,
    "a pipe as config.json": fifo("base/config.json"),
    "a pipe as weights": fifo("base/model.safetensors"),
    "a pipe as a tokenizer": fifo("base/tokenizer.json"),
    "a pipe as a template": fifo("base/chat_template.jinja"),
    "a pipe as generation_config.json": fifo("base/generation_config.json"),
    "a link to weights": linked("base/model.safetensors", "{outside}/secret"),
    "a link to a template": linked("base/chat_template.jinja", "/dev/zero"),
    "a sparse config.json": sparse("base/config.json"),
    "sparse weights": sparse("base/model.safetensors"),
    "a sparse tokenizer": sparse("base/tokenizer.json"),
    "a sparse template": sparse("base/chat_template.jinja"),
    "half of the weights": edited("base/model.safetensors", lambda data: data[: len(data) // 2]),
    "a long header": edited("base/model.safetensors", lambda data: struct.pack("<Q", HUGE) + data[8:]),
    "a tensor of another shape": weights(**{"model.norm.weight": ([3], bytes(12))}),
    "a tensor of no size": weights(**{"model.norm.weight": ([2**40, 2**40, 0], b"")}),
    "a tensor beyond the file": edited(
        "base/model.safetensors", lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1)
    ),
    "not JSON": replaced("base/config.json", "{"),
    "deep JSON": replaced("base/config.json", '{"a": ' + "[" * 100_000),
    "NaN": settings("config.json", rms_norm_eps=float("nan"), rope_theta=float("inf")),
    "a vocabulary of another size": settings("config.json", vocab_size=7),
    "a huge vocabulary": settings("config.json", vocab_size=10**12),
    "many layers": settings("config.json", num_hidden_layers=10**9),
    "no heads": settings("config.json", num_attention_heads=0),
    "sizes of other types": settings("config.json", hidden_size="64", num_hidden_layers=None),
    "another architecture": settings("config.json", architectures=["os.system"], model_type="bert"),
    "a quantization": settings("config.json", quantization_config={"quant_method": "evil"}),
    "a tokenizer of another class": settings("tokenizer_config.json", tokenizer_class="os.system"),
    "a template of code": replaced(
        "base/chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages.append(1) }}"
    ),
    "a template of no end": replaced("base/chat_template.jinja", "{{ 'x' * 10**12 }}"),
    "a template of another type": settings("tokenizer_config.json", chat_template={"a": 1}),
    "no tokens": replaced("base/tokenizer.json", "{}"),
    "an index elsewhere": lambda folder: (
        remove(folder / "base/model.safetensors"),
        replaced(
            "base/model.safetensors.index.json",
            json.dumps({"weight_map": {"model.norm.weight": "../outside/secret"}, "metadata": {}}),
        )(folder),
    ),
}


def words(command: str, folder: Path) -> list[str]:
    out = f"output_dir={folder}/result"
    of_model, of_run = [f"model.path={folder}/base", "model.dtype=float32"], [f"checkpoint={folder}/out"]
    reward = f"reward.functions=[{{path: '{folder}/reward.py:evenness'}}]"
    data, length = f"data.val_files=[{folder}/prompts.jsonl]", "data.max_response_length=4"
    return {
        "export": [*of_run, out],
        "export in place": of_run,
        "generate": [*of_run, "prompts=[a]", "max_response_length=4", f"output_file={folder}/result"],
        "generate from a model": [*of_model, "prompts=[a]", "max_response_length=4", f"output_file={folder}/result"],
        "evaluate": [*of_run, out, data, reward, "n=1"],
        "evaluate in place": [*of_run, data, reward, "n=1"],
        "evaluate a model": [*of_model, out, data, length, "data.max_prompt_length=64", reward, "n=1"],
    }[command]


JOBS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "export": (ExportConfig, Export), "generate": (GenerateConfig, Generation), "evaluate": (EvaluateConfig, Evaluation)
}  # fmt: skip


def ended(command: str, folder: Path) -> str:
    """Run a command as phalanx.run.cli does; returns what is wrong with its end, or "" if it is a result or one line."""
    kind, job = JOBS[command.partition(" ")[0]]
    phase: tuple[type[BaseException], ...] = (ValueError,)
    try:
        built = job(load_config(kind, None, words(command, folder)))
        phase = (JobError, Stopped)
        built.run()
    except phase as error:
        return "more than a line" if len(str(error).splitlines()) > 1 or SECRET in str(error) else ""
    except BaseException:  # reported by the test
        return traceback.format_exc()
    return ""


def attacked(command: str, changes: dict[str, Change], good: Path, place: Path) -> None:
    """Run a command on a copy of the good folder after each change; raises AssertionError with what was wrong."""
    os.environ["SECRET"] = SECRET
    os.chdir(place)
    wrong = {}
    for number, (name, change) in enumerate(changes.items()):
        folder, outside = place / str(number) / "given", place / str(number) / "outside"
        shutil.copytree(good, folder)
        outside.mkdir()
        (outside / "secret").write_text(SECRET)
        (outside / "evil.py").write_text("import os\nos.system('touch PWNED')\n")
        configured(model__path=str(folder / "base"))(folder)
        change(folder)
        before, start = digest(outside), time.monotonic()
        problem = ended(command, folder)
        print(f"{time.monotonic() - start:.1f} s: {command}: {name}{' FAILS' if problem else ''}", flush=True)
        if not problem and digest(outside) != before:
            problem = "it wrote outside"
        if (not problem and any(folder.rglob("PWNED"))) or Path("PWNED").exists():
            problem = "it ran code"
        result = folder / "result"
        written = [result] if result.is_file() else [file for file in result.rglob("*") if file.is_file()]
        if not problem and any(SECRET.encode() in file.read_bytes() for file in written):
            problem = "it read outside"
        if problem:
            wrong[name] = problem
        shutil.rmtree(place / str(number), ignore_errors=True)
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


def survives(command: str, changes: dict[str, Change], good: Path, place: Path) -> None:
    before_forks()
    words = in_child(lambda: attacked(command, changes, good, place), MOST_MEMORY + ORDINARY)
    assert words == "", words[-20_000:]


@pytest.mark.seldom("generate", "evaluate", "evaluate in place")
@pytest.mark.full
@pytest.mark.parametrize("command", ["export", "generate", "evaluate", "evaluate in place"])
def test_a_run_of_somebody_else(command: str, good: Path, tmp_path: Path) -> None:
    chosen = RUNS if command != "evaluate in place" else {name: RUNS[name] for name in RUNS if "link" in name}
    survives(command, chosen, good, tmp_path)


@pytest.mark.seldom("evaluate a model")
@pytest.mark.quick("generate from a model")
@pytest.mark.parametrize("command", ["generate from a model", "evaluate a model"])
def test_a_model_of_somebody_else(command: str, good: Path, tmp_path: Path) -> None:
    survives(command, MODELS, good, tmp_path)
