"""Teachers of language models: frozen models beside the policy, or the policy itself with more in its prompts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from phalanx.config.lm import LMRLConfig
from phalanx.config.section import reported_by
from phalanx.distributed.collectives import reduce_int
from phalanx.functional.looks import Look
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.blocks import build_block_policy
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.load_folder import load_tokenizer
from phalanx.models.meeting import shared
from phalanx.training.components import taught_model
from phalanx.types import Prompt, Samples, Teacher


class LoadedLMTeacher:
    """A teacher sharded over the mesh, in model.dtype; its weights are gathered layer by layer, never all at once."""

    told = False

    def __init__(self, student: LMPolicy, policy: LMPolicy) -> None:
        self.student, self.policy = student, policy

    def relative_cost(self, samples: Samples) -> float:
        """Operations of the teacher's pass over a sample, relative to the policy's."""
        trace: TokenTrace = samples.trace
        scored, length = float(trace.lengths.float().mean()), float(trace.stops.float().mean())
        more = []  # tokens of the teacher's prompts
        for prompt, start in zip(samples.prompts, trace.starts.tolist(), strict=True):
            more += [len(prompt.told) - start] if self.told and prompt.told else []
        longer = self.policy.forward_flops(length + sum(more) / max(len(more), 1), scored)
        return longer / self.student.forward_flops(length, scored)

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples unchanged: the teacher reads the same tokens."""
        return samples


def _check_same_images(teacher: LMPolicy, student: LMPolicy, here: str) -> None:
    """Raise ValueError unless both read images alike: a teacher gets the tokens and pixels that the student reads."""
    (theirs, shown), (ours, seen) = teacher.reader.tried, student.reader.tried
    alike = theirs == ours and shown.inputs.keys() == seen.inputs.keys()
    for name, values in seen.inputs.items():
        alike = alike and torch.equal(shown.inputs[name], values)
    if not alike or teacher.vision.name != student.vision.name:
        raise ValueError(
            f"{here} reads images differently from {student.config:path}; expected a {student.vision.name} with the "
            "same image processor"
        )


def load_teacher(teacher: Teacher, cfg: LMRLConfig, student: LMPolicy) -> LoadedLMTeacher:
    """Load a teacher; all ranks call this together. Raises ValueError for a model with another vocabulary."""
    model, here = taught_model(teacher, student.config), f"{teacher.key}: {teacher.path!r}"
    model.freeze_vision_tower = True
    with reported_by({"model": model}):
        theirs, ours = load_tokenizer(model).get_vocab(), student.tokenizer.get_vocab()
        if theirs != ours:
            raise ValueError(
                f"{here} has another tokenizer than {student.config:path}, with {len(theirs)} tokens instead of "
                f"{len(ours)}; the teacher's tokens must have the same ids as the policy's"
            )
        build: Callable[..., LMPolicy] = partial(build_policy, images=student.vision is not None)
        if model.block_size is not None:
            build = partial(build_block_policy, estimate=cfg.actor.log_prob_estimate)
        load = partial(
            build,
            model,
            replace(cfg.parallel, rollout_unsharded=False),  # all ranks make equally many passes
            cfg.data,
            student.world,
            chunk=cfg.actor.log_prob_chunk_size,
            temperature=cfg.rollout.temperature,
            seed=cfg.trainer.seed,
            frozen=True,
        )
        policy = shared(f"teacher {teacher}", load)
        if student.vision is not None:
            _check_same_images(policy, student, here)
        rows, needed = policy.settings.vocab_size, student.settings.vocab_size
        if rows < needed:
            raise ValueError(
                f"{teacher.key}: {teacher.path!r} has logits for {rows} tokens, but the policy may draw any of {needed}"
            )
    return LoadedLMTeacher(student, policy)


class ContextTeacher(LoadedLMTeacher):
    """The policy itself, or an average of its weights, which reads the prompts of phalanx.run.lm_context."""

    told = True

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples, whose responses follow the teacher's prompts; without one, their own."""
        trace: TokenTrace = samples.trace
        before, behind = trace.starts.tolist(), (trace.stops - trace.starts).cpu()
        told = []
        for prompt, ids, start in zip(samples.prompts, trace.ids, before, strict=True):
            told.append(torch.tensor(prompt.told) if prompt.told else ids[:start].cpu())
        starts = torch.tensor(list(map(len, told)))
        longest = reduce_int(int((starts + behind).max()), "max")
        ids, marks = torch.full((len(starts), longest), self.policy.pad), torch.zeros(len(starts), longest).bool()
        for i, (start, count) in enumerate(zip(starts.tolist(), behind.tolist(), strict=True)):
            ids[i, :start] = told[i]
            response = slice(before[i], before[i] + count)
            ids[i, start : start + count] = trace.ids[i, response].cpu()
            if trace.sampled is not None:
                marks[i, start : start + count] = trace.sampled[i, response].cpu()
        device = trace.ids.device
        looks = trace.looks and tuple(map(self._beside, trace.looks, samples.prompts))
        theirs = replace(trace, ids=ids.to(device), starts=starts.to(device), looks=looks)
        if trace.sampled is not None:
            theirs = replace(theirs, sampled=marks.to(device), ends=(starts + behind).to(device))
        assert samples.lengths is not None, "samples of this policy have lengths"
        lengths = samples.lengths.clone()
        lengths[:, 0] = starts
        return replace(samples, trace=theirs, lengths=lengths)

    def _beside(self, look: Look | None, prompt: Prompt) -> Look | None:
        """The images of the policy's prompt, which stand elsewhere in the teacher's."""
        if look is None or not prompt.told:
            return look
        positions, following = self.policy.vision.places(torch.tensor([prompt.told]), look.inputs)
        return replace(look, positions=positions, following=following)
