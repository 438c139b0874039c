"""The loop, once, for every algorithm and model."""

import logging
import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx import batches
from phalanx.config.load import ConfigError, resolve_registry
from phalanx.config.schema import TrainConfig
from phalanx.data import PromptStream, held_out_overlap, load_prompts
from phalanx.distributed import mesh
from phalanx.distributed.collectives import all_gather, mean_rows, reduce_float
from phalanx.distributed.placement import place
from phalanx.distributed.seed import fold_in, normal
from phalanx.expert import LoadedExpert, check_expert
from phalanx.flops import peak_flops, step_flops
from phalanx.functional.advantage import group_std, informative
from phalanx.functional.noising import noise_levels
from phalanx.metrics import check_loggers
from phalanx.micro_batches import MicroBatches
from phalanx.models.flow import family_of, image_columns
from phalanx.rollout import check_engine
from phalanx.rollout._rescore import rescore
from phalanx.rollout.dataset import PAIR
from phalanx.rollout.policy import train_sampler, val_sampler
from phalanx.run import Run, peak_memory_gb
from phalanx.types import Algorithm, Noised, Samples

log = logging.getLogger(__name__)
# Training steps whose prompts are encoded at once, at most: fewer where the cache would forget the first of them before
# they are sampled. Qwen-Image's embeddings of a text of 200 tokens, 3584 wide in bfloat16, are 1.4 MB. Qwen-Image-Edit
# adds some 212 tokens, of image and template, and the image's latents, 0.5 MB at 1024 x 1024 pixels: 3.5 MB, and the
# negative's at most as much. 48 prompts on 8 ranks are then 42 MB a step and rank, and 32 steps fit in half of the
# cache's 4 GiB; on one rank it is 336 MB, and 6 do. The first Qwen-Image-Edit sees 1369 tokens of an image, 24 MB a
# prompt: 15 steps on 8 ranks, and 1 on one.
ENCODE_AHEAD = 32


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
    family = family_of(cfg.model)
    train_sampler(cfg.rollout, family)
    val_sampler(cfg.rollout, family)
    return plan


class Trainer(Run):
    """Reinforcement learning: `Trainer(cfg)` builds the run (a ValueError is the user's mistake), `fit()` runs it."""

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg, self.plan = cfg, check(cfg)
        pair = PAIR if cfg.rollout.engine == "dataset" else ()
        rows = load_prompts(cfg.data.train_files, "data.train_files", images=(*image_columns(cfg.model), *pair))
        self.prompts = PromptStream(rows, cfg.data.train_batch_size, cfg.data.seed)
        self.algorithm: Algorithm = resolve_registry("phalanx.algorithms", cfg.algorithm.name, "algorithm.name").Rule(
            cfg.algorithm
        )
        for expert in self.algorithm.experts:
            check_expert(expert, cfg.model)
        super().__init__(
            cfg,
            cfg.actor.ema,
            micro_batch_size=self.plan.rollout_micro,
            detach_uncond=cfg.actor.detach_uncond,
            window=not self.algorithm.forward,
        )
        self.experts = {
            e.name: LoadedExpert(e, cfg, self.policy, self.world, self.plan.rollout_micro)
            for e in self.algorithm.experts
        }
        averages = list(self.algorithm.averages)
        if "reference" not in self.algorithm.others and cfg.actor.ref_model_sync_steps is not None:
            raise ConfigError(
                f"actor.ref_model_sync_steps: {cfg.actor.ref_model_sync_steps} has no reference to sync; set "
                "algorithm.kl_loss_coef > 0, or leave it out"
            )
        if "reference" in self.algorithm.others:
            if cfg.actor.ref_model_sync_steps is None:
                self.policy.keep_reference()
            else:
                averages.append("reference")
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            steps = self.prompts.steps(cfg.trainer.total_epochs)
        self.prepare(steps, steps * self.plan.updates * cfg.actor.ppo_epochs, averages)
        self.group_id = torch.arange(self.plan.samples) // cfg.rollout.n
        self.encoded = self.progress.step
        self._ahead: int | None = None  # steps whose embeddings the cache holds
        self._forward_flops: int | None = None
        self._view_costs: list[float] = []  # of each of the algorithm's others, in passes of the policy's own
        self._trained = 0
        if self.world.rank == 0:
            held_out = [p for prompts in self.val_sets.values() for p in prompts]
            held_out_overlap(rows, held_out, self.policy.model.image_column)
        if cfg.model.compile and self.world.rank == 0:
            log.warning(
                "model.compile: sampling and training are compiled apart, so their log-probs may differ in the last "
                "bits (see actor/first_ratio_error)"
            )
        exact = self.plan.exact or self.algorithm.forward
        if self.rollout.exact and not exact and self.world.rank == 0:
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
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()
                if step == self.encoded:
                    with self.timers("encode"):
                        self.encode_ahead(step)
                with self.timers("rollout"), self.behaviour(), self.rollout.awake():
                    samples = self.rollout.sample(self.prompts.batch(step), seed=seed, step=step, each=self.submit)
                self.ask()
                samples, drift = self.rescore(samples)
                with self.timers("reward"):  # what is left of it: the rest was scored while sampling went on
                    terms = self.terms()
                samples, terms, redrawn = self.redraw(samples, terms, step)
                reward, scores = self.rewarded(terms, step)
                with self.timers("update"):
                    row = self.update(samples, reward, step)
                    if self.stepped:
                        self.after_step(step + 1)
                row |= drift | redrawn | scores | self.performance(samples, time.perf_counter() - start)
                self.progress.samples_seen += self.plan.samples
                del samples
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def behaviour(self) -> AbstractContextManager[None]:
        """The weights that sample for training."""
        name = self.algorithm.behaviour
        return nullcontext() if name is None else self.policy.using(name)

    def terms(self) -> dict[str, Tensor]:
        """The terms of the reward [N], of all that the world submitted in the order of ranks."""
        if self.rewards is None:
            return {}
        return {name: all_gather(values) for name, values in self.score()[1].items()}

    def redraw(
        self, samples: Samples, terms: dict[str, Tensor], step: int
    ) -> tuple[Samples, dict[str, Tensor], dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal are sampled again,
        until they differ or rollout.max_num_gen_batches is reached. Returns what became of samples and terms.
        """
        times, count = self.cfg.rollout.max_num_gen_batches, 0
        if self.rewards is None or times == 1:
            return samples, terms, {}
        for attempt in range(1, times):
            stale = ~informative(self.reward(terms, step), self.group_id)
            if not stale.any():
                break
            with self.timers("rollout"), self.behaviour(), self.rollout.awake():
                samples, numbers = self.rollout.resample(samples, stale, attempt, each=self.submit)
            self.ask()
            with self.timers("reward"):
                again, numbers = self.terms(), all_gather(numbers)
            real = numbers >= 0
            terms = {name: values.index_copy(0, numbers[real], again[name][real]) for name, values in terms.items()}
            count += int(stale.sum())
        return samples, terms, {"rollout/resampled_ratio": count / self.plan.samples}

    def rewarded(self, terms: dict[str, Tensor], step: int) -> tuple[Tensor, dict[str, float]]:
        """The rewards [N] of the world's samples, and reward/... metrics; zeros and none where there is no reward."""
        if self.rewards is None:
            return torch.zeros(self.plan.samples), {}
        return self.reward(terms, step), reward_metrics(self.rewards.weighted(terms, step), terms, self.group_id)

    def reward(self, terms: dict[str, Tensor], step: int) -> Tensor:
        """The reward [N] that is trained, of its terms [N]."""
        assert self.rewards is not None
        return self.rewards.weighted(terms, step, self.group_id if self.cfg.reward.normalize == "group" else None)

    def update(self, samples: Samples, reward: Tensor, step: int) -> dict[str, float]:
        """All optimizer steps on the samples of training step `step`. reward [N] is the world's.

        Optimizer step k trains on the units (samples, but for algorithms that train several as one) whose number is k
        modulo the number of updates, so that each holds a share of every prompt, and the same whatever the number of
        ranks.
        """
        plan, world, algorithm = self.plan, self.world, self.algorithm
        advantage = algorithm.advantage(reward, self.group_id)
        units = algorithm.units(reward, self.group_id)
        counts = algorithm.counts(reward, self.group_id)[units].all(1)
        per_rank = len(units) // world.size
        mine_of_all = slice(world.rank * per_rank, (world.rank + 1) * per_rank)
        local_units = units[mine_of_all] - world.rank * plan.per_rank
        rows: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        steps: list[dict[str, Any]] = []
        batches = MicroBatches(samples, advantage[world.rank * plan.per_rank :][: plan.per_rank], world.device)
        for epoch in range(self.cfg.actor.ppo_epochs if counts.any() else 0):
            if algorithm.forward:
                batches.noised = self.noised(samples, step, epoch)
            if algorithm.forward or epoch == 0:
                batches.views = self.views(batches, local_units)
            for k in range(plan.updates):
                chosen = counts[k :: plan.updates]
                busiest = int(chosen.view(world.size, -1).sum(1).max())
                if busiest == 0:  # nothing to learn from, on any rank
                    continue
                mine = torch.arange(k, per_rank, plan.updates)
                keep = counts[mine_of_all][mine]
                order = mine[torch.sort(~keep, stable=True).indices]  # those that count first: the rest may be skipped
                weight = counts.float()[mine_of_all] / (int(chosen.sum()) * plan.window)
                micros = order.split(plan.micro_units)[: math.ceil(busiest / plan.micro_units)]
                rows.append([])
                total = torch.zeros((), device=world.device)
                for i, part in enumerate(micros):
                    batch = batches.select(local_units[part].flatten(), weight[part], plan.window)
                    self.policy.sharded.set_last_micro_batch(i == len(micros) - 1)
                    per_action, stats = algorithm.loss(self.policy, batch)
                    loss = (per_action * batch.weight).sum()
                    loss.backward()
                    total += loss.detach()
                    rows[-1].append(stats)
                steps.append(self.step_optimizer(total))
        self._trained = sum(plan.first(len(update)) for update in rows)  # samples, those skipped left out
        return self._actor_metrics(rows, steps)

    def after_step(self, step: int) -> None:
        """After training step number `step` (from 1): the algorithm's own weights follow the policy's."""
        for name in self.algorithm.averages:
            self.averages[name].mix(self.algorithm.decay(name, step))
        sync = self.cfg.actor.ref_model_sync_steps
        if sync is not None and step % sync == 0 and "reference" in self.averages:
            self.averages["reference"].mix(0.0)

    def rescore(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """The policy's own log-probabilities of samples that an engine with other kernels drew; rollout/... metrics."""
        if self.rollout.exact or self.algorithm.forward:
            return samples, {}
        with self.timers("rescore"):
            return rescore(self.policy, samples, self.cfg.rollout, self.plan.micro)

    def encode_ahead(self, step: int) -> None:
        """Encode the prompts of the training steps from `step` on, up to `self.encoded`, which it sets: the text
        encoders' way to the device and back is long.
        """
        if self._ahead is None:  # the first prompts show how large embeddings are
            self._ahead = self._encode(range(step, step + 1))
        self.encoded = min(step + self._ahead, self.total_steps)
        self._ahead = self._encode(range(step, self.encoded))

    def _encode(self, steps: range) -> int:
        """Encode the prompts of some training steps; returns of how many, at most ENCODE_AHEAD, the cache has room."""
        prompts = [self.prompts.batch(k) for k in steps]
        kept = [rollout.encode(prompts) for rollout in (self.rollout, *(e.rollout for e in self.experts.values()))]
        return max(1, min(ENCODE_AHEAD, *kept))

    def noised(self, samples: Samples, step: int, epoch: int) -> Noised:
        """Fresh noise of this rank's samples, a function of (trainer.seed, step, sample, epoch)."""
        c, device, clean = self.cfg, self.world.device, samples.trace.clean
        seeds = [fold_in(c.trainer.seed, step, int(i), "forward", epoch) for i in samples.index]
        noise = torch.stack([normal((self.plan.window, *clean.shape[1:]), seed, device) for seed in seeds])
        sampler, model = samples.trace.sampler, self.policy.model
        schedule = model.schedule(sampler.num_inference_steps, sampler.height, sampler.width)[0][:-1]
        streams = [torch.Generator().manual_seed(fold_in(seed, "level")) for seed in seeds]
        uniform = torch.stack([torch.rand(max(len(schedule), self.plan.window), generator=g) for g in streams])
        shift = model.shift(sampler.height, sampler.width)
        levels = noise_levels(
            uniform, self.plan.window, schedule, distribution=c.algorithm.level_distribution, shift=shift
        )
        return Noised(noise, levels.to(device))

    @torch.no_grad()
    def views(self, batches: MicroBatches, units: Tensor) -> dict[str, Tensor]:
        """What the algorithm wants to know of other weights, about the samples of `units` [u, s], whose samples stay
        together: [B, ...] by name, with the samples in their places.
        """
        found = {}
        size, rows = self.plan.micro_units, units.flatten()
        for name in self.algorithm.others:
            policy, theirs = self.policy, batches
            weights: AbstractContextManager[None] = nullcontext()
            if name in self.experts:
                policy = self.experts[name].policy
                theirs = replace(batches, samples=self.experts[name].samples(batches.samples))
            elif name != "policy":
                weights = policy.using(name)
            with weights, policy.unsharded():
                parts = [
                    self.algorithm.view(policy, theirs.select(part.flatten(), torch.ones(len(part)), self.plan.window))
                    for part in units.split(size)
                ]
            seen = torch.cat(parts)
            found[name] = seen.new_zeros(self.plan.per_rank, *seen.shape[1:])
            found[name][rows.to(seen.device)] = seen
        return found

    # -- metrics --------------------------------------------------------------------------------------------------

    def _actor_metrics(self, rows: list[list[dict[str, Any]]], steps: list[dict[str, Any]]) -> dict[str, float]:
        skipped = self.plan.updates * self.cfg.actor.ppo_epochs - len(steps)
        if not rows:
            return {"actor/updates_skipped": float(skipped)}
        plain = [{k: float(v) for k, v in row.items()} for update in rows for row in update]
        out = {f"actor/{k}": v for k, v in mean_rows(plain).items() if k != "ratio_error"}
        if "ratio_error" in plain[0]:
            # of the first optimizer step: 0 to the last bit where rollout and replay run at equal shapes
            error = max(row["ratio_error"] for row in plain[: len(rows[0])])
            out["actor/first_ratio_error"] = reduce_float(error, "max")
        out["actor/grad_norm"] = sum(float(s["grad_norm"]) for s in steps) / len(steps)
        out["actor/lr"] = float(steps[-1]["lr"])
        out["actor/updates_skipped"] = float(skipped)
        out["actor/updates_non_finite"] = float(sum(bool(s["skipped"]) for s in steps))
        return out

    def performance(self, samples: Samples, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of the step."""
        c, plan = self.cfg, self.plan
        row = {
            "perf/step_s": seconds,
            "perf/images_per_gpu_per_s": plan.per_rank / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if self.rewards is not None:  # on worker threads; time/reward is what was left to wait for
            row["perf/reward_busy_s"] = self.rewards.busy_s
            if self.rewards.judge_s is not None:
                row["perf/judge_busy_s"] = self.rewards.judge_s
        if self._forward_flops is None:
            length = samples.trace.embeds["prompt_embeds"].shape[1]
            self._forward_flops = self.policy.model.flops(
                c.rollout.height, c.rollout.width, length, c.rollout.num_frames
            )
            own = self._forward_flops * (2 if self.rollout.sampler.guided else 1)
            self._view_costs = [
                self.experts[name].view_flops(length) / own if name in self.experts else 1.0
                for name in self.algorithm.others
            ]
        peak = peak_flops(self.world.device, self.policy.model.dtype)
        if peak is not None:
            flops = step_flops(
                self._forward_flops,
                samples=plan.samples,
                steps=samples.trace.evaluations,
                window=plan.window,
                cfg=self.rollout.sampler.guided,
                updates_per_sample=self._trained / plan.per_rank,
                lora=c.model.lora_rank > 0,
                checkpointing=c.model.gradient_checkpointing,
                views=sum(self._view_costs) * plan.viewed / plan.per_rank if self._trained > 0 else 0,
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
