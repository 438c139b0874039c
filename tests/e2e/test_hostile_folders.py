"""Whole evaluations, exports and generations of folders as an attacker, or a damaged disk, may leave them.

Each must end, well or by one line: without a traceback, a hang or much memory, without running code, and without
reading or writing outside. The cases of a test share a fork, whose model libraries are loaded.
"""

import itertools
import json
import os
import pickle
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.run import rl
from tests.helpers.hostile import BOMB, Change, both, bound, fifo, in_place_of, linked, remove, replaced, sparse
from tests.helpers.hostile_jobs import (
    AUTO,
    HUGE,
    STEP,
    Evil,
    configured,
    edited,
    evil,
    meta,
    sealed,
    settings,
    survives,
)
from tests.helpers.lm import REWARD, tiny_lm, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task


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


def doubling(times: int) -> str:
    """A configuration whose text doubles with each key."""
    lines = ["k0: xx\n"]
    for i in range(times):
        lines.append(f"k{i + 1}: ${{k{i}}}${{k{i}}}\n")
    return "".join(lines) + f"model: {{path: ${{k{times}}}}}\n"


def chained(name: str) -> Change:
    """A file behind 60 links, more than the system follows."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder / "end")
        for i in range(60):
            (folder / f"link{i}").symlink_to(f"link{i + 1}" if i < 59 else "end")
        (folder / name).symlink_to(folder / "link0")

    return change


def growing(name: str, content: bytes = b"\0") -> Change:
    """A file to which another process adds 64 MB while it is read."""

    def change(folder: Path) -> None:
        if os.fork() == 0:
            try:
                with (folder / name).open("ab", buffering=0) as file:
                    for _ in range(1024):
                        file.write(content * (1 << 16))
                        time.sleep(0.002)
            finally:
                os._exit(0)

    return change


def tokenizer(**parts: Any) -> Change:
    """Another normalizer or pattern in tokenizer.json."""
    return settings("tokenizer.json", **parts)


def multiplied(before: str, after: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": before}, "content": after * 100}


def overlapping(data: bytes) -> bytes:
    """Weights whose tensors are all of the first one's bytes."""
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + size])
    for name, part in head.items():
        if name != "__metadata__":
            part["data_offsets"] = [0, part["data_offsets"][1] - part["data_offsets"][0]]
    written = json.dumps(head).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + size :]


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
    "shards that climb": sealed(
        edited(f"{STEP}/.metadata", lambda data: data.replace(b"__0_0.distcp", b"../../secret"))
    ),
    "shards elsewhere": sealed(
        edited(f"{STEP}/.metadata", lambda data: data.replace(b"__0_0.distcp", b"/etc//passwd"))
    ),
    "texts that grow": replaced("out/config.yaml", doubling(60)),
    "a circle of references": configured(model__path="${model.path}"),
    "a reference to much": configured(model__path="${oc.create:${oc.env:SECRET}}", trainer__project_name="${now:%H}"),
    "anchors of lists": replaced("out/config.yaml", BOMB + "reward: {functions: *a7}\ndata: {val_files: *a7}\n"),
    "a tag of Python": replaced("out/config.yaml", "model: {path: !!python/name:os.system }\n"),
    "long numbers": replaced("out/config.yaml", "trainer: {seed: " + "9" * 200_000 + "}\n"),
    "many keys": replaced("out/config.yaml", "".join(f"k{i}: 1\n" for i in range(20_000))),
    "many entries": meta(files={f"f{i}": [1, 0] for i in range(30_000)}),
    "gigantic JSON": replaced(f"{STEP}/meta.json", '{"files": [' + "0," * (60 << 20) + "0]}"),
    "a growing configuration": growing("out/config.yaml"),
    "growing tensors": growing(f"{STEP}/__0_0.distcp"),
    "a socket": bound("out/config.yaml"),
    "a link to a pipe": both(fifo("pipe"), linked("out/config.yaml", "../pipe")),
    "a chain of links": chained("out/config.yaml"),
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
    "a template that loops": replaced(
        "base/chat_template.jinja", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a template that calls itself": replaced(
        "base/chat_template.jinja", "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}"
    ),
    "a template that doubles": replaced(
        "base/chat_template.jinja",
        "{% set a = namespace(x='xx') %}{% for i in range(60) %}{% set a.x = a.x ~ a.x %}{% endfor %}{{ a.x }}",
    ),
    "a template of other files": replaced("base/chat_template.jinja", "{% include '/etc/passwd' %}"),
    "gigantic JSON": replaced("base/config.json", '{"a": [' + "0," * (50 << 20) + "0]}"),
    "a gigantic tokenizer": replaced("base/tokenizer_config.json", '{"a": "' + "x" * (100 << 20) + '"}'),
    "tensors that overlap": edited("base/model.safetensors", overlapping),
    "a long name": weights(**{"x" * (30 << 20): ([0], b"")}),
    "many tensors": weights(**{f"t{i}": ([0], b"") for i in range(30_000)}),
    "weights of a pickle": both(pickled, replaced("base/model.safetensors", pickle.dumps(Evil()))),
    "an index of pipes": both(
        fifo("base/pipe.safetensors"),
        replaced("base/model.safetensors.index.json", '{"weight_map": {"model.norm.weight": "pipe.safetensors"}}'),
    ),
    "an absolute index": replaced(
        "base/model.safetensors.index.json", '{"weight_map": {"model.norm.weight": "/etc/passwd"}}'
    ),
    "growing weights": growing("base/model.safetensors"),
    "a growing tokenizer": growing("base/tokenizer.json", b" "),
    "a normalizer that multiplies": tokenizer(
        normalizer={"type": "Sequence", "normalizers": [multiplied(c, d) for c, d in itertools.pairwise("abcdefghijk")]}
    ),
    "a pattern that backtracks": tokenizer(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(.|.)*(.|.)*(.|.)*$^"},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "code in every file": both(*(settings(name, **AUTO) for name in ("config.json", "tokenizer_config.json")), evil),
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


@pytest.mark.seldom("generate", "evaluate", "evaluate in place")
@pytest.mark.full
@pytest.mark.parametrize("command", ["export", "generate", "evaluate", "evaluate in place"])
def test_a_run_of_somebody_else(command: str, good: Path, tmp_path: Path) -> None:
    chosen = RUNS if command != "evaluate in place" else {name: RUNS[name] for name in RUNS if "link" in name}
    survives(command, words, chosen, good, tmp_path)


def test_a_damaged_checkpoint_is_told_in_a_line(good: Path, tmp_path: Path) -> None:
    """By the command itself, which loads it before the job begins."""
    shutil.copytree(good, tmp_path / "w")
    RUNS["other bytes"](tmp_path / "w")
    done = run_task(["tasks/evaluate.py", *words("evaluate", tmp_path / "w"), f"model.path={good}/base"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "step_000001 is damaged (the checksum of __0_0.distcp differs); use another one" in done.stderr


SLOW = (
    *("a template that loops", "a template that doubles", "a gigantic tokenizer", "many tensors", "gigantic JSON"),
    *("growing weights", "a growing tokenizer", "a long name", "a normalizer that multiplies"),
)  # a minute in all


@pytest.mark.long
def test_a_large_model_of_somebody_else(good: Path, tmp_path: Path) -> None:
    survives("generate from a model", words, {name: MODELS[name] for name in SLOW}, good, tmp_path)


@pytest.mark.seldom("evaluate a model")
@pytest.mark.quick("generate from a model")
@pytest.mark.parametrize("command", ["generate from a model", "evaluate a model"])
def test_a_model_of_somebody_else(command: str, good: Path, tmp_path: Path) -> None:
    quick = {name: MODELS[name] for name in MODELS if name not in SLOW}
    survives(command, words, quick, good, tmp_path)
