"""Block-by-block decoding with the trained module and a KV cache of the finished blocks.

A block begins as mask tokens, the first block after the remainder of the prompt. Each denoising step runs the model on
the block and unmasks the confident positions: those with a probability above a threshold, or else the most confident
ones (LLaDA2.0, arXiv 2512.15745). As in phalanx.rollout.lm.decode, a token is drawn by inverting the cumulative
distribution at a uniform number that belongs to its place in the sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from phalanx.functional.block_states import confident, least_unmasked
from phalanx.functional.tokens import left_padded
from phalanx.models.lm.kv_rows import CACHE, states_of
from phalanx.rollout.lm.decode import Decoding, draw
from phalanx.rollout.lm.policy_session import PolicySession, Read
from phalanx.rollout.lm.session import Request

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


class BlockSession(PolicySession):
    """See phalanx.rollout.lm.session.Session. `forward` and `config` are the language model's.

    rows: samples drawn at once; further ones wait until one ends.
    """

    def __init__(self, forward: Callable[..., Any], config: Any, device: torch.device, rows: int) -> None:
        super().__init__(forward, config, device, rows, eager=True)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """See Session: a block of each sample."""
        self._shrink()
        if self._rows:
            self._finish(cast(Denoising, self._decoding).size)
        self._admit()
        state, chosen, steps = self._denoised(cast(Denoising, self._decoding))
        over = []
        for row, tokens, log_probs, unmasked in zip(self._rows, state, chosen, steps, strict=True):
            request, first = row.request, len(row.request.rest(row.read))
            if row.draws and request.say(tokens[first:], log_probs[first:], unmasked[first:]):
                over.append(request)
        return over

    def _finish(self, size: int) -> None:
        """Read the last block of each sample that goes on."""
        feeds: list[list[int]] = []
        for row in self._rows:
            feeds.append(row.request.rest(row.read)[:size] if row.draws else [])
        if any(feeds):
            [ids] = self._moved(torch.tensor([feed or [0] * size for feed in feeds]))
            self._forward(input_ids=ids, **self._block(list(map(bool, feeds)), size), logits_to_keep=1)
            for row, feed in zip(self._rows, feeds, strict=True):
                row.read += len(feed)

    def _denoised(self, decoding: Denoising) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """The next block of each row, which begins with tokens that are known: [B, S] tokens, their log-probabilities
        and the steps that unmasked them.
        """
        size, draws = decoding.size, [row.draws for row in self._rows]
        begun, uniform = [], []
        for row in self._rows:
            known = row.request.rest(row.read)[:size] if row.draws else [decoding.pad] * size
            begun.append(known + [decoding.mask_id] * (size - len(known)))
            place = torch.arange(size) + row.read - len(row.request.prompt)  # of each token in its response
            numbers = row.request.numbers.view(decoding.draws, decoding.limit)
            uniform.append(numbers[:, place.clamp(0, decoding.limit - 1)])
        state, drawing, numbers = self._moved(
            torch.tensor(begun), torch.tensor(draws)[:, None], torch.stack(uniform, 1)
        )
        given = self._block(draws, size)
        steps, chosen = torch.full_like(state, -1), torch.zeros(state.shape, device=self._device)
        for k, least in enumerate(least_unmasked(size, decoding.steps)):
            masked = (state == decoding.mask_id) & drawing
            if not masked.any():
                break
            logits = self._forward(input_ids=state, **given, logits_to_keep=0).logits
            token, probability, confidence = drawn_tokens(logits, masked, numbers[min(k, decoding.draws - 1)], decoding)
            del logits  # free the memory before the next step's logits
            self._finite &= probability.isfinite().all()
            sure = torch.zeros(state.shape, device=self._device).masked_scatter(masked, confidence)
            now = confident(sure, masked, least=least, threshold=decoding.threshold)
            state = torch.where(now, state.masked_scatter(masked, token), state)
            chosen = torch.where(now, chosen.masked_scatter(masked, probability), chosen)
            steps = torch.where(now, k, steps)
        return state.tolist(), chosen.tolist(), steps.tolist()

    def _room(self, request: Request) -> int:
        """See PolicySession; the last block may have more tokens than the request asks for."""
        size = cast(Denoising, request.decoding).size
        return -(-super()._room(request) // size) * size

    def _block(self, takes: list[bool], size: int) -> dict[str, Any]:
        """Arguments of a pass over the next block of the rows that take one, whose tokens all see one another."""
        start = torch.tensor([row.read for row in self._rows])[:, None]
        position = start + torch.arange(size)
        width = int((start + size)[torch.tensor(takes)].max())
        seen = (torch.arange(width) < start[..., None] + size).expand(-1, size, -1)
        columns, seen, position = self._moved(position.where(torch.tensor(takes)[:, None], -1), seen, position)
        return {**self._kept.arguments(columns, width, seen), "position_ids": position, "use_cache": True}

    def _prefilled(self, requests: list[Request]) -> tuple[DynamicCache, Tensor, list[Read]]:
        """Read the complete blocks of each sample, left-padded by complete blocks."""
        decoding, cache = cast(Denoising, self._decoding), DynamicCache(config=self._config)
        blocks = [request.rest(0)[: len(request.rest(0)) // decoding.size * decoding.size] for request in requests]
        ids, mask = left_padded(blocks, decoding.pad)
        width, lengths = ids.shape[1], mask.sum(1, keepdim=True)
        if width:
            column = torch.arange(width)
            block = column // decoding.size
            seen = (block[:, None] >= block) & (mask > 0)[:, None] | torch.eye(width, dtype=torch.bool)
            position = (column - width + lengths).clamp(min=0)
            ids, seen, position = self._moved(ids, seen[:, None], position)
            beside = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
            self._forward(input_ids=ids, attention_mask=seen, position_ids=position, **beside)
        read = []
        for i, tokens in enumerate(blocks):
            states = states_of(cache, i, len(tokens)) if width else []
            read.append(Read(states, torch.zeros(0), len(tokens), 0))
        return cache, mask, read


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
