"""A tiny language model, and tiny training jobs with it, for tests."""

import json
from pathlib import Path
from typing import Any

import torch

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run.rules import load_config
from tests.helpers.jobs import first_step
from tests.helpers.jobs import fit as fit

REWARD = """
def evenness(completions, prompts, metadata):
    return [sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1) for text in completions]
"""


def tiny_lm(folder: Path) -> Path:
    """An untrained Qwen3 with two layers, some of whose responses end early."""
    from assets.make.tiny_lm import make_model, make_tokenizer

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, hidden=64, layers=2, mlp=64)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_blocks(folder: Path) -> Path:
    """As `tiny_lm`, with a mask token for block diffusion."""
    from transformers import AutoTokenizer

    tiny_lm(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.save_pretrained(folder)
    return folder


def tiny_lm_config(model: Path, folder: Path, *overrides: str) -> LMRLConfig:
    """A job of 4 prompts x 4 responses per step in 2 updates, rewarded for the evenness of their letters."""
    return load_config(LMRLConfig, None, [*lm_overrides(model, folder), *overrides])


def lm_overrides(model: Path, folder: Path) -> list[str]:
    """Overrides that turn the defaults into a tiny job, whose data and reward are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"Ann has {i} books" + " and more" * (i % 3) + "."} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train_files=[{folder / 'prompts.jsonl'}]",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "rollout.n=4",
        "rollout.micro_batch_size_per_gpu=4",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "optim.lr=1e-3",
        f"reward.functions=[{{path: '{folder}/reward.py:evenness'}}]",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder / 'out'}",
    ]


def tiny_sft_config(model: Path, folder: Path, *overrides: str) -> BlockDiffusionTaskConfig:
    """A supervised job on 8 chats of different lengths per step, in blocks of 4 tokens."""
    return load_config(BlockDiffusionTaskConfig, None, [*sft_overrides(model, folder), *overrides])


def sft_overrides(model: Path, folder: Path) -> list[str]:
    """The overrides of `tiny_sft_config`; its data and reward are written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = []
    for i in range(12):
        question = f"Ann has {i} books" + " and more" * (i % 3) + "."
        answer = f"{i}" + f" and {i}" * (i % 5)
        turns = (("user", question), ("assistant", answer))
        chats.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (folder / "reward.py").write_text(REWARD)
    return [
        f"model.path={model}",
        "model.dtype=float32",
        "model.block_size=4",
        f"data.train_files=[{folder / 'chats.jsonl'}]",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        "block_diffusion.micro_batch_size_per_gpu=2",
        "optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder / 'out'}",
    ]


def fit_sft(cfg: BlockDiffusionTaskConfig) -> dict[str, torch.Tensor]:
    """Like `fit`, for a supervised job."""
    return fit(cfg, "block_diffusion_sft")


def one_step(cfg: LMRLConfig) -> dict[str, Any]:
    """Sample, score and update once; returns this rank's samples, the row of metrics, and the weights after."""
    from phalanx.run.rl import build

    samples, found = first_step(build, cfg)
    return found | {"texts": samples.outputs, "mask": samples.mask}
