"""The same training step in a straightforward implementation of its paper, timed alternately with Phalanx's own.

    sh train.sh benchmarks/baseline.py benchmarks/cpu_reference.yaml
    NPROC_PER_NODE=2 sh train.sh benchmarks/baseline.py benchmarks/cpu_reference.yaml model.dtype=bfloat16

The baseline is a straightforward implementation of Flow-GRPO (arXiv 2505.05470) in float32: guidance as one doubled
batch, one denoising step at a time in sampling and again in the update (a forward and backward pass per step), the
whole batch decoded at once, diffusers' and peft's modules unchanged, rewards on a thread during sampling. Model, LoRA,
prompt embeddings, images, steps and updates are the same; other settings of Phalanx do not change the baseline.
With `--only phalanx` or `--only baseline` only one of them runs, to measure its memory.
"""

import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from count_kernels import by
from diffusers.models.attention_processor import JointAttnProcessor2_0
from measure import Bench, arguments, configure, origin, table
from peft.tuners.lora.layer import Linear
from torch import Tensor

from phalanx.config.flow import FlowRLConfig
from phalanx.config.registry import resolve_registry
from phalanx.data.prompts import load_prompts
from phalanx.models.lora import add_lora
from phalanx.run.cli import rank, run
from phalanx.run.kind import kind_of
from phalanx.run.world import start_world, stop_world
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.zoo.rewards.image.jpeg_compressibility import jpeg_compressibility


class Baseline:
    """Samples (`sample`) and trains (`train`) a LoRA on the family's transformer, replicated on each rank."""

    def __init__(self, cfg: FlowRLConfig) -> None:
        self.cfg, self.size, self.rank = cfg, dist.get_world_size(), dist.get_rank()
        family = resolve_registry("phalanx.zoo.families", cfg.model.family or "", "model.family")
        self.model = family.Model(cfg.model, torch.float32, torch.float32)
        add_lora(self.model.transformer, cfg.model, self.model.lora_targets, seed=0)
        by(Linear, self.model.transformer)
        self.model.transformer.set_attn_processor(JointAttnProcessor2_0())
        self.weights = [p for p in self.model.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay)
        self.generator = torch.Generator().manual_seed(self.rank)
        self.executor = ThreadPoolExecutor(1)
        r = cfg.rollout
        self.shape = self.model.latent_shape(r.height, r.width)
        self.sigmas, self.timesteps = self.model.schedule(r.num_inference_steps, r.height, r.width)
        share = cfg.data.batch_size(self.size) * r.n // self.size
        batches = share // (r.micro_batch_size_per_gpu or share)
        updates = cfg.data.batch_size(self.size) // cfg.actor.mini_batch_size(self.size)
        if batches % updates:
            raise ValueError(f"the baseline trains on whole batches: a rank has {batches} for {updates} updates")
        self.texts = [row.text for row in load_prompts(cfg.data.train_files, "data.train_files")]

    def embed(self, texts: list[str]) -> dict[str, Tensor]:
        """Embeddings [2 B, ...] of B empty prompts, then of `texts`."""
        found = self.model.encode([""] * len(texts) + texts, torch.device("cpu"), self.cfg.data.max_prompt_length)
        return {name: torch.stack([one[name] for one in found]) for name in found[0]}

    def velocity(self, x: Tensor, i: int, embeds: dict[str, Tensor]) -> Tensor:
        """Guided velocity [B, ...] at denoising step i."""
        r = self.cfg.rollout
        out = self.model.velocity(
            torch.cat([x, x]), self.timesteps[i].expand(2 * len(x)), embeds, r.height, r.width
        ).float()
        negative, positive = out.chunk(2)
        return negative + r.guidance_scale * (positive - negative)

    def step(self, x: Tensor, velocity: Tensor, i: int, after: Tensor | None) -> tuple[Tensor, Tensor]:
        """The next sample [B, ...] (drawn if `after` is None) and its log-probability [B]."""
        s, s_next = self.sigmas[i], self.sigmas[i + 1]
        dt = s_next - s
        noise_std = self.cfg.rollout.noise_level * torch.sqrt(s / (1 - torch.where(s == 1, self.sigmas[1], s)))
        drift = noise_std**2 / (2 * s)
        mean = x * (1 + drift * dt) + velocity * (1 + drift * (1 - s)) * dt
        std = noise_std * torch.sqrt(-dt)
        if after is None:
            after = mean + std * torch.randn(x.shape, generator=self.generator)
        log_prob = -((after.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
        return after, log_prob.flatten(1).mean(1)

    @torch.no_grad()
    def sample(self, number: int) -> list[dict[str, Any]]:
        """This rank's images of training step `number`, as batches with latents, log-probabilities and advantages."""
        c = self.cfg
        count = c.data.batch_size(self.size)
        prompts = [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]
        share = count * c.rollout.n // self.size
        mine = [text for text in prompts for _ in range(c.rollout.n)][self.rank * share : (self.rank + 1) * share]
        size = c.rollout.micro_batch_size_per_gpu or share
        batches, scores = [], []
        for texts in [mine[i : i + size] for i in range(0, share, size)]:
            embeds = self.embed(texts)
            x = torch.randn(len(texts), *self.shape, generator=self.generator)
            latents, log_probs = [x], []
            for i in range(c.rollout.num_inference_steps):
                x, log_prob = self.step(x, self.velocity(x, i, embeds), i, None)
                latents.append(x)
                log_probs.append(log_prob)
            images = self.model.decode(x, c.rollout.height, c.rollout.width)
            scores.append(self.executor.submit(jpeg_compressibility, images, texts, [{}] * len(texts)))
            done = {"latents": torch.stack(latents, 1), "log_probs": torch.stack(log_probs, 1), "embeds": embeds}
            batches.append(done)
        rewards = torch.cat([torch.tensor(score.result()) for score in scores])
        world = [torch.empty_like(rewards) for _ in range(self.size)]
        dist.all_gather(world, rewards)
        groups = torch.cat(world).view(-1, c.rollout.n)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        own = advantage.flatten()[self.rank * share : (self.rank + 1) * share]
        return [batch | {"advantage": part} for batch, part in zip(batches, own.split(size), strict=True)]

    def train(self, batches: list[dict[str, Any]]) -> None:
        """The step's updates: every denoising step but the last of every batch, one after the other."""
        c = self.cfg
        updates = c.data.batch_size(self.size) // c.actor.mini_batch_size(self.size)
        window = c.rollout.num_inference_steps - 1
        each = len(batches) // updates
        for k in range(updates):
            for batch in batches[k * each : (k + 1) * each]:
                for i in range(window):
                    velocity = self.velocity(batch["latents"][:, i], i, batch["embeds"])
                    _, log_prob = self.step(batch["latents"][:, i], velocity, i, batch["latents"][:, i + 1])
                    ratio = torch.exp(log_prob - batch["log_probs"][:, i])
                    advantage = batch["advantage"].clamp(-c.algorithm.adv_clip_max, c.algorithm.adv_clip_max)
                    clipped = ratio.clamp(1 - c.algorithm.clip_ratio, 1 + c.algorithm.clip_ratio)
                    loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                    (loss / (each * window)).backward()
            flat = torch.cat([p.grad.flatten() for p in self.weights if p.grad is not None])
            dist.all_reduce(flat)
            for p, part in zip(self.weights, flat.split([p.numel() for p in self.weights]), strict=True):
                p.grad = part.view_as(p) / self.size
            torch.nn.utils.clip_grad_norm_(self.weights, c.optim.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Clock:
    """Wall-clock seconds by phase, and CPU seconds of this process, which other work on the machine disturbs less."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.add(name, time.perf_counter() - wall, time.process_time() - cpu)

    def add(self, name: str, wall: float, cpu: float) -> None:
        self.wall.setdefault(name, []).append(wall)
        self.cpu.setdefault(name, []).append(cpu)

    def medians(self, kind: str, warmup: int) -> dict[str, float]:
        """The medians of "wall" or "cpu", without the first `warmup` measurements."""
        return {name: statistics.median(values[warmup:]) for name, values in vars(self)[kind].items()}


def compare(bench: Bench | None, baseline: Baseline | None, cfg: FlowRLConfig, args: Namespace) -> None:
    """Run both alternately, or one of them, and print the results."""
    clock = Clock()

    def turn(step: int) -> None:
        if baseline is not None:
            with clock("rollout"):
                batches = baseline.sample(step - 1)
            with clock("update"):
                baseline.train(batches)

    if bench is not None:
        bench.after = turn
        bench.fit()
    else:
        for step in range(args.warmup + args.steps):
            turn(step + 1)
    if rank() != 0:
        return
    names, seconds = [], {}
    for kind in ("wall", "cpu"):
        if bench is not None:
            m = bench.medians()
            prefix = "time" if kind == "wall" else "cpu"
            seconds[kind, "phalanx"] = [m[f"{prefix}/rollout"] + m[f"{prefix}/reward"], m[f"{prefix}/update"]]
        if baseline is not None:
            b = clock.medians(kind, args.warmup)
            seconds[kind, "baseline"] = [b["rollout"], b["update"]]
    for (kind, who), (rollout, update) in seconds.items():
        sums = f"rollout {rollout:7.2f} s   update {update:7.2f} s   sum {rollout + update:7.2f} s"
        names.append((f"{who}, {kind}", sums))
    result: dict[str, Any] = {"config": args.config, "overrides": args.overrides, "only": args.only}
    result |= {"steps": args.steps}
    result |= {"dtype": cfg.model.dtype, "ranks": dist.get_world_size(), **origin(torch.device("cpu"))}
    result |= {f"{who}_{kind}_s": value for (kind, who), value in seconds.items()}
    if args.only is None:
        for kind in ("wall", "cpu"):
            ours, theirs = seconds[kind, "phalanx"], seconds[kind, "baseline"]
            ratios = [theirs[0] / ours[0], theirs[1] / ours[1], sum(theirs) / sum(ours)]
            names.append((f"ratio, {kind}", "rollout {:.2f}   update {:.2f}   throughput {:.2f}".format(*ratios)))
            result[f"ratio_{kind}"] = ratios
    else:
        result["peak_memory_gb"] = peak_memory_gb(torch.device("cpu"))
        names.append(("peak memory", f"{result['peak_memory_gb']:.2f} GB of rank 0"))
    title = f"{cfg.model.path}: Phalanx in {cfg.model.dtype}, the baseline in float32, ranks: {dist.get_world_size()}"
    table(title, names)
    print(json.dumps(result), flush=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("phalanx", "baseline"), help="run only one of them")
    args = parser.parse_intermixed_args()

    def build(cfg: FlowRLConfig) -> Any:
        kind_of(cfg).check()
        torch.set_num_threads(1)
        alone = args.only == "baseline"
        if alone:
            start_world(cfg.parallel)
        bench = None if alone else Bench.of(cfg, warmup=args.warmup, steps=args.steps)
        baseline = None if args.only == "phalanx" else Baseline(cfg)

        def job() -> None:
            compare(bench, baseline, cfg, args)
            stop_world()

        return job

    run(build, configure(args))


if __name__ == "__main__":
    main()
