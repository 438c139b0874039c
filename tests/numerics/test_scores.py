"""Scores of tokens and their hand-written gradient, against autograd of the plain formulas in float64."""

from collections.abc import Callable
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.functional.scores import FAR, TokenScores
from phalanx.functional.tokens import token_scores

ROWS, VOCABULARY = 5, 40
NEVER = torch.tensor([3, 7])


def logits_of(dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    values = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    return values.to(dtype).requires_grad_()


def outside_of(tokens: Tensor) -> Tensor:
    kept = torch.rand(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.3
    return ~kept.scatter(1, tokens[:, None], True)


def plain(logits: Tensor, tokens: Tensor, temperature: float, never: Tensor | None, outside: Tensor | None) -> Tensor:
    """[3, N] float64."""
    z = logits.double() / temperature
    rest = z if never is None else z[:, [i for i in range(VOCABULARY) if i not in never]]
    certainty = rest.logsumexp(-1) - rest.mean(-1)
    z = z if never is None else z.index_fill(-1, never, FAR)
    p = torch.distributions.Categorical(logits=z if outside is None else z.masked_fill(outside, FAR))
    return torch.stack([p.log_prob(tokens), p.entropy(), certainty])


def scores(logits: Tensor, tokens: Tensor, temperature: float, never: Tensor | None, outside: Tensor | None) -> Tensor:
    return torch.stack(TokenScores.apply(logits, tokens, temperature, never, outside, False, []))


CASES = list(product((1.0, 0.7), (None, NEVER), (False, True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "never", "truncated"), CASES)
def test_scores_and_gradients(
    dtype: torch.dtype, temperature: float, never: Tensor | None, truncated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of two rows, with and without a gradient for the entropy."""
    monkeypatch.setattr("phalanx.functional.scores.BLOCK", 2 * VOCABULARY)
    tokens = torch.tensor([1, 9, 30, 8, 2])
    outside = outside_of(tokens) if truncated else None
    weight = torch.linspace(-1, 2, ROWS)
    for entropy in (0.0, 0.3):
        results = []
        for function in (scores, plain):
            logits = logits_of(dtype)
            log_prob, second, _ = values = function(logits, tokens, temperature, never, outside)
            (log_prob * weight).sum().add(second.sum() * entropy if entropy else 0.0).backward()
            assert logits.grad is not None and logits.grad.dtype == dtype
            results.append((values.detach().double(), logits.grad.double()))
        (ours, gradient), (expected, right) = results
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(gradient, right, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize(("temperature", "never", "truncated"), CASES)
def test_gradcheck(temperature: float, never: Tensor | None, truncated: bool) -> None:
    tokens = torch.tensor([1, 9, 30, 8, 2])
    outside = outside_of(tokens) if truncated else None

    def both(logits: Tensor) -> Tensor:
        return scores(logits, tokens, temperature, never, outside)[:2]

    assert torch.autograd.gradcheck(both, (logits_of(torch.float64, 1.0),))


def test_of_no_tokens() -> None:
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    values = scores(logits, torch.zeros(0, dtype=torch.int64), 1.0, None, None)
    assert [value.shape for value in values] == [(0,)] * 3
    values[0].sum().backward()
    assert logits.grad is not None and logits.grad.shape == logits.shape


def test_the_certainty_has_no_gradient() -> None:
    log_prob, entropy, certainty = TokenScores.apply(
        logits_of(torch.float32), torch.arange(ROWS), 1.0, None, None, False, []
    )
    assert log_prob.requires_grad and entropy.requires_grad and not certainty.requires_grad


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        name = func._schema.name  # type: ignore[attr-defined]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_what_the_loss_does_not_use_is_not_computed_again() -> None:
    """Sums over the vocabulary are taken once per chunk; the backward pass recomputes the logits, and one exponential."""
    head = torch.nn.Linear(8, VOCABULARY, bias=False).requires_grad_(False)
    hidden, tokens = torch.randn(6, 8, requires_grad=True), torch.arange(6)
    with Operators() as forward:
        scores = token_scores(hidden, head, tokens, temperature=0.7, chunk=3)
    with Operators() as backward:
        scores[0].sum().backward()
    assert forward.counts["aten::mm"] == 2 and forward.counts["aten::amax"] == 2
    assert backward.counts["aten::exp_"] == 2 and not {"aten::amax", "aten::mean"} & set(backward.counts)
    assert backward.counts["aten::mm"] == 4  # logits, and the gradient of the states


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_fused_scores(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch.compile are the same up to rounding, and one graph serves all numbers of rows."""
    compiled = cache(partial(torch.compile, backend=backend, fullgraph=True, dynamic=True))
    choose = lambda function, fused: compiled(function) if fused else function  # noqa: E731
    monkeypatch.setattr("phalanx.functional.scores._compiled_if_fused", choose)
    head = torch.nn.Linear(8, 300, bias=False)
    for rows in (9, 4, 7):
        tokens, results = torch.arange(rows), []
        for fused in (False, True):
            hidden = torch.linspace(-2, 2, 8 * rows).view(rows, 8).requires_grad_()
            with torch.compiler.set_stance("default" if rows == 9 else "fail_on_recompile"):
                log_prob, entropy, certainty = token_scores(hidden, head, tokens, temperature=0.7, chunk=3, fused=fused)
                (log_prob.sum() + 0.1 * entropy.sum()).backward()
            results.append([log_prob, entropy, certainty, hidden.grad])
        torch.testing.assert_close(*results, rtol=1e-6, atol=2e-6)
