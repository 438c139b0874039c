"""A language model as judge that can be checked: it is asked by itself, and over ranks."""

from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.config.reward import RewardModelConfig
from tests.judged import process_state
from tests.ranks import ROOT

BASE = ROOT / "assets" / "words" / "base"  # which answers different questions differently
QUESTIONS = ["Ann has 3 books.", "How many?", "x" * 40, "Ben sells 7 pens and 12 more.", "1+1"]
SHARES = {1: [QUESTIONS], 2: [QUESTIONS, []], 3: [QUESTIONS[:2], [], QUESTIONS[2:]]}


def ask(cfg: RewardModelConfig, shares: list[list[str]]) -> list[str]:
    """On each rank: the answers to its share of questions."""
    from phalanx.rewards.judge._model import RewardModel

    own = shares[dist.get_rank()]
    before = process_state()
    model = RewardModel(cfg, timeout_s=60.0, text=True)
    with model.awake():
        answers = model.ask([], [((), question) for question in own])
    assert process_state() == before
    return answers


def plain(folder: Path) -> list[str]:
    """What the model answers by itself, one question after the other."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    said = []
    for question in QUESTIONS:
        talk = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
        said.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return said
