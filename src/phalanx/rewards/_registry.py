"""From `reward.functions` to callables; every mistake is a ConfigError that names the entry and what would be right."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.config.load import ConfigError, known_modules, resolve_registry
from phalanx.config.schema import RewardFunctionConfig
from phalanx.functional.rewards import Share
from phalanx.rewards._base import DeviceReward, Marking
from phalanx.rewards._judge import Judge, Reading

PACKAGE = "phalanx.rewards"
FORMS = "module:function or path/to/file.py:function"
# Names that the trainer logs beside the terms, as reward/mean and so on.
RESERVED = ("mean", "std", "max", "min", "zero_std_ratio", "std_mean")


@dataclass(frozen=True)
class Term:
    """One term of the reward: its name in the logs, the bound function, and its part in the sum."""

    name: str
    function: Callable[..., Any]  # a RewardFunction, or a Reading of a judge's answers
    share: Share
    on_device: bool
    frames: int = 1  # of a video, that are scored as images
    whole: bool = False  # or it takes videos

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of its images; see Marking."""
        return self.function.marks if isinstance(self.function, Marking) else ()

    @property
    def rows(self) -> tuple[str, ...]:
        """Names in the logs: its own, of the scores, then those of the marks."""
        return self.name, *(f"{self.name}_{mark}" for mark in self.marks)


def build_terms(
    functions: list[RewardFunctionConfig], device: str, unparseable_score: float | None = None
) -> list[Term]:
    """Resolve and bind all entries of `reward.functions`; a DeviceReward is put on `device`.

    `unparseable_score` is that of the reward model's section; None where no judge can be asked.
    """
    if not functions:
        raise ConfigError(
            "reward.functions is empty: nothing to optimise; give at least one entry, e.g. {name: ocr}; "
            f"built in: {_built_in()}"
        )
    terms: list[Term] = []
    for i, entry in enumerate(functions):
        term = _build(entry, f"reward.functions[{i}]", device, unparseable_score)
        for k, other in enumerate(terms):
            if other.name == term.name:
                raise ConfigError(
                    f"reward.functions[{k}] and reward.functions[{i}] are both named {term.name!r}; give one of them "
                    f"another name and say with path which reward it is ({FORMS})"
                )
            for row in sorted(set(other.rows) & set(term.rows)):
                raise ConfigError(
                    f"reward.functions[{k}] and reward.functions[{i}] both log reward/{row}; "
                    "give one of them another name"
                )
        terms.append(term)
    return terms


def _build(entry: RewardFunctionConfig, key: str, device: str, unparseable_score: float | None) -> Term:
    if entry.path is not None:
        found, label = _from_path(entry.path, f"{key}.path")
    elif entry.name is not None:
        found, label = _from_name(entry.name, f"{key}.name")
    else:
        raise ConfigError(f"{key} has neither name nor path; give name (built in: {_built_in()}) or path ({FORMS})")
    name = entry.name if entry.name is not None else label
    if name in RESERVED:
        raise ConfigError(f"{key}: {name!r} is the name of another metric; give the term another name")
    if isinstance(found, type) and issubclass(found, Judge):
        judge = _judge(found, label, entry, name, key)
        if unparseable_score is None:
            raise ConfigError(f"{key}: {label} is a judge, which asks reward.model: training jobs have one")
        return Term(name, Reading(judge, unparseable_score), _share(entry, key), False, entry.frames)
    return _bind(found, label, entry, name, key, device)


def _share(entry: RewardFunctionConfig, key: str) -> Share:
    clip = entry.clip
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(f"{key}.clip: {clip} should be two numbers, the smaller first, e.g. [0, 1]")
    if entry.initial_weight is not None and entry.weight_steps == 0:
        raise ConfigError(f"{key}.initial_weight: {entry.initial_weight:g} needs {key}.weight_steps > 0")
    if entry.initial_weight is None and entry.weight_steps > 0:
        raise ConfigError(f"{key}.weight_steps: {entry.weight_steps} needs {key}.initial_weight")
    return Share(entry.weight, None if clip is None else (clip[0], clip[1]), entry.initial_weight, entry.weight_steps)


def _judge(found: type[Judge], label: str, entry: RewardFunctionConfig, name: str, key: str) -> Judge:
    _check_arguments(found, (), entry.kwargs, f"{key}.kwargs", label)
    if inspect.isabstract(found):
        raise ConfigError(f"{key}: the judge {label} has no method parse(answer, prompt, metadata)")
    try:
        judge = found(**entry.kwargs)
    except ValueError as error:
        raise ConfigError(f"{key} ({name}): {' '.join(str(error).split())}") from error
    _check_arguments(judge.parse, (None, None, None), {}, key, f"{label}.parse")
    return judge


def _bind(found: Callable[..., Any], label: str, entry: RewardFunctionConfig, name: str, key: str, device: str) -> Term:
    if not isinstance(found, type):
        _check_arguments(found, (None, None, None), entry.kwargs, f"{key}.kwargs", label)
        bound = functools.partial(found, **entry.kwargs)
        return Term(name, bound, _share(entry, key), False, entry.frames, _takes_videos(found))
    on_device = issubclass(found, DeviceReward)
    kwargs = {"device": device, **entry.kwargs} if on_device else entry.kwargs
    _check_arguments(found, (), kwargs, f"{key}.kwargs", label)
    try:
        instance = found(**kwargs)
    except ValueError as error:
        raise ConfigError(f"{key} ({name}): {' '.join(str(error).split())}") from error
    if not callable(instance):
        raise ConfigError(f"{key}: {label} is a class without __call__; right is __call__(images, prompts, metadata)")
    _check_arguments(instance, (None, None, None), {}, key, label)
    return Term(name, instance, _share(entry, key), on_device, entry.frames, _takes_videos(instance))


def _takes_videos(function: Callable[..., Any]) -> bool:
    """Whether a reward takes videos whole: its first parameter is called `videos`."""
    return next(iter(inspect.signature(function).parameters), "") == "videos"


def judged_frames(terms: list[Term]) -> int:
    """Frames of a video that judges are asked about: the same ones, since they share what they look at."""
    counts = {term.frames for term in terms if isinstance(term.function, Reading)}
    if len(counts) > 1:
        raise ConfigError(
            f"reward.functions: judges have frames {', '.join(map(str, sorted(counts)))}; give them the same number"
        )
    return counts.pop() if counts else 1


def _from_name(name: str, key: str) -> tuple[Callable[..., Any], str]:
    """The built-in reward `name`: the class in CamelCase of its module, or the function."""
    known = known_modules(PACKAGE)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{key}={name!r} is no built-in reward; {hint}built in: {_built_in()}; or give path: {FORMS}")
    names = vars(importlib.import_module(f"{PACKAGE}.{name}"))
    camel = "".join(word.capitalize() for word in name.split("_"))
    return (names[camel] if camel in names else names[name]), name


def _from_path(path: str, key: str) -> tuple[Callable[..., Any], str]:
    """The object that `module:function` or `path/to/file.py:function` stands for, and its name."""
    target, _, attribute = path.rpartition(":")
    if not target or not attribute:
        raise ConfigError(f"{key}={path!r} names no function; right is {FORMS}")
    module = resolve_registry(PACKAGE, target, key) if target.endswith(".py") else _import(target, path, key)
    names = vars(module)
    if attribute not in names:
        near = difflib.get_close_matches(attribute, [n for n, value in names.items() if callable(value)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}={path!r}: {target} has no {attribute!r}{hint}")
    found = names[attribute]
    if not callable(found):
        raise ConfigError(f"{key}={path!r} is of type {type(found).__name__}; right is a function or a class")
    return found, attribute


def _import(target: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not: its traceback says where
        raise ConfigError(f"{key}={path!r}: no module {error.name!r} on the Python path; right is {FORMS}") from None


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, key: str, label: str) -> None:
    """Raise where `function(*args, **kwargs)` could not be called."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)[len(args) :]
        takes = ", ".join(n for n in names if n != "device") or "none"
        call = "images, prompts, metadata, **kwargs" if args else "**kwargs"
        raise ConfigError(f"{key}: {label}({call}): {error}; its kwargs: {takes}") from None


def _built_in() -> str:
    return ", ".join(known_modules(PACKAGE))
