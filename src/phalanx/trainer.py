"""The loop, once, for every algorithm and model."""

import logging
import math
import time
from typing import Any

import torch
from torch import Tensor

from phalanx import batches
from phalanx.config.load import resolve_registry
from phalanx.config.schema import TrainConfig
from phalanx.data import PromptStream, held_out_overlap, load_prompts
from phalanx.distributed import mesh
from phalanx.distributed.collectives import all_gather, mean_rows, reduce_float
from phalanx.distributed.placement import place
from phalanx.flops import peak_flops, step_flops
from phalanx.functional.advantage import group_std, informative
from phalanx.metrics import check_loggers
from phalanx.models.flow import family_of
from phalanx.rollout import check_engine
from phalanx.rollout._rescore import rescore
from phalanx.rollout.policy import train_sampler, val_sampler
from phalanx.run import Run, peak_memory_gb
from phalanx.types import Batch, Samples, select

log = logging.getLogger(__name__)
ENCODE_AHEAD = 32  # training steps whose prompts are encoded at once


def check(cfg: TrainConfig) -> batches.BatchPlan:
    """Refuse, before any process group exists, a configuration that this world cannot run (ConfigError)."""
    batches.check(cfg)
    check_loggers(cfg.trainer.logger)
    launch = mesh.Launch.from_env()
    mesh.check_sharding(cfg.optim.name, cfg.parallel, launch)
    if cfg.reward.model.path is not None:
        place(cfg.reward.model, launch.world_size, launch.local_world_size)
    plan = batches.plan(cfg, launch.world_size)
    mesh.check_elastic(cfg, launch, lambda size: batches.plan(cfg, size))
    check_engine(cfg.rollout)
    guidance_key = family_of(cfg.model).guidance_key
    train_sampler(cfg.rollout, guidance_key)
    val_sampler(cfg.rollout, guidance_key)
    return plan


class Trainer(Run):
    """Reinforcement learning: `Trainer(cfg)` builds the run (a ValueError is the user's mistake), `fit()` runs it."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg, self.plan = cfg, check(cfg)
        rows = load_prompts(cfg.data.train_files, "data.train_files")
        self.prompts = PromptStream(rows, cfg.data.train_batch_size, cfg.data.seed)
        super().__init__(
            cfg, cfg.actor.ema, micro_batch_size=self.plan.rollout_micro, detach_uncond=cfg.actor.detach_uncond
        )
        self.algorithm = resolve_registry("phalanx.algorithms", cfg.algorithm.name, "algorithm.name").Rule(
            cfg.algorithm
        )
        if self.algorithm.needs_reference:
            self.policy.keep_reference()
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            steps = self.prompts.steps(cfg.trainer.total_epochs)
        self.prepare(steps, steps * self.plan.updates * cfg.actor.ppo_epochs)
        self.group_id = torch.arange(self.plan.samples) // cfg.rollout.n
        self._forward_flops: int | None = None
        self._trained = 0
        if self.world.rank == 0:
            held_out_overlap(rows, [p for prompts in self.val_sets.values() for p in prompts])
        if cfg.model.compile and self.world.rank == 0:
            log.warning(
                "model.compile: sampling and training are compiled apart, so their log-probs may differ in the last "
                "bits (see actor/first_ratio_error)"
            )
        if self.rollout.exact and not self.plan.exact and self.world.rank == 0:
            log.warning(
                "rollout.micro_batch_size_per_gpu %d is not ppo_micro_batch_size_per_gpu x window = %d: log-probs of "
                "rollout and replay may differ in the last bits (see actor/first_ratio_error)",
                self.plan.rollout_micro,
                self.plan.micro * self.plan.window,
            )

    def fit(self) -> None:
        """Train to the last step."""
        seed = self.cfg.trainer.seed
        with self.logger:
            self.begin()
            first = self.progress.step
            for step in range(first, self.total_steps):
                start = time.perf_counter()
                if (step - first) % ENCODE_AHEAD == 0:
                    with self.timers("encode"):
                        self.encode_ahead(step)
                with self.timers("rollout"), self.rollout.awake():
                    samples = self.rollout.sample(self.prompts.batch(step), seed=seed, step=step, each=self.submit)
                self.ask()
                samples, drift = self.rescore(samples)
                with self.timers("reward"):  # what is left of it: the rest was scored while sampling went on
                    local_reward, local_terms = self.score()
                    reward = all_gather(local_reward)
                    terms = {name: all_gather(values) for name, values in local_terms.items()}
                advantage = self.algorithm.advantage(reward, self.group_id)
                with self.timers("update"):
                    row = self.update(samples, advantage, informative(reward, self.group_id))
                row |= drift | reward_metrics(reward, terms, self.group_id)
                row |= self.performance(samples, time.perf_counter() - start)
                self.progress.samples_seen += self.plan.samples
                del samples
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def update(self, samples: Samples, advantage: Tensor, counts: Tensor) -> dict[str, float]:
        """All optimizer steps on this step's samples. advantage, counts [N] are the world's; counts: informative ones.

        Optimizer step k trains on the images whose number in the step is k modulo the number of updates, so that each
        holds a share of every prompt, and the same images whatever the number of ranks.
        """
        plan, world = self.plan, self.world
        mine_of_all = slice(world.rank * plan.per_rank, (world.rank + 1) * plan.per_rank)
        reference = self.reference_means(samples) if self.algorithm.needs_reference and bool(counts.any()) else None
        local_advantage = advantage[mine_of_all].to(world.device)
        rows: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        steps: list[dict[str, Any]] = []
        for _ in range(self.cfg.actor.ppo_epochs):
            for k in range(plan.updates):
                chosen = counts[k :: plan.updates]
                busiest = int(chosen.view(world.size, -1).sum(1).max())
                if busiest == 0:  # nothing to learn from, on any rank
                    continue
                mine = torch.arange(k, plan.per_rank, plan.updates)
                keep = counts[mine_of_all][mine]
                order = mine[torch.sort(~keep, stable=True).indices]  # those that count first: the rest may be skipped
                weight = counts.float() / (int(chosen.sum()) * plan.window)
                micros = order.to(world.device).split(plan.micro)[: math.ceil(busiest / plan.micro)]
                rows.append([])
                total = torch.zeros((), device=world.device)
                weight = weight[mine_of_all].to(world.device)
                for i, part in enumerate(micros):
                    batch = self.batch(samples, part, local_advantage, weight, reference)
                    self.policy.sharded.set_last_micro_batch(i == len(micros) - 1)
                    per_action, stats = self.algorithm.loss(self.policy, batch)
                    loss = (per_action * batch.weight).sum()
                    loss.backward()
                    total += loss.detach()
                    rows[-1].append(stats)
                steps.append(self.step_optimizer(total))
        self._trained = sum(len(update) for update in rows) * plan.micro  # samples, those skipped left out
        return self._actor_metrics(rows, steps)

    def rescore(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """The policy's own log-probabilities of samples that an engine with other kernels drew; rollout/... metrics."""
        if self.rollout.exact:
            return samples, {}
        with self.timers("rescore"):
            return rescore(self.policy, samples, self.cfg.rollout, self.plan.micro)

    def encode_ahead(self, step: int) -> None:
        """Encode the prompts of the next training steps: the text encoders' way to the device and back is long."""
        ahead = range(step, min(step + ENCODE_AHEAD, self.total_steps))
        self.rollout.encode([self.prompts.batch(k) for k in ahead])

    def batch(
        self, samples: Samples, part: Tensor, advantage: Tensor, weight: Tensor, reference: Tensor | None
    ) -> Batch:
        """The micro-batch of the rows `part` [b] of this rank's samples; all on the device."""
        assert samples.log_prob is not None
        weights = weight[part][:, None].expand(-1, self.plan.window)
        return Batch(
            trace=select(samples.trace, part),
            log_prob=samples.log_prob[part],
            advantage=advantage[part],
            weight=weights if samples.weight is None else weights * samples.weight[part],
            ref_mean=None if reference is None else reference[part],
        )

    @torch.no_grad()
    def reference_means(self, samples: Samples) -> Tensor:
        """The reference's transition means [B, W, ...], once a step."""
        rows = torch.arange(self.plan.per_rank, device=self.world.device).split(self.plan.micro)
        with self.policy.using("reference"), self.policy.unsharded():
            return torch.cat([self.policy.replay(select(samples.trace, part)).mean for part in rows])

    # -- metrics --------------------------------------------------------------------------------------------------

    def _actor_metrics(self, rows: list[list[dict[str, Any]]], steps: list[dict[str, Any]]) -> dict[str, float]:
        skipped = self.plan.updates * self.cfg.actor.ppo_epochs - len(steps)
        if not rows:
            return {"actor/updates_skipped": float(skipped)}
        plain = [{k: float(v) for k, v in row.items()} for update in rows for row in update]
        error = max(row["ratio_error"] for row in plain[: len(rows[0])])
        out = {f"actor/{k}": v for k, v in mean_rows(plain).items() if k != "ratio_error"}
        # of the first optimizer step: 0 to the last bit where rollout and replay run at equal shapes
        out["actor/first_ratio_error"] = reduce_float(error, "max")
        out["actor/grad_norm"] = sum(float(s["grad_norm"]) for s in steps) / len(steps)
        out["actor/lr"] = float(steps[-1]["lr"])
        out["actor/updates_skipped"] = float(skipped)
        out["actor/updates_non_finite"] = float(sum(bool(s["skipped"]) for s in steps))
        return out

    def performance(self, samples: Samples, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of the step."""
        c, plan = self.cfg, self.plan
        assert self.rewards is not None
        row = {
            "perf/step_s": seconds,
            "perf/images_per_gpu_per_s": plan.per_rank / seconds,
            "perf/reward_busy_s": self.rewards.busy_s,  # on worker threads; time/reward is what was left to wait for
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
                updates_per_sample=self._trained / plan.per_rank,
                lora=c.model.lora_rank > 0,
                checkpointing=c.model.gradient_checkpointing,
                reference=self.algorithm.needs_reference and self._trained > 0,
                detach_uncond=c.actor.detach_uncond,
            )
            row["perf/mfu"] = flops / (seconds * self.world.size * peak)
        return row


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
