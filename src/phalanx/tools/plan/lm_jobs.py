"""Planned jobs of language models, see phalanx.tools.plan.jobs."""

from dataclasses import replace
from typing import Any

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.lm import LMRLConfig
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rollout.lm.together import cache_bytes, fitting_together
from phalanx.run.block_diffusion_sft import Example, Training
from phalanx.run.lm_kind import LM, as_planned, scoring
from phalanx.run.lm_teacher import ContextTeacher
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import Ledger
from phalanx.tools.plan.lm_blueprint import PlannedBlockRollout, PlannedLMRollout, planned_lm_policy
from phalanx.tools.plan.rehearsal import (
    PlannedBlockDiffusion,
    RLRehearsal,
    SupervisedRehearsal,
    busiest_rank,
    longest_prompts,
)
from phalanx.training.components import LoadedTeacher
from phalanx.training.minibatches import BatchPlan
from phalanx.types import TEACHER, Samples


def rehearsed(kind: LM, cluster: Cluster, plan: BatchPlan, *, teaches: bool, learns: bool) -> RLRehearsal:
    """A step of reinforcement learning."""
    cfg: LMRLConfig = kind.cfg
    algorithm, actor, blocks = kind.build_algorithm(), cfg.actor, cfg.model.block_size is not None
    options: dict[str, Any] = {"chunk": actor.log_prob_chunk_size, "frozen": not learns}
    if blocks:
        options["estimate"] = actor.log_prob_estimate
    given, tries = replace(cfg, model=as_planned(cfg.model, plan)), cfg.model.use_remove_padding is None
    policy = planned_lm_policy(given, cluster, Ledger(), rank=busiest_rank(cfg, plan, cluster), tries=tries, **options)
    plan, some = kind.as_loaded(plan, policy), cfg.rollout.micro_batch_size_per_gpu
    decoded = some or (plan.rollout_micro if cfg.rollout.partial_rollout else plan.per_rank)
    if cfg.rollout.micro_batch_size_per_gpu is None and cfg.rollout.facts.weights == "policy":
        each = cache_bytes(cfg, policy)
        decoded = fitting_together(decoded, each, cluster.gpu_memory, policy.world.context_size)
    plan = replace(plan, rollout_micro=decoded)
    passes = scoring(plan, algorithm, cfg.rollout) if learns else None
    make = PlannedBlockRollout if blocks else PlannedLMRollout
    rollout = make(policy, cfg.rollout, policy.world, plan.rollout_micro, passes)
    rollout.facts, rollout.most = cfg.rollout.facts, cfg.most_states if blocks else 0
    with policy.ledger, policy.ledger.uncounted():
        prompts = longest_prompts(policy, plan.samples // cfg.rollout.n)
        teachers: dict[str, LoadedTeacher] = {}
        if teaches and kind.tells:
            longest = cfg.algorithm.max_context_length or cfg.data.max_response_length
            teachers[TEACHER] = _Context(policy, longest)
        return RLRehearsal(cfg, plan, algorithm, policy, rollout, prompts, teachers, learns=learns)


class _Context(ContextTeacher):
    """A teacher whose prompts are longer than the student's by `longest` tokens."""

    def __init__(self, policy: LMPolicy, longest: int) -> None:
        super().__init__(policy, policy)
        self.longest = longest

    def relative_cost(self, samples: Samples) -> float:
        """As ContextTeacher, of the longest samples."""
        trace: TokenTrace = samples.trace
        length = trace.ids.shape[1]
        longer = self.policy.forward_flops(length + self.longest, trace.width)
        return longer / self.policy.forward_flops(length, trace.width)

    def samples(self, samples: Samples) -> Samples:
        """As ContextTeacher, of shapes."""
        trace: TokenTrace = samples.trace
        ids = trace.ids.new_zeros(len(trace.ids), trace.ids.shape[1] + self.longest)
        trace = replace(trace, ids=ids, starts=trace.starts + self.longest)
        if samples.lengths is not None:
            samples = replace(samples, lengths=samples.lengths + samples.lengths.new_tensor([self.longest, 0, 0]))
        return replace(samples, trace=trace)


def rehearsed_blocks(kind: Training, cluster: Cluster, *_: Any, **__: Any) -> SupervisedRehearsal:
    """A step of supervised block diffusion."""
    cfg: BlockDiffusionTaskConfig = kind.cfg
    policy: Any = planned_lm_policy(cfg, cluster, Ledger(), chunk=cfg.block_diffusion.log_prob_chunk_size)
    decoded = cfg.rollout.micro_batch_size_per_gpu or kind.together
    rollout = PlannedBlockRollout(policy, cfg.rollout, policy.world, decoded, None)
    prompt, response, noise = cfg.data.max_prompt_length, cfg.data.max_response_length, cfg.block_diffusion
    most_noised = replace(cfg, block_diffusion=replace(noise, noise_range_low=noise.noise_range_high))
    flops = policy.states_flops(prompt + response, response / policy.size, response * noise.noise_range_high)
    with policy.ledger, policy.ledger.uncounted():
        examples = [Example([0] * prompt, [0] * response)] * cfg.data.batch_size(cluster.ranks)
        task = PlannedBlockDiffusion(most_noised, policy, examples, policy.world)
        return SupervisedRehearsal(cfg, policy, rollout, task, noise.ema, round(flops))
