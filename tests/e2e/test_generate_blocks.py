"""tasks/generate.py with block-diffusion models: a run that added the mask token, and its exported folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.tasks import ExportConfig
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task

PROMPTS = "prompts=['Ann has 3 books, and more.', Bo]"


def train(base: Path, folder: Path) -> None:
    """Two steps of supervised training of a folder without a mask token, in blocks of four tokens."""
    from phalanx.run.block_diffusion_sft import build

    rows: list[dict[str, Any]] = []
    for i in range(8):
        question, answer = f"Ann has {i} books.", f"{i} and {i} is {2 * i}."
        chats = [[{"role": role, "content": text}] for role, text in (("user", question), ("assistant", answer))]
        # texts, and chats as TRL has them
        rows.append(dict(zip(("question", "answer"), chats if i % 2 else (question, answer), strict=True)))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"model.path={base}",
        "model.dtype=float32",
        "model.block_size=4",
        f"data.train_files=[{folder / 'rows.jsonl'}]",
        "data.prompt_key=question",
        "data.response_key=answer",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "block_diffusion.micro_batch_size_per_gpu=4",
        "rollout.threshold=0.5",
        "optim.lr=1e-2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.logger=[]",
        f"trainer.output_dir={folder / 'out'}",
    ]
    build(load_config(BlockDiffusionTaskConfig, None, keys)).fit()


@pytest.fixture(scope="module")
def run(lm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    run_ranks(train, 1, lm_folder, folder)
    return folder / "out"


def written(file: Path, *words: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Generate; returns the rows, and the last line that is printed."""
    keys = [PROMPTS, "temperature=0.8", "seed=3", "n=2", "max_response_length=8", "model.dtype=float32"]
    done = run_task(["tasks/generate.py", *keys, *words, f"output_file={file}"])
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in file.read_text().splitlines()], done.stdout.splitlines()[-1]


def test_a_run_writes_as_its_export_does(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={run}", f"output_dir={folder}"])).run()
    rows, last = written(tmp_path / "run.jsonl", f"checkpoint={run}", "threshold=0.05")
    again, _ = written(tmp_path / "folder.jsonl", f"model.path={folder}", "model.block_size=4", "threshold=0.05")
    assert rows == again and len({row["text"] for row in rows}) > 2
    tokens, forwards = (sum(row[key] for row in rows) for key in ("tokens", "forward_passes"))
    assert last == f"{tokens / forwards:.2f} tokens per forward pass: {tokens} tokens in {forwards} passes over a block"
    assert all(0 < row["tokens"] <= 8 for row in rows)


def test_fixed_steps(run: Path, tmp_path: Path) -> None:
    """The two most confident tokens of a block are unmasked per step; a prompt may leave an odd number, or only one."""
    rows, _ = written(tmp_path / "two.jsonl", f"checkpoint={run}", "threshold=1", "denoising_steps_per_block=2")
    assert all(row["tokens"] / 2 <= row["forward_passes"] <= 4 for row in rows)
    rows, last = written(tmp_path / "one.jsonl", f"checkpoint={run}", "threshold=1")
    assert all(row["tokens"] == row["forward_passes"] for row in rows) and last.startswith("1.00 tokens")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.path=MODEL", "threshold=0.5"], "threshold: 0.5 is for block diffusion; set model.block_size, or"),
        (
            ["model.path=MODEL", "model.mask_token=a"],
            "model.mask_token: a is for block diffusion; set model.block_size",
        ),
        (["model.path=MODEL", "model.block_size=4"], "model.path: 'MODEL': its tokenizer has no mask token"),
        (
            ["checkpoint=RUN", "max_response_length=9"],
            "max_response_length: 9 tokens are not a whole number of blocks of",
        ),
        (["checkpoint=RUN", "denoising_steps_per_block=5"], "denoising_steps_per_block: 5 is more than model.block_s"),
        (["checkpoint=RUN", "max_response_length=1024"], "max_response_length: 1024 tokens after a prompt of"),
    ],
)
def test_mistakes(words: list[str], message: str, run: Path, lm_folder: Path) -> None:
    def named(text: str) -> str:
        return text.replace("MODEL", str(lm_folder)).replace("RUN", str(run))

    done = run_task(["tasks/generate.py", "prompts=[a]", *map(named, words)])
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith(f"error: {named(message)}"), done.stderr
