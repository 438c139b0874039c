"""Whole samplings and exports of folders of flow models as an attacker, or a damaged disk, may leave them."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hostile import Change, both, fifo, in_place_of, linked, remove, replaced, sparse
from tests.helpers.hostile_jobs import AUTO, HUGE, STEP, Evil, edited, evil, sealed, settings, survives
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_sd3

WEIGHTS = "base/transformer/diffusion_pytorch_model.safetensors"


def train(base: Path, folder: Path) -> None:
    from phalanx.run.rl import build

    words = ("trainer.total_training_steps=1", "trainer.save_freq=1", "model.lora_rank=4")
    build(tiny_config(base, folder, *words)).fit()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, and a run that trained a LoRA on it, `out`."""
    folder = tmp_path_factory.mktemp("good")
    tiny_sd3(folder / "base")
    run_ranks(train, 1, folder / "base", folder)
    return folder


def pickled(folder: Path) -> None:
    remove(folder / WEIGHTS)
    torch.save({"proj_out.weight": Evil()}, folder / "base/transformer/diffusion_pytorch_model.bin")


def index(**parts: Any) -> Change:
    """Components of model_index.json with other classes."""
    return settings("model_index.json", **parts)


MODELS: dict[str, Change] = {
    "nothing": lambda _: None,
    "a pipe as an index": fifo("base/model_index.json"),
    "a sparse index": sparse("base/model_index.json"),
    "an index of code": both(evil, index(transformer=["evil", "Evil"], **AUTO)),
    "an index of functions": index(scheduler=["os", "system"]),
    "a pipeline of code": both(evil, index(_class_name="evil.Evil")),
    "a component elsewhere": index(**{"../../outside": ["diffusers", "AutoencoderKL"]}),
    "a link to a component": linked("base/vae", "{outside}"),
    "components in a circle": linked("base/vae", "vae"),
    "a pipe as weights": fifo(WEIGHTS),
    "a folder as weights": in_place_of(WEIGHTS),
    "sparse weights": sparse(WEIGHTS),
    "a pickle": pickled,
    "weights of a pickle": replaced(WEIGHTS, pickle.dumps(Evil())),
    "a long header": edited(WEIGHTS, lambda data: struct.pack("<Q", HUGE) + data[8:]),
    "a pipe as a scheduler": fifo("base/scheduler/scheduler_config.json"),
    "a scheduler of NaN": settings("scheduler/scheduler_config.json", shift=float("nan")),
    "a scheduler of many steps": settings("scheduler/scheduler_config.json", num_train_timesteps=10**12),
    "a scheduler of another type": settings("scheduler/scheduler_config.json", shift=["3"], num_train_timesteps="x"),
    "gigantic JSON": replaced("base/transformer/config.json", '{"a": [' + "0," * (50 << 20) + "0]}"),
    "deep JSON": replaced("base/vae/config.json", '{"a": ' + "[" * 100_000),
    "many layers": settings("transformer/config.json", num_layers=10**9),
    "a huge width": settings("transformer/config.json", num_attention_heads=10**7, attention_head_dim=10**7),
    "a VAE of no channels": settings("vae/config.json", latent_channels=0, block_out_channels=[]),
    "code of an encoder": both(evil, settings("text_encoder/config.json", model_type="evil", **AUTO)),
    "a tokenizer of pipes": fifo("base/tokenizer/vocab.json", "base/tokenizer/merges.txt"),
    "a device as merges": linked("base/tokenizer/merges.txt", "/dev/zero"),
}
RUNS: dict[str, Change] = {
    "a pipe as config.yaml": fifo("out/config.yaml"),
    "shards that climb": sealed(
        edited(f"{STEP}/.metadata", lambda data: data.replace(b"__0_0.distcp", b"../../secret"))
    ),
    "a program as metadata": sealed(replaced(f"{STEP}/.metadata", pickle.dumps(Evil()))),
    "a link where output goes": linked("out/export", "{outside}"),
    "a reference to much": replaced("out/config.yaml", "model: {path: '${oc.env:SECRET}'}\n"),
}


def words(command: str, folder: Path) -> list[str]:
    tiny = ["height=16", "width=16", "num_inference_steps=2", "max_prompt_length=16", "prompts=[a]"]
    out = f"output_dir={folder}/result"
    return {
        "sample": [f"checkpoint={folder}/out", *tiny, out],
        "sample a model": [f"model.path={folder}/base", "model.dtype=float32", *tiny, out],
        "export": [f"checkpoint={folder}/out"],
    }[command]


@pytest.mark.long
@pytest.mark.parametrize("command", ["sample a model", "sample", "export"])
def test_a_flow_model_of_somebody_else(command: str, good: Path, tmp_path: Path) -> None:
    (good / "reward.json").write_text(json.dumps({}))
    survives(command, words, MODELS if command == "sample a model" else RUNS, good, tmp_path)
