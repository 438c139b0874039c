"""The arithmetic of batches: checked once before anything is built, with the nearest values that would work."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.config import ConfigError
from phalanx.config.schema import RunConfig, TrainConfig
from phalanx.functional.window import sde_window, trained_count


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of one training step.

    samples over the world; per_rank; updates: optimizer steps a pass; micro: samples of a forward and backward pass;
    window: trained denoising steps or noise levels; rollout_micro: samples of a rollout micro-batch; stochastic:
    denoising steps from which the trained ones are taken. epochs: passes over the samples; forward: each of them trains
    on noise of its own.

    A rank trains `units` in a pass: samples, or `together` of the samples of each prompt as one.
    """

    samples: int
    per_rank: int
    updates: int
    micro: int
    window: int
    rollout_micro: int
    stochastic: int
    units: int
    together: int = 1
    epochs: int = 1
    forward: bool = False

    @property
    def micro_units(self) -> int:
        """Units of a forward and backward pass: whole ones, and at least one."""
        return max(self.micro // self.together, 1)

    @property
    def passes(self) -> int:
        """Micro-batches of an optimizer step on a rank, where all samples count."""
        return math.ceil(self.units // self.updates / self.micro_units)

    @property
    def view_rounds(self) -> int:
        """How often in a step other weights view the samples that are trained: anew where the noise is another."""
        return self.epochs if self.forward else 1

    @property
    def view_passes(self) -> int:
        """Micro-batches of a rank that each of other weights views in a step."""
        return self.view_rounds * math.ceil(self.units / self.micro_units)

    @property
    def view_micro(self) -> int:
        """Samples of the first of them, which is the largest."""
        return min(self.micro_units, self.units) * self.together

    @property
    def viewed(self) -> int:
        """Samples of a rank that each of other weights views in a step, once for each time."""
        return self.view_rounds * self.units * self.together

    @property
    def trained(self) -> int:
        """Samples of a rank that are trained in a step, once for each time; where all of them count."""
        return self.epochs * self.updates * self.first(self.passes)

    def first(self, passes: int) -> int:
        """Samples of the first so many micro-batches of an optimizer step on a rank."""
        return min(passes * self.micro_units, self.units // self.updates) * self.together

    @property
    def exact(self) -> bool:
        """Whether rollout and replay run at equal shapes, so that their log-probs agree to the last bit."""
        return self.rollout_micro == self.micro * self.window


def plan(cfg: TrainConfig, world_size: int) -> BatchPlan:
    """The step's arithmetic for `world_size` ranks; raises ConfigError with the numbers where it does not divide."""
    stochastic, trained = _steps(cfg)
    numbers = _Numbers(
        world=world_size,
        window=trained,
        prompts=cfg.data.train_batch_size,
        n=cfg.rollout.n,
        mini=cfg.actor.ppo_mini_batch_size,
        micro=cfg.actor.ppo_micro_batch_size_per_gpu,
        rollout=cfg.rollout.micro_batch_size_per_gpu,
        together=cfg.algorithm.samples_together,
    )
    problem = numbers.problem()
    if problem is not None:
        what, keys = problem
        raise ConfigError(f"{what}; nearest that work: {numbers.mend(keys)}")
    samples = numbers.prompts * numbers.n
    return BatchPlan(
        samples=samples,
        per_rank=samples // world_size,
        updates=numbers.prompts // numbers.mini,
        micro=numbers.micro,
        window=numbers.window,
        rollout_micro=numbers.rollout_micro,
        stochastic=stochastic,
        units=samples // world_size if numbers.together == 1 else numbers.prompts // world_size,
        together=numbers.together,
        epochs=cfg.actor.ppo_epochs,
        forward=cfg.algorithm.trained_steps(cfg.rollout) is not None,
    )


def check(cfg: TrainConfig) -> None:
    """Refuse combinations that cannot work, whatever the world; raises ConfigError."""
    if not cfg.data.train_files:
        raise ConfigError(
            "data.train_files: [] names no prompts; give at least one .txt, .jsonl, .parquet or dataset folder"
        )
    if not cfg.reward.functions and cfg.algorithm.needs_reward:
        raise ConfigError(
            "reward.functions: [] leaves nothing to optimise; give at least one, e.g. reward.functions=[{name: ocr}]"
        )
    if not cfg.algorithm.needs_reward and cfg.rollout.max_num_gen_batches > 1:
        raise ConfigError(
            f"rollout.max_num_gen_batches: {cfg.rollout.max_num_gen_batches} goes by rewards, from which "
            f"{cfg.algorithm.name} does not learn; set it to 1"
        )
    check_run(cfg)
    if cfg.rollout.engine == "dataset":
        _check_pairs(cfg)
    cfg.algorithm.check(cfg.rollout)
    if cfg.algorithm.trained_steps(cfg.rollout) is None:
        if cfg.rollout.noise_level == 0:
            raise ConfigError("rollout.noise_level: 0.0 should be greater than 0")
    else:
        _check_windowless(cfg)
    _steps(cfg)


def _check_windowless(cfg: TrainConfig) -> None:
    """Refuse settings of a window's surroundings under an algorithm that has none; raises ConfigError."""
    r, name = cfg.rollout, cfg.algorithm.name
    if r.correction != "rescore":
        raise ConfigError(
            f"rollout.correction: {r.correction} is of log-probs, which {name} does not use; leave it out"
        )
    if r.ode_compression < 1:
        raise ConfigError(
            f"rollout.ode_compression: {r.ode_compression:g} shortens what follows a window, and {name} has none; "
            "lower rollout.num_inference_steps instead"
        )
    if r.noise_level > 0 and r.solver != "euler":
        raise ConfigError(
            f"rollout.solver: {r.solver} takes steps without noise, and under {name} all have rollout.noise_level "
            f"{r.noise_level:g}; set it to 0, or rollout.solver=euler"
        )
    if r.noise_level == 0 and r.init_same_noise:
        raise ConfigError(
            f"rollout.init_same_noise: true makes all images of a prompt equal, since {name} samples without noise; "
            "set it to false"
        )


def _check_pairs(cfg: TrainConfig) -> None:
    """Refuse what cannot be trained on pairs of images from the data."""
    if cfg.algorithm.trained_steps(cfg.rollout) is None:
        raise ConfigError(
            f"rollout.engine: dataset brings images, and algorithm.name {cfg.algorithm.name} trains on sampled "
            "denoising steps; take one that trains on images, such as diffusion_dpo"
        )
    if cfg.rollout.n != 2:
        raise ConfigError(
            f"rollout.n: {cfg.rollout.n} should be 2 where rollout.engine is dataset: the chosen image and the "
            "rejected one"
        )


def check_run(cfg: RunConfig) -> None:
    """Refuse what no training job can work with; raises ConfigError."""
    _check_output_dir(cfg.trainer.output_dir)
    if cfg.trainer.total_training_steps is None and cfg.trainer.total_epochs is None:
        raise ConfigError("trainer.total_training_steps: null needs trainer.total_epochs; set one of them")
    if len(cfg.optim.betas) != 2 or not all(0 <= b < 1 for b in cfg.optim.betas):
        raise ConfigError(f"optim.betas: {cfg.optim.betas} should be two numbers in 0 .. 1, e.g. [0.9, 0.999]")
    if cfg.parallel.param_offload and cfg.parallel.fsdp_size == 1:
        raise ConfigError(
            "parallel.param_offload: true needs parallel.fsdp_size > 1; replicated weights stay on the device"
        )
    if cfg.trainer.test_freq > 0 and not cfg.data.val_files:
        raise ConfigError(f"trainer.test_freq: {cfg.trainer.test_freq} needs data.val_files; give some, or -1")
    for key in ("save_freq", "test_freq"):
        value = vars(cfg.trainer)[key]
        if value < 1 and value != -1:
            raise ConfigError(f"trainer.{key}: {value} should be -1 (never) or a number of steps")


def _check_output_dir(output_dir: str) -> None:
    """Refuse a folder that cannot be made, before a model is loaded for hours of work that could not be kept."""
    folder = Path(output_dir)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise ConfigError(f"trainer.output_dir: {output_dir!r} cannot be a folder: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"trainer.output_dir: {output_dir!r} cannot be written: no permission in {existing}")


def _steps(cfg: TrainConfig) -> tuple[int, int]:
    """How many steps are stochastic and trained; raises ConfigError for a window that does not fit the schedule."""
    r = cfg.rollout
    levels: int | None = cfg.algorithm.trained_steps(r)
    if levels is not None:
        return 0, levels
    if r.sde_window_range is not None and len(r.sde_window_range) != 2:
        raise ConfigError(f"rollout.sde_window_range: {r.sde_window_range} should be two numbers [a, b]")
    try:
        window = sde_window(
            0,
            num_inference_steps=r.num_inference_steps,
            size=r.sde_window_size,
            window_range=r.sde_window_range,
            schedule=r.window_schedule,
            iters=r.window_iters,
            seed=0,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    end = r.sde_window_range[1] if r.sde_window_range is not None else r.num_inference_steps - 1
    if r.sde_type == "cps" and end == r.num_inference_steps:
        raise ConfigError(
            f"rollout.sde_window_range: {r.sde_window_range} holds the last step, which has no log-probability under "
            f"cps; its end should be at most {r.num_inference_steps - 1}"
        )
    return len(window), trained_count(len(window), r.timestep_fraction)


_KEYS = {
    "prompts": "data.train_batch_size",
    "n": "rollout.n",
    "mini": "actor.ppo_mini_batch_size",
    "micro": "actor.ppo_micro_batch_size_per_gpu",
    "rollout": "rollout.micro_batch_size_per_gpu",
}
_SMALLEST_GROUP = 2


@dataclass(frozen=True)
class _Numbers:
    """What the arithmetic of a step depends on; `rollout` None follows from the others."""

    world: int
    window: int
    prompts: int
    n: int
    mini: int
    micro: int
    rollout: int | None
    together: int = 1

    @property
    def rollout_micro(self) -> int:
        return self.micro * self.window if self.rollout is None else self.rollout

    def problem(self) -> tuple[str, tuple[str, ...]] | None:
        """The first thing that does not divide, and the numbers to mend it by, the best first; None where all does."""
        prompts, mini, micro, world = self.prompts, self.mini, self.micro, self.world
        if prompts % mini:
            return f"{_KEYS['mini']}: {mini} prompts do not divide {_KEYS['prompts']} {prompts}", ("mini", "prompts")
        images = mini * self.n
        update = f"{mini} prompts x {_KEYS['n']} {self.n} = {images} images of an update"
        if images % world:
            return f"{_KEYS['mini']}: {update} do not divide over {world} ranks", ("mini", "n")
        if self.together > 1 and mini % world:  # images of a prompt that are trained together are on one rank
            return f"{_KEYS['mini']}: {mini} whole prompts do not divide over {world} ranks", ("mini", "prompts")
        per_update, per_rank = images // world, prompts * self.n // world
        if per_update % micro:
            what = f"{micro} does not divide the {per_update} images of an update on a rank"
            return f"{_KEYS['micro']}: {what} ({update} / {world} ranks)", ("micro", "n")
        if per_rank % self.rollout_micro == 0:
            return None
        if self.rollout is not None:
            return f"{_KEYS['rollout']}: {self.rollout} does not divide the {per_rank} images of a rank", ("rollout",)
        batch = f"{micro} x {self.window} trained steps = {self.rollout_micro}, the rollout's micro-batch,"
        return f"{_KEYS['micro']}: {batch} does not divide the {per_rank} images of a rank", ("micro", "rollout")

    def mend(self, keys: tuple[str, ...]) -> str:
        """The nearest values of the first of `keys` with which nothing is left to mend; of two keys if need be."""
        if self.together > 1:  # more images of a prompt would be no more that are trained
            keys = (*(key for key in keys if key != "n"), "mini")
        for key in keys:
            near = self._near(key)
            if near:
                return f"{_KEYS[key]}={near}"
        if self.together > 1:
            return self._whole_prompts()
        for mini in sorted(_divisors(self.prompts), key=lambda d: abs(d - self.mini)):
            near = replace(self, mini=mini)._near("n")
            if near:
                return f"{_KEYS['mini']}={mini} with {_KEYS['n']}={near}"
        raise AssertionError(f"some number of images always fits: {self}")

    def _whole_prompts(self) -> str:
        """The nearest prompts of an optimizer step, and of a training step, that are equally many on each rank."""
        minis = range(self.world, self.mini + self.world * (self.micro + 1), self.world)  # world x micro always works
        for mini in sorted(minis, key=lambda m: abs(m - self.mini)):
            near = replace(self, mini=mini)._near("prompts")
            if near:
                return f"{_KEYS['mini']}={mini} with {_KEYS['prompts']}={near}"
        raise AssertionError(f"some number of prompts always fits: {self}")

    def _near(self, key: str) -> str:
        """The values of a number next to its own, below and above, that work: "4 or 6"; empty where there are none."""
        own = self.rollout_micro if key == "rollout" else vars(self)[key]
        last = {
            "prompts": self.prompts + self.mini * self.rollout_micro,
            "n": self.n + self.world * math.lcm(self.micro, self.rollout_micro),  # a multiple of it always works
            "mini": self.prompts,
            "micro": self.mini * self.n,
            "rollout": self.prompts * self.n,
        }
        first = _SMALLEST_GROUP if key == "n" else 1
        below = next((v for v in range(own - 1, first - 1, -1) if self._works(key, v)), None)
        above = next((v for v in range(own + 1, last[key] + 1) if self._works(key, v)), None)
        return " or ".join(str(v) for v in (below, above) if v is not None)

    def _works(self, key: str, value: int) -> bool:
        return replace(self, **{key: value}).problem() is None


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
