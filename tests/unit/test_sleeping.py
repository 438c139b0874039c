"""Weights that sleep in main memory: where they are while the model is awake, and after it."""

import pytest
import torch
from torch import nn

from phalanx.engines.transformers import Sleeping


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model.requires_grad_(False)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_on_the_device_in_the_block_alone_and_are_not_copied_back(fails: bool) -> None:
    model = tied()
    values = {name: weight.clone() for name, weight in model.state_dict().items()}
    sleeping = Sleeping(model, torch.device("meta"))
    memory = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    for _ in range(2):
        try:
            with sleeping.awake():
                assert {weight.device.type for weight in model.parameters()} == {"meta"}
                assert model[2].weight is model[0].weight and len(list(model.parameters())) == 3
                if fails:
                    raise InterruptedError
        except InterruptedError:
            assert fails
        assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == memory
        assert model[2].weight is model[0].weight
        assert all(torch.equal(weight, values[name]) for name, weight in model.state_dict().items())
        assert not any(weight.requires_grad for weight in model.parameters())


def test_buffers_keep_what_they_became() -> None:
    model = nn.BatchNorm1d(2).requires_grad_(False)
    with Sleeping(model, torch.device("cpu")).awake():
        model(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert model.running_mean.tolist() == pytest.approx([0.2, 0.4])
