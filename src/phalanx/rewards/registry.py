"""From `reward.functions` to callables; every mistake is a ConfigError that names the entry and what would be right."""

import difflib
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from phalanx.config.flow import FlowRewardFunctionConfig
from phalanx.config.load import ConfigError, known_modules, resolve_registry
from phalanx.config.run import RewardFunctionConfig
from phalanx.functional.rewards import Share
from phalanx.rewards.base import DeviceReward, RewardWithExtras
from phalanx.rewards.judge._base import Judge, ParsedAnswers
from phalanx.rewards.protocol import complaint

log = logging.getLogger(__name__)

PACKAGES = ("phalanx.rewards.image", "phalanx.rewards.judge")
FORMS = "module:function or path/to/file.py:function"
TAKES = ("images", "videos", "completions")  # names of a reward's first parameter that say what it takes
# Names that the trainer logs beside the terms, as reward/mean and so on.
RESERVED = ("mean", "std", "max", "min", "zero_std_ratio", "std_mean")


@dataclass(frozen=True)
class Term:
    """One term of the reward: its name in the logs, the bound function, and its part in the sum."""

    name: str
    function: Callable[..., Any]  # a RewardFunction, or a ParsedAnswers of a judge's answers
    share: Share
    on_device: bool
    takes: str = "images"  # or "videos", "completions"
    frames: int = 1  # of a video, that are scored as images
    extras: tuple[str, ...] = ()  # that come with its scores; see RewardWithExtras

    @property
    def rows(self) -> tuple[str, ...]:
        """Names in the logs: its own, of the scores, then those of the extras."""
        return self.name, *(f"{self.name}_{extra}" for extra in self.extras)


def build_terms(
    functions: Sequence[RewardFunctionConfig],
    device: str,
    unparseable_score: float | None = None,
    outputs: str = "images",
) -> list[Term]:
    """Resolve and bind all entries of `reward.functions`; a DeviceReward is put on `device`.

    `unparseable_score` is that of the reward model's section; None where no judge can be asked. `outputs` is what the
    job makes: "images", videos among them, or "completions".
    """
    if not functions:
        raise ConfigError(
            "reward.functions is empty: nothing to optimise; give at least one entry, e.g. {name: ocr}; "
            f"built in: {_built_in()}"
        )
    terms: list[Term] = []
    for i, entry in enumerate(functions):
        term = _build(_resolve(entry, f"reward.functions[{i}]"), device, unparseable_score, outputs)
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


@dataclass(frozen=True)
class _Entry:
    """An entry of `reward.functions`: where it stands, what it names, and how that is called in messages and logs."""

    key: str
    cfg: RewardFunctionConfig
    found: Callable[..., Any]
    label: str
    name: str


def _resolve(cfg: RewardFunctionConfig, key: str) -> _Entry:
    if cfg.path is not None:
        found, label = _from_path(cfg.path, f"{key}.path")
    elif cfg.name is not None:
        found, label = _from_name(cfg.name, f"{key}.name")
    else:
        raise ConfigError(f"{key} has neither name nor path; give name (built in: {_built_in()}) or path ({FORMS})")
    name = cfg.name if cfg.name is not None else label
    if name in RESERVED:
        raise ConfigError(f"{key}: {name!r} is the name of another metric; give the term another name")
    return _Entry(key, cfg, found, label, name)


def _build(entry: _Entry, device: str, unparseable_score: float | None, outputs: str) -> Term:
    is_judge = isinstance(entry.found, type) and issubclass(entry.found, Judge)
    takes = "images" if is_judge else _takes(entry.found)
    if (takes == "completions") != (outputs == "completions"):
        what = f"the judge {entry.label}" if is_judge else entry.label
        raise ConfigError(f"{entry.key}: {what} takes {takes}, and this job makes {outputs}")
    on_device = False
    if is_judge:
        judge = _judge(entry)
        if unparseable_score is None:
            raise ConfigError(f"{entry.key}: {entry.label} is a judge, which asks reward.model: training jobs have one")
        function: Callable[..., Any] = ParsedAnswers(judge, unparseable_score)
    elif isinstance(entry.found, type):
        on_device = issubclass(entry.found, DeviceReward)
        function = _instance(entry, {"device": device} if on_device else {})
        if not callable(function):
            form = f"__call__({takes}, prompts, metadata)"
            raise ConfigError(f"{entry.key}: {entry.label} is a class without __call__; expected {form}")
        _check_arguments(function, (takes, "prompts", "metadata"), {}, entry.key, entry.label)
    else:
        function = functools.partial(entry.found, **entry.cfg.kwargs)
        arguments = (takes, "prompts", "metadata")
        _check_arguments(entry.found, arguments, entry.cfg.kwargs, f"{entry.key}.kwargs", entry.label)
    frames = entry.cfg.frames if isinstance(entry.cfg, FlowRewardFunctionConfig) else 1
    share = _share(entry.cfg, entry.key)
    return Term(entry.name, function, share, on_device, takes, frames, _extras(function, entry.label))


def _extras(function: Callable[..., Any], label: str) -> tuple[str, ...]:
    """Names of the rows that a reward returns beside its scores."""
    if not isinstance(function, RewardWithExtras):
        return ()
    if function.marks:
        log.warning("the reward %s has an attribute `marks`, which is now called `extras`; rename it", label)
        return function.marks
    return function.extras


def _takes(found: Callable[..., Any]) -> str:
    """Tell what a reward takes: the name of its first parameter, or "images" where that says nothing.

    Of a class it is read before an instance is made, which may load a model.
    """
    names = list(inspect.signature(found.__call__ if isinstance(found, type) else found).parameters)
    if isinstance(found, type):
        names = names[1:]  # without self
    return names[0] if names and names[0] in TAKES else "images"


def _instance(entry: _Entry, defaults: dict[str, Any]) -> Any:
    """An instance of the class that the entry names, made with `defaults` and its kwargs."""
    kwargs = {**defaults, **entry.cfg.kwargs}
    _check_arguments(entry.found, (), kwargs, f"{entry.key}.kwargs", entry.label)
    try:
        return entry.found(**kwargs)
    except ValidationError as error:
        raise ConfigError(f"{entry.key} ({entry.name}): {complaint(error, values=True)}") from error
    except ValueError as error:
        raise ConfigError(f"{entry.key} ({entry.name}): {' '.join(str(error).split())}") from error


def _judge(entry: _Entry) -> Judge:
    if inspect.isabstract(entry.found):
        raise ConfigError(f"{entry.key}: the judge {entry.label} has no method parse(answer, prompt, metadata)")
    judge: Judge = _instance(entry, {})
    _check_arguments(judge.parse, ("answer", "prompt", "metadata"), {}, entry.key, f"{entry.label}.parse")
    return judge


def _share(entry: RewardFunctionConfig, key: str) -> Share:
    clip = entry.clip
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(f"{key}.clip: {clip} should be two numbers, the smaller first, e.g. [0, 1]")
    if entry.initial_weight is not None and entry.weight_steps == 0:
        raise ConfigError(f"{key}.initial_weight: {entry.initial_weight:g} needs {key}.weight_steps > 0")
    if entry.initial_weight is None and entry.weight_steps > 0:
        raise ConfigError(f"{key}.weight_steps: {entry.weight_steps} needs {key}.initial_weight")
    return Share(entry.weight, None if clip is None else (clip[0], clip[1]), entry.initial_weight, entry.weight_steps)


def judged_frames(terms: list[Term]) -> int:
    """Frames of a video that judges are asked about: the same ones, since they share what they look at."""
    counts = {term.frames for term in terms if isinstance(term.function, ParsedAnswers)}
    if len(counts) > 1:
        raise ConfigError(
            f"reward.functions: judges have frames {', '.join(map(str, sorted(counts)))}; give them the same number"
        )
    return counts.pop() if counts else 1


def _from_name(name: str, key: str) -> tuple[Callable[..., Any], str]:
    """The built-in reward `name`: the class in CamelCase of its module, or the function."""
    known = _known()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{key}={name!r} is not a built-in reward; {hint}built in: {_built_in()}; or give path: {FORMS}"
        )
    names = vars(importlib.import_module(f"{known[name]}.{name}"))
    camel = "".join(word.capitalize() for word in name.split("_"))
    return (names[camel] if camel in names else names[name]), name


def _from_path(path: str, key: str) -> tuple[Callable[..., Any], str]:
    """The object that `module:function` or `path/to/file.py:function` stands for, and its name."""
    target, _, attribute = path.rpartition(":")
    if not target or not attribute:
        raise ConfigError(f"{key}={path!r} names no function; expected {FORMS}")
    module = resolve_registry(PACKAGES[0], target, key) if target.endswith(".py") else _import(target, path, key)
    names = vars(module)
    if attribute not in names:
        near = difflib.get_close_matches(attribute, [n for n, value in names.items() if callable(value)], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}={path!r}: {target} has no {attribute!r}{hint}")
    found = names[attribute]
    if not callable(found):
        raise ConfigError(f"{key}={path!r} is of type {type(found).__name__}; expected a function or a class")
    return found, attribute


def _import(target: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{target}.".startswith(f"{error.name}."):
            raise  # the module is there, and what it imports is not: its traceback says where
        raise ConfigError(f"{key}={path!r}: no module {error.name!r} on the Python path; expected {FORMS}") from None


def _check_arguments(
    function: Callable[..., Any], args: tuple[str, ...], kwargs: dict[str, Any], key: str, label: str
) -> None:
    """Raise where `function` cannot be called with so many arguments, named in the message, and `kwargs`."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)[len(args) :]
        takes = ", ".join(n for n in names if n != "device") or "none"
        call = ", ".join((*args, "**kwargs"))
        raise ConfigError(f"{key}: {label}({call}): {error}; its kwargs: {takes}") from None


def _built_in() -> str:
    return ", ".join(_known())


def _known() -> dict[str, str]:
    """The built-in rewards, in alphabetical order, and the package that each is in."""
    found = {name: package for package in PACKAGES for name in known_modules(package)}
    return dict(sorted((found | {"http": "phalanx.rewards"}).items()))
