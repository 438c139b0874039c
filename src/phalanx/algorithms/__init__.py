"""The learning algorithms, one file each, and base classes for new ones."""

import inspect
from types import ModuleType
from typing import Any

import torch

from phalanx import types
from phalanx.algorithms._bases import (
    GroupAlgorithm,
    GroupConfig,
    TokenAlgorithm,
    TokenConfig,
    TransitionAlgorithm,
    TransitionConfig,
)
from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig
from phalanx.algorithms._returns import ReturnsAlgorithm, ReturnsConfig
from phalanx.config.messages import ConfigError, users_code
from phalanx.config.registry import resolve_registry

__all__ = [
    "ForwardAlgorithm",
    "ForwardConfig",
    "GroupAlgorithm",
    "GroupConfig",
    "ReturnsAlgorithm",
    "ReturnsConfig",
    "TokenAlgorithm",
    "TokenConfig",
    "TransitionAlgorithm",
    "TransitionConfig",
    "build",
    "check_entry",
]


def build(config: Any) -> types.Algorithm:
    """Build the algorithm that the section `algorithm` names; ConfigError if its attributes contradict each other."""
    module = resolve_registry("phalanx.algorithms", config.name, "algorithm.name")
    algorithm: types.Algorithm = module.Algorithm(config)
    _check_facts(algorithm, config.name)
    return algorithm


def check_entry(module: ModuleType, name: str) -> None:
    """Raise ConfigError, when a configuration is loaded, if a module's class Algorithm lacks required members."""
    kind = vars(module)["Algorithm"]
    here = f"algorithm.name: {name!r}: class Algorithm"
    if not isinstance(kind, type):
        raise ConfigError(f"{here} is not a class")
    required = [*inspect.get_annotations(types.Algorithm), *vars(types.Algorithm)]
    missing = [member for member in required if not member.startswith("_") and member not in dir(kind)]
    if inspect.isabstract(kind):
        missing += sorted(vars(kind)["__abstractmethods__"])
    if missing:
        raise ConfigError(
            f"{here} lacks {', '.join(missing)}; derive it from GroupAlgorithm, TransitionAlgorithm, "
            "ForwardAlgorithm or TokenAlgorithm of phalanx.algorithms"
        )


def _check_facts(algorithm: types.Algorithm, name: str) -> None:
    """Raise ConfigError if the algorithm's attributes contradict each other or the results for two groups."""
    here = f"algorithm.name: {name!r}"
    known = {"policy", "reference", *algorithm.averages, *(teacher.name for teacher in algorithm.teachers)}
    for reference in algorithm.references:
        if reference not in known:
            raise ConfigError(f"{here}: references has {reference!r}; expected one of {', '.join(sorted(known))}")
    if algorithm.behaviour is not None and algorithm.behaviour not in algorithm.averages:
        raise ConfigError(f"{here}: behaviour is {algorithm.behaviour!r}, which is not one of its averages")
    reward, group_id = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0]), torch.arange(8) // 4

    calls = {"advantage": algorithm.advantage, "sample_mask": algorithm.sample_mask, "units": algorithm.units}
    for method, call in calls.items():
        with users_code(f"{here}: {method} raised"):
            shape = list(call(reward, group_id).shape)
        if method != "units" and shape != [8]:
            raise ConfigError(f"{here}: {method} of 8 rewards has shape {shape}; expected [8]")
    expected = [8 if algorithm.samples_per_unit == 1 else 2, algorithm.samples_per_unit or 4]
    if shape != expected:
        raise ConfigError(
            f"{here}: samples_per_unit is {algorithm.samples_per_unit}, and units of 2 prompts x 4 samples has shape "
            f"{shape}; expected {expected}"
        )
