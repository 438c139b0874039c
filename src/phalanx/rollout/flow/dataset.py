"""Pairs of images from the data instead of sampled images, for training on preference data with the same loop."""

from dataclasses import replace

import torch

from phalanx.config.engine_facts import EngineFacts
from phalanx.distributed.collectives import on_all_ranks
from phalanx.distributed.seed import fold_in
from phalanx.functional.flow import FlowTrace
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.types import Each, Prompt, Samples

PAIR = ("chosen", "rejected")  # columns of the data


class DatasetRollout(PolicyRollout):
    """See phalanx.types.Rollout. Validation samples from the policy.

    The images of a prompt come from its row in the data. `preferred` in the meta of each image is True for the one in
    the first column, PAIR[0]. The samples have no transitions.
    """

    facts = EngineFacts(weights="none", redraws=False, videos=False, columns=PAIR)

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Read this rank's share of the images; `prompts` are those of all ranks, with Pictures in their meta.

        Raises JobError, on all ranks, if an image cannot be read.
        """
        index, rows, embeds = self.share(prompts)
        # An optimizer step trains on every k-th image. If the chosen image were always first, a step could see only
        # chosen ones, so the order within a group is a function of (seed, step, group).
        shown, columns = [], self.facts.columns
        for i in index.tolist():
            group = i // self.config.n
            turned = fold_in(seed, step, group, "pair")
            shown.append((prompts[group], columns[(i + turned) % len(columns)]))
        size = self.sampler.height, self.sampler.width
        # [B, 3, H, W] in 0..1
        pixels = torch.stack(on_all_ranks(lambda: [prompt.meta[column].pixels(*size) for prompt, column in shown]))
        marked = [self._mark_preferred(prompt, column == columns[0]) for prompt, column in shown]
        parts = []
        for part in torch.arange(len(index)).split(self.micro_batch_size):
            parts.append(self.policy.model.encode_images(pixels[part].to(self.world.device)))
            each(pixels[part], [marked[j] for j in part.tolist()])
        clean, schedule = torch.cat(parts), self.schedule(self.sampler)
        # a trajectory without steps: algorithms on the forward process need only `clean`
        trace = FlowTrace(
            sampler=self.sampler,
            latents=clean[:, None],
            means=clean.new_zeros(len(clean), 0, *clean.shape[1:]),
            clean=clean,
            sigmas=schedule.sigmas[:1],
            timesteps=schedule.timesteps[:0],
            sigma_max=schedule.levels[1],
            typical_std=0.0,
            trained=rows[:0],
            evaluations=0,
            embeds=embeds,
            prompt_index=rows,
        )
        none = clean.new_zeros(len(clean), 0)
        return Samples(marked, pixels, none, none.bool(), trace, index)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """As PolicyRollout. `preferred` is None, because these images are not from the data."""
        with self.policy.unsharded():  # `awake` does not gather the weights
            super().sample_validation([self._mark_preferred(prompt, None) for prompt in prompts], each=each)

    def _mark_preferred(self, prompt: Prompt, preferred: bool | None) -> Prompt:
        """The prompt of one image: its meta gets `preferred` instead of the columns of images."""
        other = {name: value for name, value in prompt.meta.items() if name not in self.facts.columns}
        return replace(prompt, meta=other | {"preferred": preferred})
