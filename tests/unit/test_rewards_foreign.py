"""Rewards written for TRL, verl and VeRL-Omni, used without changes."""

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.flow import FlowRewardConfig, FlowRewardFunctionConfig
from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.media.pictures import Picture, raw_file
from phalanx.rewards import RewardError, RewardSet
from phalanx.types import Prompt
from tests.helpers.rewards import scored, told

HERE = __name__
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
PLAIN = Prompt("2+2?", 0, {"solution": "4", "answer": 4, "data_source": "sums", "ground_truth": "4"})
CHATTED = Prompt("1+1?", 1, {"solution": "2", "answer": 2, "ground_truth": "2"}, None, CHAT)


def plain_trl(prompts: list[str], completions: list[str], solution: list[str], **kwargs: Any) -> list[float | None]:
    assert prompts == ["2+2?"] * len(completions) and kwargs["answer"] == [4] * len(completions)
    scores = {"4": 1.0, "5": 0.0}
    return [scores.get(c) if s == "4" else -1.0 for c, s in zip(completions, solution, strict=True)]


def chat_trl(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    assert kwargs["prompts"] == [CHAT] * len(completions)
    assert all(each[0]["role"] == "assistant" and len(each) == 1 for each in completions)
    return [float(each[0]["content"] == s) for each, s in zip(completions, kwargs["solution"], strict=True)]


def turns_trl(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    return [len(turns) + float(turns[-1]["content"]) / 8 for turns in completions]


# by its parameters alone it could be called as a reward of this package
def defaults_trl(completions: Any, solution: Any, marks: Any = None, scale: float = 1.0, **kwargs: Any) -> Tensor:
    assert marks is None
    return torch.tensor([scale * (c == s) for c, s in zip(completions, solution, strict=True)])


async def async_trl(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(each)) for each in completions]


class ClassTrl:
    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    def __call__(self, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        return [self.bonus + number for number in answer]


instance = ClassTrl(0.25)


def images_trl(completions: Any, images: Any, **kwargs: Any) -> list[float]:
    assert "image" not in kwargs and [len(each) for each in images] == [2, 0, 2]
    assert images[0][0] is images[2][0]  # read once
    return [sum(image.width for image in each) for each in images]


def image_trl(completions: Any, image: Any, **kwargs: Any) -> list[float]:
    assert [[] if each is None else [each] for each in image] == kwargs["images"]
    return [0.0 if each is None else each.getpixel((0, 0))[0] + each.height for each in image]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, wrong: float = 0.0) -> float:
    assert data_source == "sums" and extra_info == {}
    return 1.0 if solution_str == ground_truth else wrong


def dict_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "acc": solution_str}


async def async_verl(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    await asyncio.sleep(0)
    return float(solution_str == ground_truth and kwargs["data_source"] == "sums")


def broken_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 1 / float(solution_str)


def scoreless_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {"acc": 1.0}


def demanding_verl(data_source: str, solution_str: str, ground_truth: str, router: str) -> float:
    return 0.0


def omni(data_source: str, solution_image: Tensor, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return float(solution_image.mean())


def own(completions: list[str], prompts: list[str], metadata: list[dict[str, Any]], **kwargs: Any) -> list[float]:
    return [float(meta["answer"]) for meta in metadata]


def rewards(name: str, on_error: str = "fail", **kwargs: Any) -> RewardSet:
    entry = RewardFunctionConfig(path=f"{HERE}:{name}", kwargs=kwargs)
    return RewardSet(RewardConfig(functions=[entry], on_error=on_error), "cpu", outputs="completions")


@pytest.mark.parametrize(
    ("name", "kwargs", "scores"),
    [
        ("plain_trl", {}, [1, 0]),
        ("defaults_trl", {"scale": 0.5}, [0.5, 0]),
        ("async_trl", {}, [1, 1]),
        ("ClassTrl", {"bonus": 0.5}, [4.5, 4.5]),
        ("instance", {}, [4.25, 4.25]),
        ("verl", {}, [1, 0]),
        ("verl", {"wrong": -1.0}, [1, -1]),
        ("dict_verl", {}, [1, 0]),
        ("async_verl", {}, [1, 0]),
        ("own", {}, [4, 4]),
    ],
)
def test_functions_of_trl_and_verl(name: str, kwargs: dict[str, Any], scores: list[float]) -> None:
    assert scored(rewards(name, **kwargs), (["4", "5"], [PLAIN, PLAIN])) == {name: scores}


def shown(number: int, *files: bytes) -> Prompt:
    pictures = tuple(Picture(partial(bytes, file), Path(), f"row {number}") for file in files)
    return Prompt("What?", number, {"images": pictures}, images=pictures)


def test_functions_of_trl_get_images_as_pil() -> None:
    red, wide = (raw_file(torch.tensor([9, 0, 0]).byte()[:, None, None].expand(3, 2, width)) for width in (4, 64))
    both, none, one = shown(0, red, wide), shown(1), shown(2, red)
    assert scored(rewards("images_trl"), (["a"] * 3, [both, none, both])) == {"images_trl": [68, 0, 68]}
    assert scored(rewards("image_trl"), (["a"] * 2, [one, none])) == {"image_trl": [11, 0]}
    (term,) = rewards("image_trl").terms
    assert term.objection("", one.meta) is None is term.objection("", none.meta)
    absent = "its function needs the column 'image', which the row does not have"
    assert term.objection("", both.meta) == absent == term.objection("", {})


def test_functions_of_trl_get_chats_as_messages() -> None:
    assert scored(rewards("chat_trl"), (["2", "3"], [CHATTED, CHATTED])) == {"chat_trl": [1, 0]}
    assert scored(rewards("dict_verl"), (["2", "3"], [CHATTED, CHATTED])) == {"dict_verl": [1, 0]}


def test_functions_of_trl_get_all_that_was_said_behind_the_prompt() -> None:
    turns = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "2"}]
    turns.append({"role": "assistant", "content": "4"})
    said = [*CHAT, {"role": "user", "content": "from reset"}, *turns]
    meta = {"environment_reward": None, "messages": said}
    talk, silent = (Prompt("1+1?", 1, meta | changes, None, CHAT) for changes in ({}, {"messages": said[:3]}))
    assert scored(rewards("turns_trl"), (["4", "0"], [talk, silent])) == {"turns_trl": [3.5, 1]}
    assert scored(rewards("async_trl"), (["4"], [Prompt("1+1?", 1, meta)])) == {
        "async_trl": [1]
    }  # the prompt is not a chat


def test_functions_of_verl_omni_get_images() -> None:
    entry = FlowRewardFunctionConfig(path=f"{HERE}:omni")
    images = torch.stack([torch.full((3, 4, 4), 0.5), torch.ones(3, 4, 4)])
    assert scored(RewardSet(FlowRewardConfig(functions=[entry]), "cpu"), (images, [PLAIN, CHATTED])) == {
        "omni": [0.5, 1.0]
    }
    assert told(ValueError, rewards, "omni") == "reward.functions[0]: omni takes images, and this job makes completions"
    entry = FlowRewardFunctionConfig(path=f"{HERE}:plain_trl")
    assert told(ValueError, RewardSet, FlowRewardConfig(functions=[entry]), "cpu") == (
        "reward.functions[0]: plain_trl takes completions, and this job makes images"
    )


def of_environments(environments: Any, **kwargs: Any) -> list[float]:
    return [environment.reward for environment in environments]


def of_tokens(completion_ids: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(each)) for each in completion_ids]


def logs_trl(completions: Any, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any) -> list[float]:
    assert log_metric is None and trainer_state is None
    return [float(len(each)) for each in completions]


def test_arguments_of_trls_trainer() -> None:
    """What does not exist here is told at the start, to functions that require it."""
    assert told(ValueError, rewards, "of_environments") == (
        "reward.functions[0]: of_environments reads TRL's environments, which is not passed here; give the "
        "environment's class a method get_reward, whose term is {name: environment}"
    )
    assert told(ValueError, rewards, "of_tokens") == (
        "reward.functions[0]: of_tokens reads TRL's completion_ids, which is not passed here; read the texts, which are "
        "`completions`, and give it a default"
    )
    assert scored(rewards("logs_trl"), (["4", "10"], [PLAIN, PLAIN])) == {"logs_trl": [1, 2]}


def test_mistakes_of_functions_of_other_trainers() -> None:
    assert told(ValueError, rewards, "demanding_verl") == (
        "reward.functions[0].kwargs: demanding_verl(**kwargs): missing a required argument: 'router'; "
        "its kwargs: data_source, solution_str, ground_truth, router"
    )
    message = told(RewardError, scored, rewards("broken_verl"), (["4", "0"], [PLAIN, CHATTED]))
    line = (
        "reward 'broken_verl' raised ZeroDivisionError: float division by zero on the prompt \"1+1?\", at " + __file__
    )
    assert re.fullmatch(re.escape(line) + r":\d+", message)  # names only the sample that raised
    message = told(RewardError, scored, rewards("scoreless_verl"), (["4"], [PLAIN]))
    assert message == (
        "reward 'scoreless_verl' raised ValueError: it returned a dict without score; its keys: acc on the prompt \"2+2?\""
    )
    lenient = rewards("broken_verl", on_error="zero")
    assert str(scored(lenient, (["4", "0"], [PLAIN, CHATTED]))) == "{'broken_verl': [0.25, nan]}"
