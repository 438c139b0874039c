"""Sampling with the trained modules themselves: no second copy of the weights, and exact log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.lm import LMRolloutConfig
from phalanx.distributed.collectives import local_numbers, on_all_ranks, reduce_float, reduce_int
from phalanx.distributed.context_parallel import ContextGroup
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.functional.aggregation import Mean
from phalanx.functional.token_budget import in_order
from phalanx.functional.tokens import TokenTrace, Truncation
from phalanx.models.lm.joined_steps import decoding_forward
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.policy_session import PolicySession
from phalanx.rollout.lm.session import Drawn as Drawn
from phalanx.rollout.lm.session import Request, Session, StopTexts, converse
from phalanx.types import Each, Prompt, Samples


class LMRollout:
    """See phalanx.types.Rollout."""

    facts = EngineFacts()
    fps = 1
    noun = "samples"
    talks: Any = None  # phalanx.rollout.lm.conversations.Talks, if samples have several turns

    def __init__(
        self, policy: LMPolicy, config: LMRolloutConfig, world: World, micro_batch_size: int, passes: Passes | None
    ) -> None:
        """micro_batch_size: number of samples decoded together. passes: the forward passes, of the same shapes as in
        training, that compute the old log-probabilities; None if the training pass computes them (on-policy).
        """
        self.policy, self.config, self.data, self.world = policy, config, policy.data, world
        self.micro_batch_size, self.passes = micro_batch_size, passes
        self.how, self.val_how = self._settings()
        self.drawn: list[Drawn] = []  # the samples of the last `sample` or `gathered`, as they are after `resample`
        self._seed = (0, 0)
        self._held: list[Any] = []  # keeps the current prompts' images alive: the policy does not hold on to them

    @property
    def exact(self) -> bool:
        """See phalanx.types.Rollout."""
        return self.facts.exact and self.config.partial_rollout is None

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Do nothing: no work is cheaper when done ahead."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the weights gathered for the duration of the rollout, unless its samples are of the data."""
        with torch.no_grad(), nullcontext() if self.facts.weights == "none" else self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Sample this rank's share of `n` responses per prompt; `prompts` are the prompts of all ranks.

        The uniform numbers of response i of group g at training step k are a function of (seed, k, g, i).
        """
        n = self.config.n
        # sample i of the step is response i % n to prompt i // n
        index = local_numbers(len(prompts) * n, self.world.data_rank, self.world.data_size)
        self._seed = (seed, step)
        local, names = [], []
        for i in index.tolist():
            local.append(prompts[i // n])
            # keyed random numbers: the response depends neither on the rank nor on the batch
            names.append((seed, step, local[-1].group_id, i % n))
        self.drawn = self._draw(local, names, self.how, each)
        return self._samples(local, index)

    def gathered(self, drawn: list[Drawn], prompts: list[Prompt], index: Tensor, seed: tuple[int, int]) -> Samples:
        """The Samples of responses `drawn` earlier for these prompts; `index` [B] are their numbers in the step, and
        `seed` is that of the run and the step.
        """
        self.drawn, self._seed = drawn, seed
        return self._samples(prompts, index)

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """Replace the prompts of the samples of the last `sample`, before `resample`."""
        return replace(samples, prompts=[prompts[i // self.config.n] for i in samples.index.tolist()])

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """See phalanx.types.Rollout. New responses use the random numbers of responses attempt x n and up."""
        n, local = self.config.n, stale[samples.index].nonzero().flatten().tolist()
        # all ranks draw and score equally many responses; the padding is dropped
        places = local + [0] * (reduce_int(len(local), "max") - len(local))
        names = []
        for j in places:
            i = int(samples.index[j]) % n
            # numbers that no response of an earlier attempt has used
            names.append((*self._seed, samples.prompts[j].group_id, i + attempt * n))
        again = self._draw([samples.prompts[j] for j in places], names, self.how, each)
        for j, drawn in zip(local, again, strict=False):
            self.drawn[j] = drawn
        numbers = torch.full((len(places),), -1)
        numbers[: len(local)] = samples.index[local]
        return self._samples(samples.prompts, samples.index), numbers

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """Sample rollout.val.n responses per prompt, prompt by prompt."""
        self.draw_validation(prompts, each=each)

    def draw_validation(self, prompts: list[Prompt], *, each: Each) -> list[Drawn]:
        """As `sample_validation`, and return the responses."""
        val = self.config.val
        repeated = [prompt for prompt in prompts for _ in range(val.n)]
        names = [(val.seed, 0, prompt.group_id, i) for prompt in prompts for i in range(val.n)]
        with self.policy.unsharded() if self.facts.weights == "none" else nullcontext():  # `awake` does not gather them
            return self._draw(repeated, names, self.val_how, each)

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics response/... and prompt/... over the samples of all ranks, whose rewards are `reward` [N]."""
        trace: TokenTrace = samples.trace
        lengths = torch.tensor([float(drawn.length - drawn.behind) for drawn in self.drawn])
        cut = torch.tensor([drawn.truncated for drawn in self.drawn])
        total = reduce_int(len(cut), "sum")
        count = reduce_int(int(cut.sum()), "sum")  # truncated by max_response_length
        of_cut = reduce_float(float(reward[samples.index][cut].nan_to_num().sum()), "sum")
        row: dict[str, float] = {
            "response/length_mean": reduce_float(float(lengths.sum()), "sum") / total,
            "response/length_max": reduce_float(float(lengths.max()), "max"),
            "response/length_min": -reduce_float(-float(lengths.min()), "max"),
            "response/truncated_ratio": count / total,
            "prompt/length_mean": reduce_float(float(trace.starts.float().sum()), "sum") / total,
        }
        if count:
            row["response/truncated_reward_mean"] = Mean(of_cut / count, count)
        if self.talks is not None:
            row |= self.talks.metrics(self.drawn, reward[samples.index])
        # nothing is drawn again from here on, so the frozen vision tower's features are freed with the samples
        self.drawn = [replace(drawn, look=None) for drawn in self.drawn]
        return row

    def close(self) -> None:
        """Wait until all environment instances are closed."""
        if self.talks is not None:
            self.talks.environments.close()

    # -- decoding ---------------------------------------------------------------------------------

    def _settings(self) -> tuple[Decoding, Decoding]:
        """Settings of training and of validation."""
        config, val, limit = self.config, self.config.val, self.data.max_response_length
        ends, pad = [*self.policy.ends, *config.stop_token_ids], self.policy.pad
        # LMPolicy.replay truncates as training does here, so that its log-probabilities are of the sampled distribution
        never = self.policy.trained.module.never
        decoding = Decoding(limit, config.temperature, ends, pad, Truncation.of(config), never, config.stop)
        val_limit = val.max_response_length or limit
        changed: dict[str, Any] = {"limit": val_limit, "temperature": val.temperature, "truncation": Truncation.of(val)}
        return decoding, replace(decoding, **changed)

    def checked(self) -> AbstractContextManager[None]:
        """For a block that draws on all ranks: a rank that fails closes its environments, and then all do."""
        return nullcontext() if self.talks is None else self.talks.checked()

    def _draw(
        self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding, each: Each
    ) -> list[Drawn]:
        """Draw a sample for each prompt in micro-batches, and pass each finished micro-batch to `each`. Raises
        JobError, on all ranks, if a prompt's image is unreadable.
        """
        if self.policy.vision is not None:
            self._held = on_all_ranks(lambda: [self.policy.look(prompt) for prompt in prompts])
        draw, together = self._decode, self.micro_batch_size
        if self.world.context is not None:
            draw, together = self._decode_shares, together * self.world.context_size
        parts = [slice(start, start + together) for start in range(0, len(prompts), together)]
        # parts are rewarded in order, while later ones are drawn; all ranks have equally many
        queued: list[Request] = []
        if self._refills and len(parts) > 1:  # samples take the places of those that have ended
            queued = self.requests(prompts, names, decoding)
            for request in queued:
                self.session.add(request)
        result: list[Drawn] = []
        with self.checked():
            for part in parts:
                if queued:
                    # a step draws a token of each sample that has a row, also of later parts
                    while not all(request.over for request in queued[part]):
                        self.session.step()
                    new = [self.drawn_sample(request) for request in queued[part]]
                else:
                    new = draw(prompts[part], names[part], decoding)
                hand_over(prompts[part], new, decoding, each, together)
                result += new
            if queued:
                # raises if logits were not finite
                self.session.close()
        self._held = []
        return result

    @property
    def _refills(self) -> bool:
        """Whether the samples of all micro-batches are drawn in one session, in which no step waits for other ranks.

        Kernels of other batches round differently: a fixed size of the micro-batches fixes which samples share one.
        """
        fixed = self.config.micro_batch_size_per_gpu is not None
        if fixed if self.config.refill is None else not self.config.refill:
            return False
        return self.world.context is None and self.talks is None and not self.facts.exclusive

    def _decode_shares(
        self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding
    ) -> list[Drawn]:
        """As `_decode`, for ranks that hold the same samples: each rank draws a part, and all return all of them."""
        assert self.world.context is not None
        context = ContextGroup.of(self.world.context)
        share = -(-len(prompts) // context.size)
        # all ranks draw equally many samples; the padding of the last ranks is dropped
        places = [min(context.place * share + i, len(prompts) - 1) for i in range(share)]
        drawn = self._decode([prompts[i] for i in places], [names[i] for i in places], decoding)
        # an environment's images travel; each rank has read those of the prompts
        travels, local, every = self.talks is not None, [], []
        for one in drawn:
            local.append(replace(one, look=one.look.alone() if one.look and travels else None))
        for one, prompt in zip(chain.from_iterable(context.objects(local)), prompts, strict=False):
            every.append(one if travels else replace(one, look=self.policy.look(prompt)))
        return every

    @cached_property
    def session(self) -> Session:
        """Draws the tokens; other engines override this. With `facts` that are not exact, it gives log-probs."""
        vision, module = self.policy.vision, self.policy.trained.module
        prefill = None if vision is None else vision.prefill
        forward = decoding_forward(self.policy.trained)
        eager = self.config.enforce_eager or forward is not module  # other jobs' steps are not in a graph of this one
        options = {"scores": not self.exact, "masks": module.masks, "eager": eager}
        rows, settings = self.micro_batch_size, self.policy.settings
        return PolicySession(forward, settings, self.world.device, rows, prefill, **options)

    @contextmanager
    def decoding_scores(self) -> Iterator[None]:
        """Within this context, samples have the log-probabilities of their decoding, as those of other engines have."""
        facts, self.facts = self.facts, replace(self.facts, exact=False)
        vars(self).pop("session", None)
        try:
            yield
        finally:
            self.facts = facts
            vars(self).pop("session", None)

    def _decode(self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding) -> list[Drawn]:
        """Draw a response for each prompt, all together.

        The random numbers of each response are a function of its entry in `names` (phalanx.distributed.seed). Repeated
        prompts have the same `group_id`.
        """
        if self.talks is not None:
            # turns, answered by an environment or tools
            return self.talks.held(self, prompts, names, decoding)
        requests = self.requests(prompts, names, decoding)
        converse(self.session, requests)
        return [self.drawn_sample(request) for request in requests]

    def requests(self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding) -> list[Request]:
        """A request for a response to each prompt."""
        # samples of a prompt share its tokens and, by reference, its images
        made: list[Request] = []
        encoded: dict[int, list[int]] = {}
        for prompt, name in zip(prompts, names, strict=True):
            if prompt.group_id not in encoded:
                encoded[prompt.group_id] = self.policy.encode(prompt)
            tokens, look = encoded[prompt.group_id], self.policy.look(prompt)
            made.append(self.request(tokens, name, decoding, look=look, place=prompt.place))
        return made

    def request(
        self, prompt: list[int], name: tuple[Any, ...], decoding: Decoding, *earlier: Sequence[Any], **options: Any
    ) -> Request:
        """A request for further tokens of a response, of which `earlier` were drawn before: see Request.say."""
        # each response has its own detector, which has read its prompt: a text may begin in the middle of a token
        stops = StopTexts(self.policy.tokenizer, decoding.stop, prompt) if decoding.stop else None
        options = {"room": decoding.limit} | options
        request = Request(prompt=prompt, name=name, decoding=decoding, stops=stops, **options)
        if earlier and earlier[0]:
            # as if they had been drawn now: the next one has the random number of its place
            request.say(*earlier)
        return request

    def drawn_sample(self, request: Request) -> Drawn:
        """The sample of a request that is over; with `facts` that are not exact, with the log-probs of its tokens."""
        response, scores = request.tokens, () if self.exact else request.log_probs
        return Drawn(request.prompt, response, self.text(request), request.cut, scores, look=request.look)

    def text(self, request: Request) -> str:
        """The text of a response, or of its last turn."""
        return self.policy.decode(request.turn)

    def _samples(self, prompts: list[Prompt], index: Tensor) -> Samples:
        """Pad the samples to tensors of the same sizes on all ranks, and add the policy's log-probabilities."""
        # [B]: the tokens of each prompt, the tokens after it, and those of the latter that the model drew; T and A are
        # the maxima over all ranks
        starts = torch.tensor([len(drawn.prompt) for drawn in self.drawn])
        behind = torch.tensor([len(drawn.response) for drawn in self.drawn])
        lengths = torch.tensor([drawn.length for drawn in self.drawn])
        longest = reduce_int(int((starts + behind).max()), "max")
        ids = torch.full((len(self.drawn), longest), self.policy.pad)  # [B, T]: prompt, response, padding
        for i, drawn in enumerate(self.drawn):
            ids[i, : starts[i] + behind[i]] = torch.tensor(drawn.prompt + drawn.response)
        device, width = self.world.device, reduce_int(int(lengths.max()), "max")
        trace = self._trace(ids.to(device), starts.to(device), lengths.to(device), width)
        mask = trace.mask  # [B, A]
        if self.config.mask_truncated:
            cut = torch.tensor([drawn.truncated for drawn in self.drawn], device=device)
            mask = mask & ~cut[:, None]  # DAPO's overlong filtering: a truncated response has no loss
        texts = [drawn.text for drawn in self.drawn]
        lengths = torch.stack([starts, behind, lengths], 1)
        samples = Samples(prompts, texts, torch.empty(0), mask, trace, index, lengths=lengths)
        if self.talks is not None:
            samples = self.talks.samples(samples, self.drawn)
        return self._scored(replace(samples, positions=self._positions(samples)))

    def _trace(self, ids: Tensor, starts: Tensor, lengths: Tensor, width: int) -> Any:
        """The trace that the policy replays: see TokenTrace."""
        looks = tuple(drawn.look for drawn in self.drawn)
        trace = TokenTrace(ids, starts, lengths, width, looks=looks if any(looks) else None)
        return trace if self.talks is None else self.talks.trace(trace, self.drawn)

    def _positions(self, samples: Samples) -> Tensor | None:
        """See phalanx.types.Samples."""
        return None

    def _scored(self, samples: Samples) -> Samples:
        """Add log-probabilities to the samples: computed by the policy in passes of the training's shapes, or the
        engine's own (`Drawn.log_probs`) if it is not exact.
        """
        if not self.exact:
            # computed by other kernels: rollout.correction weighs or replaces them
            log_prob = torch.zeros(samples.mask.shape)
            for i, drawn in enumerate(self.drawn):
                log_prob[i, : len(drawn.log_probs)] = torch.tensor(drawn.log_probs)
            return replace(samples, log_prob=log_prob.to(samples.mask.device))
        if self.passes is None:
            # One update per sample: log pi_old is the detached log-probability of the training pass, and rho = 1.
            unknown = torch.full_like(samples.mask, torch.nan, dtype=torch.float32)
            return replace(samples, log_prob=unknown, on_policy=True)
        trace, tokens = samples.trace, samples.tokens
        assert tokens is not None
        # log pi_old [B, A], computed in passes of the training's shapes, so that rho is exactly 1 at the first update
        parts = self.passes.parts(len(tokens), tokens[:, None])
        replays = [self.policy.replay(trace.select(part.to(trace.ids.device))) for part in parts]
        log_prob = in_order([replay.log_prob for replay in replays], parts)
        return replace(samples, log_prob=log_prob, trace=trace.rescored(replays, parts))


def check_stops(policy: LMPolicy, config: LMRolloutConfig) -> None:
    """Raise ValueError, in one line, for stop tokens or texts that can never end a response of this policy."""
    path, last = policy.config.path, max(config.stop_token_ids, default=0)
    if last >= policy.rows:
        raise ValueError(
            f"{config:stop_token_ids}: {last} is not a token of {path!r}; expected ids below {policy.rows}"
        )
    if config.stop and not isinstance(policy.tokenizer, transformers.PreTrainedTokenizerFast):
        raise ValueError(
            f"{config:stop}: the tokenizer of {path!r} is not backed by the tokenizers library, which is needed to "
            f"find these texts token by token; use {config:stop_token_ids} instead"
        )


def hand_over(prompts: list[Prompt], drawn: list[Drawn], decoding: Decoding, each: Each, together: int) -> None:
    """Pass samples to `each`, `together` at a time. The `meta` of their prompts gets what rewards may read: the
    response's length, the limit, whether the response was truncated, and the sample's further metadata.
    """
    for first in range(0, len(drawn), together):
        texts, shown = [], []
        for prompt, sample in zip(prompts[first : first + together], drawn[first : first + together], strict=True):
            lengths = {
                "response_length": len(sample.response) - sample.behind,
                "max_response_length": decoding.limit,
                "truncated": sample.truncated,
            }
            texts.append(sample.text)
            shown.append(replace(prompt, meta=prompt.meta | lengths | sample.beside))
        each(texts, shown)
