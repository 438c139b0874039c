"""Log-probabilities of tokens, decoding and token losses, against plain computations."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.functional.losses import clipped_tokens, kl_estimate
from phalanx.functional.tokens import TokenTrace, Truncation, token_scores
from phalanx.models.lm.model import CausalLM
from phalanx.rollout.lm.decode import Decoding
from tests.helpers.checks import reduced
from tests.helpers.sessions import decode

PROMPTS = [[5, 9, 11, 40], [7], [8, 8, 30, 31, 32, 33, 34]]


@pytest.fixture(scope="module")
def model(lm_folder: Path) -> CausalLM:
    return CausalLM(AutoModelForCausalLM.from_pretrained(lm_folder, dtype=torch.float32).eval(), chunk=1024)


def test_scores_and_their_gradient_in_chunks() -> None:
    torch.manual_seed(0)
    head, tokens = torch.nn.Linear(6, 11, bias=False), torch.randint(11, (7,))
    gradients, results = [], []
    for chunk in (7, 2):
        hidden = torch.linspace(-1, 1, 42).view(7, 6).requires_grad_()
        scores = token_scores(hidden, head, tokens, temperature=0.7, chunk=chunk)
        scores[0].sum().backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
        results.append([value.detach() for value in scores])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(results[0], results[1])
    log_prob, entropy, certainty = results[0]
    p = torch.log_softmax(head(torch.linspace(-1, 1, 42).view(7, 6)) / 0.7, -1).detach()
    torch.testing.assert_close(log_prob, p[torch.arange(7), tokens])
    torch.testing.assert_close(entropy, -(p.exp() * p).sum(-1))
    # the mean over the vocabulary of log(1 / V) - log p is the KL from the uniform distribution
    torch.testing.assert_close(certainty - math.log(11), (-math.log(11) - p).mean(-1))


def test_greedy_decoding_is_that_of_transformers(model: CausalLM, lm_folder: Path) -> None:
    """With prompts of different lengths, several samples of each, and samples that end before others."""
    tokenizer = AutoTokenizer.from_pretrained(lm_folder)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rows = [0, 0, 1, 2, 2]
    how = Decoding(limit=12, temperature=0.0, ends=[end], pad=pad)
    found = decode(model, PROMPTS, rows, torch.zeros(5, 12), how)
    for row, response in zip(rows, found, strict=True):
        ids = torch.tensor([PROMPTS[row]])
        out = model.lm.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=pad
        )
        assert response == out[0, ids.shape[1] :].tolist()


def test_tokens_are_drawn_from_the_models_distribution(model: CausalLM) -> None:
    """The frequencies of the first token in 4,000 samples equal its probabilities, at a temperature and with top_p."""
    uniform = (torch.arange(4000) + 0.5)[:, None] / 4000
    logits = model.lm(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    p = torch.softmax(logits / 0.3, -1)
    for top_p in (1.0, 0.5):
        how = Decoding(limit=1, temperature=0.3, ends=[], pad=0, truncation=Truncation(top_p=top_p))
        found = decode(model, PROMPTS, [0] * 4000, uniform, how)
        share = torch.bincount(torch.tensor(found).flatten(), minlength=len(p)) / 4000
        ordered, order = p.sort(descending=True)
        kept = order[ordered.cumsum(0) - ordered < top_p]
        expected = torch.zeros_like(p).index_copy(0, kept, p[kept] / p[kept].sum())
        assert (share - expected).abs().max() < 1e-3


def test_the_replay_scores_what_was_drawn(model: CausalLM) -> None:
    """A pass over padded sequences gives the same log-probs as a separate pass for each response."""
    responses = [[3, 4, 5], [6], [7, 8]]
    longest = max(len(p) + len(r) for p, r in zip(PROMPTS, responses, strict=True))
    ids = torch.zeros(3, longest, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    trace = TokenTrace(ids, torch.tensor([4, 1, 7]), torch.tensor([3, 1, 2]), 3)
    scores, _, _ = model(trace.ids, trace.predicting, 0.8)
    expected = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        logits = model.lm(torch.tensor([prompt + response])).logits[0].float() / 0.8
        for k, token in enumerate(response):
            expected.append(torch.log_softmax(logits[len(prompt) + k - 1], -1)[token])
    torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=1e-5)


def test_the_clipped_loss_by_hand() -> None:
    """Token by token, by the papers' formulas."""
    log_ratio = torch.tensor([[0.5, -0.5, 0.1, 2.0], [0.5, -0.5, 0.1, 2.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    loss, metrics = clipped_tokens(log_ratio, torch.tensor([1.5, -2.0]), low=0.2, high=0.28, dual=3.0)
    stats = reduced(metrics, mask)
    for i, a in enumerate((1.5, -2.0)):
        for t in range(4):
            rho = math.exp(log_ratio[i, t])
            surrogate = min(a * rho, a * min(max(rho, 0.8), 1.28))
            if a < 0:
                surrogate = max(surrogate, 3.0 * a)
            assert loss[i, t].item() == pytest.approx(-surrogate, rel=1e-6)
    assert stats["clipfrac_higher"] == pytest.approx(3 / 7)  # the masked token is not counted
    assert stats["clipfrac_lower"] == pytest.approx(2 / 7)
    assert stats["clipfrac"] == pytest.approx(2 / 7)  # A > 0 above, A < 0 below


def test_the_gradients_of_the_kl_estimates() -> None:
    """The expected gradient of k2, k1+ and k3+ is that of the KL, of k1 it is 0, and of k3 that of the forward KL."""
    logits, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, logits = other.log_softmax(0), logits.requires_grad_()

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    def mean(kind: str) -> Tensor:
        p = logits.log_softmax(0)
        return (p.exp().detach() * kl_estimate(p, q, kind)).sum()

    p = logits.log_softmax(0)
    reverse, forward = (p.exp() * (p - q)).sum(), (q.exp() * (q - p)).sum()
    for kind in ("k1", "k1+", "k3", "k3+"):
        torch.testing.assert_close(mean(kind), reverse)
    (right,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    for kind in ("k2", "k1+", "k3+"):
        torch.testing.assert_close(gradient(mean(kind)), right)
    torch.testing.assert_close(gradient(mean("k1")), torch.zeros(50, dtype=torch.float64))
    torch.testing.assert_close(gradient(mean("k3")), gradient(forward))


def test_the_kl_estimates() -> None:
    """The means of k1 and k3 over many draws are the KL; k3 is never negative."""
    torch.manual_seed(0)
    p, q = torch.log_softmax(torch.randn(6), -1), torch.log_softmax(torch.randn(6), -1)
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True)
    kl = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3"):
        assert kl_estimate(p[drawn], q[drawn], kind).mean().item() == pytest.approx(kl, rel=0.02)
    assert (kl_estimate(p[drawn], q[drawn], "k3") >= 0).all()
    assert kl_estimate(p[drawn], q[drawn], "k2").mean().item() == pytest.approx(((p - q) ** 2 / 2)[drawn].mean().item())
