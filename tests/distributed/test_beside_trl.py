"""Supervised fine-tuning and DPO take the steps of TRL's trainers on the same rows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.lm_supervised import DPOConfig, SFTConfig
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from tests.helpers.jobs import rows
from tests.helpers.ranks import rank_environment, run_ranks

# without a newline behind the last end token, which TRL would train
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
    "{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS, LR = 4, 1e-4
ROWS = [
    {"prompt": f"Ann has {i} eggs and buys {3 * i}.", "chosen": f"{i}+{3 * i}={4 * i}\n#### {4 * i}", "rejected": f"#### {i}"}
    for i in range(8)
]  # fmt: skip
COMMON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def of_trl(name: str, base: Path, folder: Path, options: dict[str, Any]) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient of each step of one of TRL's trainers."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    for variable in rank_environment(0, 1, 1):  # by which accelerate would join a world
        os.environ.pop(variable, None)
    examples = []
    for row in ROWS:
        chosen, rejected = said("assistant", row["chosen"]), said("assistant", row["rejected"])
        answers = {"completion": chosen} if name == "SFT" else {"chosen": chosen, "rejected": rejected}
        examples.append({"prompt": said("user", row["prompt"])} | answers)
    kinds = {"SFT": (trl.SFTConfig, trl.SFTTrainer), "DPO": (trl.DPOConfig, trl.DPOTrainer)}
    config, trainer_class = kinds[name]
    trainer = trainer_class(
        model=str(base),
        args=config(output_dir=str(folder), **COMMON, **options),
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


def fit(cfg: Any) -> None:
    build(cfg).run()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained("assets/words/base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained("assets/words/base", dtype="float32").save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("SFT", {}, ()),
        ("DPO", {"loss_type": ["sigmoid"]}, ()),
        ("DPO", {"loss_type": ["ipo"]}, ("algorithm.loss_type=ipo",)),
    ],
    ids=["sft", "dpo", "ipo"],
)
def test_the_steps_are_trls(
    name: str, options: dict[str, Any], keys: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    """Two ranks here, two accumulated micro-batches there; AdamW."""
    (theirs,) = run_ranks(of_trl, 1, name, base, tmp_path / "trl", options, init=False, timeout=200)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    schema, metric = (SFTConfig, "actor/nll") if name == "SFT" else (DPOConfig, "actor/dpo_loss")
    data = ("data.prompt_key=prompt", "data.response_key=chosen") if name == "SFT" else ()
    scored = () if name == "SFT" else ("reward.functions=[{name: chosen}]",)
    cfg = load_config(
        schema,
        None,
        [
            f"model.path={base}",
            "model.dtype=float32",
            f"data.train_files=[{tmp_path}/rows.jsonl]",
            f"data.train_batch_size={len(ROWS)}",
            "data.max_prompt_length=64",
            "data.max_response_length=40",
            f"actor.ppo_mini_batch_size={len(ROWS)}",
            "actor.ppo_micro_batch_size_per_gpu=4",
            f"optim.lr={LR}",
            "optim.weight_decay=0",
            f"trainer.total_training_steps={STEPS}",
            "trainer.logger=[]",
            "trainer.save_freq=-1",
            f"trainer.output_dir={tmp_path}/out",
            *data,
            *scored,
            *keys,
        ],
    )
    run_ranks(fit, 2, cfg)
    for step, (row, (loss, norm)) in enumerate(zip(rows(tmp_path / "out"), theirs, strict=True)):
        assert row[metric] == pytest.approx(loss, rel=2e-5 if step else 1e-6)  # steps amplify roundings
        assert row["actor/grad_norm"] == pytest.approx(norm, rel=1e-4 if step else 1e-5)
