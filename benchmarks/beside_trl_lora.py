"""GRPO of a LoRA of SmolLM2-135M-Instruct, in Phalanx and in TRL's GRPOTrainer, alternating.

    pip install trl
    MODEL=SmolLM2-135M-Instruct python benchmarks/beside_trl_lora.py [--steps 3] [--runs 2]

Each runs in one process on one thread: the same folder, prompts, reward (the length in characters) and batch (2 prompts
x 8 responses of at most 32 tokens, one update per step), float32, a LoRA of rank 16 on all linear layers, sampling
without vLLM, no gradient checkpointing. Figures are CPU seconds of the process from the end of the first step to the
end of the last one, per 1,000 tokens of responses, and the peak of its memory. The last line is JSON.
docs/language-models.md says how to make the folder.
"""

import os
import resource
from pathlib import Path
from typing import Any

from beside_trl import CONFIG, RESPONSES, WORDS, job, job_of_trl, main

MODEL = Path(os.environ.get("MODEL", "SmolLM2-135M-Instruct")).absolute()
PROMPTS, LIMIT, RANK, LEARNING_RATE = 2, 32, 16, 1e-5


def with_memory(found: dict[str, Any]) -> dict[str, Any]:
    """The figures, with the peak of this process's memory."""
    return found | {"peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)}


def phalanx(steps: int, folder: Path) -> dict[str, Any]:
    """The job of the quickstart with another model, on this process only."""
    keys = {
        "model.path": MODEL,
        "model.lora_rank": RANK,
        "model.lora_alpha": RANK,
        "data.train_batch_size": PROMPTS,
        "data.val_files": "[]",
        "data.max_prompt_length": 128,
        "data.max_response_length": LIMIT,
        "actor.ppo_mini_batch_size": PROMPTS,
        "optim.lr": LEARNING_RATE,
        "reward.functions": "[{name: length}]",
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    return with_memory(job(CONFIG, PROMPTS * RESPONSES, steps, folder, *given))


def trl(steps: int, folder: Path) -> dict[str, Any]:
    """The same job in TRL."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion[-1]["content"])) for completion in completions]

    parts: dict[str, Any] = {
        "model": AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
        "processing_class": AutoTokenizer.from_pretrained(MODEL),
        "peft_config": LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"),
        "reward_funcs": reward,
    }
    settings = {"max_completion_length": LIMIT, "learning_rate": LEARNING_RATE}
    return with_memory(job_of_trl(WORDS, PROMPTS * RESPONSES, steps, folder, settings, **parts))


if __name__ == "__main__":
    main(__file__, __doc__, {"phalanx": phalanx, "trl": trl})
