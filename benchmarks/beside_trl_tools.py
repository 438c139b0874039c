"""GRPO of the quickstart with tools, in Phalanx and in TRL's GRPOTrainer with `tools`, alternating.

    pip install trl
    python benchmarks/beside_trl_tools.py [--steps 20] [--runs 3]

Each runs in one process on one thread: the same model, prompts, calculator, reward and batch (8 prompts x 8 samples of
at most 4 turns and 112 tokens after the prompt, one update per step), sampling without vLLM, no gradient checkpointing.
Figures are CPU seconds of the process from the end of the first step to the end of the last one, per 1,000 tokens that
the model sampled, without the calculator's answers. `prompts_once` computes each prompt once per update. The last line
is JSON.
"""

from pathlib import Path
from typing import Any

from alone import ROOT
from beside_trl import RESPONSES, job, job_of_trl, main

CALCULATOR = ROOT / "assets" / "calculator"
PROMPTS, TURNS, LIMIT = 8, 4, 112


def phalanx(steps: int, folder: Path) -> dict[str, float]:
    """The job of the quickstart, on this process only."""
    return job(ROOT / "configs" / "grpo" / "quickstart_tools.yaml", PROMPTS * RESPONSES, steps, folder)


def prompts_once(steps: int, folder: Path) -> dict[str, float]:
    """The same job with packed samples, and each prompt computed once per update."""
    packed = "model.use_remove_padding=true", "model.use_prefix_grouper=true"
    return job(ROOT / "configs" / "grpo" / "quickstart_tools.yaml", PROMPTS * RESPONSES, steps, folder, *packed)


def trl(steps: int, folder: Path) -> dict[str, float]:
    """The same job in TRL, whose rewards get all messages after the prompt."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    from phalanx.zoo.environments.calculator import Calculator
    from phalanx.zoo.rewards.text.gsm8k import Gsm8k

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return list(Gsm8k()(texts, texts, [{"ground_truth": text} for text in answer]))

    tokenizer = AutoTokenizer.from_pretrained(CALCULATOR / "base")
    tokenizer.response_template = qwen3_template  # the format of calls, which TRL has only for well-known models
    settings = {"max_completion_length": LIMIT, "max_tool_calling_iterations": TURNS - 1}
    parts = {"tools": [Calculator().calculator], "reward_funcs": reward, "processing_class": tokenizer}
    return job_of_trl(CALCULATOR, PROMPTS * RESPONSES, steps, folder, settings, **parts)


if __name__ == "__main__":
    main(__file__, __doc__, {"phalanx": phalanx, "prompts_once": prompts_once, "trl": trl})
