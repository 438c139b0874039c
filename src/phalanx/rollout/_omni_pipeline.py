"""What vLLM-omni runs in place of its own pipelines: the SDE loop around its transformer."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from phalanx.rollout._denoise import Job, generate
from phalanx.types import Policy


class Pipeline(nn.Module):
    """A family's pipeline. Text is encoded and images are decoded by the policy's own modules, which do not change."""

    def __init__(self, transformer: nn.Module, od_config: Any) -> None:
        super().__init__()
        self.transformer: Any = transformer.to(od_config.dtype)
        self.weights_sources: list[Any] = []  # weights come from the policy, never from files
        self._shapes = {name: p.shape for name, p in self.transformer.named_parameters()}

    def attach(self, policy: Policy) -> None:
        """Compute as `policy` does, with this transformer in place of its own."""
        self.transformer.config = policy.model.transformer.config
        self.policy = policy.through(self.transformer)

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """One request, whose `extra_args` hold the Job."""
        job: Job = batch.requests[0].sampling_params.extra_args["job"]
        done = generate(self.policy, job)
        timesteps = job.schedule.timesteps[job.window.start : job.window.stop]
        return [
            DiffusionOutput(
                output={"images": done.images, "means": done.means, "clean": done.clean},
                trajectory_latents=done.latents,
                trajectory_log_probs=done.log_prob,
                trajectory_timesteps=timesteps,
            )
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """What vLLM-omni calls with the contents of files: there are none. See refresh."""

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, under diffusers' names. Raises ValueError where that leaves some unfilled."""
        for name, p in self.transformer.named_parameters():
            p.data = p.new_empty(self._shapes[name])
        filled = self.transformer.load_weights(weights)
        missing = sorted({name for name, _ in self.transformer.named_parameters()} - filled)
        if missing:
            raise ValueError(f"rollout.engine: vllm_omni has weights that the model lacks: {', '.join(missing[:3])}")

    def release(self) -> None:
        """Let the memory of the weights go until `refresh`, which brings all of them anew."""
        for p in self.transformer.parameters():
            p.data = p.new_empty(0)
