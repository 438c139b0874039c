"""Exports of language models: stock transformers and peft compute what the trained policy computes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.config.tasks import ExportConfig, SampleConfig
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.export import Export
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task

LORA = ("model.lora_rank=4", "model.lora_alpha=6", "optim.lr=1e-1")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {  # ranks, overrides
    "full": (2, ("optim.lr=1e-2", "parallel.fsdp_size=2", "actor.ema={decay: 0.7, warmup: false}")),
    "lora": (2, (*LORA, "parallel.fsdp_size=2")),
    "pissa-bfloat16": (
        1,
        (*LORA, "model.lora_init=pissa", "model.target_modules=[self_attn.v_proj]", "model.lora_dtype=bfloat16"),
    ),
    "pissa": (1, (*LORA, "model.lora_init=pissa", "model.target_modules=[self_attn.v_proj, mlp.down_proj]")),
}
IDS = torch.arange(3, 60).reshape(3, 19)


@dataclass(frozen=True)
class Run:
    """A trained run: its output_dir, its base model, and the policy's logits with each kind of weights."""

    folder: Path
    base: Path
    logits: dict[str, Tensor]


Runs = Callable[[str], Run]


def train(base: Path, folder: Path, overrides: tuple[str, ...]) -> dict[str, Tensor]:
    from phalanx.run.rl import build

    trainer = build(tiny_lm_config(base, folder, "trainer.save_freq=2", *overrides))

    def logits(name: str | None = None) -> Tensor:
        policy: Any = trainer.policy
        if name is not None:
            with policy.using(name):
                return logits()
        with torch.no_grad(), policy.unsharded():
            return policy.trained.module(input_ids=IDS).logits

    found = {"start": logits()}
    trainer.fit()
    found["model"] = logits()
    return found | ({"ema": logits("ema")} if trainer.job.state.ema is not None else {})


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    @cache
    def get(name: str) -> Run:
        base, folder, (ranks, overrides) = (
            request.getfixturevalue("lm_folder"),
            tmp_path_factory.mktemp(name),
            RUNS[name],
        )
        return Run(folder / "out", base, run_ranks(train, ranks, base, folder, overrides)[0])

    return get


def export(folder: Path, checkpoint: Path, *overrides: str) -> Path:
    Export(load_config(ExportConfig, None, [f"checkpoint={checkpoint}", f"output_dir={folder}", *overrides])).run()
    return folder


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_all_weights(trained: Runs, tmp_path: Path) -> None:
    run = trained("full")
    assert (run.logits["model"] - run.logits["start"]).abs().max() > 0.05
    assert (run.logits["model"] - run.logits["ema"]).abs().max() > 0.01
    for weights, name in (("auto", "ema"), ("model", "model")):
        folder = export(tmp_path / weights, run.folder, f"weights={weights}")
        assert torch.allclose(logits_of(stock(folder)), run.logits[name], atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(run.base).chat_template
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (run.base / file).read_bytes()
    readable = {(folder / file).stat().st_mode for file in ("model.safetensors", "config.json")}
    assert len(readable) == 1  # others may read the weights as the rest
    half = export(tmp_path / "half", run.folder, "dtype=bfloat16")
    assert {t.dtype for t in load_file(half / "model.safetensors").values()} == {torch.bfloat16}
    settings = json.loads((half / "config.json").read_text())
    assert settings.pop("dtype") == "bfloat16"
    assert settings == {k: v for k, v in json.loads((run.base / "config.json").read_text()).items() if k != "dtype"}


@pytest.mark.quick("pissa")
@pytest.mark.parametrize("name", ["lora", "pissa", "pissa-bfloat16"])
def test_lora(name: str, trained: Runs, tmp_path: Path) -> None:
    run = trained(name)
    assert (run.logits["model"] - run.logits["start"]).abs().max() > 0.05
    adapter = export(tmp_path / "adapter", run.folder)
    assert torch.allclose(
        logits_of(PeftModel.from_pretrained(stock(run.base), adapter)), run.logits["model"], atol=1e-4
    )
    assert AutoTokenizer.from_pretrained(adapter).chat_template is not None
    merged = export(tmp_path / "merged", run.folder, "merge_lora=true")
    assert torch.allclose(logits_of(stock(merged)), run.logits["model"], atol=1e-4)
    assert not list(merged.glob("adapter*"))


def test_an_export_writes_as_the_checkpoint_does(trained: Runs, tmp_path: Path) -> None:
    """tasks/generate.py gives the same texts with either; an output file that cannot be written is an error."""
    run = trained("full")
    folder = export(tmp_path / "export", run.folder)
    words = ["temperature=0.8", "seed=3", "n=2", "max_response_length=9"]
    prompts = "prompts=['Ann has 3 books, and more.', Bo]"
    texts = []
    for source in (f"checkpoint={run.folder}", f"model.path={folder}"):
        file = tmp_path / "texts.jsonl"
        done = run_task(["tasks/generate.py", source, prompts, *words, "model.dtype=float32", f"output_file={file}"])
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["index"], row["response"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert all(0 < row["tokens"] <= 9 and row["truncated"] in (True, False) for row in rows)
        assert "--- prompt 1, response 0: Bo\n" in done.stdout
        texts.append([row["text"] for row in rows])
    assert texts[0] == texts[1] and len(set(texts[0])) > 2
    done = run_task(["tasks/generate.py", source, prompts, *words, "output_file=/dev/full"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: output_file: '/dev/full' cannot be written: No space left on device"


def test_validation_is_written_again(lm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with its run's settings repeats the samples of the run's validation, even from another working
    directory than the one to which model.path was relative.
    """
    keys = ("trainer.save_freq=2", "trainer.test_freq=2", f"data.val_files=[{tmp_path / 'prompts.jsonl'}]")
    monkeypatch.chdir(lm_folder.parent)
    (_,) = run_ranks(train, 1, Path(lm_folder.name), tmp_path, keys)
    monkeypatch.undo()
    (kept,) = (tmp_path / "out" / "samples").glob("*/step_000002")
    file = tmp_path / "texts.jsonl"
    words = [f"checkpoint={tmp_path / 'out'}", f"prompt_file={tmp_path / 'prompts.jsonl'}", f"output_file={file}"]
    done = run_task(["tasks/generate.py", *words])
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert texts == [row["text"] for row in read_index(kept, "text")]


def test_mistakes_of_an_export(trained: Runs, tmp_path: Path) -> None:
    from phalanx.tools.sample import Generator

    run = trained("full")
    with pytest.raises(ValueError, match=r"output_dir: '/dev/full/x' cannot be created: '/dev/full' is not a folder"):
        export(Path("/dev/full/x"), run.folder)
    with pytest.raises(ValueError, match=r"is of a language model; use tasks/generate\.py"):
        Generator(load_config(SampleConfig, None, [f"checkpoint={run.folder}", "prompts=[a]"]))
    with pytest.raises(ValueError, match=r"contains \[[0-9, ]+\], the model has \[[0-9, ]+\]; give the base model"):
        other = tmp_path / "other"
        stock(run.base).save_pretrained(other)
        settings = json.loads((other / "config.json").read_text())
        model = AutoModelForCausalLM.from_config(type(stock(run.base).config)(**settings | {"intermediate_size": 32}))
        model.save_pretrained(other)
        AutoTokenizer.from_pretrained(run.base).save_pretrained(other)
        export(tmp_path / "export", run.folder, f"model_path={other}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "neither model.path nor checkpoint is set; give one of them"),
        (["model.path=MODEL"], "neither prompts nor prompt_file is set; give one of them, e.g. prompts='Why is"),
        (["model.path=MODEL", "prompts=[a]", "prompt_file=b.txt"], "prompts and prompt_file are both set; give one"),
        (["model.path=MODEL", "prompts=[a]", "max_response_length=4096"], "max_response_length: 4096 tokens after a"),
        (["model.path=MODEL", "prompts=[LONG]"], "prompt 0 has "),
        (["model.path=MODEL", "prompts=[a]", "output_file=/tmp"], "output_file: '/tmp' is a folder; give a file"),
        (
            ["model.path=MODEL", "prompts=[a]", "output_file=/dev/full/x"],
            "output_file: '/dev/full/x' cannot be created: '/dev/full' is not a folder",
        ),
        (["model.path=/nowhere", "prompts=[a]"], "model.path: '/nowhere': no such folder"),
        (["checkpoint=/nowhere", "prompts=[a]"], "checkpoint: '/nowhere': no such folder"),
    ],
)
def test_mistakes_of_a_generation(words: list[str], message: str, lm_folder: Path) -> None:
    words = [word.replace("MODEL", str(lm_folder)).replace("LONG", "12 " * 400) for word in words]
    done = run_task(["tasks/generate.py", *words])
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith(f"error: {message}"), done.stderr
