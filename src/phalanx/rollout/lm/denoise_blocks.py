"""Block-by-block decoding with the trained module and a KV cache of the finished blocks.

A block begins as mask tokens, the first block after the remainder of the prompt. Each denoising step runs the model on
the block and unmasks the confident positions: those with a probability above a threshold, or else the most confident
ones (LLaDA2.0, arXiv 2512.15745). As in phalanx.rollout.lm.decode, a token is drawn by inverting the cumulative
distribution at a uniform number that belongs to its place in the sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from phalanx.functional.block_states import confident, least_unmasked
from phalanx.models.lm.model import CACHE
from phalanx.rollout.lm.decode import SHRINK, Decoding, check_finite, draw

TOGETHER = 2**24  # logits that are drawn from at once; each takes up to 50 bytes of temporary memory


@dataclass(frozen=True)
class Denoising(Decoding):
    """Settings: blocks of `size` tokens with at most `steps` denoising steps each; for `threshold` see
    phalanx.functional.block_states.confident. `confidence` of a position: its largest probability ("distribution")
    or that of its drawn token ("token").
    """

    size: int = 1
    steps: int = 1
    threshold: float = 1.0
    mask_id: int = 0
    confidence: str = "distribution"

    @property
    def draws(self) -> int:
        """Uniform numbers per token: one per step if the confidence is that of the drawn token, otherwise one."""
        return self.steps if self.confidence == "token" else 1


@dataclass(frozen=True)
class Denoised:
    """A response: its tokens, up to the end of a block; the step of its block in which each token was unmasked, and its
    log-probability in that step.
    """

    tokens: list[int]
    steps: list[int]
    log_probs: list[float]


@torch.no_grad()
def denoise(
    forward: Callable[..., Any],
    config: Any,
    prompts: list[list[int]],
    rows: list[int],
    uniform: Tensor,
    decoding: Denoising,
) -> list[Denoised]:
    """Draw a response for each of `rows`, ascending indices into `prompts`, with uniform numbers [B, draws, limit].

    `forward` and `config` are the language model's. Raises JobError if logits are not finite.
    """
    device, size = uniform.device, decoding.size
    cache = DynamicCache(config=config)
    seen, start = read(forward, cache, prompts, rows, decoding, device)
    tails = [prompts[row][len(prompts[row]) // size * size :] for row in rows]
    tail = torch.tensor([len(tokens) for tokens in tails], device=device)
    blocks = decoding.limit // size
    shape = (len(rows), blocks * size)
    ids, step = torch.full(shape, decoding.pad, device=device), torch.full(shape, -1, device=device)
    log_prob = torch.zeros(shape, device=device)
    alive = torch.arange(len(rows), device=device)
    within, ends = torch.arange(size, device=device), torch.tensor(decoding.ends, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    used = torch.zeros(len(rows), dtype=torch.long, device=device)  # number of blocks of each response
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    for b in range(blocks):
        state = torch.full((len(alive), size), decoding.mask_id, device=device)
        if b == 0:
            for i, tokens in enumerate(tails):
                state[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        here = slice(b * size, (b + 1) * size)
        seen = torch.cat([seen, seen.new_ones(len(alive), size)], 1)
        block = {
            "attention_mask": seen[:, None, None].expand(-1, 1, size, -1),
            "position_ids": start[alive, None] + b * size + within,
            CACHE: cache,
            "use_cache": True,
        }
        place = (b * size + within - tail[alive, None]).clamp(min=0)  # index of each token in its response
        steps, chosen = torch.full_like(state, -1), torch.zeros(state.shape, device=device)
        for k, least in enumerate(least_unmasked(size, decoding.steps)):
            masked = state == decoding.mask_id
            if not masked.any():
                break
            logits = forward(input_ids=state, **block).logits
            cache.crop(-size)
            drawn = uniform[alive, min(k, decoding.draws - 1)].gather(1, place)
            token, probability, confidence = drawn_tokens(logits, masked, drawn, decoding)
            del logits  # free the memory before the next step's logits
            finite &= probability.isfinite().all()
            sure = torch.zeros(state.shape, device=device).masked_scatter(masked, confidence)
            now = confident(sure, masked, least=least, threshold=decoding.threshold)
            state = torch.where(now, state.masked_scatter(masked, token), state)
            chosen = torch.where(now, chosen.masked_scatter(masked, probability), chosen)
            steps = torch.where(now, k, steps)
        ids[alive, here], step[alive, here], log_prob[alive, here] = state, steps, chosen
        used[alive] += ~ended[alive]
        ended[alive] |= (torch.isin(state, ends) & (steps >= 0)).any(1)
        going = ~ended[alive]
        if b + 1 == blocks or not going.any():
            break
        forward(input_ids=state, **block, logits_to_keep=1)  # adds the finished block's keys and values to the cache
        if int(going.sum()) < SHRINK * len(going):
            cache.batch_select_indices(going.nonzero().squeeze(1))
            alive, seen = alive[going], seen[going]
    check_finite(finite)
    responses = []
    for i, (first, last) in enumerate(zip(tail.tolist(), (used * size).tolist(), strict=True)):
        of_response = (i, slice(first, last))
        responses.append(
            Denoised(ids[of_response].tolist(), step[of_response].tolist(), log_prob[of_response].tolist())
        )
    return responses


def read(
    forward: Callable[..., Any],
    cache: DynamicCache,
    prompts: list[list[int]],
    rows: list[int],
    decoding: Denoising,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Read the complete blocks of each prompt once. Returns which columns of the cache hold tokens [B, width], and the
    position [B] of the first block of each response.
    """
    whole = [len(prompt) // decoding.size * decoding.size for prompt in prompts]
    width = max(whole)
    # left-padded by complete blocks, so that all responses begin in the same column
    ids = torch.full((len(prompts), width), decoding.pad)
    for i, prompt in enumerate(prompts):
        ids[i, width - whole[i] :] = torch.tensor(prompt[: whole[i]], dtype=torch.long)
    start = torch.tensor(whole, device=device)
    column = torch.arange(width, device=device)
    real, at = column >= width - start[:, None], torch.tensor(rows, device=device)
    if width:
        block = column // decoding.size
        seen = (block[:, None] >= block) & real[:, None]
        forward(
            input_ids=ids.to(device),
            attention_mask=(seen | torch.eye(width, dtype=torch.bool, device=device))[:, None],
            position_ids=(column - width + start[:, None]).clamp(min=0),
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(at)
    return real[at], start[at]


def drawn_tokens(logits: Tensor, masked: Tensor, uniform: Tensor, decoding: Denoising) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens [M] at the M masked positions of logits [R, S, V]; returns them with their log-probabilities and
    confidences [M]. masked and uniform are [R, S].
    """
    flat, numbers = logits.flatten(0, 1), uniform.flatten()
    rows = masked.flatten().nonzero().squeeze(1).split(max(TOGETHER // logits.shape[-1], 1))
    parts = [_drawn(flat[part].float(), numbers[part], decoding) for part in rows]
    token, log_prob, confidence = (torch.cat(values) for values in zip(*parts, strict=True))
    return token, log_prob, confidence


def _drawn(logits: Tensor, uniform: Tensor, decoding: Denoising) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.index_fill(-1, torch.tensor([decoding.mask_id], device=logits.device), float("-inf"))
    token = draw(logits, uniform, decoding)
    log_p = (logits / (decoding.temperature or 1.0)).log_softmax(-1)
    log_prob = log_p.gather(-1, token[:, None]).squeeze(1)
    return token, log_prob, (log_prob if decoding.confidence == "token" else log_p.amax(-1)).exp()
