"""Builds callables from `reward.functions`; mistakes are ConfigErrors that name the entry and what was expected."""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from phalanx.config.arguments import check_arguments, signature_of
from phalanx.config.flow import FlowRewardFunctionConfig
from phalanx.config.messages import ConfigError, nearest, reason
from phalanx.config.registry import built_in, known_modules, object_forms, resolve_object
from phalanx.config.reward import RewardFunctionConfig
from phalanx.functional.advantage import Share
from phalanx.kept import kept
from phalanx.rewards.base import DeviceReward, PolicyReward, RewardWithExtras
from phalanx.rewards.call import Term
from phalanx.rewards.foreign import OUTPUTS, TrlReward, VerlReward, absent_argument, form_of, verl_arguments
from phalanx.rewards.judge import Judge, PairJudge, ParsedAnswers, WinRates
from phalanx.rewards.protocol import complaint

log = logging.getLogger(__name__)

PACKAGES = (
    "phalanx.zoo.rewards.image",
    "phalanx.zoo.rewards.video",
    "phalanx.zoo.rewards.text",
    "phalanx.zoo.rewards.judge",
)
FORMS = object_forms("function")
TEXTS = ("completions", "transcripts")
TAKES = ("images", "videos", *TEXTS)  # names of a reward's first parameter that determine its input
EITHER = "outputs"  # or this, for images or completions, whichever the job generates
UNSPLIT = ("http",)  # built-in CPU rewards whose calls are not split, since they batch and parallelise themselves
# Names of metrics that the trainer logs beside the terms, as reward/mean etc.
RESERVED = ("mean", "std", "max", "min", "zero_std_ratio", "std_mean", "kl_mean", "errors")


def build_terms(
    functions: Sequence[RewardFunctionConfig],
    device: str,
    unparseable_score: float | None = None,
    outputs: str = "images",
) -> list[Term]:
    """Resolve and bind all entries of `reward.functions`.

    device: where DeviceRewards are put.
    unparseable_score: that of `reward.model`; None if the job has no reward model and judges are refused.
    outputs: what the job generates: "images", which includes videos, or "completions".
    """
    if not functions:
        raise ConfigError(
            "reward.functions is empty: nothing to optimise; give at least one entry, e.g. {name: ocr}; "
            f"built in: {', '.join(_known_rewards())}"
        )
    terms: list[Term] = []
    for i, entry in enumerate(functions):
        term = _build_term(entry, f"reward.functions[{i}]", device, unparseable_score, outputs)
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


def asks_model(functions: Sequence[RewardFunctionConfig]) -> bool:
    """Whether any of the functions is a judge, which needs `reward.model`."""
    rewards = (_find_reward(entry, f"reward.functions[{i}]")[0] for i, entry in enumerate(functions))
    return any(isinstance(reward, type) and issubclass(reward, Judge) for reward in rewards)


def _build_term(
    cfg: RewardFunctionConfig, key: str, device: str, unparseable_score: float | None, outputs: str
) -> Term:
    """Resolve, check and bind one entry, which messages call `key`; see `build_terms`."""
    reward, label = _find_reward(cfg, key)
    name = label if cfg.name is None else cfg.name
    if name in RESERVED:
        raise ConfigError(f"{key}: {name!r} is the name of another metric; give the term another name")
    is_judge = isinstance(reward, type) and issubclass(reward, Judge)
    takes = _taken_outputs(reward, key, label, outputs)
    if (takes in TEXTS) != (outputs == "completions"):
        what = f"the judge {label}" if is_judge else label
        raise ConfigError(f"{key}: {what} takes {takes}, and this job makes {outputs}")

    of_policy = isinstance(reward, type) and issubclass(reward, PolicyReward)
    arguments = ("policy", "samples", "passes") if of_policy else (takes, "prompts", "metadata")
    on_device = isinstance(reward, type) and issubclass(reward, DeviceReward)
    form = None if is_judge or of_policy else form_of(_call_signature(reward, key, label))
    function: Callable[..., Any]
    if not isinstance(reward, type):
        if form is None:
            check_arguments(reward, arguments, cfg.kwargs, f"{key}.kwargs", label)
            function = functools.partial(reward, **cfg.kwargs)
        else:
            function = _adapt_function(form, reward, cfg.kwargs, f"{key}.kwargs", label)
    elif is_judge and inspect.isabstract(reward):
        raise ConfigError(f"{key}: the judge {label} has no method parse(answer, prompt, metadata)")
    else:
        kwargs = {"device": device, **cfg.kwargs} if on_device else cfg.kwargs
        check_arguments(reward, (), kwargs, f"{key}.kwargs", label, hidden=("device",) if on_device else ())
        make = functools.partial(_make_instance, reward, kwargs, f"{key} ({name})", "" if is_judge else name)
        function = kept(("reward", key, str(reward), repr(kwargs)), make) if on_device else make()
        if isinstance(function, Judge):
            check_arguments(function.parse, ("answer", "prompt", "metadata"), {}, key, f"{label}.parse")
            if unparseable_score is None:
                raise ConfigError(
                    f"{key}: {label} is a judge and needs reward.model, which only training and evaluations have"
                )
            scores = ParsedAnswers
            if isinstance(function, PairJudge):
                scores, opponents = WinRates, function.opponents
                if function.opens:
                    raise ConfigError(f"{key} ({name}): opens=True is only for judges of single samples, not of pairs")
                if opponents is not None and (opponents < 2 or opponents % 2):
                    raise ConfigError(
                        f"{key} ({name}): opponents={opponents} should be an even number, such as 4, or null for all"
                    )
            function = scores(function, unparseable_score)
        elif not callable(function):
            call = f"__call__({', '.join(arguments)})"
            raise ConfigError(f"{key}: {label} is a class without __call__; expected {call}")
        elif form is not None:
            function = _adapt_function(form, function, {}, key, label)
        else:
            check_arguments(function, arguments, {}, key, label)
    frames = cfg.frames if isinstance(cfg, FlowRewardFunctionConfig) else 1
    on_threads = not (on_device or of_policy or is_judge)
    if cfg.per_sample and not on_threads:
        raise ConfigError(
            f"{key}.per_sample: {label} does not run on the threads of reward.num_workers, which could share a call; "
            "leave it out"
        )
    splittable = form is VerlReward or (cfg.path is None and label not in UNSPLIT)
    per_sample = (splittable if cfg.per_sample is None else cfg.per_sample) and on_threads
    extras = function.extras if isinstance(function, RewardWithExtras) else ()
    chats = form is TrlReward
    clip = None if cfg.clip is None else (cfg.clip[0], cfg.clip[1])
    share = Share(cfg.weight, clip, cfg.initial_weight, cfg.weight_steps)
    return Term(name, function, share, on_device, takes, frames, extras, per_sample, chats)


def _adapt_function(
    form: type[TrlReward] | type[VerlReward], function: Callable[..., Any], kwargs: dict[str, Any], key: str, label: str
) -> Callable[..., Any]:
    """A function of another trainer as a reward. Raises ConfigError if it does not accept that trainer's arguments."""
    signature = signature_of(function, key, label)
    if form is VerlReward:
        names = verl_arguments(signature)
        check_arguments(function, (), {**dict.fromkeys(names), **kwargs}, key, label, ours=names)
    elif (problem := absent_argument(signature, kwargs)) is not None:
        raise ConfigError(f"{key.removesuffix('.kwargs')}: {label} {problem}")
    return form(function, kwargs)


def _taken_outputs(reward: Callable[..., Any], key: str, label: str, outputs: str) -> str:
    """The outputs that a reward takes, one of TAKES, by the name of its first parameter; "images" for other names.

    The parameters of a class are read before it is instantiated, because the constructor may load a model.
    """
    if isinstance(reward, type) and issubclass(reward, Judge | PolicyReward):
        return outputs if reward.takes == EITHER else reward.takes
    signature = _call_signature(reward, key, label)
    names = signature.parameters
    if form_of(signature) is not None:
        return next((takes for name, takes in OUTPUTS.items() if name in names), "completions")
    first = next(iter(names), "")
    if first == EITHER:
        return outputs
    return first if first in TAKES else "images"


def _make_instance(reward: Callable[..., Any], kwargs: dict[str, Any], where: str, name: str) -> Any:
    if name:
        log.info("loading the reward %s", name)
    try:
        return reward(**kwargs)
    except ValidationError as error:
        raise ConfigError(f"{where}: {complaint(error, values=True)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(f"{where}: {reason(error).removeprefix('ValueError: ')}") from error


def judged_frames(terms: list[Term]) -> int:
    """Frames per video that judges are asked about; it must be equal for all judges, since they share the frames."""
    counts = {term.frames for term in terms if isinstance(term.function, ParsedAnswers)}
    if len(counts) > 1:
        raise ConfigError(
            f"reward.functions: judges have frames {', '.join(map(str, sorted(counts)))}; give them the same number"
        )
    return counts.pop() if counts else 1


def _find_reward(cfg: RewardFunctionConfig, key: str) -> tuple[Callable[..., Any], str]:
    """The object that an entry refers to, and its name in messages."""
    if cfg.path is not None:
        reward = resolve_object(cfg.path, f"{key}.path", "function")
        if not callable(reward):
            kind = type(reward).__name__
            raise ConfigError(f"{key}.path={cfg.path!r} is of type {kind}; expected a function or a class")
        return reward, cfg.path.rpartition(":")[2]
    known = _known_rewards()
    names = ", ".join(known)
    if cfg.name is None:
        raise ConfigError(f"{key} has neither name nor path; give name (built in: {names}) or path ({FORMS})")
    if cfg.name not in known:
        hint = nearest(cfg.name, list(known)) or ";"
        raise ConfigError(
            f"{key}.name={cfg.name!r} is not a built-in reward{hint} built in: {names}; or give path: {FORMS}"
        )
    return built_in(known[cfg.name], cfg.name), cfg.name


def _call_signature(reward: Callable[..., Any], key: str, label: str) -> inspect.Signature:
    """The signature of a reward's call; for a class, that of `__call__` without `self`."""
    if not isinstance(reward, type):
        return signature_of(reward, key, label)
    signature = signature_of(reward.__call__, key, label)
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    return signature.replace(parameters=parameters)


def _known_rewards() -> dict[str, str]:
    """The packages of the built-in rewards by their names, in alphabetical order."""
    packages = {"http": "phalanx.zoo.rewards"}
    for package in PACKAGES:
        packages |= dict.fromkeys(known_modules(package), package)
    return dict(sorted(packages.items()))
