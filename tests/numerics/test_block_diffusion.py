"""All states of a response in one pass equal one state at a time and the rollout's, with the same gradient."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from phalanx.config.lm import LMDataConfig, LMRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.ranges import ESTIMATES
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.functional.block_states import BlockTrace, States, confident, least_unmasked, replayed, states_of
from phalanx.functional.tokens import Truncation
from phalanx.models.lm.blocks import BlockDiffusionPolicy, build_block_policy
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.denoise_blocks import Denoising, drawn_tokens
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import Drawn, hand_over
from phalanx.types import Prompt, Samples
from phalanx.zoo.rewards.text.overlong import Overlong
from tests.helpers.policies import disturb

SIZE = 4
PROMPTS = ["Ann has 3 books.", "How many?", "Kim sells 24 stamps on Monday and 9 more than that on Tuesday."]


def policy_of(folder: Path, world: World, estimate: str = "trace", **keys: Any) -> BlockDiffusionPolicy:
    config = LMModelConfig(path=str(folder), dtype="float32", block_size=SIZE, **keys)
    data = LMDataConfig(max_prompt_length=64, max_response_length=16)
    options: dict[str, Any] = {"chunk": 5, "temperature": 0.7, "seed": 0, "add_mask": True, "estimate": estimate}
    policy = build_block_policy(config, ParallelConfig(), data, world, **options)
    disturb(policy, 0.02)
    return policy


def sampled(policy: BlockDiffusionPolicy, world: World, **keys: Any) -> tuple[Samples, BlockDiffusionRollout]:
    """Three samples for each prompt; the prompts end anywhere in a block."""
    config = LMRolloutConfig(n=3, temperature=0.7, **keys)
    rollout = BlockDiffusionRollout(policy, config, world, 9, None)
    prompts = [Prompt(text, i, {}) for i, text in enumerate(PROMPTS)]
    with rollout.awake():
        return rollout.sample(prompts, seed=1, step=0, each=lambda outputs, prompts: None), rollout


def predicted(policy: BlockDiffusionPolicy, row: Tensor) -> Tensor:
    """Log-probabilities [L, V] of the plain model; a token of ids [L] attends to its block and those before."""
    at = torch.arange(len(row)) // SIZE
    mask = torch.zeros(len(row), len(row)).masked_fill(at[:, None] < at, torch.finfo(torch.float32).min)
    logits = policy.trained.module.lm(input_ids=row[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    logits = logits.index_fill(-1, torch.tensor([policy.mask_id]), -torch.inf)
    return (logits / 0.7).log_softmax(-1)


def one_at_a_time(policy: BlockDiffusionPolicy, trace: BlockTrace) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [B, A]: the plain model on each state separately, in a loop."""
    found, entropy = torch.zeros(trace.step.shape), torch.zeros(trace.step.shape)
    for i in range(len(trace.ids)):
        start, length = int(trace.starts[i]), int(trace.lengths[i])
        tokens, steps = trace.ids[i, : start + length], trace.step[i, :length]
        for b in range(start // SIZE, (start + length) // SIZE):
            inside = [j for j in range(length) if (start + j) // SIZE == b]
            for k in sorted({int(steps[j]) for j in inside}):
                row = tokens[: (b + 1) * SIZE].clone()
                for j in inside:
                    if steps[j] >= k:
                        row[start + j] = policy.mask_id
                p = predicted(policy, row)
                for j in inside:
                    if steps[j] == k:
                        found[i, j] = p[start + j, tokens[start + j]]
                        entropy[i, j] = torch.distributions.Categorical(logits=p[start + j]).entropy()
    return found, entropy


def gradient(policy: BlockDiffusionPolicy, log_prob: Tensor) -> list[Tensor]:
    weight = torch.linspace(0.5, 2, log_prob.numel()).view_as(log_prob)
    parameters = list(policy.trained.parameters.values())
    return list(torch.autograd.grad((log_prob * weight).sum(), parameters))


@pytest.mark.parametrize(
    "keys",
    [{}, {"gradient_checkpointing": True}, {"attn_implementation": "eager"}],
    ids=["plain", "checkpointing", "eager"],
)
def test_the_replay_is_one_state_at_a_time(keys: dict[str, Any], lm_folder: Path, world: World) -> None:
    policy = policy_of(lm_folder, world, **keys)
    samples, _ = sampled(policy, world, threshold=0.02)
    trace: BlockTrace = samples.trace
    steps = {int(s) for s in trace.step[trace.mask]}
    assert len(steps) > 2 and (trace.starts % SIZE).unique().numel() > 1, "the samples are of many kinds"
    replay = policy.replay(trace)
    expected, entropy = one_at_a_time(policy, trace)
    torch.testing.assert_close(replay.log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(replay.entropy, entropy, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradient(policy, replay.log_prob), gradient(policy, expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(policy.replay(trace).log_prob, replay.log_prob)


@pytest.mark.parametrize("keys", [{"threshold": 0.02}, {"threshold": 1.0}, {"denoising_steps_per_block": 2}])
@pytest.mark.parametrize("confidence", ["distribution", "token"])
def test_the_replay_says_what_the_rollout_said(
    keys: dict[str, Any], confidence: str, lm_folder: Path, world: World
) -> None:
    policy = policy_of(lm_folder, world)
    samples, rollout = sampled(policy, world, confidence=confidence, **keys)
    said = torch.zeros(samples.mask.shape)
    for i, drawn in enumerate(rollout.drawn):
        said[i, : len(drawn.log_probs)] = torch.tensor(drawn.log_probs)
    assert torch.equal(said != 0, samples.mask)
    torch.testing.assert_close(policy.replay(samples.trace).log_prob, said, rtol=1e-5, atol=1e-5)
    if "denoising_steps_per_block" in keys:
        assert int(samples.trace.step.max()) == 1
    if keys.get("threshold") == 1.0:
        assert rollout.metrics(samples, torch.zeros(9))["rollout/tokens_per_forward"] == 1.0


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_pass_may_be_trimmed(estimate: str, lm_folder: Path, world: World) -> None:
    policy = policy_of(lm_folder, world, estimate)
    samples, _ = sampled(policy, world, threshold=0.02)
    part = samples.trace.select(torch.tensor([0, 5]))
    whole = policy.replay(part).log_prob
    policy.trim = True
    torch.testing.assert_close(policy.replay(part).log_prob, whole, rtol=1e-5, atol=1e-5)


def test_a_pass_is_as_wide_as_its_widest_sample(lm_folder: Path, world: World) -> None:
    """For a long prompt with few states and a short one with many; a token budget counts this width."""
    policy = policy_of(lm_folder, world)
    samples, _ = sampled(policy, world, threshold=0.02)
    trace: BlockTrace = samples.trace
    at_once = torch.arange(9)[:, None] >= 6  # for the last prompt, the longest
    trace = replace(trace, step=torch.where(at_once & trace.mask, 0, trace.step))
    length, states = trace.starts + trace.lengths, (policy.states(trace) - 1) * SIZE
    wanted = length + states
    assert wanted.max() < length.max() + states.max()
    whole, seen = policy.replay(trace).log_prob, []
    policy.trim = True
    forward = policy.trained.module.forward

    def watched(states: States, *args: Any) -> Any:
        seen.append(states.tokens.shape[1])
        return forward(states, *args)

    with patch.object(policy.trained.module, "forward", watched):
        log_prob = policy.replay(trace).log_prob
    assert seen == [int(wanted.max())]
    torch.testing.assert_close(log_prob, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_estimates_mask_what_their_papers_say(estimate: str, lm_folder: Path, world: World) -> None:
    policy = policy_of(lm_folder, world, estimate)
    samples, _ = sampled(policy, world, threshold=0.02)
    trace: BlockTrace = samples.trace
    found = policy.replay(trace).log_prob
    views = replayed(trace, estimate)
    if estimate == "block_mean_field":
        at_once = replace(trace, step=torch.where(trace.mask, 0, -1))
        expected, _ = one_at_a_time(policy, at_once)
    elif estimate == "mean_field":
        expected = torch.zeros_like(found)
        for i in range(len(trace.ids)):
            start, length = int(trace.starts[i]), int(trace.lengths[i])
            row = trace.ids[i, : start + length].clone()
            row[start:] = policy.mask_id
            targets = trace.ids[i, start : start + length]
            expected[i, :length] = predicted(policy, row)[start:].gather(1, targets[:, None])[:, 0]
    elif estimate == "trace":
        expected, _ = one_at_a_time(policy, trace)
    else:
        # each view separately: all of its masked tokens are scored at once
        expected = torch.zeros_like(found)
        for v in range(views.masked.shape[2]):
            only = replace(views, masked=views.masked[:, :, v : v + 1], weight=views.weight[:, :, v : v + 1])
            states = states_of(trace.ids, only, mask_id=policy.mask_id, count=int(only.count.max()))
            assert torch.equal(states.weight != 0, (states.weight != 0) & (states.target != policy.mask_id))
            for i in range(len(trace.ids)):
                for c in range(states.weight.shape[1]):
                    asked = (states.weight[i, c] != 0).nonzero().flatten()
                    if len(asked) == 0:
                        continue
                    first = int(states.place[i, c, 0])
                    row = trace.ids[i, : first + SIZE].clone()
                    row[states.place[i, c, asked]] = policy.mask_id
                    p = predicted(policy, row)
                    for place in (asked + first).tolist():
                        weight = states.weight[i, c, place - first]
                        expected[i, place - int(trace.starts[i])] += weight * p[place, trace.ids[i, place]]
        total = views.weight.sum(2)[trace.steps >= 0]
        if estimate == "coupled":
            assert views.masked.sum() == 2 * (trace.steps >= 0).sum()
            assert bool(((total > 1.1) & (total < 3.1)).all())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_reward_counts_a_response_up_to_its_end() -> None:
    """A response of 6 tokens including its end has 2 more in its last block: overlong's limit of 8 is not reached."""
    drawn = Drawn([1], [5] * 8, "text", truncated=False, steps=[0] * 8, behind=2)
    handed: list[Prompt] = []
    hand_over([Prompt("?", 0, {})], [drawn], Decoding(8, 1.0, [0], 0), lambda _, prompts: handed.extend(prompts), 1)
    (meta,) = [prompt.meta for prompt in handed]
    assert meta == {"response_length": 6, "max_response_length": 8, "truncated": False}
    assert Overlong(4)(["text"], ["?"], [meta]) == [-0.5]


def test_the_surest_positions_are_unmasked() -> None:
    masked = torch.tensor([[True, True, False, True]])
    sure = torch.tensor([[0.5, 0.95, 0.99, 0.92]])
    assert confident(sure, masked, least=1, threshold=0.9).tolist() == [[False, True, False, True]]
    assert confident(sure, masked, least=3, threshold=0.9).tolist() == [[True, True, False, True]]
    assert confident(sure, masked, least=1, threshold=0.99).tolist() == [[False, True, False, False]]
    assert [least_unmasked(4, k) for k in (1, 2, 3, 4)] == [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    "keys", [{}, {"temperature": 0.0}, {"truncation": Truncation(top_p=0.8)}, {"confidence": "token"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draw_in_parts_is_the_draw(keys: dict[str, Any], dtype: torch.dtype) -> None:
    how = replace(Denoising(limit=16, temperature=0.7, ends=(1,), pad=0, size=SIZE, steps=SIZE, mask_id=5), **keys)
    stream = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(6, SIZE, 1000, generator=stream)).to(dtype)
    uniform, masked = (torch.rand(6, SIZE, generator=stream) for _ in range(2))
    whole = drawn_tokens(logits, masked < 0.8, uniform, how)
    for rows in (1, 7):
        with patch("phalanx.rollout.lm.denoise_blocks.TOGETHER", rows * 1000 + 999):
            parts = drawn_tokens(logits, masked < 0.8, uniform, how)
        assert all(torch.equal(one, other) for one, other in zip(parts, whole, strict=True))
    assert 12 < len(whole[0]) < 24 and not (whole[0] == how.mask_id).any()
