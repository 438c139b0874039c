"""Samples packed into one row have the same log-probabilities and gradients as with padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm import packing
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.model import CausalLM
from phalanx.types import Prompt, Samples
from tests.helpers.checks import agree_as_sums
from tests.helpers.policies import disturb

STARTS, LENGTHS = [4, 9, 1, 4, 4], [3, 11, 1, 7, 1]
GROUPED = {"use_prefix_grouper": True, "gradient_checkpointing": True}


def trace() -> TokenTrace:
    """Samples of very different lengths; the first, the fourth and the last share a prompt."""
    ids = torch.randint(3, 400, (5, 20), generator=torch.Generator().manual_seed(0))
    ids[3:, :4] = ids[0, :4]
    return TokenTrace(ids, torch.tensor(STARTS), torch.tensor(LENGTHS), 11)


def scored(policy: LMPolicy) -> list[Tensor]:
    """Log-probs, entropies, and the gradient of a weighted sum of them."""
    replay = policy.replay(trace())
    weight = torch.linspace(0.5, 2, replay.log_prob.numel()).view_as(replay.log_prob)
    (replay.log_prob * weight + replay.entropy).sum().backward()
    gradient = [p.grad for p in policy.trained.parameters.values() if p.grad is not None]
    assert len(gradient) == len(policy.trained.parameters)
    return [replay.log_prob.detach(), replay.entropy.detach(), *gradient]


@pytest.mark.parametrize(
    "keys",
    [{}, {"gradient_checkpointing": True}, {"lora_rank": 4, "gradient_checkpointing": True}, {**GROUPED}],
    ids=["full", "checkpointing", "lora", "prompts once"],
)
def test_a_packed_pass_is_a_padded_one(keys: dict[str, Any], lm_folder: Path, world: World) -> None:
    found = []
    for packed in (False, True):
        config = LMModelConfig(path=str(lm_folder), dtype="float32", use_remove_padding=packed)
        if packed or "use_prefix_grouper" not in keys:
            config = replace(config, **keys)
        data = LMDataConfig(max_prompt_length=64, max_response_length=16)
        policy = build_policy(config, ParallelConfig(), data, world, chunk=5, temperature=0.7, seed=0)
        disturb(policy, 0.02)
        found.append(scored(policy))
    for padded, packed_ in zip(*found, strict=True):
        agree_as_sums(packed_, padded)


def test_conversations_are_replayed_as_their_turns_are(lm_folder: Path, world: World) -> None:
    """With answers between the sampled tokens: padded, packed, trimmed, and each turn in a separate pass after all
    earlier ones.
    """
    turns = [[(4, 3), (2, 5)], [(3, 1), (6, 2), (1, 4)], [(8, 2)]]  # alternating (given, sampled) tokens
    ids = torch.randint(3, 400, (3, 24), generator=torch.Generator().manual_seed(0))
    sampled = torch.zeros(3, 24, dtype=torch.bool)
    singly: list[tuple[int, int, int]] = []  # row, tokens before a turn, and tokens of the turn
    ends = [0, 0, 0]
    for row, said in enumerate(turns):
        for given, drawn in said:
            begin = ends[row] + given
            ends[row] = begin + drawn
            sampled[row, begin : ends[row]] = True
            singly.append((row, begin, drawn))
    starts, lengths = torch.tensor([said[0][0] for said in turns]), sampled.sum(1)
    whole = TokenTrace(ids, starts, lengths, 8, sampled=sampled, ends=torch.tensor(ends))
    found = []
    for packed, trim in ((False, False), (False, True), (True, True)):
        config = LMModelConfig(path=str(lm_folder), dtype="float32", use_remove_padding=packed)
        data = LMDataConfig(max_prompt_length=64, max_response_length=16)
        policy = build_policy(config, ParallelConfig(), data, world, chunk=5, temperature=0.7, seed=0, trim=trim)
        disturb(policy, 0.02)
        some = TokenTrace.joined([whole.select(torch.tensor([2, 0])), whole.select(torch.tensor([1]))])
        replay = policy.replay(some).log_prob.detach()[torch.tensor([1, 2, 0])]
        assert torch.equal(replay != 0, whole.mask)
        found.append(replay)
    by_turns: list[list[Tensor]] = [[], [], []]
    for row, begin, drawn in singly:
        turn = TokenTrace(ids[row : row + 1], torch.tensor([begin]), torch.tensor([drawn]), drawn)
        by_turns[row].append(policy.replay(turn).log_prob.detach()[0])
    expected = torch.zeros(3, 8)
    for row, parts in enumerate(by_turns):
        expected[row, : int(lengths[row])] = torch.cat(parts)
    for replay in found:
        torch.testing.assert_close(replay, expected, rtol=1e-5, atol=1e-5)


def test_a_prompt_of_several_samples_is_read_once() -> None:
    """The row has 3 tokens of a prompt, and those that follow it in each sample; the last sample has none to read."""
    given = trace().select(torch.tensor([0, 3, 4]))
    row = packing.Row.of(given.ids, given.stops.tolist(), [4, 4, 4], [b"", b"", b""])
    assert row.groups == [(4, [2, 6])] and row.first == [0]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]]
    read = row.read(given.ids[:, :-1])
    assert read.tolist() == [*given.ids[0, :6].tolist(), *given.ids[1, 4:10].tolist()]
    assert torch.equal(read[row.places[1, :10]], given.ids[1, :10])
    assert torch.equal(read[row.places[2, :4]], given.ids[2, :4])


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Sequence lengths in the form that flash-attention takes."""
    ends = kwargs["cu_seq_lens_q"]
    assert mask is None and ends.dtype == torch.int32 and torch.equal(ends, kwargs["cu_seq_lens_k"])
    lengths = ends.diff().tolist()
    assert max(lengths) == kwargs["max_length_q"] == kwargs["max_length_k"]
    groups = [(length, ()) for length in lengths]
    return packing.packed_sdpa(module, query, key, value, None, groups=groups, scaling=kwargs["scaling"])


@pytest.mark.parametrize("kind", ["eager", "flash_attention_2"])
def test_other_kinds_of_attention(kind: str, lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention derives the sequences from positions; flash-attention, only its call is tested, gets lengths."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    lm = AutoModelForCausalLM.from_pretrained(lm_folder, dtype=torch.float32).eval()
    found, given = [], trace()
    for row in (None, packing.Row.of(given.ids, given.stops.tolist())):
        found.append(CausalLM(lm, chunk=64)(given.ids, given.predicting, 1.0, row)[0])
        lm.config._attn_implementation = kind
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


def test_a_sliding_window_is_kept() -> None:
    """Layers with a sliding window of 4 tokens alternate with full attention."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    settings = Qwen3Config(vocab_size=400, head_dim=16, use_sliding_window=True, sliding_window=4, **sizes, **layers)
    lm, given = Qwen3ForCausalLM(settings).eval(), trace()
    padded = CausalLM(lm, chunk=64)(given.ids, given.predicting, 1.0)[0]
    lm.config._attn_implementation = packing.PACKED_SDPA
    for prompts in (None, "abcaa"):
        row = packing.Row.of(given.ids, given.stops.tolist(), STARTS, prompts)
        packed = CausalLM(lm, chunk=64)(given.ids, given.predicting, 1.0, row)[0]
        torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
    settings.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"^model\.use_remove_padding: true needs layers of attention, and qwen3 has"):
        packing.check(lm)


def test_operations_are_those_of_real_tokens(lm_folder: Path, world: World) -> None:
    """By hand, for a step with two samples for each of two prompts."""
    config = LMModelConfig(path=str(lm_folder), dtype="float32", use_remove_padding=True)
    data = LMDataConfig(max_prompt_length=64, max_response_length=16)
    policy = build_policy(config, ParallelConfig(), data, world, chunk=5, temperature=0.7, seed=0)
    lm = policy.trained.module.lm
    layers = 2 * sum(m.weight.numel() for m in lm.model.modules() if isinstance(m, torch.nn.Linear))
    head = 2 * lm.lm_head.weight.numel()
    s = lm.config
    square = 4 * s.num_hidden_layers * s.num_attention_heads * s.head_dim

    def forward(tokens: int, logits: int) -> int:
        return layers * tokens + square * tokens**2 + head * logits

    assert policy.forward_flops(7, 3) == pytest.approx(forward(7, 3), rel=1e-3)  # rotary embeddings are counted too
    prompts, lengths = [Prompt("a", i // 2, {}) for i in range(4)], torch.tensor([[4, 3], [4, 11], [9, 1], [9, 7]])
    lengths = torch.cat([lengths, lengths[:, 1:]], 1)
    samples = Samples(prompts, [], torch.zeros(4, 11), torch.ones(4, 11).bool(), None, torch.arange(4), lengths=lengths)
    scored = sum(forward(p + r, r) for p, r, _ in lengths.tolist())
    decoded = scored - forward(4, 0) - forward(9, 0)
    expected = decoded + scored * (1 + 3 * 0.5 + 1)  # half of them are trained, and a reference scores all
    found = policy.step_flops(samples, actions=11, count=4, updates=0.5, references=1.0, recomputed=False)
    assert found == pytest.approx(expected, rel=1e-3)
