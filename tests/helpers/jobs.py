"""Tiny training jobs for tests."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from phalanx.config.flow import FlowRLConfig
from phalanx.run.rules import load_config
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.types import Samples

if TYPE_CHECKING:
    from phalanx.run.rl import Trainer

PROMPTS = [
    'a sign that says "alpha"',
    'the word "beta" on a wall',
    'a "gamma" poster with a longer description of what it shows',
    '"delta"',
    'an "epsilon" in neon',
    'a book called "zeta"',
]
SIZE = 32
CONTRAST = f"{Path(__file__).with_name('contrast.py')}:contrast"


def tiny_config(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    """A job of 4 prompts x 4 images per step in 2 updates, rewarded for contrast; files go below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return load_config(FlowRLConfig, None, [*base_overrides(model, folder), *overrides])


def algorithm_config(model: Path, folder: Path, name: str, *overrides: str) -> FlowRLConfig:
    """Like `tiny_config`, with another algorithm."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    base = [o for o in base_overrides(model, folder) if not o.startswith("algorithm.")]
    return load_config(FlowRLConfig, None, [*base, f"algorithm.name={name}", *overrides])


def base_overrides(model: Path, folder: Path) -> list[str]:
    """Overrides that turn the defaults into a tiny job."""
    guidance = "true_cfg_scale" if "qwen" in model.name else "guidance_scale"
    return [
        f"model.path={model}",
        "model.dtype=float32",
        f"data.train_files=[{folder / 'prompts.txt'}]",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "rollout.n=4",
        "rollout.num_inference_steps=4",
        f"rollout.height={SIZE}",
        f"rollout.width={SIZE}",
        f"rollout.{guidance}=3.0",
        "rollout.sde_window_size=2",
        "actor.ppo_mini_batch_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "optim.lr=1e-3",
        "algorithm.clip_ratio=1e-3",
        f"reward.functions=[{{name: contrast, path: '{CONTRAST}'}}]",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        f"trainer.output_dir={folder / 'out'}",
    ]


def one_step(cfg: FlowRLConfig) -> dict[str, Any]:
    """Sample, score and update once; returns this rank's samples, the row of metrics, and the weights after."""
    from phalanx.run.rl import build

    samples, found = first_step(build, cfg)
    return found | {"images": samples.outputs, "latents": samples.trace.latents.cpu()}


def first_step(build: "Callable[[Any], Trainer]", cfg: Any) -> tuple[Samples, dict[str, Any]]:
    """This rank's samples and log-probs of a job's first step, all ranks' rewards, the row of metrics, and the weights
    after.
    """
    from phalanx.distributed.collectives import all_gather

    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=cfg.trainer.seed, step=0, each=t.collector.rewards.submit
        )
    reward = all_gather(t.collector.rewards.score()[0])
    row = update(t, samples, reward, 0)
    weights = full_weights(t.policy.trained.parameters)
    return samples, {"log_prob": samples.log_prob, "reward": reward, "row": row, "weights": weights}


class Drawn:
    """A collector for the loop with given samples and rewards."""

    chunks = 1

    def __init__(self, samples: Samples, reward: torch.Tensor) -> None:
        self.samples, self.rewards = samples, reward

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        return self.samples, {}

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, torch.Tensor, dict[str, float]]:
        return samples, self.rewards, {}


def update(t: "Trainer", samples: Samples, reward: torch.Tensor, step: int) -> dict[str, float]:
    """Run the loop's updates of training step `step` on these samples; returns its metrics without time and memory."""
    from phalanx.training.loop import train

    kept: dict[str, float] = {}

    class OneStep:
        def __init__(self) -> None:
            self.timers, self.world, self.state, self.progress = t.job.timers, t.job.world, t.job.state, t.job.progress
            self.stops = t.job.stops

        def steps(self) -> Iterator[int]:
            yield step

        def end_step(self, number: int, row: dict[str, float]) -> None:
            kept.update({key: value for key, value in row.items() if not key.startswith(("perf/", "time/"))})

    train(OneStep(), Drawn(samples, reward), t.updater)  # type: ignore[arg-type]
    return kept


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run's folder, without time and memory."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("perf/", "time/"))}
        for row in read_metrics(folder / METRICS_FILE)
    ]


def full_weights(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Detached copies of the parameters, unsharded."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters.items()}


def fit(cfg: Any, kind: str = "rl") -> dict[str, torch.Tensor]:
    """Train to the end, as phalanx.run.<kind> builds the job; returns the weights."""
    t = importlib.import_module(f"phalanx.run.{kind}").build(cfg)
    t.fit()
    return full_weights(t.policy.trained.parameters)


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], lr: float) -> None:
    """Weights after two updates with equal gradients are equal except for a few: Adam divides by the gradient's size, so
    a weight whose gradient is rounding noise may move in either direction.
    """
    gaps = torch.cat([(value - other[name]).abs().flatten() for name, value in one.items()])
    assert gaps.max() <= 2.1 * 2 * lr
    assert gaps.gt(lr / 20).sum() <= 0.01 * len(gaps)
