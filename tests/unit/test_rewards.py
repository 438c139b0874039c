"""Running rewards beside the rollout, and how their failures end the job."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardFunctionConfig
from phalanx.rewards import DeviceReward, RewardError, RewardOutput, RewardSet, RewardWithExtras
from phalanx.types import JobError, Prompt
from tests.helpers.checks import wait_for
from tests.helpers.ranks import LIMIT_S, ROOT
from tests.helpers.rewards import entry, rewards, scored, told

HERE = __name__
MEETING = threading.Barrier(4)
SOURCE = Path(__file__).read_text().splitlines()

Meta = list[dict[str, Any]]


def brightness(images: Tensor, prompts: list[str], metadata: Meta, scale: float = 1.0) -> Tensor:
    return images.mean((1, 2, 3)) * scale


def listed(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    return [len(p) + m["bonus"] for p, m in zip(prompts, metadata, strict=True)]


def array(images: Tensor, prompts: list[str], metadata: Meta) -> "np.ndarray[Any, Any]":
    return np.arange(len(images), dtype=np.float64)


def nap(images: Tensor, prompts: list[str], metadata: Meta, seconds: float = 0.2) -> list[float]:
    time.sleep(seconds)
    return [0.0] * len(images)


def meets(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    MEETING.wait(60)  # passes only if four calls run at once
    return [0.0] * len(images)


def sleeps_on_slow(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    time.sleep(60 if "slow" in prompts else 0)
    return [0.0] * len(images)


def boom(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    if "bad" in prompts:
        raise KeyError("no\nsuch thing")
    return [0.0] * len(images)


def gives(images: Tensor, prompts: list[str], metadata: Meta, value: Any = None) -> Any:
    return value


def second_is_lost(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    return [float("nan") if i == 1 else 1.0 for i in range(len(images))]


BUFFER = np.zeros(1, dtype=np.float32)


def reuses_its_buffer(images: Tensor, prompts: list[str], metadata: Meta) -> "np.ndarray[Any, Any]":
    BUFFER[:] = len(prompts[0])
    return BUFFER


def two_arguments(images: Tensor, prompts: list[str]) -> list[float]:
    return []


NUMBER = 3


class Stateful:
    made = 0

    def __init__(self, offset: float, sign: int = 1) -> None:
        type(self).made += 1
        if sign not in (1, -1):
            raise ValueError(f"sign={sign} is neither 1\nnor -1")
        self.offset = offset * sign

    def __call__(self, images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
        return [self.offset] * len(images)


class Extras(RewardWithExtras):
    def __init__(self, extras: list[str]) -> None:
        self.extras = tuple(extras)

    def __call__(self, images: Tensor, prompts: list[str], metadata: Meta) -> RewardOutput:
        return RewardOutput([2.0] * len(images), metadata[0]["extras"])


class NoCall:
    pass


class OnDevice(DeviceReward):
    """Records the thread and the time of each call."""

    def __init__(self, factor: float = 1.0, device: str = "?") -> None:
        self.device, self.factor = device, factor
        self.calls: list[tuple[str, float]] = []

    def __call__(self, images: Tensor, prompts: list[str], metadata: Meta) -> Tensor:
        self.calls.append((threading.current_thread().name, time.perf_counter()))
        return images.requires_grad_().amax((1, 2, 3)) * self.factor


def mine(name: str, weight: float = 1.0, term: str | None = None, **kwargs: Any) -> FlowRewardFunctionConfig:
    return entry(term, f"{HERE}:{name}", weight, **kwargs)


def some(*texts: str, value: float = 0.5, **meta: Any) -> tuple[Tensor, list[Prompt]]:
    """Images of one value, and their prompts."""
    prompts = [Prompt(text, i, dict(meta)) for i, text in enumerate(texts)]
    return torch.full((len(texts), 3, 8, 8), value), prompts


# --- running


def vandal(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    images.numpy()[:] = 0
    prompts.clear()
    for meta in metadata:
        meta["nested"]["list"].clear()
        meta.clear()
    return [0.0] * len(images)


def witness(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    return [float(image.sum()) + len(meta["nested"]["list"]) for image, meta in zip(images, metadata, strict=True)]


def test_a_reward_has_its_arguments_to_itself() -> None:
    """Neither other rewards nor the caller see the changes that a reward makes."""
    reward = rewards(mine("vandal"), mine("witness"), mine("vandal", term="again"))
    images, prompts = some("a", "b", value=1.0, nested={"list": [1, 2]})
    reward.submit(images, prompts)
    assert reward.collect()["witness"].tolist() == [194.0, 194.0]
    assert images.eq(1).all() and [p.meta for p in prompts] == [{"nested": {"list": [1, 2]}}] * 2


class Mute(Exception):
    def __str__(self) -> str:
        raise OSError


def raises_mute(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    raise Mute


def leaves(images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
    sys.exit(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_whatever_a_reward_raises_is_named(overlap: bool) -> None:
    left = f"SystemExit: 0 at {__file__}:{leaves.__code__.co_firstlineno + 1}"
    for name, said in (("raises_mute", "Mute: (its str() raised OSError)"), ("leaves", left)):
        reward = rewards(mine(name), overlap=overlap)
        reward.submit(*some("a"))
        with pytest.raises(RewardError) as error:
            reward.collect()
        message = f"reward '{name}' raised {said} on the prompt \"a\""
        if name == "leaves":
            assert str(error.value) == message
        else:
            line = str(error.value).removeprefix(f"{message}, at {__file__}:")
            assert "raise" in SOURCE[int(line) - 1]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reward_that_leaves_beside_wandb(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of wandb replaces `sys.exit` by its own function."""
    from wandb.sdk.lib.exit_hooks import ExitHooks

    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ExitHooks().hook()
    test_whatever_a_reward_raises_is_named(overlap)


class Gone:
    def __init__(self) -> None:
        sys.exit(0)

    def __call__(self, images: Tensor, prompts: list[str], metadata: Meta) -> list[float]:
        return []


def test_a_reward_that_leaves_as_it_is_made() -> None:
    with pytest.raises(ConfigError) as error:
        rewards(mine("Gone"))
    line = Gone.__init__.__code__.co_firstlineno + 1
    assert str(error.value) == f"reward.functions[0] (Gone): SystemExit: 0 at {__file__}:{line}"
    with pytest.raises(ConfigError) as error:
        rewards(entry(path="builtins:int"))
    expected = "expected a function or class written in Python"
    assert str(error.value) == f"reward.functions[0].kwargs: int has no signature; {expected}"


def test_all_kinds_of_numbers_in_the_order_of_submission() -> None:
    reward = rewards(mine("listed"), mine("array"), mine("OnDevice", factor=2.0), num_workers=3)
    for i in range(5):
        reward.submit(*some("a" * i, "b", value=i / 8, bonus=10 * i))
    terms = reward.collect()
    assert terms["listed"].tolist() == [v for i in range(5) for v in (11 * i, 10 * i + 1)]
    assert terms["array"].tolist() == [0, 1] * 5
    assert terms["OnDevice"].tolist() == [i / 4 for i in range(5) for _ in range(2)]
    assert not terms["OnDevice"].requires_grad
    assert scored(reward) == {"listed": [], "array": [], "OnDevice": []}


def test_scores_are_kept_though_the_reward_reuses_its_buffer() -> None:
    reward = rewards(mine("reuses_its_buffer"))
    assert scored(reward, *map(some, ("a", "bb", "ccc"))) == {"reuses_its_buffer": [1, 2, 3]}


def done(reward: RewardSet) -> bool:
    """Whether all calls so far have ended."""
    return all(call.task is not None and call.task.done() for call in reward._calls)


def test_cpu_rewards_overlap_with_sampling() -> None:
    """The same work with and without overlap: with it, only the last micro-batch is waited for."""

    overlapped = rewards(mine("nap", seconds=0.1))
    for _ in range(4):
        wait_for(lambda: done(overlapped))  # the next micro-batch is sampled for at least as long
        overlapped.submit(*some("a", "b"))
    sampled = time.perf_counter()
    overlapped.collect()
    assert len(overlapped.spans) == 4 and overlapped.busy_s >= 0.4
    assert all(end < sampled for _, end in overlapped.spans[:3])

    after = rewards(mine("nap", seconds=0.1), overlap=False)
    for _ in range(4):
        after.submit(*some("a", "b"))
    sampled = time.perf_counter()
    after.collect()
    assert all(start > sampled for start, _ in after.spans)
    assert time.perf_counter() - sampled >= 0.4


def test_a_call_is_cut_over_the_workers() -> None:
    """Samples that are scored independently have the scores and the order of a single call."""
    listing = mine("listed", term="whole"), mine("listed", term="cut")
    listing[1].per_sample = True
    batches = [some(*("x" * (i + k) for i in range(11)), bonus=0) for k in (1, 12)] + [some("last", bonus=0)]
    reward = rewards(*listing, num_workers=3)
    found = scored(reward, *batches)
    assert found["cut"] == found["whole"] == [*range(1, 23), 4]
    assert len(reward.spans) == 3 + 6 + 6 + 1
    meeting = mine("meets")
    meeting.per_sample = True
    reward = rewards(meeting, num_workers=4)
    reward.submit(*some(*"abcdefgh"))
    reward.collect()
    assert len(reward.spans) == 8


def test_which_calls_are_cut(tmp_path: Path) -> None:
    """Calls of built-in rewards on the CPU are split, and of others if the configuration says so."""
    (tmp_path / "own.py").write_text("def own(images, prompts, metadata):\n    return [0.0] * len(images)\n")
    own = entry(path=f"{tmp_path / 'own.py'}:own")
    http = entry("http", url="http://127.0.0.1:1")
    assert [term.per_sample for term in rewards(own, entry("jpeg_compressibility"), http).terms] == [False, True, False]
    own.per_sample = True
    jpeg = entry("jpeg_compressibility")
    jpeg.per_sample = False
    assert [term.per_sample for term in rewards(own, jpeg).terms] == [True, False]
    device = mine("OnDevice")
    device.per_sample = True
    assert told(ConfigError, rewards, device) == (
        "reward.functions[0].per_sample: OnDevice does not run on the threads of reward.num_workers, which could "
        "share a call; leave it out"
    )


def test_device_rewards_run_after_the_rollout_one_at_a_time() -> None:
    reward = rewards(mine("OnDevice", term="a"), mine("OnDevice", term="b"), num_workers=4)
    instances = [term.function for term in reward.terms]
    assert all(isinstance(r, OnDevice) and r.device == "cpu" for r in instances)
    for _ in range(3):
        reward.submit(*some("x"))
    time.sleep(0.05)
    assert [r.calls for r in instances] == [[], []]
    sampled = time.perf_counter()
    reward.collect()
    assert {name for r in instances for name, _ in r.calls} == {"reward-device-0"}
    assert all(at > sampled for r in instances for _, at in r.calls)


def test_configured_device_can_be_overridden() -> None:
    (term,) = rewards(mine("OnDevice", device="meta")).terms
    assert term.function.device == "meta"


# --- failures


def test_a_reward_that_raises_is_named_with_its_prompts() -> None:
    reward = rewards(mine("brightness"), mine("boom", term="fragile"))
    reward.submit(*some("fine"))
    with pytest.raises(RewardError) as error:
        reward.submit(*some("x " * 100, "bad", "bad", "other"))
        reward.collect()
    shown = ("x " * 100)[:120]
    problem = f"KeyError: 'no\\nsuch thing' on the prompts \"{shown}…\" (+2 more)"
    assert re.fullmatch(re.escape(f"reward 'fragile' raised {problem}, at {__file__}:") + r"\d+", str(error.value))
    assert isinstance(error.value, JobError)
    assert isinstance(error.value.__cause__, KeyError) and error.value.__cause__.__traceback__ is not None


def test_a_failure_is_seen_at_the_next_micro_batch_and_not_only_at_the_end() -> None:
    reward = rewards(mine("boom"))
    with pytest.raises(RewardError, match=r"^reward 'boom' raised KeyError: .* on the prompt \"bad\", at .*:\d+$"):
        reward.submit(*some("bad"))
        wait_for(lambda: done(reward))
        reward.submit(*some("fine"))


def test_a_later_failure_does_not_wait_for_an_earlier_slow_call() -> None:
    reward = rewards(mine("nap", seconds=60.0), mine("boom"), num_workers=2)
    begin = time.perf_counter()
    with pytest.raises(RewardError, match=r"^reward 'boom' raised"):
        reward.submit(*some("bad"))
        reward.collect()
    assert time.perf_counter() - begin < 30


ALL = 'on the prompts "a" (+1 more)'
THREE = f"{ALL}; expected 3 numbers: a list, an array or a tensor"
NOT_NAMED = "expected those that `extras` of its class, derived from RewardWithExtras, names"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, f"returned a NoneType instead of numbers {THREE}"),
        ([0.0, "good", 1.0], f"returned a list with 'good' as scores[1] instead of numbers {THREE}"),
        ([0.0, None, 1.0], 'has no score for 1 of 3 images on the prompt "b": scores[1] is None'),
        (([0.0, 0.0, 0.0], {}), f"returned a tuple instead of numbers {THREE}"),
        ([1.0, 2.0], f"returned 2 scores for 3 images {THREE}"),
        ([[1.0], [2.0], [3.0]], f"returned scores of shape [3, 1] for 3 images {THREE}"),
        (0.5, f"returned scores of shape [] for 3 images {THREE}"),
        (
            [0.0, 1e38, 1.0],
            'returned 9.999999680285692e+37 for 1 of 3 images on the prompt "b"; expected finite numbers up to 1e+18',
        ),
        ([0.0, float("nan"), 1.0], 'returned nan for 1 of 3 images on the prompt "b"; expected finite numbers'),
        (
            [float("-inf"), 0.0, float("nan")],
            'returned -inf for 2 of 3 images on the prompt "a"; expected finite numbers',
        ),
        (RewardOutput([0.0, 1.0, 2.0], {"odd": [0, 1, 0]}), f"returned the extras odd {ALL}; {NOT_NAMED}: none"),
    ],
)
def test_what_a_reward_must_not_return(value: Any, message: str) -> None:
    reward = rewards(mine("gives", value=value))
    assert told(RewardError, scored, reward, some("a", "b", "a")) == f"reward 'gives' {message}"


def test_what_is_forgiven_has_no_score_and_a_reason() -> None:
    reward = rewards(mine("brightness"), mine("boom"), on_error="skip")
    found = scored(reward, some("fine", "bad"), some("fine"))
    assert np.isfinite(found["brightness"]).all()
    assert np.isnan(found["boom"]).tolist() == [True, True, False]  # only the samples of that call
    problem = "reward 'boom' raised KeyError: 'no\\nsuch thing' on the prompts \"fine\" (+1 more), at "
    assert reward.problem is not None and reward.problem.startswith(problem)
    assert (
        scored(reward, some("fine"))["boom"] == [0.0] and reward.problem is None
    )  # `problem` is that of the last collection
    reward = rewards(mine("gives", value=[0.5, float("inf"), float("nan")]), on_error="zero")
    found = scored(reward, some("a", "b", "c"))
    assert found["gives"][0] == 0.5 and np.isnan(found["gives"][1:]).all()
    reward = rewards(mine("gives", value=[0.5, None, 1.0]), on_error="skip")
    assert str(scored(reward, some("a", "b", "c"))) == "{'gives': [0.5, nan, 1.0]}"
    assert reward.problem == "reward 'gives' has no score on the prompt \"b\": scores[1] is None"
    reward = rewards(mine("gives", value=[0.5, float("inf"), float("nan")]), on_error="zero")
    scored(reward, some("a", "b", "c"))
    assert reward.problem == "reward 'gives' returned NaN, infinity or more than 1e+18 on the prompts \"b\" (+1 more)"


def test_a_frame_without_a_score_takes_its_video_with_it() -> None:
    function = entry("brightness", path=f"{HERE}:second_is_lost")
    function.frames = 2
    reward = rewards(function, on_error="skip")
    videos = torch.rand(2, 2, 3, 4, 4)
    (values,) = scored(reward, (videos, [Prompt("a", 0, {}), Prompt("b", 1, {})])).values()
    assert np.isnan(values).tolist() == [True, False]
    assert reward.problem == "reward 'brightness' returned NaN, infinity or more than 1e+18 on the prompt \"a\""


def test_what_is_wrong_at_every_call_is_not_forgiven() -> None:
    reward = rewards(mine("gives", value=[1.0, 2.0]), on_error="zero")
    assert (
        told(RewardError, scored, reward, some("a", "b", "a"))
        == f"reward 'gives' returned 2 scores for 3 images {THREE}"
    )


def test_extras_are_rows_of_their_own() -> None:
    reward = rewards(mine("Extras", extras=["even", "odd"]), mine("brightness"), num_workers=2)
    reward.submit(*some("0", "1", extras={"odd": [0, 1], "even": [1, 0]}))
    reward.submit(*some("3", extras={"odd": [1], "even": [0]}))
    terms = reward.collect()
    assert list(terms) == ["Extras", "Extras_even", "Extras_odd", "brightness"]
    assert (terms["Extras_odd"].tolist(), terms["Extras_even"].tolist()) == ([0, 1, 1], [1, 0, 0])
    assert reward.weighted(terms).tolist() == [0.5 + 2] * 3  # extras are not part of the reward
    one = "expected 1 numbers: a list, an array or a tensor"
    for extras, message in (
        ({"odd": [0]}, f"reward 'Extras' returned the extras odd on the prompt \"a\"; {NOT_NAMED}: even, odd"),
        (
            {"even": [1], "odd": [0, 1]},
            f"reward 'Extras_odd' returned 2 scores for 1 images on the prompt \"a\"; {one}",
        ),
    ):
        wrong = rewards(mine("Extras", extras=["even", "odd"]))
        assert told(RewardError, scored, wrong, some("a", extras=extras)) == message


@pytest.mark.parametrize("overlap", [True, False])
def test_a_reward_that_hangs_ends_the_collection(overlap: bool) -> None:
    reward = rewards(mine("sleeps_on_slow"), overlap=overlap, timeout_s=0.6)
    begin = time.perf_counter()
    for text in ("a", "b", "slow", "c"):
        reward.submit(*some(text))
    assert told(RewardError, reward.collect) == (
        "reward 'sleeps_on_slow' ran longer than reward.timeout_s=0.6 seconds on the prompt \"slow\""
    )
    assert time.perf_counter() - begin < 30


def test_the_time_limit_holds_for_a_call_and_not_for_the_queue() -> None:
    reward = rewards(mine("nap", seconds=0.3), timeout_s=1)
    assert len(scored(reward, *[some("a")] * 4)["nap"]) == 4  # 1.2 seconds in all


def test_the_process_exits_although_a_reward_hangs(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import time\ndef forever(images, prompts, metadata):\n    time.sleep(600)\n    return [0.0]\n"
    )
    code = f"""if True:
        import torch
        from phalanx.types import Prompt
        from tests.helpers.rewards import entry, rewards, scored

        reward = rewards(entry(path="{tmp_path}/hang.py:forever"), timeout_s=0.2)
        scored(reward, (torch.zeros(1, 3, 8, 8), [Prompt("stuck", 0, {{}})]))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "phalanx.rewards.base.RewardError: reward 'forever' ran longer than reward.timeout_s=0.2 seconds "
        'on the prompt "stuck"'
    )


# --- the rewards without a model


def test_jpeg_rewards_are_the_file_size_in_kilobytes() -> None:
    from io import BytesIO

    from PIL import Image

    noise = torch.rand(3, 3, 40, 24, generator=torch.Generator().manual_seed(0))
    images = torch.stack([noise[0], noise[1], torch.full((3, 40, 24), 0.5)])
    expected = []
    for image in images:
        buffer = BytesIO()
        pixels = np.rint(image.permute(1, 2, 0).numpy() * 255).astype(np.uint8)
        Image.fromarray(pixels, "RGB").save(buffer, "JPEG", quality=95)
        expected.append(len(buffer.getvalue()) / 1000)
    batch = images, some("a", "b", "c")[1]
    terms = scored(rewards(entry("jpeg_compressibility", weight=0.5), entry("jpeg_incompressibility")), batch)
    assert terms["jpeg_incompressibility"] == pytest.approx(expected)
    assert terms["jpeg_compressibility"] == pytest.approx([-size for size in expected])
    assert expected[2] < min(expected[:2]) / 2  # a uniform image has the smaller file
    coarse = scored(rewards(entry("jpeg_incompressibility", quality=10)), batch)["jpeg_incompressibility"]
    assert max(coarse[:2]) < min(expected[:2]) / 2
