"""Reward functions written for other trainers, called with the arguments that they get there.

TRL calls a function on a batch with the keyword arguments `prompts`, `completions` and each column of the data. verl
calls `compute_score(data_source, solution_str, ground_truth, extra_info)` on each sample; VeRL-Omni passes
`solution_image` instead of `solution_str`.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from itertools import dropwhile
from typing import Any

from torch import Tensor

from phalanx.rewards.base import RewardOutput
from phalanx.telemetry.records import TALKS

OUTPUTS = {"solution_str": "completions", "solution_image": "images"}  # by parameter of verl and VeRL-Omni
# parameters with values of TRL's trainer that do not exist here, and what a function that requires one can do
_ABSENT = {
    "environments": "give the environment's class a method get_reward, whose term is {name: environment}",
    "completion_ids": "read the texts, which are `completions`, and give it a default",
    "trainer_state": "give it a default",
    "log_extra": "give it a default, and call it only where it is passed",
    "log_metric": "give it a default, and call it only where it is passed",
}
_OWN = ("metadata", "meta")  # names of the third parameter of a reward in the form of phalanx.rewards.base


class TrlReward:
    """A reward function of TRL. If a prompt is a chat, the function gets it as a list of messages, and its completion
    as the list of all messages after the prompt.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._function, self._kwargs = function, dict(kwargs)

    def __call__(self, completions: list[str], prompts: list[Any], metadata: list[dict[str, Any]]) -> Any:
        """Call the function on B texts and B prompts, each a text or a chat. Returns B numbers or None."""
        columns = {}
        for name in dict.fromkeys(name for meta in metadata for name in meta):
            columns[name] = [meta.get(name) for meta in metadata]
        columns |= _pil_images(metadata)
        answers: list[Any] = []
        for prompt, completion, meta in zip(prompts, completions, metadata, strict=True):
            turns = [{"role": "assistant", "content": completion}]
            if isinstance(prompt, list) and TALKS in meta:
                # messages that the environment's reset has added belong to the prompt
                answered = dropwhile(lambda message: message["role"] != "assistant", meta["messages"][len(prompt) :])
                turns = list(answered) or turns
            answers.append(turns if isinstance(prompt, list) else completion)
        arguments = {**columns, **self._kwargs, "prompts": prompts, "completions": answers}
        return _await_results([self._function(**arguments)])[0]

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a column that the function requires."""
        given = {"prompts", "completions", *metadata, *self._kwargs}
        pictures = metadata.get("images")
        if isinstance(pictures, tuple) and len(pictures) <= 1:
            given.add("image")
        for name, parameter in inspect.signature(self._function).parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if needed and name not in given:
                raise ValueError(f"its function needs the column {name!r}, which the row does not have")


class VerlReward:
    """A reward function of verl. Of a dict that it returns, `score` is used, and `feedback` if it is a text."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._function, self._kwargs = function, dict(kwargs)
        self._names = verl_arguments(inspect.signature(function))

    def __call__(self, outputs: list[str] | Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """Score B completions, or images [B, 3, H, W]."""
        results = []
        for output, meta in zip(outputs, metadata, strict=True):
            values = {
                **dict.fromkeys(OUTPUTS, output),
                "data_source": meta.get("data_source", ""),
                "ground_truth": meta.get("ground_truth", ""),
                "extra_info": meta.get("extra_info") or {},
            }
            arguments = {name: values[name] for name in self._names}
            results.append(self._function(**{**arguments, **self._kwargs}))
        results = _await_results(results)
        scores: list[Any] = []
        feedback: list[str | None] = []
        for result in results:
            text = result.get("feedback") if isinstance(result, Mapping) else None
            feedback.append(text if isinstance(text, str) else None)
            scores.append(_verl_score(result))
        return RewardOutput(scores, feedback=feedback if any(feedback) else None)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without the ground truth that a function of texts requires."""
        parameters = inspect.signature(self._function).parameters
        needed = "ground_truth" in parameters and parameters["ground_truth"].default is inspect.Parameter.empty
        if needed and "solution_str" in parameters and not {"ground_truth"} & {*metadata, *self._kwargs}:
            raise ValueError("its function needs a ground_truth, which the row does not have")


def form_of(signature: inspect.Signature) -> type[TrlReward] | type[VerlReward] | None:
    """The adapter for the trainer whose form a reward's parameters have; None for the form of this package."""
    names = list(signature.parameters)
    if OUTPUTS.keys() & set(names):
        return VerlReward
    # TRL passes every column of the data, so each of its functions accepts any keyword
    if not _takes_any(signature) or (len(names) > 2 and names[2] in _OWN):
        return None
    return TrlReward if {"completions", *_ABSENT} & set(names) else None


def absent_argument(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str | None:
    """The problem of a function of TRL that requires an argument which does not exist here; None if there is none."""
    for name, parameter in signature.parameters.items():
        if name in _ABSENT and name not in kwargs and parameter.default is parameter.empty:
            return f"reads TRL's {name}, which is not passed here; {_ABSENT[name]}"
    return None


def verl_arguments(signature: inspect.Signature) -> list[str]:
    """Names of the keyword arguments that verl passes to a function, of those that it accepts."""
    output = [name for name in OUTPUTS if name in signature.parameters]
    others = ["data_source", "ground_truth", "extra_info"]
    if not _takes_any(signature):
        others = [name for name in others if name in signature.parameters]
    return output + others


def _pil_images(metadata: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The images of prompts in TRL's columns: `images`, a list per sample, and, if no prompt has several images and
    the data have no such column, `image`, one image or None per sample.
    """
    images: list[list[Any]] = []
    read: dict[int, Any] = {}  # the samples of a prompt share its images
    for meta in metadata:
        pictures = meta.get("images")
        images.append([])
        for picture in pictures if isinstance(pictures, tuple) else ():
            if id(picture) not in read:
                read[id(picture)] = picture.pil()
            images[-1].append(read[id(picture)])
    if not read:
        return {}
    columns: dict[str, list[Any]] = {"images": images}
    if max(map(len, images)) == 1 and not any("image" in meta for meta in metadata):
        columns["image"] = [shown[0] if shown else None for shown in images]
    return columns


def _takes_any(signature: inspect.Signature) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())


def _verl_score(result: Any) -> float | None:
    """The score in a result of a function of verl."""
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise ValueError(f"it returned a dict without score; its keys: {', '.join(map(str, result)) or 'none'}")
    return result["score"]


def _await_results(returned: list[Any]) -> list[Any]:
    """The results of calls; those of an `async` function are awaited concurrently."""
    if not returned or not inspect.isawaitable(returned[0]):
        return returned

    async def together() -> list[Any]:
        return await asyncio.gather(*returned)

    return asyncio.run(together())
