"""Supervised flow matching: the velocity's regression on images with prompts.

    L = mean of (v(x_t, t, prompt) - (noise - x_0))^2,   x_t = (1 - t) x_0 + t noise

t = sigmoid(N(m, s)) (SD3, https://arxiv.org/abs/2403.03206, section 3.1), moved by the model folder's own shift. The
mesh, the model, checkpoints, validation and logs are those of reinforcement learning.
"""

import logging
import time
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.data.images import ImageTextData
from phalanx.data.prompts import DataError
from phalanx.data.streams import IndexStream
from phalanx.distributed import mesh
from phalanx.distributed.collectives import reduce_float
from phalanx.distributed.seed import fold_in
from phalanx.models.flow.policy import FlowPolicy, image_columns
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.samplers import train_sampler
from phalanx.telemetry.metrics import check_loggers
from phalanx.training import batches
from phalanx.training.flow_parts import FlowParts, build_parts
from phalanx.training.run import Run, peak_memory_gb
from phalanx.types import JobError, Prompt

log = logging.getLogger(__name__)

ENCODED_TOGETHER = 64  # images, where latents are cached


def check(cfg: FlowMatchingTaskConfig) -> int:
    """Refuse what cannot run here (ConfigError); returns the images of a rank."""
    if not cfg.data.train_files:
        raise ConfigError("data.train_files: [] names no images; give a .jsonl file or a Hugging Face dataset folder")
    batches.check_run(cfg)
    if image_columns(cfg.model):
        raise ConfigError(f"model.path: {cfg.model.path!r} edits images; flow matching trains from texts alone")
    if cfg.rollout.num_frames > 1:
        raise ConfigError(f"rollout.num_frames: {cfg.rollout.num_frames}: flow matching trains on images; set it to 1")
    check_loggers(cfg.trainer.logger)
    return mesh.check(cfg, lambda size: images_of_rank(cfg, size))


def images_of_rank(cfg: FlowMatchingTaskConfig, world_size: int) -> int:
    """A rank's images per step; raises ConfigError where they do not divide."""
    size, micro = cfg.data.batch_size(world_size), cfg.flow_matching.micro_batch_size_per_gpu
    each = cfg.data.train_batch_size_per_gpu
    if each is not None and each % micro:
        below = max(each // micro, 1) * micro
        raise ConfigError(
            f"data.train_batch_size_per_gpu: {each} images do not divide by flow_matching.micro_batch_size_per_gpu "
            f"{micro}; nearest that do: {below} or {below + micro}"
        )
    unit = world_size * micro
    if size % unit:
        below = max(size // unit, 1) * unit
        raise ConfigError(
            f"data.train_batch_size: {size} images do not divide over {world_size} ranks x "
            f"flow_matching.micro_batch_size_per_gpu {micro}; nearest that do: {below} or {below + unit}"
        )
    return size // world_size


def build(cfg: FlowMatchingTaskConfig) -> "FlowMatching":
    """The job, built on all ranks in step; a ValueError is the user's mistake."""
    check(cfg)
    r = cfg.rollout
    images = ImageTextData(cfg.data.train_files, r.height, r.width)
    return FlowMatching(cfg, images, build_parts(cfg, r.micro_batch_size_per_gpu or 16))


class FlowMatching(Run):
    """Supervised training: `fit()` runs it. `build` makes it."""

    cfg: FlowMatchingTaskConfig
    policy: FlowPolicy
    rollout: PolicyRollout

    def __init__(self, cfg: FlowMatchingTaskConfig, images: ImageTextData, parts: FlowParts) -> None:
        super().__init__(cfg, parts)
        self.images, self.per_rank = images, images_of_rank(cfg, parts.world.size)
        self.batch_size = self.per_rank * parts.world.size
        self.stream = IndexStream(len(self.images), self.batch_size, cfg.data.seed)
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            seen = int(cfg.trainer.total_epochs * len(self.images))
            steps = -(-seen // self.batch_size)
        self.prepare(steps, steps, cfg.flow_matching.ema)
        # without guidance: each branch is trained for itself
        self.sampler = replace(train_sampler(cfg.rollout, self.policy.model), guidance=1.0)
        self._latents: dict[int, Tensor] = {}

    def fit(self) -> None:
        """Train to the last step."""
        with self.logger:
            if self.cfg.flow_matching.cache_latents:
                self._encode_all()
            self.begin()
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()
                with self.timers("update"):
                    self.timers.expect(self.per_rank // self.cfg.flow_matching.micro_batch_size_per_gpu)
                    row = self.update(step)
                seconds = time.perf_counter() - start
                self.progress.samples_seen += self.batch_size
                row |= {
                    "perf/step_s": seconds,
                    "perf/images_per_gpu_per_s": self.per_rank / seconds,
                    "perf/peak_memory_gb": peak_memory_gb(self.world.device),
                }
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step on this rank's share of the step's images."""
        first, share = self.world.rank * self.per_rank, self._share(step)
        micro = self.cfg.flow_matching.micro_batch_size_per_gpu
        losses = []
        for start in range(0, self.per_rank, micro):
            # gradients are summed across ranks, so each loss is divided by the whole batch
            self.policy.trained.sharded.set_last_micro_batch(start + micro == self.per_rank)
            loss = self.loss(share[start : start + micro], step, first + start)
            (loss.sum() / self.batch_size).backward()
            losses.append(loss.detach().sum())
            self.timers.advance()
        loss = torch.stack(losses).sum()
        stats = self.step_optimizer(loss)
        return {
            "train/loss": reduce_float(float(loss), "sum") / self.batch_size,
            "actor/grad_norm": float(stats["grad_norm"]),
            "actor/lr": float(stats["lr"]),
            "actor/updates_non_finite": float(stats["skipped"]),
        }

    def _share(self, step: int) -> list[int]:
        """This rank's images of a step."""
        first = self.world.rank * self.per_rank
        return self.stream.batch(step)[first : first + self.per_rank]

    def loss(self, images: list[int], step: int, first: int) -> Tensor:
        """The loss [b] of some images, the first of which is number `first` of all ranks' batch."""
        c, device = self.cfg.flow_matching, self.world.device
        x0 = torch.stack([self._latent(i) for i in images]).to(device)
        # all randomness of a sample is named by (seed, step, its number): no matter how many ranks there are
        seeds = [fold_in(self.cfg.trainer.seed, step, first + j) for j in range(len(images))]
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = torch.stack([torch.randn(x0.shape[1:], generator=g) for g in streams]).to(device)
        normal = torch.stack([torch.randn((), generator=g) for g in streams])
        keep = torch.stack([torch.rand((), generator=g) for g in streams]) >= c.prompt_dropout
        sigma = self._shift(torch.sigmoid(c.logit_mean + c.logit_std * normal)).to(device)
        # some images without their prompt, so that guidance has an unconditional branch
        texts = [self.images.prompt(i) if kept else "" for i, kept in zip(images, keep.tolist(), strict=True)]
        embeds, rows = self._embed(texts)
        level = sigma.view(-1, *[1] * (x0.dim() - 1))
        x = (1 - level) * x0 + level * noise
        velocity = self.policy.velocity(x, sigma * 1000, embeds, rows, self.sampler)
        return ((velocity - (noise - x0)) ** 2).flatten(1).mean(1)

    def _shift(self, t: Tensor) -> Tensor:
        """Levels, moved as the model's own noise schedule is at the size of the images."""
        shift = self.policy.model.shift(self.sampler.height, self.sampler.width)
        return shift * t / (1 + (shift - 1) * t)

    def _latent(self, i: int) -> Tensor:
        return self._latents[i] if i in self._latents else self._encode([i])[0]

    @torch.no_grad()
    def _encode(self, images: list[int]) -> Tensor:
        try:
            pixels = torch.stack([self.images.image(i) for i in images]).to(self.world.device)
        except DataError as error:
            raise JobError(str(error)) from error
        return self.policy.model.encode_images(pixels)

    def _encode_all(self) -> None:
        """Encode this rank's share of the run's images, once."""
        steps = range(self.progress.step, self.total_steps)
        wanted = sorted({i for step in steps for i in self._share(step)})
        if wanted:
            log.info("encoding %d images", len(wanted))
        for start in range(0, len(wanted), ENCODED_TOGETHER):
            part = wanted[start : start + ENCODED_TOGETHER]
            self._latents.update(zip(part, self._encode(part).cpu(), strict=True))

    def _embed(self, texts: list[str]) -> tuple[dict[str, Tensor], Tensor]:
        """Embeddings of a batch's distinct prompts, and each text's row [b] among them."""
        distinct = list(dict.fromkeys(texts))
        prompts = [Prompt(text=text, group_id=i, meta={}) for i, text in enumerate(distinct)]
        rows = torch.tensor([distinct.index(text) for text in texts], device=self.world.device)
        return self.rollout.collate(prompts, negatives=False), rows
