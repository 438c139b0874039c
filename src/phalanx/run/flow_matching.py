"""Supervised flow matching: regress the velocity on images with prompts.

    L = mean of (v(x_t, t, prompt) - (noise - x_0))^2,   x_t = (1 - t) x_0 + t noise

t = sigmoid(N(m, s)) (SD3, https://arxiv.org/abs/2403.03206, section 3.1), then shifted as in the model's own noise
schedule. Mesh, model, checkpoints, validation and logs are shared with reinforcement learning.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.config.flow import FlowMatchingTaskConfig
from phalanx.config.messages import ConfigError, told_as
from phalanx.data.images import ImageTextData
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.flow.registry import family_of, image_columns
from phalanx.rollout.flow.samplers import train_sampler
from phalanx.run import rules
from phalanx.run.flow_kind import Flow
from phalanx.run.kind import sampling_parts
from phalanx.run.start import start_job
from phalanx.run.supervised_job import supervised_trainer
from phalanx.run.usable_images import usable_rows
from phalanx.training.supervised import Shares, SupervisedTrainer, Task, share_of_rank
from phalanx.types import JobError, Prompt

log = logging.getLogger(__name__)

ENCODED_TOGETHER = 64  # images per VAE pass when latents are cached


class Training(Flow):
    """The job's kind: see phalanx.run.kind."""

    schemas = ()
    section = "flow_matching"
    planner = "phalanx.tools.plan.flow_jobs:rehearsed_matching"
    together = 16

    def check_config(self) -> None:
        rules.check_start(self.cfg)
        model = self.cfg.model
        if image_columns(model):
            raise ConfigError(
                f"model.path: {model.path!r} takes an image with each text; flow matching trains only from texts"
            )
        if not family_of(model).encodes_images:
            raise ConfigError(f"model.path: {model.path!r} cannot encode images; flow matching trains on images")

    def plan(self, ranks: int) -> int:
        """The images per rank and step."""
        return share_of_rank(self.cfg, self.section, self.drawn, ranks)


def build(cfg: FlowMatchingTaskConfig) -> SupervisedTrainer:
    """Build the job; all ranks call this together. A ValueError is the user's mistake."""
    kind = Training(cfg)
    kind.check()
    r = cfg.rollout
    key, unusable = "data.train_files", cfg.data.unusable_rows
    images = ImageTextData(cfg.data.train_files, r.height, r.width, key, unusable)
    val_sets = kind.read_sets()
    world = start_job(cfg)
    _, val_sets = kind.usable([], val_sets, world)
    components = sampling_parts(kind, world, val_sets)
    policy: Any = components.policy
    images.keep(partial(usable_rows, key=key, unusable=unusable, world=world))
    task = FlowMatching(cfg, policy, components.rollout, images, world)
    return supervised_trainer(cfg, components, task, cfg.flow_matching.ema)


class FlowMatching(Task):
    """The task: see phalanx.training.supervised.Task. `build` makes its job."""

    noun = "images"
    policy: FlowPolicy

    def __init__(
        self, cfg: FlowMatchingTaskConfig, policy: FlowPolicy, rollout: Any, images: ImageTextData, world: World
    ) -> None:
        """`rollout`, a PolicyRollout, embeds the prompts."""
        self.cfg, self.policy, self.rollout, self.images, self.world = cfg, policy, rollout, images, world
        self.shares = Shares(len(images), cfg, Training.section, self.noun, world)
        # no guidance in training: the conditional and the unconditional branch are trained separately
        self.sampler = replace(train_sampler(cfg.rollout, policy.model), guidance=1.0)
        self._latents: dict[int, Tensor] = {}

    def begin(self, steps: range) -> None:
        """Encode this rank's images of these steps if latents are cached."""
        if not self.cfg.flow_matching.cache_latents:
            return
        images = sorted({i for step in steps for i in self.shares.of_step(step)})
        if images:
            log.info("encoding %d images", len(images))
        for start in range(0, len(images), ENCODED_TOGETHER):
            part = images[start : start + ENCODED_TOGETHER]
            self._latents.update(zip(part, self._encode_images(part).cpu(), strict=True))

    def passes(self, share: list[int], step: int) -> list[tuple[list[int], int, int]]:
        """Per pass: its images, the step, and the number of its first image in the batch of all ranks."""
        first, micro = self.shares.first, self.shares.micro
        return [(share[start : start + micro], step, first + start) for start in range(0, len(share), micro)]

    def loss(self, batch: tuple[list[int], int, int]) -> tuple[Tensor, dict[str, Tensor]]:
        """See Task; the loss is the mean over all images."""
        return self.errors(*batch).sum() / self.shares.batch_size, {}

    def errors(self, images: list[int], step: int, first: int) -> Tensor:
        """The loss [b] of some images; the first is number `first` in the batch of all ranks."""
        c, device = self.cfg.flow_matching, self.world.device
        x0 = torch.stack([self._latents[i] if i in self._latents else self._encode_images([i])[0] for i in images])
        x0 = x0.to(device)
        # a sample's randomness depends only on (seed, step, its number), not on the number of ranks
        seeds = [fold_in(self.cfg.trainer.seed, step, first + j) for j in range(len(images))]
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = torch.stack([torch.randn(x0.shape[1:], generator=g) for g in streams]).to(device)
        normal = torch.stack([torch.randn((), generator=g) for g in streams])
        keep = torch.stack([torch.rand((), generator=g) for g in streams]) >= c.prompt_dropout
        sigma = self._shift_levels(torch.sigmoid(c.logit_mean + c.logit_std * normal)).to(device)
        # drop some prompts, to train the unconditional branch for classifier-free guidance
        texts = [self.images.prompt(i) if kept else "" for i, kept in zip(images, keep.tolist(), strict=True)]
        embeds, rows = self._embed_texts(texts)
        level = sigma.view(-1, *[1] * (x0.dim() - 1))
        x = (1 - level) * x0 + level * noise
        velocity = self.policy.velocity(x, sigma * 1000, embeds, rows, self.sampler)
        return ((velocity - (noise - x0)) ** 2).flatten(1).mean(1)

    def _shift_levels(self, t: Tensor) -> Tensor:
        """Shift noise levels as the model's own schedule does at this image size."""
        s = self.sampler
        shift = self.policy.level_shift(s.num_inference_steps, s.height, s.width, frames=1)
        return shift * t / (1 + (shift - 1) * t)

    @torch.no_grad()
    def _encode_images(self, images: list[int]) -> Tensor:
        with told_as(JobError):
            pixels = torch.stack([self.images.image(i) for i in images]).to(self.world.device)
        return self.policy.model.encode_images(pixels)

    def _embed_texts(self, texts: list[str]) -> tuple[dict[str, Tensor], Tensor]:
        """The embeddings of the distinct prompts, and the row [b] of each text among them."""
        distinct = list(dict.fromkeys(texts))
        prompts = [Prompt(text=text, group_id=i, meta={}) for i, text in enumerate(distinct)]
        rows = torch.tensor([distinct.index(text) for text in texts], device=self.world.device)
        return self.rollout.collate(prompts, negatives=False), rows
