"""Direct preference optimisation of language models: the loss of a plain loop over pairs, and pairs that are drawn."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.config.lm_supervised import DPOConfig
from phalanx.config.messages import ConfigError
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from tests.helpers.jobs import rows
from tests.helpers.ranks import RankError, run_ranks

BASE = Path("assets/words/base")
PAIRS = [
    ("Ann has 2 eggs and buys 3.", "2+3=5\n#### 5", "#### 6"),
    ("Kim has 7 pens and loses 4.", "7-4=3\n#### 3", "7-4=4\n#### 4"),
    ("Bo has 9 books.", "#### 9", "9+9=18\n#### 18"),
    ("Mia has 12 stamps and gives 5 to Carl.", "12-5=7\n#### 7", "12+5=17\n#### 17"),
]
KEYS = ("rollout.engine=dataset", "reward.functions=[{name: chosen}]")


def config(folder: Path, *overrides: str, pairs: Any = PAIRS) -> DPOConfig:
    """A job of three steps on all of these pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), pair, strict=True))) for pair in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    keys = [
        f"model.path={BASE}",
        "model.dtype=float32",
        f"data.train_files=[{folder}/pairs.jsonl]",
        f"data.train_batch_size={len(pairs)}",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        f"actor.ppo_mini_batch_size={len(pairs)}",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "optim.lr=1e-4",
        "trainer.total_training_steps=3",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder}/out",
    ]
    return load_config(DPOConfig, None, [*keys, *overrides])


def fit(cfg: DPOConfig) -> None:
    build(cfg).run()


def trained(folder: Path, ranks: int, *overrides: str) -> list[dict[str, float]]:
    run_ranks(fit, ranks, config(folder, *KEYS, *overrides))
    return rows(folder / "out")


def plain(steps: int, kind: str, sft: float, beta: float = 0.1) -> list[tuple[float, float]]:
    """The loss and the norm of its gradient at each step of AdamW, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model, reference = (AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)

    def scored(policy: Any, question: str, answer: str) -> Tensor:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        first, then = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        ids = torch.tensor([[*first, *then, tokenizer.eos_token_id]])
        log_probs = policy(ids).logits[0, len(first) - 1 : -1].log_softmax(-1)
        return log_probs.gather(1, ids[0, len(first) :, None])[:, 0]

    result = []
    for _ in range(steps):
        losses = []
        for question, chosen, rejected in PAIRS:
            ours = [scored(model, question, answer) for answer in (chosen, rejected)]
            theirs = [scored(reference, question, answer).detach() for answer in (chosen, rejected)]
            gains = [(a - b).mean() if kind == "ipo" else (a - b).sum() for a, b in zip(ours, theirs, strict=True)]
            margin, nll = gains[0] - gains[1], -ours[0].mean()
            loss = (margin - 1 / (2 * beta)) ** 2 if kind == "ipo" else -logsigmoid(beta * margin)
            losses.append(loss + sft * nll)
        total = torch.stack(losses).mean()
        optimizer.zero_grad()
        torch.autograd.backward(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append((float(total.detach()), float(norm)))
    return result


@pytest.mark.parametrize(
    ("ranks", "kind", "sft", "overrides"),
    [
        (1, "sigmoid", 0.0, ()),
        (2, "sigmoid", 0.5, ("model.use_remove_padding=false",)),
        (2, "ipo", 0.0, ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=200")),
    ],
)
def test_the_loss_is_that_of_a_plain_loop(
    ranks: int, kind: str, sft: float, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    keys = (f"algorithm.loss_type={kind}", f"algorithm.sft_coef={sft}")
    measured = trained(tmp_path, ranks, *keys, *overrides)
    for row, (loss, norm) in zip(measured, plain(3, kind, sft), strict=True):
        assert row["actor/dpo_loss"] + sft * row["actor/nll"] == pytest.approx(loss, rel=1e-5)
        assert row["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert measured[-1]["actor/accuracy"] == 1 and measured[-1]["actor/margin"] > 0


def test_pairs_that_the_policy_draws(tmp_path: Path) -> None:
    """Online DPO: the best and the worst of four responses; equal on one and two ranks."""
    (tmp_path / "reward.py").write_text(
        "def length(completions, prompts, metadata):\n    return list(map(len, completions))\n"
    )
    keys = (
        "rollout.engine=policy",
        "rollout.n=4",
        f"reward.functions=[{{path: '{tmp_path}/reward.py:length'}}]",
        "model.use_remove_padding=false",
    )
    runs = []
    for ranks in (1, 2):
        run_ranks(fit, ranks, config(tmp_path / str(ranks), *keys))
        runs.append(rows(tmp_path / str(ranks) / "out"))
    one, two = runs
    assert [row["reward/mean"] for row in one] == pytest.approx([row["reward/mean"] for row in two])
    assert [row["actor/dpo_loss"] for row in one] == pytest.approx([row["actor/dpo_loss"] for row in two], rel=1e-5)
    assert one[0]["actor/dpo_loss"] == pytest.approx(0.6931472, rel=1e-6) and one[-1]["actor/dpo_loss"] < 0.69


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("Hi", "Yes", "Yes"), "chosen and rejected are the same"),
        (("Hi", "Yes", ""), "a message of the assistant is empty"),
        (("Hi", "Yes", None), "has no response (its column rejected has no message of the assistant)"),
    ],
)
def test_a_pair_that_is_none_is_named(pair: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=re.escape(message)):
        run_ranks(fit, 1, config(tmp_path, *KEYS, pairs=[*PAIRS[:3], pair]))


def test_a_pair_is_two_responses(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"expected 2 with rollout\.engine=dataset and data\.rejected_key"):
        run_ranks(fit, 1, config(tmp_path, *KEYS, "rollout.n=4"))
    with pytest.raises(ConfigError, match=r"data\.rejected_key: other is for responses of the data"):
        config(tmp_path, "rollout.engine=policy", "data.rejected_key=other")
