"""The pipeline that replaces vLLM-omni's own: Phalanx's sampling loop around vLLM-omni's transformer."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch


class Pipeline(nn.Module):
    """A family's pipeline: vLLM-omni's transformer, and everything else from the policy.

    The policy's own modules, which training does not change, encode texts and decode images.
    """

    def __init__(self, transformer: nn.Module, od_config: Any) -> None:
        super().__init__()
        self.transformer: Any = transformer.to(od_config.dtype)
        self.weights_sources: list[Any] = []  # weights come from the policy, never from files
        # for `refresh`, because `release` leaves empty tensors
        self._shapes = {name: p.shape for name, p in self.transformer.named_parameters()}

    def attach(self, policy: Any, generate: Callable[[Any, Any], Any]) -> None:
        """Run jobs with `generate` and a copy of `policy` that uses this transformer."""
        self.generate = generate
        # the policy reads diffusers' configuration from its transformer
        self.transformer.config = policy.model.transformer.config
        self.policy = policy.through(self.transformer)

    def forward(self, batch: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Run one request, whose `extra_args` contain the job."""
        # Prompt and sizes of the request are ignored: the job has embeddings, noise and schedule, so this rollout draws
        # the same samples as one with the policy's own modules.
        job = batch.requests[0].sampling_params.extra_args["job"]
        done = self.generate(self.policy, job)
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
        """Do nothing: vLLM-omni calls this with weights from files, and no files are given."""

    def refresh(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, by diffusers' names; ValueError if some parameters are not among them."""
        # new tensors, because `release` has freed the old ones
        for name, p in self.transformer.named_parameters():
            p.data = p.new_empty(self._shapes[name])
        # vLLM-omni's own loader, which assembles its fused matrices
        filled = self.transformer.load_weights(weights)
        missing = sorted({name for name, _ in self.transformer.named_parameters()} - filled)
        if missing:
            names = ", ".join(missing[:3])
            raise ValueError(f"rollout.engine: vllm_omni has weights that the model lacks: {names}")

    def release(self) -> None:
        """Free the memory of the weights until the next `refresh`."""
        for p in self.transformer.parameters():
            p.data = p.new_empty(0)
