"""Supervised fine-tuning of language models: the loss of a plain loop over the assistant's tokens, on any layout."""

import json
import re
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from phalanx.config.lm_supervised import SFTConfig
from phalanx.config.messages import ConfigError
from phalanx.config.tasks import read_run
from phalanx.engines.transformers import load_processor
from phalanx.run.kind import kind_of, known_schemas
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from tests.helpers.jobs import rows
from tests.helpers.ranks import ROOT, RankError, launch_environment, run_ranks

BASE = Path("assets/calculator/base")
WIDE = ("attention_mask", "mm_token_type_ids")  # inputs of a token each
TURN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


def call(text: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": {"expression": text}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


CHATS = [
    [said("user", "Ann has 2 eggs."), said("assistant", "2\n#### 2")],
    [said("user", "Kim has 12*7 pens."), call("12*7"), said("tool", "84"), said("assistant", "#### 84")],
    [said("user", "Hi"), said("assistant", "Hi"), said("user", "And 1+1?"), said("assistant", "1+1=2\n#### 2")],
    [said("system", "Short."), said("user", "Who?"), said("assistant", "Ann"), said("user", "Thanks")],
]


def config(folder: Path, *overrides: str, chats: Any = CHATS) -> SFTConfig:
    """A job of three steps on all of these chats."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps({"messages": chat, "tools": [TOOL]}) for chat in chats) + "\n"
    for arguments in re.findall(r'"arguments": (\{.*?\})', text):  # as OpenAI writes them
        text = text.replace(arguments, json.dumps(arguments))
    (folder / "chats.jsonl").write_text(text)
    keys = [
        f"model.path={BASE}",
        "model.dtype=float32",
        f"data.train_files=[{folder}/chats.jsonl]",
        f"data.train_batch_size={len(chats)}",
        "data.max_prompt_length=64",
        "data.max_response_length=96",
        f"actor.ppo_mini_batch_size={len(chats)}",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "optim.lr=1e-3",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder}/out",
    ]
    return load_config(SFTConfig, None, [*keys, *overrides])


def fit(cfg: SFTConfig) -> None:
    build(cfg).run()


def trained(folder: Path, ranks: int, *overrides: str) -> list[dict[str, float]]:
    run_ranks(fit, ranks, config(folder, *overrides))
    return rows(folder / "out")


@pytest.fixture(scope="module")
def plain() -> tuple[float, float, int]:
    """The loss, the norm of its gradient and the number of tokens, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    losses = []
    for chat in CHATS:
        text = tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False)
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [turn.span(1) for turn in TURN.finditer(text)]
        ids = torch.tensor([whole["input_ids"]])
        counts = [any(first <= begin < end for first, end in spans) for begin, _ in whole["offset_mapping"]]
        losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")[torch.tensor(counts[1:])])
    loss = torch.cat(losses).mean()
    torch.autograd.backward(loss)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss.detach()), float(norm), sum(map(len, losses))


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, ()),
        (2, ("model.use_remove_padding=false",)),
        (1, ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=200")),
        (2, ("parallel.ulysses_sequence_parallel_size=2", "actor.ppo_micro_batch_size_per_gpu=4")),
    ],
    ids=["one rank", "padded on two", "by tokens", "context"],
)
def test_the_loss_is_that_of_a_plain_loop(
    ranks: int, overrides: tuple[str, ...], plain: tuple[float, float, int], tmp_path: Path
) -> None:
    first, *_, last = trained(tmp_path, ranks, *overrides)
    loss, norm, count = plain
    assert first["actor/nll"] == pytest.approx(loss, rel=1e-6)
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["response/length_mean"] * len(CHATS) == count
    assert last["actor/nll"] < first["actor/nll"]


def test_images_of_the_prompt(tmp_path: Path) -> None:
    """A vision-language model's loss is that of transformers' own class with its processor."""
    base = Path("assets/reading/base")
    table = parquet.read_table("assets/reading/test.parquet").slice(0, 3).to_pylist()
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32),
        load_processor(str(base), None, "model.path"),
    )
    losses = []
    for row in table:
        row["messages"] = [*row.pop("prompt"), said("assistant", row["reward_model"]["ground_truth"])]
        parts = [{"type": "image"}, {"type": "text", "text": row["messages"][0]["content"].removeprefix("<image>")}]
        prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
        image = Image.open(BytesIO(row["images"][0]["bytes"]))
        inputs = processor(text=[prompt + row["messages"][1]["content"]], images=[image], return_tensors="pt")
        answer = processor.tokenizer(row["messages"][1]["content"], add_special_tokens=False)["input_ids"]
        end = torch.tensor([[processor.tokenizer.eos_token_id]])
        ids = torch.cat([inputs.pop("input_ids"), end], 1)
        inputs = {
            name: pad(inputs[name], (0, 1), mode="replicate") if name in WIDE else inputs[name] for name in inputs
        }
        logits = model(input_ids=ids, **inputs).logits[0, -len(answer) - 2 : -1]
        losses.append(cross_entropy(logits, ids[0, -len(answer) - 1 :], reduction="none"))
    parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "images.parquet")
    first, *_ = trained(tmp_path, 1, f"model.path={base}", f"data.train_files=[{tmp_path}/images.parquet]",
                        "data.train_batch_size=3", "actor.ppo_mini_batch_size=3",
                        "actor.ppo_micro_batch_size_per_gpu=3")  # fmt: skip
    assert first["actor/nll"] == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-5)


def test_plain_texts(tmp_path: Path) -> None:
    """All tokens but the first count, without a chat template; beside chats in another file."""
    texts = ["Ann has 2 eggs.", "1+1=2\nand 2+2=4", "Kim"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"messages": text}) for text in texts) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    losses = []
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    sizes = ("data.train_batch_size=3", "actor.ppo_mini_batch_size=3", "actor.ppo_micro_batch_size_per_gpu=3")
    first, *_ = trained(tmp_path, 1, f"data.train_files=[{tmp_path}/texts.jsonl]", *sizes)
    assert first["actor/nll"] == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-6)
    sizes = ("data.train_batch_size=7", "actor.ppo_mini_batch_size=7", "actor.ppo_micro_batch_size_per_gpu=7")
    both = f"data.train_files=[{tmp_path}/both/chats.jsonl,{tmp_path}/texts.jsonl]"
    first, *_ = trained(tmp_path / "both", 1, both, *sizes)
    assert first["response/length_mean"] * 7 > sum(map(len, losses))


def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    """Also from a LoRA, whose checkpoint is of a language model."""
    lora = ("model.lora_rank=4", "trainer.save_freq=1")
    whole = trained(tmp_path / "whole", 1, *lora)
    trained(tmp_path / "part", 1, *lora, "trainer.total_training_steps=2")
    assert trained(tmp_path / "part", 1, *lora) == whole
    read = read_run(tmp_path / "part" / "out" / "config.yaml", *known_schemas())
    assert type(kind_of(read)).__name__ == "LM"


def test_too_many_tokens_are_cut_or_left_out(tmp_path: Path) -> None:
    """The longest response of the four has 20 tokens; with the answers of others between turns."""
    limit = "data.max_response_length=16"
    cut, *_ = trained(tmp_path / "cut", 1, limit, "data.overlong_prompts=truncate")
    assert cut["response/truncated_ratio"] > 0
    left, *_ = trained(tmp_path / "left", 1, limit, "data.overlong_prompts=filter", "data.train_batch_size=2",
                       "actor.ppo_mini_batch_size=2")  # fmt: skip
    assert left["response/truncated_ratio"] == 0
    with pytest.raises(RankError, match=r"chats.jsonl:2: its response has \d+ tokens, more than data.max_resp"):
        run_ranks(fit, 1, config(tmp_path / "error", limit))


WRONG = {
    "no answer": ([said("user", "Hi")], "has no response (its chat has no message of the assistant)"),
    "first": (
        [said("assistant", "Hi"), said("user", "Hi")],
        "its chat begins with the assistant; expected a message to be answered",
    ),
    "empty": ([said("user", "Hi"), said("assistant", " ")], "a message of the assistant is empty"),
    "twice": (
        [said("user", "Hi"), said("assistant", "a"), said("assistant", "b")],
        "a message of the assistant follows another; expected one in between",
    ),
    "ends": (
        [said("user", "Hi"), said("assistant", "a<|im_end|> b")],
        "a message of the assistant contains an end token of the model",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_chat_without_a_response_is_named(case: str, tmp_path: Path) -> None:
    chat, message = WRONG[case]
    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(fit, 1, config(tmp_path, chats=[*CHATS[:3], chat]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", "rollout.temperature: 0.7 is for sampled responses, but rollout.engine=dataset"),
        ("rollout.partial_rollout.tokens=48", "is for sampled responses"),
        ("rollout.engine=vllm", "rollout.engine: expected one of dataset"),
    ],
)
def test_keys_of_sampling_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(tmp_path, override)


def test_other_kinds_by_the_same_command() -> None:
    """A configuration's section says which task it is for; the refusal of a key is that task's."""
    command = [sys.executable, "tasks/train_sft.py"]
    for words, message in (
        (["configs/flow_matching/digits.yaml", "flow_matching.emma=1"], "did you mean flow_matching.ema?"),
        (["model.path=x", "block_diffusion.noise=1"], "unknown key block_diffusion.noise"),
        (["model.path=x", "rollout.engine=policy"], "rollout.engine: expected one of dataset"),
    ):
        done = subprocess.run([*command, *words], cwd=ROOT, env=launch_environment(), capture_output=True, text=True)
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_template_that_marks_what_the_assistant_writes(tmp_path: Path) -> None:
    """As transformers' mask of the assistant's tokens: here without a role's first line and without end tokens."""
    base = Path(shutil.copytree(BASE, tmp_path / "base"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}So: {% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (base / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    chats, losses = [CHATS[0], CHATS[2], CHATS[0], CHATS[2]], []
    for chat in chats:
        given = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor([given["input_ids"]]), torch.tensor(given["assistant_masks"]).bool()
        losses.append(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")[mask[1:]])
    run_ranks(fit, 1, config(tmp_path, f"model.path={base}", chats=chats))
    first, *_ = rows(tmp_path / "out")
    assert first["actor/nll"] == pytest.approx(float(torch.cat(losses).mean().detach()), rel=1e-6)
    assert first["response/length_mean"] * len(chats) == sum(map(len, losses))
