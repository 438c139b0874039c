"""Rewards of completions: text goes to rewards that take it, and to no others."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.rewards import DeviceReward, Judge, RewardError, RewardOutput, RewardSet, RewardWithExtras
from phalanx.types import Prompt
from phalanx.zoo.rewards.judge.llm_judge import LlmJudge
from tests.helpers.rewards import scored, told

HERE = __name__
Meta = list[dict[str, Any]]
MEETING = threading.Barrier(2)
# of 100 kB each: where a search would look at each place for an end that is far or not there
LONG = ["2" * 100_000, "2," * 50_000, "2,222" * 20_000, "2 " * 50_000, "2/" * 50_000, "= " * 50_000, " " * 100_000]


def exact(completions: list[str], prompts: list[str], metadata: Meta, case: bool = True) -> list[float]:
    wanted = [meta["ground_truth"] for meta in metadata]
    return [float((c if case else c.lower()) == w) for c, w in zip(completions, wanted, strict=True)]


def meets(completions: list[str], prompts: list[str], metadata: Meta) -> list[float]:
    MEETING.wait(timeout=60)  # passes only if two calls run at once
    return [float(len(completion) - len(prompt)) for completion, prompt in zip(completions, prompts, strict=True)]


def nan(completions: list[str], prompts: list[str], metadata: Meta) -> list[float]:
    return [0.0] * (len(completions) - 1) + [float("nan")]


class Learned(DeviceReward):
    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, completions: list[str], prompts: list[str], metadata: Meta) -> Tensor:
        assert threading.current_thread().name == "reward-device-0"
        return torch.tensor([len(completion) for completion in completions], device=self.device)


class Long(RewardWithExtras):
    extras = ("long",)

    def __call__(self, completions: list[str], prompts: list[str], metadata: Meta) -> RewardOutput:
        lengths = [len(completion) for completion in completions]
        return RewardOutput(lengths, {"long": [float(length > 2) for length in lengths]})


class Costly:
    """A reward of images that records when it is loaded."""

    def __init__(self) -> None:
        raise AssertionError("loaded, though it cannot be used")

    def __call__(self, images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
        return []


def unnamed(x: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    return x.amax((1, 2, 3)).tolist()


class Verdict(Judge):
    template = "?"

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        return 0.0


def rewards(*names: str, outputs: str = "completions", workers: int = 1, **kwargs: Any) -> RewardSet:
    entries = [RewardFunctionConfig(path=f"{HERE}:{name}", kwargs=kwargs) for name in names]
    return RewardSet(RewardConfig(functions=entries, num_workers=workers), "cpu", 60.0, outputs=outputs)


def prompts(*wanted: str) -> list[Prompt]:
    return [Prompt("p", i, {"ground_truth": text}) for i, text in enumerate(wanted)]


def test_completions_are_scored_in_the_order_of_submission() -> None:
    batches = (["a", "bc"], prompts("a", "b")), (["def"], prompts("def"))
    assert scored(rewards("exact", "Learned", "Long"), *batches) == {
        "exact": [1, 0, 1],
        "Learned": [1, 2, 3],
        "Long": [1, 2, 3],
        "Long_long": [0, 0, 1],
    }
    assert scored(rewards("exact", case=False), (["A"], prompts("a"))) == {"exact": [1]}


def test_completions_are_scored_on_threads_while_more_are_sampled() -> None:
    reward = rewards("meets", workers=2)
    reward.submit(["abc"], prompts(""))
    reward.submit(["abcde", ""], prompts("", ""))
    while any(not call.task.done() for call in reward._calls if call.task is not None):
        time.sleep(0.01)  # done before `collect` is called
    assert reward.collect()["meets"].tolist() == [2, 4, -1]
    assert len(reward.spans) == 2


def test_a_bad_score_of_a_completion_is_told() -> None:
    assert told(RewardError, scored, rewards("nan"), (["a", "b"], prompts("a", "b"))) == (
        "reward 'nan' returned nan for 1 of 2 completions on the prompt \"p\"; expected finite numbers"
    )


@pytest.mark.parametrize(
    ("outputs", "names", "problem"),
    [
        ("completions", ("exact", "Costly"), "[1]: Costly takes images, and this job makes completions"),
        ("completions", ("unnamed",), "[0]: unnamed takes images, and this job makes completions"),
        ("completions", ("Verdict",), "[0]: the judge Verdict takes images, and this job makes completions"),
        ("images", ("exact",), "[0]: exact takes completions, and this job makes images"),
        ("images", ("Learned",), "[0]: Learned takes completions, and this job makes images"),
    ],
)
def test_rewards_of_what_the_job_does_not_make_are_refused(outputs: str, names: tuple[str, ...], problem: str) -> None:
    assert told(ValueError, rewards, *names, outputs=outputs) == f"reward.functions{problem}"


def test_a_built_in_reward_of_images_is_refused_in_a_job_of_text() -> None:
    cfg = RewardConfig(functions=[RewardFunctionConfig(name="pickscore")])  # its model does not exist
    problem = "reward.functions[0]: pickscore takes images, and this job makes completions"
    assert told(ValueError, RewardSet, cfg, "cpu", outputs="completions") == problem


def test_any_other_name_of_the_first_parameter_means_images() -> None:
    batch = torch.full((2, 3, 4, 4), 0.5), prompts("", "")
    assert scored(rewards("unnamed", outputs="images"), batch) == {"unnamed": [0.5, 0.5]}


def test_a_call_that_does_not_fit_names_what_the_reward_takes() -> None:
    assert told(ValueError, rewards, "exact", outputs="completions", cased=True) == (
        "reward.functions[0].kwargs: exact(completions, prompts, metadata, **kwargs): got an unexpected keyword argument "
        "'cased'; its kwargs: case"
    )


# --- user verifiers that hang or raise, and bad completions


def hangs(completions: list[str], prompts: list[str], metadata: Meta) -> list[float]:
    threading.Event().wait(600)  # in a daemon thread, for which nothing waits
    return []


def raises(completions: list[str], prompts: list[str], metadata: Meta) -> list[float]:
    raise KeyError("no\nsuch")


def text_rewards(name: str, **settings: Any) -> RewardSet:
    entry = RewardFunctionConfig(path=f"{HERE}:{name}")
    return RewardSet(RewardConfig(functions=[entry], **settings), "cpu", outputs="completions")


def test_a_verifier_that_hangs_or_raises() -> None:
    batch = (["a", "b"], prompts("a", "b"))
    assert told(RewardError, scored, text_rewards("hangs", timeout_s=0.2), batch) == (
        "reward 'hangs' ran longer than reward.timeout_s=0.2 seconds on the prompt \"p\""
    )
    raised = "reward 'raises' raised KeyError: 'no\\nsuch' on the prompt \"p\", at " + f"{__file__}:"
    assert told(RewardError, scored, text_rewards("raises"), batch).startswith(raised)
    lenient = text_rewards("raises", on_error="zero")
    assert str(scored(lenient, batch)) == "{'raises': [nan, nan]}"
    assert lenient.problem is not None and lenient.problem.startswith(raised)
    # a call that hangs ends the job for any reward.on_error
    assert "timeout_s=0.2" in told(RewardError, scored, text_rewards("hangs", timeout_s=0.2, on_error="zero"), batch)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("gsm8k", {}), ("math", {"equivalence": "string"}), ("dapo", {}), ("format", {}), ("length", {})],
)
def test_completions_of_any_kind_are_scored(name: str, kwargs: dict[str, Any]) -> None:
    cfg = RewardConfig(functions=[RewardFunctionConfig(name=name, kwargs=kwargs)])
    odd = [
        "",
        "\x00",
        "\ud800",
        "####" * 300_000,
        "\\boxed{" * 100_000,
        "<answer>" * 100_000,
        "Answer:" * 100_000,
        *LONG,
    ]
    begin = time.monotonic()
    found = scored(RewardSet(cfg, "cpu", outputs="completions"), (odd, prompts(*["1"] * len(odd))))[name]
    assert len(found) == len(odd) and (name == "length" or max(found) <= 0)
    assert time.monotonic() - begin < 60


def either(outputs: Any, prompts: list[str], metadata: Meta) -> list[float]:
    return [float(len(output)) for output in outputs]


def test_a_reward_of_outputs_takes_what_the_job_makes() -> None:
    assert scored(rewards("either"), (["ab"], prompts(""))) == {"either": [2]}
    image = torch.zeros(1, 3, 4, 4), prompts("")
    assert scored(rewards("either", outputs="images"), image) == {"either": [3]}


def asks_and_answers(transcripts: list[list[dict[str, str]]], prompts: list[str], metadata: Meta) -> list[float]:
    scores = []
    for messages in transcripts:
        scores.append(float("".join(message["content"] for message in messages)))
        messages.clear()
    return scores


def test_a_reward_of_transcripts_gets_all_messages() -> None:
    said = [{"role": role, "content": str(i)} for i, role in enumerate(["user", "assistant", "tool", "assistant"], 1)]
    talk = Prompt("1", 0, {"environment_reward": 0.0, "messages": said})
    chat = Prompt("6", 1, {}, None, [{"role": "system", "content": "5"}, {"role": "user", "content": "6"}])
    batch = ["4", "7", "9"], [talk, chat, Prompt("8", 2, {})]
    assert scored(rewards("asks_and_answers"), batch) == {"asks_and_answers": [1234, 567, 89]}
    assert len(said) == 4 and chat.messages is not None and len(chat.messages) == 2  # it was given copies
    assert told(ValueError, rewards, "asks_and_answers", outputs="images") == (
        "reward.functions[0]: asks_and_answers takes transcripts, and this job makes images"
    )


def test_the_weight_of_rewards_of_turns_is_that_of_the_environment() -> None:
    entries = [
        RewardFunctionConfig(name="environment", weight=2.0, initial_weight=1.0, weight_steps=4),
        RewardFunctionConfig(path=f"{HERE}:either"),
    ]
    reward = RewardSet(RewardConfig(functions=entries), "cpu", outputs="completions")
    assert [reward.turn_weight(step) for step in (0, 2, 9)] == [1.0, 1.5, 2.0]
    assert rewards("either").turn_weight(0) == 0


def why(completions: list[str], prompts: list[str], metadata: Meta) -> RewardOutput:
    return RewardOutput([1.0, float("nan")], problem="it was too late")


def test_a_reward_says_why_scores_are_missing() -> None:
    batch = (["a", "b"], prompts("a", "b"))
    assert told(RewardError, scored, text_rewards("why"), batch) == (
        "reward 'why' has no score for 1 of 2 completions on the prompt \"p\": it was too late"
    )
    lenient = text_rewards("why", on_error="skip")
    assert str(scored(lenient, batch)) == "{'why': [1.0, nan]}"
    assert lenient.problem == "reward 'why' has no score on the prompt \"p\": it was too late"


# --- terms of the policy, and judges


def test_the_policys_own_term_is_of_texts_in_training_alone() -> None:
    entry = RewardFunctionConfig(name="self_certainty")
    cfg = RewardConfig(functions=[entry])
    assert not RewardSet(cfg, "cpu", outputs="completions").validates
    assert told(ValueError, RewardSet, cfg, "cpu") == (
        "reward.functions[0]: self_certainty takes completions, and this job makes images"
    )
    both = RewardConfig(functions=[entry, RewardFunctionConfig(name="length", weight=0.5)])
    reward = RewardSet(both, "cpu", outputs="completions")
    rows = scored(reward, (["ab"], prompts("")))
    assert reward.validates and rows == {"length": [2]}
    assert reward.weighted({"length": torch.tensor([2.0])}).tolist() == [1]
    assert reward.weighted({"length": torch.tensor([2.0]), "self_certainty": torch.tensor([3.0])}).tolist() == [4]


def test_the_judge_of_texts() -> None:
    judge = LlmJudge()
    asked = judge.question("1+1?", {"completion": "2 {prompt}", "ground_truth": "2"})
    assert (
        "The task:\n1+1?\n" in asked and "The answer:\n2 {prompt}\n" in asked and "from 0 (worst) to 10 (best)" in asked
    )
    answers = ["Score: 5", "score 3, no: **Score:** 10", "Score: 11", "5", ""]
    assert [judge.parse(answer, "", {}) for answer in answers] == [0.5, 1.0, None, None, None]
    last = LlmJudge("Is {completion} equal to {ground_truth}? Say 1 or 0.", highest=1, read="last")
    assert last.question("?", {"completion": "2", "ground_truth": 2}) == "Is 2 equal to 2? Say 1 or 0."
    assert [last.parse(answer, "", {}) for answer in ("1", "0 or 1? 0", "-1", "?")] == [1, 0, None, None]


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"template": "?"}, "template has no {completion}, the text to judge"),
        ({"lowest": 1, "highest": 1}, "lowest=1 and highest=1 should be numbers, the smaller one first"),
    ],
)
def test_mistakes_of_the_judge_of_texts(kwargs: dict[str, Any], problem: str) -> None:
    cfg = RewardConfig(functions=[RewardFunctionConfig(name="llm_judge", kwargs=kwargs)])
    message = f"reward.functions[0] (llm_judge): {problem}"
    assert told(ValueError, RewardSet, cfg, "cpu", 60.0, outputs="completions") == message
