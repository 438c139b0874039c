"""Teachers: frozen language models beside the policy that score its responses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from phalanx.config.lm import LMRLConfig
from phalanx.config.section import reported_by
from phalanx.distributed.mesh import World
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.blocks import build_block_policy
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.load_folder import load_tokenizer
from phalanx.training.components import taught_model
from phalanx.types import Samples, Teacher


class LoadedLMTeacher:
    """A teacher sharded over the mesh, in model.dtype; its weights are gathered layer by layer, never all at once."""

    def __init__(self, student: LMPolicy, policy: LMPolicy) -> None:
        self.student, self.policy = student, policy

    def relative_cost(self, samples: Samples) -> float:
        """Operations of the teacher's pass over a sample, relative to the policy's."""
        trace: TokenTrace = samples.trace
        scored = float(trace.lengths.float().mean())
        length = float(trace.stops.float().mean())
        return self.policy.forward_flops(length, scored) / self.student.forward_flops(length, scored)

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples unchanged: the teacher reads the same tokens."""
        return samples


def load_teacher(teacher: Teacher, cfg: LMRLConfig, student: LMPolicy, world: World) -> LoadedLMTeacher:
    """Load a teacher; all ranks call this together. Raises ValueError for a model with another vocabulary."""
    model, here = taught_model(teacher, student.config), f"{teacher.key}: {teacher.path!r}"
    with reported_by({"model": model}):
        theirs, ours = load_tokenizer(model).get_vocab(), student.tokenizer.get_vocab()
        if theirs != ours:
            raise ValueError(
                f"{here} has another tokenizer than {student.config:path}, with {len(theirs)} tokens instead of "
                f"{len(ours)}; the teacher's tokens must have the same ids as the policy's"
            )
        build: Callable[..., LMPolicy] = build_policy
        if model.block_size is not None:
            build = partial(build_block_policy, estimate=cfg.actor.log_prob_estimate)
        policy = build(
            model,
            replace(cfg.parallel, rollout_unsharded=False),  # all ranks make equally many passes
            cfg.data,
            world,
            chunk=cfg.actor.log_prob_chunk_size,
            temperature=cfg.rollout.temperature,
            seed=cfg.trainer.seed,
            frozen=True,
        )
        rows, needed = policy.settings.vocab_size, student.settings.vocab_size
        if rows < needed:
            raise ValueError(
                f"{teacher.key}: {teacher.path!r} has logits for {rows} tokens, but the policy may draw any of {needed}"
            )
    return LoadedLMTeacher(student, policy)
