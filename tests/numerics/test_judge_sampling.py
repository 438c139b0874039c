"""A judge's tokens are drawn with the probabilities of its logits at the temperature."""

import pytest
import torch

from phalanx.engines.transformers import Choice

LOGITS = torch.tensor([[1.5, 0.2, -0.7, 0.9, -2.0], [-1.0, 3.0, 0.0, 2.5, 1.0]])
SEEDS = 5000
ERRORS = 4  # accepted standard errors of a frequency in 5000 draws


def chosen(temperature: float, seed: int, step: int) -> list[int]:
    """The token of each row of LOGITS, after `step` tokens of the answer."""
    tokens = torch.zeros(len(LOGITS), 3 + step, dtype=torch.int64)
    return Choice(temperature, seed, 3, None)(tokens, LOGITS).argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    draws = torch.tensor([[chosen(temperature, seed, step) for step in range(2)] for seed in range(SEEDS)])
    for row, wanted in enumerate((LOGITS.double() / temperature).softmax(1)):
        for step in range(2):
            frequency = draws[:, step, row].bincount(minlength=LOGITS.shape[1]) / SEEDS
            assert ((frequency - wanted).abs() < ERRORS * (wanted * (1 - wanted) / SEEDS).sqrt()).all()
        both = torch.outer(wanted, wanted)  # two tokens of an answer are independent
        pairs = (draws[:, 0, row] * LOGITS.shape[1] + draws[:, 1, row]).bincount(minlength=both.numel()) / SEEDS
        assert (
            (pairs - both.flatten()).abs() < ERRORS * (both * (1 - both) / SEEDS).sqrt().flatten() + 1 / SEEDS
        ).all()


def test_without_a_temperature_the_likeliest_token_is_taken() -> None:
    assert {tuple(chosen(0.0, seed, 0)) for seed in range(20)} == {(0, 1)}
