"""The model card of an export, read as the hub reads it."""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from PIL import Image

from phalanx.config.tasks import ExportConfig
from phalanx.run.provenance import digest_path
from phalanx.run.rules import load_config
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import read_run
from phalanx.tools.board.report import write_report
from phalanx.tools.card_curves import lines_of
from phalanx.tools.export import Export
from phalanx.tools.model_card import base_name, licence_of
from tests.distributed.test_joint import fit as fit_joint
from tests.distributed.test_joint import joint_config
from tests.helpers.hub import hub_server
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT, run_ranks

SECRET = "s3cr3t-key-of-a-judge"
BASE_CARD = (
    "---\nlicense: other\nlicense_name: tiny\nlicense_link: https://x.org/tiny\nbase_model: a/b\n---\n# A base\n"
)
REWARD = """
def needs_key(completions, prompts, metadata, key):
    return [len(text) / 40 for text in completions]
"""


@pytest.fixture(scope="module")
def run(lm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A LoRA of a base in the cache of the hub, trained on a data set of the hub, with a reward that has a secret."""
    import datasets

    folder = tmp_path_factory.mktemp("carded")
    base = folder / "hub" / "models--me--tiny" / "snapshots" / "0a1b"
    shutil.copytree(lm_folder, base)
    (base / "README.md").write_text(BASE_CARD)
    (folder / "me" / "sums").mkdir(parents=True)
    questions = Dataset.from_dict({"prompt": [f"Ann has {i} books." for i in range(6)]})
    questions.to_parquet(str(folder / "me" / "sums" / "train.parquet"))
    (folder / "held_out.jsonl").write_text(json.dumps({"prompt": "Bob has 2 | 3 cats."}) + "\n")
    (folder / "judge.py").write_text(REWARD)
    judge = f"{{path: '{folder}/judge.py:needs_key', weight: 2, kwargs: {{key: '${{oc.env:PHALANX_CARD_KEY}}'}}}}"
    keys = [
        "model.lora_rank=4",
        "actor.ema.decay=0.5",
        "data.train_files=hf://me/sums@0f/default:train",
        f"data.val_files=[{folder}/held_out.jsonl]",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
        f"reward.functions=[{judge}]",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setenv("PHALANX_CARD_KEY", SECRET)
        patch.setattr(sys, "argv", [str(ROOT / "tasks" / "train_grpo.py"), *keys, f"model.path={base}"])
        patch.chdir(folder)
        run_ranks(fit, 1, tiny_lm_config(base, folder, *keys))
    yield folder / "out"


def card_of(folder: Path, checkpoint: Path, *overrides: str) -> ModelCard:
    """Export a checkpoint, and read the card of the folder."""
    Export(load_config(ExportConfig, None, [f"checkpoint={checkpoint}", f"output_dir={folder}", *overrides])).run()
    return ModelCard.load(folder / "README.md")


def test_a_lora(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CARD_KEY", SECRET)
    card = card_of(tmp_path / "mine", run / "checkpoints" / "step_000002")
    assert card.data.to_dict() == {
        "base_model": "me/tiny",
        "base_model_relation": "adapter",
        "datasets": ["me/sums"],
        "library_name": "peft",
        "license": "other",
        "license_name": "tiny",
        "license_link": "https://x.org/tiny",
        "pipeline_tag": "text-generation",
        "tags": ["phalanx", "lora", "grpo"],
    }
    text = card.text
    assert (
        text.splitlines()[0] == ""
        and "# mine\n\nA LoRA of [me/tiny](https://huggingface.co/me/tiny), trained by `grpo`" in text
    )
    assert "for 2 steps" in text and "| weights | the moving average |" in text
    assert "`hf://me/sums@0f/default:train`" in text
    held_out = run.parent / "held_out.jsonl"
    assert f"| validation data | `held_out.jsonl`, SHA-256 `{digest_path(held_out)}` |" in text
    assert "| reward | `judge.py:needs_key`, weight 2.0 |" in text
    # the validation of the exported step, not of the last one, with its interval if there is one
    values = {row["step"]: row["val/held_out/reward/mean"] for row in read_metrics(run / "metrics.jsonl")}
    assert f"| `held_out` | 2 | {values[2]:.4g} |" in text and f"| {values[0]:.4g} (step 0) |" in text
    assert "sh train.sh tasks/train_grpo.py" in text and "trainer.total_training_steps=3" in text
    assert "\n  lora_rank: 4\n" in text and re.search(r"versions \|.* phalanx .* torch ", text)
    # the picture that the card shows
    assert "## Curves\n\n![Curves up to step 2," in text and "](curves.png)" in text and "report.html" not in text
    training, held_out_line = lines_of(read_run(run), 2)
    assert [step for step, _ in training.points] == [1, 2] and held_out_line.points[-1] == (2, values[2])
    with Image.open(tmp_path / "mine" / "curves.png") as picture:
        assert picture.size == (860, 340) and len(picture.convert("L").getcolors() or []) > 20
    # neither a secret nor a folder of this machine
    assert SECRET not in text and "key: ${oc.env:PHALANX_CARD_KEY}" in text
    assert str(run.parent) not in text and os.path.expanduser("~") + "/" not in text


def test_a_merged_lora_under_a_name_of_the_hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.tools.export.make_repository", lambda repo: None)
    monkeypatch.setattr(
        "phalanx.tools.export.upload", lambda folder, repo, name: f"{repo} {sorted(os.listdir(folder))}"
    )
    card = card_of(tmp_path / "merged", run, "merge_lora=true", "push_to_hub=me/new")
    data = card.data.to_dict()
    assert (data["library_name"], data["base_model_relation"]) == ("transformers", "finetune")
    assert "# new\n\nA fine-tuned [me/tiny]" in card.text and "from_pretrained('me/new')" in card.text
    assert data["tags"] == ["phalanx", "grpo"]


def test_an_upload_to_the_hub(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files reach the hub in one commit, with the run's report, and neither hosts, paths nor secrets."""
    monkeypatch.setenv("PHALANX_CARD_KEY", SECRET)
    (run / "ranks").mkdir()
    assert 'id="of-ranks"' in write_report(run, output=tmp_path / "own.html").read_text()
    with hub_server() as hub:
        for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", hub.url), ("HF_HUB_DISABLE_XET", True)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", "hf_local")
        card_of(tmp_path / "mine", run, "push_to_hub=me/new")
    assert hub.repositories == ["me/new"] and hub.messages == ["step_000003 of a Phalanx run"]
    assert hub.tokens == {"Bearer hf_local"}
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "mine").iterdir()}
    assert {"adapter_model.safetensors", "README.md", "curves.png", "report.html"} <= hub.files.keys()
    assert "](report.html)" in hub.files["README.md"].decode()
    report = hub.files["report.html"].decode()
    assert "Resolved configuration" in report and "Bob has 2 | 3 cats." in report
    assert str(run.parent) not in report and SECRET not in report and 'id="of-ranks"' not in report


def test_a_run_without_its_records(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "metrics.jsonl").unlink()
    (copy / "provenance.json").write_text("[]")
    card = card_of(tmp_path / "export", copy)
    assert not (tmp_path / "export" / "curves.png").exists() and "## Curves" not in card.text
    assert card.data.base_model == "me/tiny" and "## Validation" not in card.text and "train.sh" not in card.text
    assert "<details>" in card.text


@pytest.mark.parametrize("lora", [True, False])
def test_a_flow_model_of_a_folder(lora: bool, sd3_folder: Path, tmp_path: Path) -> None:
    keys = ("model.lora_rank=4",) if lora else ()
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, *keys, "trainer.save_freq=1", "trainer.total_training_steps=1"))
    data = card_of(tmp_path / "export", tmp_path / "out").data.to_dict()
    assert data == {"library_name": "diffusers", "tags": ["phalanx", *(["lora"] if lora else []), "flow_grpo"]}
    text = (tmp_path / "export" / "README.md").read_text()
    assert ("load_lora_weights('export')" in text) == lora
    digest = digest_path(tmp_path / "prompts.txt")
    assert f"| training data | `prompts.txt`, SHA-256 `{digest}` |" in text and "| reward | `contrast`, weight" in text


@pytest.mark.full
def test_a_policy_of_a_joint_run(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    keys = ("trainer.save_freq=1", "trainer.test_freq=1", "trainer.total_training_steps=1", "writer.model.lora_rank=4")
    run_ranks(fit_joint, 1, joint_config(lm_folder, sd3_folder, tmp_path, *keys))
    card = card_of(tmp_path / "writer", tmp_path / "out", "policy=writer")
    assert card.data.to_dict()["library_name"] == "peft" and "lora" in card.data.tags
    assert "| `prompts_original` | 1 |" in card.text
    assert (
        card_of(tmp_path / "painter", tmp_path / "out", "policy=painter").data.to_dict()["library_name"] == "diffusers"
    )


def test_names_and_licences_of_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert base_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B" and base_name(str(tmp_path)) is None
    assert licence_of(str(tmp_path), None) == {}
    for content in ("# no front matter\n", "---\nlicense: [mit]\n---\n", "---\n: : {\n---\n", "---\nfoo\n---\n"):
        (tmp_path / "README.md").write_text(content)
        assert licence_of(str(tmp_path), None) == {}
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert licence_of(str(tmp_path), None) == {"license": "mit"}
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "README.md"))
    assert licence_of("me/base", "main") == {"license": "mit"}
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert licence_of("me/absent", None) == {}
