"""Responses of a long tail of lengths, drawn in the trained modules: work for the stage `graphs` of gpu_day.py.

8 responses to each of 12 prompts of 20 to 60 tokens, by a random Qwen2 of 6 layers, 192 channels and 8,192 tokens. The
median length is 60, the longest 1,024. A response ends where the random number of a token says so.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from phalanx.models.lm.model import CausalLM
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.policy_session import PolicySession
from phalanx.rollout.lm.session import converse

PROMPTS, RESPONSES, VOCABULARY, LONGEST = 12, 8, 8192, 1024
END = VOCABULARY - 1
SIZES = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 4096, "vocab_size": VOCABULARY}  # fmt: skip


def job() -> tuple[list[list[int]], list[int]]:
    """The prompts, and the lengths of the responses, prompt by prompt."""
    stream, prompts = torch.Generator().manual_seed(1), []
    for _ in range(PROMPTS):
        length = int(torch.randint(20, 60, (1,), generator=stream))
        prompts.append(torch.randint(3, END, (length,), generator=stream).tolist())
    lengths = (60 * torch.exp(1.1 * torch.randn(PROMPTS * RESPONSES, generator=stream))).clamp(4, LONGEST).long()
    lengths[37] = LONGEST
    return prompts, lengths.tolist()


def numbers(lengths: list[int]) -> torch.Tensor:
    """Uniform numbers [B, LONGEST]; that of a response's last token is so large that the end token is drawn."""
    uniform = 0.99 * torch.rand(len(lengths), LONGEST, generator=torch.Generator().manual_seed(2))
    for i, length in enumerate(lengths):
        uniform[i, length - 1] = 1 - 2**-24
    return uniform


def session(rows: int, device: str, *, eager: bool) -> list[list[int]]:
    """The responses, of which `rows` are decoded together; eager: without CUDA graphs."""
    from tests.helpers.sessions import asked

    torch.manual_seed(0)
    module = CausalLM(Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval().float().to(device), 1024)
    prompts, lengths = job()
    each = [i // RESPONSES for i in range(len(lengths))]
    requests = asked(prompts, each, numbers(lengths), Decoding(LONGEST, 1.0, [END], 0))
    converse(PolicySession(module, module.lm.config, torch.device(device), rows, eager=eager), requests)
    return [request.tokens for request in requests]
