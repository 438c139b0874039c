"""Forward and backward passes keep the logits of only one chunk of tokens in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

from phalanx.functional.tokens import token_scores
from phalanx.models.lm.model import CausalLM
from phalanx.tools.plan.ledger import Ledger

VOCABULARY, HIDDEN = 151_936, 64


class Largest(TorchDispatchMode):
    """Records the elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [found.numel() for found in tree_leaves(out) if isinstance(found, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


def peak(tokens: int, chunk: int) -> float:
    """Peak memory of scores of that many tokens and their gradient, in rows of float32 logits."""
    with Ledger() as ledger, torch.device("meta"):
        head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        hidden = torch.empty(tokens, HIDDEN, requires_grad=True)
        drawn = torch.empty(tokens, dtype=torch.long)
        with ledger.during("scores"):
            log_prob, entropy, _ = token_scores(hidden, head, drawn, temperature=0.7, chunk=chunk)
            (log_prob - entropy).sum().backward()
    phase = ledger.phases["scores"]
    return (phase.peak - phase.before) / (4 * VOCABULARY)


def test_the_peak_grows_with_the_chunk_alone() -> None:
    """On meta tensors, so that they can be as large as in real jobs."""
    weight = HIDDEN * 3  # gradients of the head on their way to their sum
    few, many, wide = peak(2048, 256), peak(16384, 256), peak(16384, 1024)
    assert many < few * 1.02  # 14,336 tokens more: their states, not their logits
    assert many < 8 * 256 + weight
    assert 3 * many < wide + 3 * weight and wide < 8 * 1024 + weight


def test_no_tensor_of_a_pass_is_larger_than_a_chunk() -> None:
    """A whole pass with gradient checkpointing, forward and backward, with real values."""
    settings = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    lm = Qwen3ForCausalLM(settings).eval()
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = CausalLM(lm, chunk=16, recomputes=1)
    ids = torch.randint(VOCABULARY, (4, 33))
    with Largest() as largest:
        scores, _, _ = model(ids, torch.ones(4, 32, dtype=torch.bool), 1.0)
        scores.sum().backward()
    assert largest.elements == 16 * VOCABULARY  # for 128 tokens
