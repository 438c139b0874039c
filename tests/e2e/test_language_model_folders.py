"""Unusual model folders and settings of a language model's job: each trains, or ends with one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from phalanx.config.trained_model import LMModelConfig
from phalanx.models.lm.lm_folder import check_folder
from phalanx.models.lm.load_folder import load_tokenizer
from phalanx.types import JobError
from tests.helpers.jobs import rows
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks

Change = Callable[[Path], None]
BERT = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
GPT2 = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "eos_token_id": 2}


def tokenizer_without(name: str) -> Change:
    def change(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != name}))

    return change


def weights(change: Callable[[Any], Any]) -> Change:
    def changed(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            change(model)
        model.save_pretrained(folder)

    return changed


def another(make: Callable[[], Any]) -> Change:
    def change(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        shutil.rmtree(folder)
        make().save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return change


def setting(name: str, value: Any, file_name: str = "config.json") -> Change:
    def change(folder: Path) -> None:
        file = folder / file_name
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return change


def ends_at_once(model: Any) -> None:
    """Make the end token by far the likeliest first token."""
    model.model.embed_tokens.weight.fill_(1e-3)
    model.model.embed_tokens.weight[2] = 5.0


@pytest.fixture
def folder(lm_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lm_folder, tmp_path / "model"))


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        tokenizer_without("pad_token"),
        lambda folder: (folder / "chat_template.jinja").unlink(),
        weights(lambda model: model.resize_token_embeddings(700)),
        another(lambda: GPT2LMHeadModel(GPT2Config(**GPT2))),
    ],
    ids=["no-pad-token", "no-chat-template", "more-embeddings-than-tokens", "gpt2"],
)
def test_it_trains(change: Change, folder: Path, tmp_path: Path) -> None:
    change(folder)
    (step,) = run_ranks(one_step, 1, tiny_lm_config(folder, tmp_path, "data.max_prompt_length=60"))
    row = step["row"]
    assert row["actor/grad_norm"] > 0 and row["actor/first_ratio_error"] == 0
    assert row["actor/updates_skipped"] == row["actor/updates_non_finite"] == 0


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (tokenizer_without("eos_token"), (), ": its tokenizer has no eos_token, by which a response would end"),
        (
            weights(lambda model: model.resize_token_embeddings(100)),
            (),
            ": its tokenizer has 453 tokens, and the model embeds 100",
        ),
        (another(lambda: BertForMaskedLM(BertConfig(**BERT))), (), " is a BertForMaskedLM; expected a causal language"),
        (another(lambda: BertLMHeadModel(BertConfig(**BERT))), (), " is an encoder; expected a causal language model"),
        (
            another(lambda: BertLMHeadModel(BertConfig(**BERT, is_decoder=True))),
            (),
            ": the layers of a BertLMHeadModel are not where others are",
        ),
        (
            setting("num_attention_heads", 0),
            (),
            " does not load: ZeroDivisionError: integer division or modulo by zero",
        ),
        (
            setting("num_hidden_layers", "two"),
            (),
            " does not load: Validation error for field 'num_hidden_layers': TypeError: Field",
        ),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('no such\nrole') }}"),
            (),
            ": its chat template does not render the prompt 'Ann has 0 books.', a chat of user: TemplateError: no such role",
        ),
        (
            setting("eos_token_id", "x", "generation_config.json"),
            (),
            ": its generation_config.json has eos_token_id 'x'; expected a token's id, or a list of them",
        ),
        (lambda folder: (folder / "model_index.json").write_text("{}"), (), " is a diffusers pipeline; expected a"),
        (
            lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
            (),
            " is an adapter of peft; expected a whole model, with the adapter merged",
        ),
        (
            another(lambda: GPT2LMHeadModel(GPT2Config(**GPT2))),
            ("model.lora_rank=4",),
            "model.lora_rank: 4; the model has no linear layers but its head",
        ),
        (
            lambda folder: None,
            ("model.lora_rank=4", "model.target_modules=[c_attn]"),
            "model.target_modules: no linear layer ends in 'c_attn'; in a block: mlp.down_proj, mlp.gate_proj, ",
        ),
    ],
    ids=[
        "no-eos",
        "few-rows",
        "bert",
        "bert-lm",
        "bert-decoder",
        "no-heads",
        "layers-text",
        "template",
        "end-text",
        "pipeline",
        "adapter",
        "gpt2-lora",
        "targets",
    ],
)
def test_it_is_refused(change: Change, keys: tuple[str, ...], message: str, folder: Path, tmp_path: Path) -> None:
    from phalanx.run.rl import build

    def built() -> str:
        with pytest.raises(ValueError) as error:
            build(tiny_lm_config(folder, tmp_path, "data.max_prompt_length=60", *keys))
        return str(error.value)

    change(folder)
    (said,) = run_ranks(built, 1)
    assert said.startswith(message if message.startswith("model.") else f"model.path: '{folder}'{message}")
    assert "\n" not in said


def test_damaged_settings_are_told(folder: Path) -> None:
    """Also if transformers ignores the damage, or raises only when the setting is used."""
    for name in ("model.safetensors.index.json", "generation_config.json", "special_tokens_map.json"):
        for text, problem in (("[1]", " holds a list; expected an object, {...}"), ("{", ":1:2 is not valid JSON: ")):
            (folder / name).write_text(text)
            with pytest.raises(ValueError, match=re.escape(f"model.path: {folder / name}{problem}")):
                check_folder(str(folder))
        (folder / name).unlink()
    setting("model_max_length", "x", "tokenizer_config.json")(folder)
    with pytest.raises(ValueError, match=f"model.path: the tokenizer of '{folder}' does not load: TypeError: "):
        load_tokenizer(LMModelConfig(path=str(folder)))


@pytest.mark.full
def test_responses_may_be_empty(folder: Path, tmp_path: Path) -> None:
    """They get the reward of an empty text; if all are empty, there is nothing to learn, and the job continues."""
    weights(ends_at_once)(folder)
    run_ranks(fit, 1, tiny_lm_config(folder, tmp_path))
    for row in rows(tmp_path / "out"):
        assert row["response/length_mean"] == 1 and row["response/truncated_ratio"] == 0
        assert row["reward/zero_std_ratio"] == 1 and row["actor/updates_skipped"] == 2


@pytest.mark.full
@pytest.mark.parametrize("keys", [(), ("algorithm.kl_loss_coef=0.1", "actor.loss_agg_mode=seq-mean-token-mean")])
def test_all_responses_may_be_left_out(keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """If a limit truncates all of them, although their rewards differ."""
    limit = ("rollout.mask_truncated=true", "data.max_response_length=1")
    run_ranks(fit, 2, tiny_lm_config(lm_folder, tmp_path, *limit, *keys))
    for row in rows(tmp_path / "out"):
        assert row["response/truncated_ratio"] == 1 and row["actor/updates_skipped"] == 2
        assert row["reward/zero_std_ratio"] < 1


def overflowing(cfg: Any) -> str:
    from phalanx.run.rl import build

    trainer = build(cfg)
    with torch.no_grad():
        next(p for name, p in trainer.policy.trained.module.named_parameters() if "model.norm" in name).mul_(3e38)
    with pytest.raises(JobError) as error:
        trainer.fit()
    return str(error.value)


def refused(cfg: Any) -> str:
    from phalanx.run.rl import build

    with pytest.raises(ValueError, match="NaN") as error:
        build(cfg)
    return str(error.value)


def test_a_model_that_overflows_is_refused(folder: Path, tmp_path: Path) -> None:
    """The weights are finite, but the outputs are not."""
    weights(lambda model: model.model.norm.weight.mul_(3e38))(folder)
    (message,) = run_ranks(refused, 1, tiny_lm_config(folder, tmp_path, "model.dtype=bfloat16"))
    assert message == f"model.path: {str(folder)!r}: log-probs of a Qwen3ForCausalLM are NaN or infinite"


def test_an_overflow_while_decoding_ends_the_job(folder: Path, tmp_path: Path) -> None:
    """As may happen when weights grow in training."""
    (said,) = run_ranks(overflowing, 1, tiny_lm_config(folder, tmp_path, "model.dtype=bfloat16"))
    assert said.startswith("model.path: the model's logits contain NaN or infinity during decoding")
