"""The loop, once, for every algorithm and model."""

import logging
import math
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx import batches
from phalanx.checkpoint import Checkpointer, Progress, trained_state
from phalanx.config import save
from phalanx.config.load import resolve_registry
from phalanx.config.schema import TrainConfig
from phalanx.data import PromptStream, held_out_overlap, load_prompts, validation_sets
from phalanx.distributed import mesh
from phalanx.distributed.collectives import all_gather, first_error, mean_rows, reduce_float
from phalanx.evaluate import validate
from phalanx.flops import peak_flops, step_flops
from phalanx.functional.advantage import group_std, informative
from phalanx.metrics import METRICS_FILE, RunLogger, Timers, check_loggers, read_metrics
from phalanx.models.flow import build_policy
from phalanx.optim import Ema, Optimizer
from phalanx.report import write_report
from phalanx.rewards import RewardError, RewardSet
from phalanx.rollout.policy import PolicyRollout
from phalanx.types import Batch, Prompt, Samples, select

log = logging.getLogger(__name__)


def check(cfg: TrainConfig) -> batches.BatchPlan:
    """Refuse, before any process group exists, a configuration that this world cannot run (ConfigError)."""
    batches.check(cfg)
    check_loggers(cfg.trainer.logger)
    launch = mesh.Launch.from_env()
    mesh.shard_size(cfg.parallel, launch)
    return batches.plan(cfg, launch.world_size)


class Trainer:
    """One run: `Trainer(cfg)` builds it (a ValueError is the user's mistake), `fit()` runs it."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg, self.plan = cfg, check(cfg)
        c, t = cfg, cfg.trainer
        self.world = world = mesh.start(c.parallel)
        torch.use_deterministic_algorithms(t.deterministic)
        rows = load_prompts(c.data.train_files, "data.train_files")
        self.prompts = PromptStream(rows, c.data.train_batch_size, c.data.seed)
        self.val_sets = validation_sets(c.data.val_files)
        self._warn(rows)
        self.total_steps = t.total_training_steps
        if self.total_steps is None:
            assert t.total_epochs is not None
            self.total_steps = self.prompts.steps(t.total_epochs)

        self.rewards = RewardSet(c.reward, str(world.device))
        self.algorithm = resolve_registry("phalanx.algorithms", c.algorithm.name, "algorithm.name").Rule(c.algorithm)
        self.policy = build_policy(
            c.model, c.parallel, c.data, world, seed=t.seed, detach_uncond=c.actor.detach_uncond
        )
        self.rollout = PolicyRollout(self.policy, c.rollout, world, self.plan.rollout_micro)
        if self.algorithm.needs_reference:
            self.policy.keep_reference()
        updates = self.total_steps * self.plan.updates * c.actor.ppo_epochs
        offload = c.parallel.optimizer_offload
        self.optimizer = Optimizer(c.optim, self.policy.sharded, updates, offload=offload)
        self.ema: Ema | None = None
        if c.actor.ema.decay is not None:
            self.ema = Ema(c.actor.ema, self.policy.parameters, offload=offload)
            self.policy.add_weights("ema", self.ema.values)
        self.checkpointer = Checkpointer(Path(t.output_dir), world, self._signature(), t.max_checkpoints)
        self.progress = self._resume()
        if world.rank == 0:
            Path(t.output_dir).mkdir(parents=True, exist_ok=True)
            save(cfg, Path(t.output_dir) / "config.yaml")
        self.logger = RunLogger(
            t, asdict(cfg), self.progress.wandb_id, self.progress.step, self.total_steps, world.rank == 0
        )
        self.progress.wandb_id = self.logger.wandb_id
        self.timers = Timers()
        self._forward_flops: int | None = None

    def run(self) -> None:
        """Train, write the report, and say what came of it."""
        self.fit()
        if self.world.rank == 0:
            folder = Path(self.cfg.trainer.output_dir)
            print(*validation_summary(folder), f"report: {write_report(folder)}", sep="\n", flush=True)
        mesh.stop()

    # -- the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step."""
        c, t, n = self.cfg, self.cfg.trainer, self.cfg.rollout.n
        assert self.total_steps is not None
        group_id = torch.arange(self.plan.samples) // n
        with self.logger:
            if self.progress.step == 0 and t.val_before_train and self.val_sets:
                self.logger.log(0, self.validate(0) | self.timers.pop())
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()
                with self.timers("rollout"), self.rollout.awake():
                    samples = self.rollout.sample(
                        self.prompts.batch(step), seed=t.seed, step=step, each=self.rewards.submit
                    )
                with self.timers("reward"):  # what is left of it: the rest was scored while sampling went on
                    local_reward, local_terms = self.score()
                    reward = all_gather(local_reward)
                    terms = {name: all_gather(values) for name, values in local_terms.items()}
                advantage = self.algorithm.advantage(reward, group_id)
                with self.timers("update"):
                    row = self.update(samples, advantage, informative(reward, group_id))
                row |= reward_metrics(reward, terms, group_id) | self.performance(samples, time.perf_counter() - start)
                self.progress.step = step + 1
                self.progress.samples_seen += self.plan.samples
                del samples
                last = step + 1 == self.total_steps
                if t.save_freq > 0 and (last or (step + 1) % t.save_freq == 0):
                    with self.timers("checkpoint"):
                        self.checkpointer.save(self.state(), replace(self.progress))
                if t.test_freq > 0 and (last or (step + 1) % t.test_freq == 0):
                    row |= self.validate(step + 1)
                self.logger.log(step + 1, row | self.timers.pop())
            self.checkpointer.wait()

    def score(self) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's rewards [B] and their terms; a reward that fails on any rank ends the job on all."""
        terms: dict[str, Tensor] = {}
        failure: RewardError | None = None
        try:
            terms = self.rewards.collect()
        except RewardError as error:
            failure = error
        message = first_error(str(failure) if failure is not None else None)
        if message is not None:
            raise RewardError(message) from failure
        self.timers.add("reward_busy", self.rewards.busy_s)
        return self.rewards.weighted(terms), terms

    def update(self, samples: Samples, advantage: Tensor, counts: Tensor) -> dict[str, float]:
        """All optimizer steps on this step's samples. advantage, counts [N] are the world's; counts: informative ones.

        Optimizer step k trains on the images whose number in the step is k modulo the number of updates, so that each
        holds a share of every prompt, and the same images whatever the number of ranks.
        """
        plan, world = self.plan, self.world
        first, last = world.rank * plan.per_rank, (world.rank + 1) * plan.per_rank
        reference = self.reference_means(samples) if self.algorithm.needs_reference and bool(counts.any()) else None
        rows: list[dict[str, Any]] = []
        steps: list[dict[str, Any]] = []
        for _ in range(self.cfg.actor.ppo_epochs):
            for k in range(plan.updates):
                chosen = counts[k :: plan.updates]
                busiest = int(chosen.view(world.size, -1).sum(1).max())
                if busiest == 0:  # nothing to learn from, on any rank
                    continue
                mine = torch.arange(k, plan.per_rank, plan.updates)
                keep = counts[first:last][mine]
                order = mine[torch.sort(~keep, stable=True).indices]  # those that count first: the rest may be skipped
                weight = counts.float() / (int(chosen.sum()) * plan.window)
                micros = order.split(plan.micro)[: math.ceil(busiest / plan.micro)]
                for i, part in enumerate(micros):
                    batch = self.batch(samples, part, advantage[first:last], weight[first:last], reference)
                    self.policy.sharded.set_last_micro_batch(i == len(micros) - 1)
                    per_action, stats = self.algorithm.loss(self.policy, batch)
                    (per_action * batch.weight).sum().backward()
                    rows.append(stats)
                steps.append(self.optimizer.step())
                self.progress.updates = self.optimizer.updates
                if self.ema is not None:
                    self.ema.update(self.optimizer.updates)
        return self._actor_metrics(rows, steps)

    def batch(
        self, samples: Samples, part: Tensor, advantage: Tensor, weight: Tensor, reference: Tensor | None
    ) -> Batch:
        """The micro-batch of the rows `part` [b] of this rank's samples."""
        assert samples.log_prob is not None
        device = self.world.device
        rows = part.to(device)
        return Batch(
            trace=select(samples.trace, rows),
            log_prob=samples.log_prob[rows],
            advantage=advantage[part].to(device),
            weight=weight[part].to(device)[:, None].expand(-1, self.plan.window),
            ref_mean=None if reference is None else reference[rows],
        )

    @torch.no_grad()
    def reference_means(self, samples: Samples) -> Tensor:
        """The reference's transition means [B, W, ...], once a step."""
        rows = torch.arange(self.plan.per_rank, device=self.world.device).split(self.plan.micro)
        with self.policy.using("reference"), self.policy.unsharded():
            return torch.cat([self.policy.replay(select(samples.trace, part)).mean for part in rows])

    def validate(self, step: int) -> dict[str, float]:
        """Validate on all sets and hand the images to the loggers; returns the row."""
        row: dict[str, float] = {}
        with self.timers("validation"):
            for name, prompts in self.val_sets.items():
                result = validate(
                    self.policy,
                    self.rollout,
                    self.rewards.submit,
                    self.score,
                    name,
                    prompts,
                    self.world,
                    images_a_prompt=self.cfg.rollout.val.n,
                    keep_images=self.cfg.trainer.log_val_generations,
                    ema=self.ema is not None,
                )
                row |= result.row
                self.logger.images(step, name, result.images)
        return row

    # -- metrics --------------------------------------------------------------------------------------------------

    def _actor_metrics(self, rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> dict[str, float]:
        if not rows:
            return {"actor/updates_skipped": float(self.plan.updates * self.cfg.actor.ppo_epochs)}
        plain = [{k: float(v) for k, v in row.items()} for row in rows]
        first_update = plain[: max(len(plain) // len(steps), 1)]
        error = max(row.pop("ratio_error") for row in first_update)
        for row in plain[len(first_update) :]:
            row.pop("ratio_error")
        out = {f"actor/{k}": v for k, v in mean_rows(plain).items()}
        out["actor/first_ratio_error"] = reduce_float(error, "max")
        out["actor/grad_norm"] = sum(float(s["grad_norm"]) for s in steps) / len(steps)
        out["actor/lr"] = float(steps[-1]["lr"])
        return out

    def performance(self, samples: Samples, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of the step."""
        c, plan = self.cfg, self.plan
        row = {
            "perf/step_s": seconds,
            "perf/images_per_gpu_per_s": plan.per_rank / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if self._forward_flops is None:
            length = samples.trace.embeds["prompt_embeds"].shape[1]
            self._forward_flops = self.policy.model.flops(c.rollout.height, c.rollout.width, length)
        peak = peak_flops(self.world.device, self.policy.model.dtype)
        if peak is not None:
            flops = step_flops(
                self._forward_flops,
                samples=plan.samples,
                steps=c.rollout.num_inference_steps,
                window=plan.window,
                cfg=self.rollout.sampler.guidance > 1,
                updates_per_sample=c.actor.ppo_epochs,
                lora=c.model.lora_rank > 0,
                checkpointing=c.model.gradient_checkpointing,
                reference=self.algorithm.needs_reference,
                detach_uncond=c.actor.detach_uncond,
            )
            row["perf/mfu"] = flops / (seconds * self.world.size * peak)
        return row

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as tensors of the mesh."""
        ema = self.ema.values if self.ema is not None else None
        return trained_state(self.policy.parameters, self.optimizer.state(), ema)

    def _signature(self) -> dict[str, Any]:
        return {
            "trained tensors": len(self.policy.parameters),
            "trained parameters": sum(p.numel() for p in self.policy.parameters.values()),
            "lora_rank": self.cfg.model.lora_rank,
            "moving average": self.cfg.actor.ema.decay is not None,
        }

    def _resume(self) -> Progress:
        folder = self.checkpointer.locate(self.cfg.trainer.resume)
        if folder is None:
            return Progress()
        progress = self.checkpointer.load(folder, self.state())
        self.policy.sharded.publish()
        self.optimizer.updates = progress.updates
        if self.world.rank == 0:
            log.warning("resuming from %s: step %d of %d", folder, progress.step, self.total_steps)
        return progress

    def _warn(self, rows: list[Any]) -> None:
        if self.world.rank != 0:
            return
        held_out: list[Prompt] = [p for prompts in self.val_sets.values() for p in prompts]
        overlap = held_out_overlap(rows, held_out)
        if overlap:
            log.warning("%d of %d validation prompts are training prompts too", overlap, len(held_out))
        if not self.plan.exact:
            log.warning(
                "rollout.micro_batch_size_per_gpu %d is not ppo_micro_batch_size_per_gpu x window = %d: log-probs of rollout "
                "and replay may differ in the last bits (see actor/first_ratio_error)",
                self.plan.rollout_micro,
                self.plan.micro * self.plan.window,
            )


def validation_summary(folder: Path) -> list[str]:
    """A line for each validation set: the first and the last mean reward in a run's metrics.jsonl."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        for key, value in row.items():
            if key.startswith("val/") and key.endswith("/reward/mean"):
                found.setdefault(key, []).append((row["step"], value))
    return [
        f"{key}: {points[0][1]:.3f} (step {points[0][0]}) -> {points[-1][1]:.3f} (step {points[-1][0]})"
        for key, points in found.items()
    ]


def peak_memory_gb(device: torch.device) -> float:
    """The largest memory that this process ever held, in GB (10^9): the device's, or on a CPU the process's own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def reward_metrics(reward: Tensor, terms: dict[str, Tensor], group_id: Tensor) -> dict[str, float]:
    """reward/... of the world's rewards [N] and their terms."""
    spread = group_std(reward, group_id)
    row = {
        "reward/mean": reward.mean().item(),
        "reward/std": reward.std(correction=0).item(),
        "reward/max": reward.max().item(),
        "reward/min": reward.min().item(),
        "reward/std_mean": spread.mean().item(),
        "reward/zero_std_ratio": 1 - informative(reward, group_id).float().mean().item(),
    }
    return row | {f"reward/{name}": values.mean().item() for name, values in terms.items()}
