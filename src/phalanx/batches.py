"""The arithmetic of batches: checked once before anything is built, with the nearest values that would work."""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.config import ConfigError
from phalanx.config.schema import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """Numbers of one training step.

    samples over the world; per_rank; updates: optimizer steps a pass; micro: samples of a forward and backward pass;
    window: trained denoising steps; rollout_micro: samples of a rollout micro-batch.
    """

    samples: int
    per_rank: int
    updates: int
    micro: int
    window: int
    rollout_micro: int

    @property
    def exact(self) -> bool:
        """Whether rollout and replay run at equal shapes, so that their log-probs agree to the last bit."""
        return self.rollout_micro == self.micro * self.window


def plan(cfg: TrainConfig, world_size: int) -> BatchPlan:
    """The step's arithmetic for `world_size` ranks; raises ConfigError with the numbers where it does not divide."""
    prompts, n, mini = cfg.data.train_batch_size, cfg.rollout.n, cfg.actor.ppo_mini_batch_size
    micro = cfg.actor.ppo_micro_batch_size_per_gpu
    if prompts % mini:
        raise ConfigError(
            f"actor.ppo_mini_batch_size: {mini} prompts do not divide data.train_batch_size {prompts}; "
            f"nearest that do: {_near(mini, _divisors(prompts))}"
        )
    samples, updates = prompts * n, prompts // mini
    if samples % (world_size * updates):
        fits = (p for p in range(1, 4 * prompts + world_size) if p % mini == 0 and p * n % (world_size * (p // mini)) == 0)
        raise ConfigError(
            f"data.train_batch_size: {prompts} prompts x rollout.n {n} = {samples} images do not divide over "
            f"{world_size} ranks x {updates} updates; nearest train_batch_size that does: {_near(prompts, fits)}"
        )
    per_rank = samples // world_size
    per_update = per_rank // updates
    if per_update % micro:
        raise ConfigError(
            f"actor.ppo_micro_batch_size_per_gpu: {micro} does not divide the {per_update} images of an update on a rank "
            f"({mini} prompts x {n} images / {world_size} ranks); nearest that do: {_near(micro, _divisors(per_update))}"
        )
    window = _window(cfg)
    wanted = cfg.rollout.micro_batch_size_per_gpu
    rollout_micro = micro * window if wanted is None else wanted
    if per_rank % rollout_micro:
        if wanted is None:
            fits = (m for m in _divisors(per_update) if per_rank % (m * window) == 0)
            raise ConfigError(
                f"actor.ppo_micro_batch_size_per_gpu: {micro} x {window} trained steps = {rollout_micro}, the rollout's "
                f"micro-batch, does not divide the {per_rank} images of a rank; nearest that do: {_near(micro, fits)}, "
                "or set rollout.micro_batch_size_per_gpu"
            )
        raise ConfigError(
            f"rollout.micro_batch_size_per_gpu: {wanted} does not divide the {per_rank} images of a rank; "
            f"nearest that do: {_near(wanted, _divisors(per_rank))}"
        )
    return BatchPlan(samples, per_rank, updates, micro, window, rollout_micro)


def check(cfg: TrainConfig) -> None:
    """Refuse combinations that cannot work, whatever the world; raises ConfigError."""
    if not cfg.data.train_files:
        raise ConfigError("data.train_files: [] names no prompts; give at least one .txt, .jsonl, .parquet or dataset folder")
    if cfg.trainer.total_training_steps is None and cfg.trainer.total_epochs is None:
        raise ConfigError("trainer.total_training_steps: null needs trainer.total_epochs; set one of them")
    if len(cfg.optim.betas) != 2 or not all(0 <= b < 1 for b in cfg.optim.betas):
        raise ConfigError(f"optim.betas: {cfg.optim.betas} should be two numbers in 0 .. 1, e.g. [0.9, 0.999]")
    if cfg.parallel.param_offload and cfg.parallel.fsdp_size == 1:
        raise ConfigError("parallel.param_offload: true needs parallel.fsdp_size > 1; replicated weights stay on the device")
    if cfg.rollout.engine != "policy":
        raise ConfigError(f"rollout.engine: {cfg.rollout.engine!r} is unknown; known: policy")
    if cfg.trainer.test_freq > 0 and not cfg.data.val_files:
        raise ConfigError(f"trainer.test_freq: {cfg.trainer.test_freq} needs data.val_files; give some, or -1")
    for key in ("save_freq", "test_freq"):
        value = vars(cfg.trainer)[key]
        if value < 1 and value != -1:
            raise ConfigError(f"trainer.{key}: {value} should be -1 (never) or a number of steps")
    _window(cfg)


def _window(cfg: TrainConfig) -> int:
    """The number of trained steps; raises ConfigError for a window that does not fit the schedule."""
    from phalanx.functional.window import sde_window

    r = cfg.rollout
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
    return len(window)


def _divisors(n: int) -> Iterable[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _near(value: int, fitting: Iterable[int]) -> str:
    """The fitting values next to `value` from below and above, in words."""
    all_ = sorted(fitting)
    near = {*[f for f in all_ if f < value][-1:], *[f for f in all_ if f > value][:1]}
    return " or ".join(str(f) for f in sorted(near)) if near else "none"


