"""top_k, top_p and min_p: log-probabilities are those of the truncated distributions."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.functional.tokens import TokenTrace, Truncation, sampled_from, token_scores
from phalanx.rollout.lm.decode import Decoding, draw
from tests.helpers.jobs import assert_same_weights, rows
from tests.helpers.lm import fit, one_step, tiny_lm_config
from tests.helpers.ranks import run_ranks

TRUNCATIONS = [Truncation(top_k=4), Truncation(top_p=0.7), Truncation(min_p=0.3), Truncation(5, 0.8, 0.05)]
TOP_P = ("rollout.top_p=0.9", "rollout.temperature=0.8")


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(), [1, 1, 1, 1, 0]),
        (Truncation(top_k=2), [1, 1, 0, 0, 0]),
        (Truncation(top_k=1), [1, 0, 0, 0, 0]),
        (Truncation(top_p=0.7), [1, 1, 0, 0, 0]),
        (Truncation(top_p=0.41), [1, 1, 0, 0, 0]),
        (Truncation(top_p=0.39), [1, 0, 0, 0, 0]),
        (Truncation(min_p=0.6), [1, 1, 0, 0, 0]),
        (Truncation(min_p=0.4), [1, 1, 1, 0, 0]),
        # among the two likeliest tokens, the first has probability 4 / 7
        (Truncation(top_k=2, top_p=0.55), [1, 0, 0, 0, 0]),
        (Truncation(top_k=2, top_p=0.6), [1, 1, 0, 0, 0]),
        (Truncation(min_p=0.6, top_p=0.55), [1, 0, 0, 0, 0]),
    ],
)
def test_the_tokens_that_are_kept(truncation: Truncation, expected: list[int]) -> None:
    """For probabilities in any order, by hand."""
    p, order = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64), torch.tensor([3, 0, 4, 2, 1])
    kept = truncation.kept(torch.stack([p, p[order]]))
    assert kept[0].int().tolist() == expected and torch.equal(kept[1], kept[0][order])


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_log_probs_are_those_of_what_is_drawn(truncation: Truncation) -> None:
    """The frequency of each token in 20,000 draws is exp(log_prob); these sum up to 1 over the kept tokens."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    uniform = (torch.arange(20000) + 0.5) / 20000
    drawn = draw(logits.expand(20000, -1), uniform, Decoding(1, 0.7, [], 0, truncation))
    share = torch.bincount(drawn, minlength=12) / 20000
    tokens = torch.unique(drawn)
    assert len(tokens) < 12
    states = logits.expand(len(tokens), -1)
    pool = sampled_from(states, torch.nn.Identity(), tokens, truncation, temperature=0.7, chunk=3)
    log_prob, entropy, certainty = token_scores(
        states, torch.nn.Identity(), tokens, temperature=0.7, chunk=3, pool=pool
    )
    assert pool[1].tolist() == [len(tokens)] * len(tokens) and torch.equal(pool[0], tokens.int().repeat(len(tokens)))
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(log_prob.exp(), share[tokens], rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy, -(log_prob.exp() * log_prob).sum().expand_as(entropy))
    _, _, whole = token_scores(states, torch.nn.Identity(), tokens, temperature=0.7, chunk=3)
    assert torch.equal(certainty, whole)


@pytest.mark.parametrize("chunk", [7, 2])
def test_the_gradient_is_that_of_a_masked_softmax(chunk: int) -> None:
    """For log-probs and entropy, with recomputed chunks, and weights that changed since the tokens were kept."""
    torch.manual_seed(0)
    head, tokens = torch.nn.Linear(6, 11, bias=False), torch.randint(11, (7,))
    hidden = torch.linspace(-1, 1, 42).view(7, 6)
    truncation = Truncation(top_p=0.6, top_k=6)
    pool = sampled_from(hidden, head, tokens, truncation, temperature=0.7, chunk=chunk)
    with torch.no_grad():
        head.weight += 0.3 * torch.randn_like(head.weight)
    inside = torch.zeros(7, 11, dtype=torch.bool)
    for row, kept in enumerate(pool[0].split(pool[1].tolist())):
        inside[row, kept.long()] = True
        assert tokens[row] in kept  # truncation excludes some tokens
    assert inside.sum() < 77

    def gradient(log_prob: Tensor, entropy: Tensor) -> list[Tensor]:
        weights = torch.arange(1.0, 8.0)
        return list(torch.autograd.grad((weights * (log_prob - 0.3 * entropy)).sum(), [states, head.weight]))

    states = hidden.clone().requires_grad_()
    log_p = (head(states) / 0.7).masked_fill(~inside, -math.inf).log_softmax(-1)
    plain = log_p.masked_fill(~inside, 0.0)
    expected = log_p[torch.arange(7), tokens], -(plain.exp() * plain).masked_fill(~inside, 0.0).sum(-1)
    scores = token_scores(states, head, tokens, temperature=0.7, chunk=chunk, pool=pool)
    torch.testing.assert_close(scores[:2], expected)
    torch.testing.assert_close(gradient(*scores[:2]), gradient(*expected))


def test_what_was_kept_stays_with_its_sample() -> None:
    """In passes over parts of the samples, each padded to its own width."""
    lengths = torch.tensor([2, 3, 1])
    trace = TokenTrace(torch.zeros(3, 8, dtype=torch.long), torch.tensor([4, 4, 4]), lengths, 3)
    of_tokens = [[[1, 2], [3]], [[4], [5, 6, 7], [8]], [[9]]]

    def part(rows: list[int]) -> TokenTrace:
        """Some of the samples, with their kept tokens."""
        some = trace.select(torch.tensor(rows))
        sets = [kept for row in rows for kept in of_tokens[row]]
        flat = torch.tensor([token for kept in sets for token in kept], dtype=torch.int32)
        counts, kept = some.pooled(flat, torch.tensor([len(kept) for kept in sets], dtype=torch.int32))
        return TokenTrace(some.ids, some.starts, some.lengths, 3, counts=counts, kept=kept)

    joined = TokenTrace.joined([part([2]), part([0, 1])])
    for some in ([0, 1, 2], [1], [2, 0], [0]):
        pool = joined.select(torch.tensor([[1, 2, 0][row] for row in some])).pool
        assert pool is not None
        sets = [kept.tolist() for kept in pool[0].split(pool[1].tolist())]
        assert sets == [kept for row in some for kept in of_tokens[row]]


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm.kl_loss_coef=0.04", "actor.ppo_epochs=2"),
        ("algorithm.kl_loss_coef=0.04", "actor.ppo_mini_batch_size=4"),  # one update, with a reference
        ("actor.ppo_mini_batch_size=4",),
        ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=128"),
    ],
    ids=str,
)
def test_a_step_of_truncated_samples(keys: tuple[str, ...], lm_folder: Path, tmp_path: Path) -> None:
    """The first ratio is 1, log-probs exceed those of whole distributions, and the reference equals the policy."""
    (whole,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "whole", TOP_P[1], *keys))
    (step,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "top_p", *TOP_P, *keys))
    exact = 0.0 if len(keys) < 3 else 2e-6
    assert step["row"]["actor/first_ratio_error"] <= exact
    assert step["row"]["actor/entropy"] < whole["row"]["actor/entropy"]
    assert step["texts"] != whole["texts"] and step["row"]["actor/grad_norm"] > 1e-4


def test_layouts_agree(lm_folder: Path, tmp_path: Path) -> None:
    """Two ranks take the same step as one; recomputed layers and logits do not change ratios."""
    keys = (*TOP_P, "rollout.min_p=0.01", "algorithm.kl_loss_coef=0.04")
    (alone,) = run_ranks(one_step, 1, tiny_lm_config(lm_folder, tmp_path / "1", *keys))
    parts = run_ranks(one_step, 2, tiny_lm_config(lm_folder, tmp_path / "2", *keys, "parallel.fsdp_size=2"))
    assert torch.equal(torch.cat([part["log_prob"] for part in parts]), alone["log_prob"])
    assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)
    keys = (*keys, "algorithm.clip_ratio=0.2", "model.gradient_checkpointing=true", "actor.log_prob_chunk_size=5")
    run_ranks(fit, 1, tiny_lm_config(lm_folder, tmp_path / "3", *keys))
    for row in rows(tmp_path / "3" / "out"):
        assert row["actor/first_ratio_error"] < 1e-6 and math.isfinite(row["actor/kl_ref"])
