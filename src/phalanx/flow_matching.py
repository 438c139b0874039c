"""Supervised flow matching: the velocity's regression on images with prompts.

    L = mean of (v(x_t, t, prompt) - (noise - x_0))^2,   x_t = (1 - t) x_0 + t noise

t = sigmoid(N(m, s)) (SD3, https://arxiv.org/abs/2403.03206, section 3.1), moved by the model folder's own shift.
The mesh, the model, checkpoints, validation and logs are those of reinforcement learning.
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from phalanx import batches
from phalanx.config import ConfigError
from phalanx.config.schema import FlowMatchingTaskConfig
from phalanx.data import DataError
from phalanx.distributed import mesh
from phalanx.distributed.collectives import reduce_float
from phalanx.distributed.seed import fold_in
from phalanx.image_data import ImageTextData, IndexStream
from phalanx.metrics import check_loggers
from phalanx.models.flow import image_columns
from phalanx.rollout.policy import train_sampler
from phalanx.run import Run, peak_memory_gb
from phalanx.types import JobError, Prompt, Sampler


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
    launch = mesh.Launch.from_env()
    mesh.check_sharding(cfg.optim.name, cfg.parallel, launch)
    mesh.check_elastic(cfg, launch, lambda size: images_of_rank(cfg, size))
    return images_of_rank(cfg, launch.world_size)


def images_of_rank(cfg: FlowMatchingTaskConfig, world_size: int) -> int:
    """A rank's images a step; raises ConfigError where they do not divide."""
    size, micro = cfg.data.train_batch_size, cfg.flow_matching.micro_batch_size_per_gpu
    unit = world_size * micro
    if size % unit:
        below = max(size // unit, 1) * unit
        raise ConfigError(
            f"data.train_batch_size: {size} images do not divide over {world_size} ranks x "
            f"flow_matching.micro_batch_size_per_gpu {micro}; nearest that do: {below} or {below + unit}"
        )
    return size // world_size


class FlowMatching(Run):
    """`FlowMatching(cfg)` builds the run (a ValueError is the user's mistake), `fit()` runs it."""

    def __init__(self, cfg: FlowMatchingTaskConfig) -> None:
        self.cfg, self.per_rank = cfg, check(cfg)
        r = cfg.rollout
        self.images = ImageTextData(cfg.data.train_files, r.height, r.width)
        super().__init__(cfg, cfg.flow_matching.ema, micro_batch_size=r.micro_batch_size_per_gpu or 16)
        self.stream = IndexStream(len(self.images), cfg.data.train_batch_size, cfg.data.seed)
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            steps = -(-int(cfg.trainer.total_epochs * len(self.images)) // cfg.data.train_batch_size)
        self.prepare(steps, steps)
        self.sampler = train_sampler(r, self.policy.model)
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
                    row = self.update(step)
                seconds = time.perf_counter() - start
                self.progress.samples_seen += self.cfg.data.train_batch_size
                row |= {
                    "perf/step_s": seconds,
                    "perf/images_per_gpu_per_s": self.per_rank / seconds,
                    "perf/peak_memory_gb": peak_memory_gb(self.world.device),
                }
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step on this rank's share of the step's images."""
        share = self.stream.batch(step)[self.world.rank * self.per_rank : (self.world.rank + 1) * self.per_rank]
        first = self.world.rank * self.per_rank
        micro = self.cfg.flow_matching.micro_batch_size_per_gpu
        losses = []
        for start in range(0, self.per_rank, micro):
            self.policy.sharded.set_last_micro_batch(start + micro == self.per_rank)
            loss = self.loss(share[start : start + micro], step, first + start)
            (loss.sum() / self.cfg.data.train_batch_size).backward()
            losses.append(loss.detach().sum())
        loss = torch.stack(losses).sum()
        stats = self.step_optimizer(loss)
        return {
            "train/loss": reduce_float(float(loss), "sum") / self.cfg.data.train_batch_size,
            "actor/grad_norm": float(stats["grad_norm"]),
            "actor/lr": float(stats["lr"]),
            "actor/updates_non_finite": float(stats["skipped"]),
        }

    def loss(self, images: list[int], step: int, first: int) -> Tensor:
        """The loss [b] of some images, the first of which is number `first` of the world's batch."""
        c, device = self.cfg.flow_matching, self.world.device
        x0 = torch.stack([self._latent(i) for i in images]).to(device)
        # all randomness of a sample is named by (seed, step, its number), so that it does not depend on the ranks
        streams = [
            torch.Generator().manual_seed(fold_in(self.cfg.trainer.seed, step, first + j)) for j in range(len(images))
        ]
        noise = torch.stack([torch.randn(x0.shape[1:], generator=g) for g in streams]).to(device)
        normal = torch.stack([torch.randn((), generator=g) for g in streams])
        keep = torch.stack([torch.rand((), generator=g) for g in streams]) >= c.prompt_dropout
        sigma = self._shift(torch.sigmoid(c.logit_mean + c.logit_std * normal)).to(device)
        texts = [self.images.prompt(i) if k else "" for i, k in zip(images, keep.tolist(), strict=True)]
        embeds, rows = self._embed(texts)
        level = sigma.view(-1, *[1] * (x0.dim() - 1))
        x = (1 - level) * x0 + level * noise
        velocity = self.policy.velocity(x, sigma * 1000, embeds, rows, self._plain())
        return ((velocity - (noise - x0)) ** 2).flatten(1).mean(1)

    def _plain(self) -> Sampler:
        """Without guidance: each branch is trained for itself."""
        return replace(self.sampler, guidance=1.0)

    def _shift(self, t: Tensor) -> Tensor:
        """Moved as the model's own noise schedule is, at the size of the images."""
        shift = self.policy.model.shift(self.sampler.height, self.sampler.width)
        return shift * t / (1 + (shift - 1) * t)

    def _latent(self, i: int) -> Tensor:
        if i not in self._latents:
            latent = self._encode([i])[0]
            if not self.cfg.flow_matching.cache_latents:
                return latent
            self._latents[i] = latent
        return self._latents[i]

    @torch.no_grad()
    def _encode(self, images: list[int]) -> Tensor:
        try:
            pixels = torch.stack([self.images.image(i) for i in images]).to(self.world.device)
        except DataError as error:
            raise JobError(str(error)) from error
        return self.policy.model.encode_images(pixels)

    def _encode_all(self) -> None:
        """This run's images to latents, once; every rank keeps those that its share of the steps will ask for."""
        first = self.world.rank * self.per_rank
        wanted = sorted(
            {
                i
                for step in range(self.progress.step, self.total_steps)
                for i in self.stream.batch(step)[first : first + self.per_rank]
            }
        )
        for start in range(0, len(wanted), 64):
            part = wanted[start : start + 64]
            self._latents.update(zip(part, self._encode(part).cpu(), strict=True))

    def _embed(self, texts: list[str]) -> tuple[dict[str, Tensor], Tensor]:
        """Embeddings of a batch's distinct prompts, and each text's row [b] among them."""
        distinct = list(dict.fromkeys(texts))
        prompts = [Prompt(text=text, group_id=i, meta={}) for i, text in enumerate(distinct)]
        rows = torch.tensor([distinct.index(text) for text in texts], device=self.world.device)
        return self.rollout.collate(prompts, negatives=False), rows
