"""Partial rollouts: a training step does not wait for the longest responses; they resume in the next step.

More groups are in flight than a step trains. In each round all unfinished responses get further tokens, drawn with the
current weights, until enough groups are complete; the step trains the oldest complete groups, and the others wait. No
group is dropped, so in the long run the policy is trained on the same distribution of lengths that it samples.

Every rank knows all waiting groups. Each round distributes the unfinished responses over the ranks again, except those
whose environment is on a rank. A response is a function of its name, the steps and the weights, so it does not depend
on the layout.
"""

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from phalanx.config.lm import LMRolloutConfig
from phalanx.distributed.collectives import all_gather_object, local_numbers, on_all_ranks
from phalanx.functional.token_budget import evenly_dealt
from phalanx.rollout.lm.in_policy import Drawn, LMRollout, hand_over
from phalanx.rollout.lm.session import Request, converse
from phalanx.rollout.lm.unfinished import LISTS, OF_TOKENS, PausedTalks, Response
from phalanx.types import Each, JobError, Prompt, Samples

log = logging.getLogger(__name__)
_MARK = "partial"  # among a checkpoint's tensors


@dataclass(eq=False)
class _Group:
    """The responses to prompt number `number` of the run, whose first tokens are of the weights after `begun` steps."""

    number: int
    begun: int
    prompt: Prompt
    tokens: list[int]
    look: Any
    responses: list[Response]

    @property
    def complete(self) -> bool:
        """Whether all responses have ended."""
        return all(response.ended for response in self.responses)

    @property
    def checksum(self) -> int:
        """CRC-32 of the prompt's tokens."""
        return zlib.crc32(repr(self.tokens).encode())


def drawn_at_once(config: LMRolloutConfig, prompts: int) -> int:
    """The number of groups in flight, if a training step trains the groups of `prompts` prompts."""
    partial = config.partial_rollout
    return prompts if partial is None else partial.over_sampling_batch_size or 2 * prompts


class PartialRollout:
    """See phalanx.types.Rollout: a wrapper of a rollout that draws the tokens. prompts: their number per training step.

    A step trains the samples of `prompts` groups, which may have begun up to rollout.max_staleness steps earlier;
    Samples.version holds the step whose weights drew each token.
    """

    def __init__(self, rollout: LMRollout, prompts: int) -> None:
        self.rollout, self.config, self.world = rollout, rollout.config, rollout.world
        self.facts, self.fps, self.noun = rollout.facts, rollout.fps, rollout.noun
        self.exact, self.micro_batch_size = rollout.exact, rollout.micro_batch_size
        self.awake, self.sample_validation, self.close = rollout.awake, rollout.sample_validation, rollout.close
        self._prompts = prompts
        self._pool = drawn_at_once(self.config, prompts)
        self._groups: list[_Group] = []  # waiting groups, in the order of their numbers
        self._next = 0  # the number of the first group that has not begun
        self._step = 0  # number of training steps that have their samples
        self._saved: dict[str, Tensor] = {}  # a checkpoint's groups, until the prompts are available
        self._version: int | None = None  # see of_version
        self._waiting: tuple[int, dict[str, Tensor]] = -1, {}  # the last step begun, and what waited
        self._row: dict[str, float] = {}
        self._given: list[Prompt] = []  # the prompts of the last step
        self._versions: list[list[int]] = []  # of the last samples, the steps that drew their tokens
        self._paused = None if rollout.talks is None else PausedTalks(rollout)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def begin(self, step: int, kept: Sequence[Tensor]) -> None:
        """Continue after `step` training steps, with the results of `in_flight` of all ranks that a checkpoint has."""
        self._step, self._next = step, step * self._prompts
        for data in kept:
            tensors = safetensors.torch.load(data.numpy().tobytes())
            if _MARK in tensors and tensors[_MARK].tolist() == self._shape(step):
                self._saved = tensors
            elif self.world.rank == 0:
                log.warning(
                    "dropped the checkpoint's unfinished responses: they are of another step, batch size or schedule"
                )

    def of_version(self, version: int) -> None:
        """See phalanx.types.KeepsSamples."""
        self._version = version

    def _version_at(self, step: int) -> int:
        return step if self._version is None else self._version

    def in_flight(self, step: int) -> Tensor:
        """Bytes [K] uint8 of the groups that wait after `step` training steps; equal on all ranks."""
        begun, tensors = self._waiting
        if step != begun:  # it has its samples; otherwise the job has stopped within the next step, which is repeated
            tensors = self._saved or self._tensors()
        return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)

    def _shape(self, step: int) -> list[int]:
        """Numbers that must agree for a checkpoint's groups to be restored."""
        return [step, self._prompts, self.config.n, *([] if self._paused is None else [1])]

    def _tensors(self) -> dict[str, Tensor]:
        responses = [response for group in self._groups for response in group.responses]
        record = [response.record for response in responses]
        of_tokens = {}
        for name, dtype in LISTS.items():
            values = chain.from_iterable(vars(response)[name] for response in responses)
            of_tokens[name] = torch.tensor(list(values), dtype=dtype)
        # for another schedule that resumes from it: a parcel without samples, see phalanx.run.disaggregated.wire
        empty = torch.tensor(list(b'{"stop": 0}'), dtype=torch.uint8)
        return {
            "json": empty,
            _MARK: torch.tensor(self._shape(self._step)),
            "next": torch.tensor(self._next),
            "number": torch.tensor([group.number for group in self._groups], dtype=torch.long),
            "begun": torch.tensor([group.begun for group in self._groups], dtype=torch.long),
            "checksum": torch.tensor([group.checksum for group in self._groups], dtype=torch.long),
            "length": torch.tensor([len(response.tokens) for response in responses], dtype=torch.long),
            "ended": torch.tensor([response.ended for response in responses], dtype=torch.bool),
            "rank": torch.tensor([response.rank for response in responses], dtype=torch.long),
            "ranks": torch.tensor(self.world.size),
            "record": torch.frombuffer(bytearray("\n".join(record).encode() + b"\n"), dtype=torch.uint8),
            **of_tokens,
        }

    def _restore(self, saved: dict[str, Tensor]) -> None:
        """Restore the groups of a checkpoint; groups whose prompt has changed since are drawn from the start."""
        # those of an earlier version of Phalanx have neither turns nor records
        saved = {"sampled": torch.ones(len(saved["tokens"])).bool(), "record": torch.zeros(0).byte()} | saved
        lengths = saved["length"].tolist()
        responses = [Response(ended=ended) for ended in saved["ended"].tolist()]
        sampled = [sum(part.tolist()) for part in saved["sampled"].split(lengths)]
        for name in LISTS:
            if len(saved[name]):  # only block diffusion has denoising steps
                parts = saved[name].split(lengths if name in OF_TOKENS else sampled)
                for response, part in zip(responses, parts, strict=True):
                    vars(response)[name] = part.tolist()
        for response, record in zip(responses, saved["record"].numpy().tobytes().decode().split("\n"), strict=False):
            response.record = record
        if "rank" in saved and int(saved["ranks"]) == self.world.size:  # batches round as before
            for response, rank in zip(responses, saved["rank"].tolist(), strict=True):
                response.rank = rank
        self._next, n, changed = int(saved["next"]), self.config.n, 0
        columns = [saved[name].tolist() for name in ("number", "begun", "checksum")]
        for i, (number, begun, checksum) in enumerate(zip(*columns, strict=True)):
            group = self._new(number, begun)
            if group.checksum == checksum:
                group.responses = responses[i * n : (i + 1) * n]
            else:
                changed += 1
            self._groups.append(group)
        if changed and self.world.rank == 0:
            log.warning("%d prompts have changed since the checkpoint: their responses are drawn again", changed)

    # -- training steps -----------------------------------------------------------------------------------------------

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """See phalanx.types.Rollout: begin new groups until the pool is full, but none of step `end` or later."""
        self.rollout.prepare(batches, step, end)
        self._batches = batches
        saved, self._saved = self._saved, {}
        self._waiting = step, saved or self._tensors()
        if saved:
            self._restore(saved)
        last = min(self._pool + step * self._prompts, end * self._prompts)
        for number in range(self._next, last):
            self._groups.append(self._new(number, self._version_at(step)))
        self._next = max(last, self._next)

    def _new(self, number: int, begun: int) -> _Group:
        step, place = divmod(number, self._prompts)
        prompt = self._batches(step)[place]
        responses = [Response() for _ in range(self.config.n)]
        policy = self.rollout.policy
        return _Group(number, begun, prompt, policy.encode(prompt), policy.look(prompt), responses)

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """See phalanx.types.Rollout; the samples' prompts are those of the trained groups, not `prompts`."""
        self._given, rounds = prompts, 0
        with self.rollout.checked():
            while (trained := self._trained(step)) is None:
                self._draw(seed, step)
                rounds += 1
        before = len(self._groups)
        self._groups = [group for group in self._groups if group not in trained]
        self._step = step + 1
        self._row = self._metrics(trained, step, before) | {"rollout/rounds": float(rounds)}
        n = self.config.n
        index = local_numbers(self._prompts * n, self.world.data_rank, self.world.data_size)
        local: list[Prompt] = []
        drawn: list[Drawn] = []
        self._versions = []
        for i in index.tolist():
            group, response = trained[i // n], trained[i // n].responses[i % n]
            local.append(replace(group.prompt, group_id=i // n))
            self._versions.append(response.versions)
            if self._paused is None:
                drawn.append(self.rollout.drawn_sample(self._request(group, response, ())))
            else:
                drawn.append(self._paused.sample(group.prompt, response))
        hand_over(local, drawn, self.rollout.how, each, self.micro_batch_size)
        return self._versioned(self.rollout.gathered(drawn, local, index, (seed, step)), step)

    def _versioned(self, samples: Samples, step: int) -> Samples:
        version = torch.full(samples.mask.shape, self._version_at(step))  # [B, A]
        for i, of_tokens in enumerate(self._versions):
            version[i, : len(of_tokens)] = torch.tensor(of_tokens)
        return replace(samples, version=version)

    def _trained(self, step: int) -> list[_Group] | None:
        """The groups that this step trains: the oldest complete ones. None while there are too few of them, or while
        a waiting group would become too old to be trained within rollout.max_staleness.
        """
        complete = [group for group in self._groups if group.complete]
        if len(complete) < self._prompts:
            return None
        trained = complete[: self._prompts]
        waiting = [group for group in self._groups if group not in trained]
        for place, group in enumerate(waiting):
            left = group.begun + self.config.max_staleness - step  # further steps in which it may be trained
            if place >= self._prompts * left and len(complete) < len(self._groups):
                return None
        return trained

    def _draw(self, seed: int, step: int) -> None:
        """Draw one round of further tokens for all unfinished responses. Collective."""
        alive: list[tuple[_Group, int]] = []
        for group in self._groups:
            alive += [(group, i) for i, response in enumerate(group.responses) if not response.ended]
        places = [place for place, rank in enumerate(self._ranks(alive)) if rank == self.world.rank]
        parts = on_all_ranks(lambda: self._round([alive[place] for place in places], seed, step), JobError)
        for of_rank in all_gather_object(list(zip(places, parts, strict=True))):
            for place, part in of_rank:
                group, i = alive[place]
                group.responses[i].extend(part)

    def _ranks(self, alive: list[tuple[_Group, int]]) -> list[int]:
        """The ranks that go on with responses: those that have their environments; otherwise each rank gets the same
        number, and about as many tokens to prefill.
        """
        ranks = [group.responses[i].rank for group, i in alive]
        most, world = -(-len(alive) // self.world.size), range(self.world.size)
        costs = [float(len(g.tokens) + len(g.responses[i].tokens)) for g, i in alive if g.responses[i].rank < 0]
        dealt = iter(evenly_dealt(costs, [max(most - ranks.count(rank), 0) for rank in world]))
        return [next(dealt) if rank < 0 else rank for rank in ranks]

    def _round(self, local: list[tuple[_Group, int]], seed: int, step: int) -> list[Response]:
        """Draw further tokens of responses on this rank."""
        assert self.config.partial_rollout is not None
        count, version = self.config.partial_rollout.tokens, self._version_at(step)
        responses = [group.responses[i] for group, i in local]
        names = [(seed, *divmod(group.number, self._prompts), i) for group, i in local]
        if (paused := self._paused) is not None:
            prompts = [group.prompt for group, _ in local]
            on_all_ranks(lambda: paused.open(responses, prompts, names), JobError)  # before any waits in a session
            return paused.draw(responses, count, version)
        requests = []
        for (group, _), response, name in zip(local, responses, names, strict=True):
            request = self._request(group, response, name)
            request.go_on(count)
            requests.append(request)
        converse(self.rollout.session, requests)
        return [response.beyond(request, version) for response, request in zip(responses, requests, strict=True)]

    def _request(self, group: _Group, response: Response, name: tuple[Any, ...]) -> Request:
        earlier = response.tokens, response.log_probs, response.steps
        return self.rollout.request(group.tokens, name, self.rollout.how, *earlier, look=group.look)

    def _metrics(self, trained: list[_Group], step: int, pool: int) -> dict[str, float]:
        ages: list[int] = []
        versions: list[int] = []
        for group in trained:
            for response in group.responses:
                ages += [step - version for version in response.versions]
                versions.append(len(set(response.versions)))
        return {
            "rollout/staleness_mean": sum(ages) / len(ages),
            "rollout/staleness_max": float(max(ages)),
            "rollout/versions_mean": sum(versions) / len(versions),
            "rollout/versions_max": float(max(versions)),
            "rollout/pending_ratio": len(self._groups) / pool,
            "rollout/pending_age_max": float(max((step - group.begun for group in self._groups), default=0)),
        }

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of the wrapped rollout, and rollout/... of the trained and the waiting groups."""
        return self.rollout.metrics(samples, reward) | self._row

    @property
    def drawn(self) -> list[Drawn]:
        """As LMRollout."""
        return self.rollout.drawn

    # -- other methods ------------------------------------------------------------------------------------------------

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """See phalanx.types.Rollout."""
        renewed = self.rollout.renew(samples, prompts).prompts
        for j, i in enumerate(samples.index.tolist()):
            place = i // self.config.n
            if prompts[place] == self._given[place]:  # the step's own prompt, in whose place another one is trained
                renewed[j] = samples.prompts[j]
        return replace(samples, prompts=renewed)

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """See phalanx.types.Rollout: whole responses, of the current weights."""
        for i in stale[samples.index].nonzero().flatten().tolist():
            self._versions[i] = []
        samples, numbers = self.rollout.resample(samples, stale, attempt, each=each)
        return self._versioned(samples, self._step - 1), numbers
