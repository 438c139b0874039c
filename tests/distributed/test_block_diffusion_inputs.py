"""Inputs of block diffusion jobs: each job trains, or ends with one line that says why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from phalanx.config import ConfigError
from phalanx.config.lm import LMRLConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.models.lm.blocks import load_blocks
from phalanx.types import JobError
from tests.helpers.jobs import rows
from tests.helpers.lm import fit, tiny_lm_config, tiny_sft_config
from tests.helpers.ranks import run_ranks

BLOCK = "model.block_size=4"
RL: list[tuple[tuple[str, ...], str]] = [
    (
        (BLOCK, "data.max_response_length=10"),
        "data.max_response_length: 10 tokens are not a whole number of blocks of model.block_size=4; nearest: 8 or 12",
    ),
    (
        (BLOCK, "rollout.val.max_response_length=2"),
        "rollout.val.max_response_length: 2 tokens are not a whole number of blocks of model.block_size=4; nearest: 4 "
        "or 8",
    ),
    (
        (BLOCK, "rollout.denoising_steps_per_block=5"),
        "rollout.denoising_steps_per_block: 5 is more than model.block_size=4",
    ),
    (
        (BLOCK, "rollout.val.denoising_steps_per_block=5"),
        "rollout.val.denoising_steps_per_block: 5 is more than model.block_size=4",
    ),
    (("model.mask_token=x",), "model.mask_token: x is for block diffusion; set model.block_size, or leave it out"),
    (
        ("rollout.threshold=0.5",),
        "rollout.threshold: 0.5 is for block diffusion; set model.block_size, or leave it out",
    ),
    (
        ("rollout.val.threshold=0.5",),
        "rollout.val.threshold: 0.5 is for block diffusion; set model.block_size, or leave it out",
    ),
    (
        ("actor.log_prob_estimate=elbo",),
        "actor.log_prob_estimate: elbo is for block diffusion; set model.block_size, or leave it out",
    ),
    (
        (BLOCK, "rollout.engine=vllm"),
        "rollout.engine: vllm does not work with block diffusion (model.block_size=4); leave it out",
    ),
    (
        (BLOCK, "model.use_remove_padding=true"),
        "model.use_remove_padding: true does not work with block diffusion (model.block_size=4); leave it out",
    ),
    (
        (BLOCK, "model.attn_implementation=flash_attention_2"),
        "model.attn_implementation: flash_attention_2 does not work with block diffusion (model.block_size=4); leave "
        "it out",
    ),
    (
        (BLOCK, "algorithm.name=ppo"),
        "algorithm.name: ppo trains a critic, which reads from left to right and not in blocks (model.block_size=4); set "
        "algorithm.name=grpo, or leave model.block_size out",
    ),
    (
        (BLOCK, "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=119"),
        "actor.ppo_max_token_len_per_gpu: 119 tokens are too few for a sample, which may have 120 "
        "(data.max_prompt_length, data.max_response_length, and rollout.denoising_steps_per_block times it)",
    ),
]
SFT: list[tuple[tuple[str, ...], str]] = [
    (("model.block_size=null",), "model.block_size is missing: the number of tokens of a block, 32 in LLaDA2"),
    (
        ("data.max_response_length=10",),
        "data.max_response_length: 10 tokens are not a whole number of blocks of model.block_size=4; nearest: 8 or 12",
    ),
    (
        ("block_diffusion.train_fill=max_length", "data.max_prompt_length=63"),
        "data.max_prompt_length: with data.max_response_length it makes 87 tokens, which are not a whole number of "
        "blocks of model.block_size=4",
    ),
    (("block_diffusion.noise_range_low=0.9",), "block_diffusion.noise_range_low: 0.9 is above noise_range_high 0.8"),
    (
        ("block_diffusion.same_token_labels=false", "data.val_files=[a.jsonl]"),
        "block_diffusion.same_token_labels: false trains a model that cannot be validated; leave out data.val_files",
    ),
]


@pytest.mark.parametrize(("keys", "message"), RL)
def test_settings_of_reinforcement_learning(keys: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_lm_config(tmp_path, tmp_path, *keys)
    assert str(error.value) == message


@pytest.mark.parametrize(("keys", "message"), SFT)
def test_settings_of_supervised_training(keys: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        tiny_sft_config(tmp_path, tmp_path, *keys)
    assert str(error.value) == message


# --- what is known once the model is there: all in one launch


def said(cfgs: dict[str, Any]) -> dict[str, str]:
    """The messages of jobs that do not start."""
    from phalanx.run import block_diffusion_sft, rl

    found = {}
    for name, cfg in cfgs.items():
        with pytest.raises(ValueError) as error:
            (rl if isinstance(cfg, LMRLConfig) else block_diffusion_sft).build(cfg)
        found[name] = str(error.value)
    return found


def chats(file: Path, *contents: tuple[str, str]) -> str:
    """A file of chats; returns the key that names it."""
    file.parent.mkdir(exist_ok=True)
    turns = [[("user", question), ("assistant", answer)] for question, answer in contents]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat if text != "-"]} for chat in turns]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_files=[{file}]"


def test_models_and_data_that_are_refused(lm_folder: Path, blocks_folder: Path, tmp_path: Path) -> None:
    window, none = tmp_path / "window", "its tokenizer has no mask token, as block-diffusion models have; name it by"
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    MistralForCausalLM(MistralConfig(**small, vocab_size=512, sliding_window=8, head_dim=16)).save_pretrained(window)
    AutoTokenizer.from_pretrained(blocks_folder).save_pretrained(window)

    def rl(name: str, model: Path, *keys: str) -> LMRLConfig:
        return tiny_lm_config(model, tmp_path / name, BLOCK, *keys)

    def sft(name: str, *contents: tuple[str, str], keys: tuple[str, ...] = ()) -> Any:
        data = chats(tmp_path / f"{name}_data" / "a.jsonl", *contents)
        return tiny_sft_config(blocks_folder, tmp_path / name, data, *keys)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Ann has <|mask|> books."}) + "\n")
    masked = f"data.train_files=[{prompts}]"
    no_answer = "has no response (the last message of its chat is not the assistant's); see data.prompt_key and"
    long = "data.max_prompt_length=16"
    cases: dict[str, tuple[Any, str]] = {
        "no mask": (
            rl("a", lm_folder),
            f"model.path: '{lm_folder}': {none} model.mask_token, or train the model by tasks/train_block_diffusion.py "
            "first, which adds one",
        ),
        "unknown mask": (
            rl("b", lm_folder, "model.mask_token=<mask>"),
            f"model.mask_token: '<mask>' is not a token of '{lm_folder}'",
        ),
        "window": (
            rl("c", window),
            f"model.block_size: '{window}' has layers of other kinds (sliding_attention) than attention to all that was "
            "before; blocks cannot be denoised with it",
        ),
        "masked prompt": (
            rl("e", blocks_folder, masked),
            "data: the prompt 'Ann has <|mask|> books.' contains the mask token '<|mask|>', which stands for tokens "
            "that are to be generated; remove it",
        ),
        "masked response": (
            sft("f", ("Why?", "So <|mask|>.")),
            "data.train_files, sample 0: its response contains the mask token '<|mask|>'",
        ),
        "no response": (sft("g", ("Why?", "So."), ("Why?", "-")), f"data.train_files, sample 1 {no_answer}"),
        "empty response": (sft("h", ("Why?", " ")), "data.train_files, sample 0: its response is empty"),
        "no column": (
            sft("i", ("Why?", "-"), keys=("data.response_key=answer",)),
            "data.train_files, sample 0 has no response (no answer); see data.prompt_key and data.response_key",
        ),
        "long prompt": (
            sft("j", ("Why? " * 9, "So."), keys=(long,)),
            "data.train_files, sample 0: its prompt has 53 tokens, more than data.max_prompt_length=16; raise that, or "
            "set data.overlong_prompts to filter or truncate",
        ),
        "long response": (
            sft("k", ("Why?", "So. " * 20)),
            "data.train_files, sample 0: its response has 81 tokens, more than data.max_response_length=24; raise that, "
            "or set data.overlong_prompts to filter or truncate",
        ),
        "all are long": (
            sft("l", ("Why? " * 9, "So."), keys=(long, "data.overlong_prompts=filter")),
            "data.train_files: all 1 samples are longer than data.max_prompt_length or max_response_length",
        ),
        "uneven": (
            sft("m", ("Why?", "So."), keys=("data.train_batch_size=3",)),
            "data.train_batch_size: 3 samples do not divide over 1 ranks x block_diffusion.micro_batch_size_per_gpu 2; "
            "nearest that do: 2 or 4",
        ),
    }
    (found,) = run_ranks(said, 1, {name: cfg for name, (cfg, _) in cases.items()})
    for name, (_, message) in cases.items():
        assert found[name].startswith(message), name
        assert "\n" not in found[name]


def test_a_known_mask_token_keeps_its_embedding(blocks_folder: Path, tmp_path: Path) -> None:
    """If the tokenizer knows the token under another role; a new token's embedding is the mean of all."""
    folder = Path(shutil.copytree(blocks_folder, tmp_path / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings.pop("mask_token") == "<|mask|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained(folder).mask_token is None
    before = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    for add, given in ((True, None), (True, "<|mask|>"), (False, "<|mask|>"), (False, "<|im_start|>")):
        config = LMModelConfig(path=str(folder), dtype="float32", block_size=4, mask_token=given)
        model, tokenizer = load_blocks(config, torch.float32, 1, add_mask=add)
        assert tokenizer.mask_token == (given or "<|mask|>")
        assert torch.equal(model.lm.get_input_embeddings().weight, before)


def likeliest_end(model: Any) -> None:
    """The end token is by far the most likely token at every position."""
    model.model.embed_tokens.weight.fill_(1e-3)
    model.model.embed_tokens.weight[2] = 5.0


def with_weights(folder: Path, to: Path, change: Callable[[Any], Any]) -> Path:
    shutil.copytree(folder, to)
    model = AutoModelForCausalLM.from_pretrained(to)
    with torch.no_grad():
        change(model)
    model.save_pretrained(to)
    return to


def overflowing(cfg: Any) -> str:
    from phalanx.run.rl import build

    with pytest.raises(JobError) as error:
        build(cfg).fit()
    return str(error.value)


def test_what_a_model_may_say(blocks_folder: Path, tmp_path: Path) -> None:
    """Only end tokens, which is an empty text; or NaN, which ends the job."""
    ends = with_weights(blocks_folder, tmp_path / "ends", likeliest_end)
    run_ranks(fit, 2, tiny_lm_config(ends, tmp_path, BLOCK))
    found = rows(tmp_path / "out")
    for row in found:
        assert row["response/length_max"] <= 4 and row["response/truncated_ratio"] == 0
        assert row["reward/zero_std_ratio"] == 1 and row["actor/updates_skipped"] == 2
    assert len(found) == 2
    broken = with_weights(blocks_folder, tmp_path / "nan", lambda model: model.model.norm.weight.mul_(3e38))
    (text,) = run_ranks(overflowing, 1, tiny_lm_config(broken, tmp_path / "b", BLOCK, "model.dtype=bfloat16"))
    assert text.startswith("model.path: the model's logits contain NaN or infinity during decoding")
