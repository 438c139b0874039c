"""GRPO of the quickstart's language model, in Phalanx and in TRL's GRPOTrainer, alternating.

    pip install trl
    python benchmarks/beside_trl.py [--steps 20] [--runs 3]

Each runs in one process on one thread: the same model, prompts, reward and batch (16 prompts x 8 responses of at most
40 tokens, one update per step), sampling without vLLM, no gradient checkpointing. Figures are CPU seconds of the
process from the end of the first step to the end of the last one, per 1,000 tokens of responses, which are sampled and
trained once. The last line is JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alone import ROOT, in_turns, trainer_of

WORDS = ROOT / "assets" / "words"
CONFIG = ROOT / "configs" / "grpo" / "quickstart.yaml"
PROMPTS, RESPONSES, LIMIT, LEARNING_RATE = 16, 8, 40, 3e-4
Sides = dict[str, Callable[[int, Path], dict[str, Any]]]  # by name; called with a number of steps and a folder


def phalanx(steps: int, folder: Path) -> dict[str, float]:
    """The job of the quickstart, on this process only."""
    return job(CONFIG, PROMPTS * RESPONSES, steps, folder)


def job(config: Path, samples: int, steps: int, folder: Path, *overrides: str) -> dict[str, float]:
    """A job of a language model, on this process only, with `samples` samples per step."""
    from phalanx.config.lm import LMRLConfig

    ends: list[float] = []
    keys = [f"actor.ppo_micro_batch_size_per_gpu={samples}", *overrides]
    trainer = trainer_of(LMRLConfig, config, steps, folder, keys)
    plain = trainer.job.end_step

    def end_step(step: int, row: dict[str, float]) -> None:
        plain(step, row)
        ends.append(time.process_time())

    trainer.job.end_step = end_step
    trainer.fit()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["response/length_mean"] for row in rows[1:]) * samples
    rewards = [row["reward/mean"] for row in rows]
    return figures(ends, tokens, rewards)


def trl(steps: int, folder: Path) -> dict[str, Any]:
    """The same job in TRL."""
    from phalanx.zoo.rewards.text.gsm8k import Gsm8k

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return list(Gsm8k()(texts, texts, [{"ground_truth": text} for text in answer]))

    return job_of_trl(WORDS, PROMPTS * RESPONSES, steps, folder, {"max_completion_length": LIMIT}, reward_funcs=reward)


def job_of_trl(
    folder_of_data: Path,
    samples: int,
    steps: int,
    folder: Path,
    settings: dict[str, Any],
    clock: Callable[[], float] = time.process_time,
    **parts: Any,
) -> dict[str, Any]:
    """A job of TRL's trainer with the problems and by default the model in a folder of assets. `clock`: seconds."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in (folder_of_data / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    ends: list[float] = []

    class Timed(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(clock())

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": samples,
        "num_generations": RESPONSES,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": LEARNING_RATE,
        "adam_beta2": 0.99,
        "warmup_steps": 3,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    config, base = GRPOConfig(**{**options, **settings}), folder_of_data / "base"
    parts.setdefault("processing_class", AutoTokenizer.from_pretrained(base))
    if "model" not in parts:
        parts["model"] = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    trainer = GRPOTrainer(args=config, train_dataset=data, callbacks=[Timed()], **parts)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    tokens = sum(entry["completions/mean_length"] for entry in logged[1:]) * samples  # without answers of tools
    return {**figures(ends, tokens, [entry["reward"] for entry in logged]), "ends": ends}


def figures(ends: list[float], tokens: float, rewards: list[float]) -> dict[str, float]:
    """The figures of a run; `ends` are CPU seconds at the ends of the steps."""
    return {
        "cpu_s_per_1000_tokens": 1000 * (ends[-1] - ends[0]) / tokens,
        "tokens": tokens,
        "first_rewards": statistics.mean(rewards[:5]),
        "last_rewards": statistics.mean(rewards[-5:]),
    }


def main(script: str, description: str | None, sides: Sides) -> None:
    """Run the sides of a script alternately, and print their medians."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (20)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--only", choices=sides, help="run one side once, in this process")
    args = parser.parse_args()
    if args.only:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            print(json.dumps(sides[args.only](args.steps, Path(name))))
        return
    found = in_turns([script, "--steps", str(args.steps)], sides, args.runs)
    medians = {side: statistics.median(run["cpu_s_per_1000_tokens"] for run in runs) for side, runs in found.items()}
    ratios = {f"trl / {side}": medians["trl"] / median for side, median in medians.items() if side != "trl"}
    print(json.dumps(medians | ratios))


if __name__ == "__main__":
    main(__file__, __doc__, {"phalanx": phalanx, "trl": trl})
