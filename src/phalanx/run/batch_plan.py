"""Check that batch sizes divide, before anything is built; errors suggest values that would work."""

import math
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config.messages import ConfigError
from phalanx.config.run import RLConfig
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Algorithm


def plan(
    cfg: RLConfig, algorithm: Algorithm, world_size: int, *, actions: int = 1, micro: int | None = None
) -> BatchPlan:
    """The batch sizes of a step on `world_size` ranks; ConfigError with the numbers if they do not divide.

    actions: rows per sample in a training pass, if rollout and replay are to have equal shapes. micro: samples per
    pass, instead of the configuration's.
    """
    each = {"prompts": cfg.data.train_batch_size_per_gpu, "mini": cfg.actor.ppo_mini_batch_size_per_gpu}
    numbers = _Numbers(
        keys=keys_of(cfg),
        world=world_size,
        actions=actions,
        prompts=cfg.data.batch_size(world_size),
        n=cfg.rollout.n,
        mini=cfg.actor.mini_batch_size(world_size),
        micro=cfg.actor.ppo_micro_batch_size_per_gpu if micro is None else micro,
        rollout=cfg.rollout.micro_batch_size_per_gpu,
        together=algorithm.samples_per_unit or cfg.rollout.n,
        per_gpu=frozenset(name for name, value in each.items() if value is not None),
    )
    problem = numbers.problem()
    if problem is not None:
        message, keys = problem
        raise ConfigError(f"{message}; nearest that work: {numbers.nearest(keys)}")
    samples = numbers.prompts * numbers.n
    return BatchPlan(
        samples=samples,
        per_rank=samples // world_size,
        updates=numbers.prompts // numbers.mini,
        micro=numbers.micro,
        actions=actions,
        rollout_micro=numbers.rollout_micro,
        exact=numbers.rollout_micro == numbers.micro * actions,
        units=samples // world_size if numbers.together == 1 else numbers.prompts // world_size,
        together=numbers.together,
        epochs=cfg.actor.ppo_epochs,
        forward=algorithm.levels is not None,
    )


def keys_of(cfg: RLConfig) -> dict[str, str]:
    """The configuration keys of the numbers that must divide."""
    return {
        "prompts": f"{cfg.data:train_batch_size}",
        "n": f"{cfg.rollout:n}",
        "mini": f"{cfg.actor:ppo_mini_batch_size}",
        "micro": f"{cfg.actor:ppo_micro_batch_size_per_gpu}",
        "rollout": f"{cfg.rollout:micro_batch_size_per_gpu}",
    }


_SMALLEST_GROUP = 2


@dataclass(frozen=True)
class _Numbers:
    """The numbers that must divide, and their configuration keys. rollout: None to derive it from the others. per_gpu:
    names of the numbers that the user gives per rank.
    """

    keys: dict[str, str]
    world: int
    actions: int
    prompts: int
    n: int
    mini: int
    micro: int
    rollout: int | None
    together: int = 1
    per_gpu: frozenset[str] = frozenset()

    @property
    def rollout_micro(self) -> int:
        return self.micro * self.actions if self.rollout is None else self.rollout

    def problem(self) -> tuple[str, tuple[str, ...]] | None:
        """The first number that does not divide, as a message, and the numbers to change, best first; None if none."""
        prompts, mini, micro, world = self.prompts, self.mini, self.micro, self.world
        mini_key, mini_prompts = self.key("mini"), f"{self.product('mini')} prompts"
        if prompts % mini:
            message = f"{mini_key}: {mini_prompts} do not divide {self.key('prompts')} {self.product('prompts')}"
            return message, ("mini", "prompts")
        samples = mini * self.n
        update = f"{mini_prompts} x {self.keys['n']} {self.n} = {samples} samples of an update"
        if samples % world:
            return f"{mini_key}: {update} do not divide over {world} ranks", ("mini", "n")
        # the samples of a unit must be on one rank
        if self.together > 1 and mini % world:
            return f"{mini_key}: {mini} whole prompts do not divide over {world} ranks", ("mini", "prompts")
        per_update, per_rank = samples // world, prompts * self.n // world
        if per_update % micro:
            message = f"{micro} does not divide the {per_update} samples of an update on a rank"
            return f"{self.keys['micro']}: {message} ({update} / {world} ranks)", ("micro", "n")
        if per_rank % self.rollout_micro == 0:
            return None
        uneven = f"does not divide the {per_rank} samples of a rank"
        if self.rollout is not None:
            return f"{self.keys['rollout']}: {self.rollout} {uneven}", ("rollout",)
        rows = f"{micro} x {self.actions} trained steps = {self.rollout_micro}"
        return f"{self.keys['micro']}: {rows}, the rollout's micro-batch, {uneven}", ("micro", "rollout")

    def nearest(self, keys: tuple[str, ...]) -> str:
        """The nearest values that work, for the first of `keys` that has any, or for two keys.

        `keys` are in the order in which a user would prefer to change them.
        """
        if self.together > 1:  # a larger n does not change the number of units
            keys = (*(key for key in keys if key != "n"), "mini")
        for key in keys:
            near = self._nearest_values(key)
            if near:
                return f"{self.key(key)}={near}"
        # Changing one number is not enough: change two, the first of them as little as possible.
        if self.together > 1:  # world x micro whole prompts always fit the ranks
            minis, other = list(range(self.world, self.mini + self.world * (self.micro + 1), self.world)), "prompts"
        else:
            step = self.step("mini")
            minis, other = [d for d in range(step, self.prompts + 1, step) if self.prompts % d == 0], "n"
        for mini in sorted(minis, key=lambda m: abs(m - self.mini)):
            near = replace(self, mini=mini)._nearest_values(other)
            if near:
                return f"{self.key('mini')}={mini // self.step('mini')} with {self.key(other)}={near}"
        raise AssertionError(f"some numbers always fit: {self}")

    def _nearest_values(self, key: str) -> str:
        """The nearest values of a number that work, below and above, such as "4 or 6"; empty if none do."""
        # the current value of each number, and the largest one to try
        bounds = {
            "prompts": (self.prompts, self.prompts + self.mini * self.rollout_micro * self.step("prompts")),
            # a multiple of both micro-batches on every rank always works
            "n": (self.n, self.n + self.world * math.lcm(self.micro, self.rollout_micro)),
            "mini": (self.mini, self.prompts),
            "micro": (self.micro, self.mini * self.n),
            "rollout": (self.rollout_micro, self.prompts * self.n),
        }
        current, last = bounds[key]
        step = self.step(key)
        first = _SMALLEST_GROUP if key == "n" else step

        def works(value: int) -> bool:
            changed: dict[str, Any] = {key: value}
            return replace(self, **changed).problem() is None

        below = next((v for v in range(current - step, first - 1, -step) if works(v)), None)
        above = next((v for v in range(current + step, last + 1, step) if works(v)), None)
        return " or ".join(str(v // step) for v in (below, above) if v is not None)

    def step(self, name: str) -> int:
        """By how much a number changes if the configured value changes by one."""
        return self.world if name in self.per_gpu else 1

    def key(self, name: str) -> str:
        """The configuration key of a number."""
        return f"{self.keys[name]}_per_gpu" if name in self.per_gpu else self.keys[name]

    def product(self, name: str) -> str:
        """A number as text, written as a product if it is configured per rank."""
        value: int = vars(self)[name]
        return f"{value // self.world} x {self.world} ranks = {value}" if name in self.per_gpu else str(value)
