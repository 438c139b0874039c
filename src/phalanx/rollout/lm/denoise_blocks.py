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
from phalanx.models.lm.kv_rows import CACHE
from phalanx.rollout.lm.decode import Decoding, check_finite, draw
from phalanx.rollout.lm.policy_session import SHRINK
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


class BlockSession:
    """See phalanx.rollout.lm.session.Session. `forward` and `config` are the language model's.

    rows: samples drawn at once; the others wait until all of these have ended.
    """

    def __init__(self, forward: Callable[..., Any], config: Any, device: torch.device, rows: int) -> None:
        self._forward, self._config, self._device, self._most = forward, config, device, rows
        self._queue: list[Request] = []
        self._block = 0  # the number of the next block
        self._finite = torch.ones((), dtype=torch.bool, device=device)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Free what the samples held: their keys and values must not outlive them."""
        self._rows: list[Request] = []
        self._cache, self._passed = DynamicCache(config=self._config), dict[str, Any]()
        self._seen = self._start = self._numbers = self._state = torch.empty(0)

    def add(self, request: Request) -> None:
        """See Session."""
        self._queue.append(request)

    def close(self) -> None:
        """See Session."""
        finite, self._finite = self._finite, torch.ones_like(self._finite)
        self._queue = []
        self._forget_rows()
        check_finite(finite)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """See Session: a block of each sample."""
        if self._rows:
            self._finish()
        else:
            self._begin()
        decoding = self._decoding
        size, rows = decoding.size, len(self._rows)
        state = torch.full((rows, size), decoding.mask_id, device=self._device)
        tails = [len(request.rest(0)) % size if self._block == 0 else 0 for request in self._rows]
        for i, (tail, request) in enumerate(zip(tails, self._rows, strict=True)):
            state[i, :tail] = torch.tensor(request.rest(0)[len(request.rest(0)) - tail :], dtype=torch.long)
        self._seen = torch.cat([self._seen, self._seen.new_ones(rows, size)], 1)
        within = torch.arange(size, device=self._device)
        self._passed = {
            "attention_mask": self._seen[:, None, None].expand(-1, 1, size, -1),
            "position_ids": self._start[:, None] + self._block * size + within,
            CACHE: self._cache,
            "use_cache": True,
        }
        prompts = torch.tensor([len(request.prompt) for request in self._rows], device=self._device)
        # [B, S]: index of each token in its response
        place = (self._passed["position_ids"] - prompts[:, None]).clamp(min=0)
        steps, chosen = torch.full_like(state, -1), torch.zeros(state.shape, device=self._device)
        for k, least in enumerate(least_unmasked(size, decoding.steps)):
            masked = state == decoding.mask_id
            if not masked.any():
                break
            logits = self._forward(input_ids=state, **self._passed).logits
            self._cache.crop(-size)
            numbers = self._numbers[:, min(k, decoding.draws - 1)].gather(1, place)
            token, probability, confidence = drawn_tokens(logits, masked, numbers, decoding)
            del logits  # free the memory before the next step's logits
            self._finite &= probability.isfinite().all()
            sure = torch.zeros(state.shape, device=self._device).masked_scatter(masked, confidence)
            now = confident(sure, masked, least=least, threshold=decoding.threshold)
            state = torch.where(now, state.masked_scatter(masked, token), state)
            chosen = torch.where(now, chosen.masked_scatter(masked, probability), chosen)
            steps = torch.where(now, k, steps)
        self._state, over = state, []
        columns = zip(self._rows, tails, state.tolist(), chosen.tolist(), steps.tolist(), strict=True)
        for request, first, tokens, log_probs, unmasked in columns:
            if not request.over and request.say(tokens[first:], log_probs[first:], unmasked[first:]):
                over.append(request)
        if all(request.over for request in self._rows):
            self._forget_rows()
        self._block += 1
        return over

    def _begin(self) -> None:
        """Read the prompts of the next samples, with the blocks that were drawn before."""
        self._rows, self._queue = self._queue[: self._most], self._queue[self._most :]
        decoding = cast(Denoising, self._rows[0].decoding)  # BlockDiffusionRollout makes no others
        self._decoding, self._block = decoding, 0
        begun = [tuple(request.rest(0)) for request in self._rows]
        distinct = list(dict.fromkeys(begun))
        at, prompts = [distinct.index(tokens) for tokens in begun], [list(tokens) for tokens in distinct]
        self._seen, self._start = read(self._forward, self._cache, prompts, at, decoding, self._device)
        numbers = torch.stack([request.numbers for request in self._rows])
        self._numbers = numbers.view(len(self._rows), decoding.draws, decoding.limit).to(self._device)

    def _finish(self) -> None:
        """Add the keys and values of the last block to the cache, and drop samples that have ended if they are many."""
        self._forward(input_ids=self._state, **self._passed, logits_to_keep=1)
        going = [i for i, request in enumerate(self._rows) if not request.over]
        if len(going) < SHRINK * len(self._rows):
            at = torch.tensor(going, device=self._device)
            self._cache.batch_select_indices(at)
            self._seen, self._start, self._numbers = self._seen[at], self._start[at], self._numbers[at]
            self._rows = [self._rows[i] for i in going]


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
