"""Rules for sampling: the engine, its schedule and the window of trained denoising steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from phalanx.config.engine_facts import EngineFacts
from phalanx.run.rules.rule import CONTEXT, FLOW, FLOW_MATCHING, FLOW_RL, LM, LM_RL, RL, RUN, Rule


def _able_engines(rollout: Any, able: Callable[[EngineFacts], bool]) -> str:
    """The built-in engines whose facts satisfy `able`, as a setting such as rollout.engine=policy or vllm."""
    names = [name for name in rollout.ENGINES if able(replace(rollout, engine=name).facts)]
    return f"{rollout:engine}={' or '.join(names)}"


def redrawn(c: Any) -> str | None:
    """The first key that makes samples of groups with equal rewards be drawn again."""
    for key in ("max_num_gen_batches", "max_draws_per_prompt"):
        if vars(c.rollout)[key] > 1:
            return f"rollout.{key}"
    return None


def truncated(c: Any) -> str | None:
    """The first key that truncates the distributions from which training samples are drawn."""
    keys = {"rollout.top_k": c.rollout.top_k > 0, "rollout.top_p": c.rollout.top_p < 1}
    return next((key for key, on in (keys | {"rollout.min_p": c.rollout.min_p > 0}).items() if on), None)


def _no_log_probs(c: Any) -> bool:
    """Whether samples with other log-probs than the policy's are used without recomputing their log-probs."""
    r = c.rollout
    return r.correction == "none" and (not r.facts.exact or bool(r.partial_rollout))


def _needless_correction(c: Any) -> str | None:
    """The reason why there is nothing to correct, if a correction is set."""
    r = c.rollout
    older = r.schedule == "one_step_off" or vars(r).get("partial_rollout")
    if r.correction == "rescore" or older or not r.facts.exact:
        return None
    return "its images have no log-probs" if r.facts.columns else "its log-probs are exact"


def _two_sleep(c: Any) -> bool:
    """Whether the rollout's vLLM and the reward model's, which share processes, would both sleep."""
    model = c.reward.model
    return bool(model.path is not None and model.engine == "vllm" and model.sleep and c.rollout.engine_memory.sleeps)


def _trains_on_whole_steps(c: Any, a: Any) -> bool:
    """Whether the algorithm needs all samples of a step before it trains on the first one."""
    whole = vars(c.algorithm).get("global_std") or a.per_action or c.reward.normalize == "gdpo"
    return bool(whole) or a.levels is not None or a.samples_per_unit != 1


def _other_number_of_images(c: Any, a: Any) -> tuple[int, str] | None:
    """The number of images per prompt in the data and their names, if rollout.n differs."""
    columns = c.rollout.facts.columns
    return (len(columns), " image and the ".join(columns)) if columns and c.rollout.n != len(columns) else None


def _not_differentiated(c: Any, a: Any) -> tuple[str, Any, str] | None:
    """The first key that does not work with an algorithm that differentiates the reward, its value and the remedy."""
    r, ranks = c.rollout, c.parallel.ulysses_sequence_parallel_size
    broken = (
        ("rollout.engine", r.engine, r.engine == "policy", "set it to policy"),
        ("rollout.noise_level", f"{r.noise_level:g}", r.noise_level == 0, "set it to 0"),
        ("rollout.solver", r.solver, r.solver == "euler", "set it to euler"),
        ("reward.normalize", c.reward.normalize, c.reward.normalize == "none", "set it to none"),
        ("placement", ", ".join(map(str, c.placement)), not c.placement, "leave it out"),
        (CONTEXT, ranks, ranks == 1, "set it to 1"),
    )
    return next(((key, value, what) for key, value, fits, what in broken if a.last_steps and not fits), None)


def _last_step(c: Any, a: Any) -> int | None:
    """The largest end of the window, if it contains the last step, which has no log-probability under cps."""
    r, window = c.rollout, c.rollout.sde_window_range
    if a.levels is None and r.sde_type == "cps" and window is not None and window[1] == r.num_inference_steps:
        return r.num_inference_steps - 1
    return None


RULES = (
    Rule("rollout.correction rollout.engine", RUN, _needless_correction,
         " has nothing to correct with {c.rollout:engine=}; {x}"),
    Rule("rollout.max_num_gen_batches rollout.max_draws_per_prompt rollout.engine", RUN,
         lambda c: None if c.rollout.facts.redraws else redrawn(c),
         " needs an engine that draws again, such as {c.rollout:engine}=policy; set it to 1"),
    Rule("rollout.num_frames rollout.engine", FLOW,
         lambda c: c.rollout.num_frames > 1 and not c.rollout.facts.videos
         and _able_engines(c.rollout, lambda facts: facts.videos),
         " needs {x}; {c.rollout.engine} samples images, not videos"),
    Rule("rollout.num_frames", FLOW_MATCHING, lambda c: c.rollout.num_frames > 1,
         ": flow matching trains on images; set it to 1"),
    Rule("rollout.top_k rollout.top_p rollout.min_p rollout.correction", LM,
         lambda c: truncated(c) if _no_log_probs(c) else None,
         " needs the policy's own log-probs, which determine the tokens that are kept, but "
         "{c.rollout:correction}=none does not compute them; set it to rescore"),
    Rule("rollout.partial_rollout rollout.schedule", LM_RL,
         lambda c: c.rollout.partial_rollout and c.rollout.schedule == "pipelined",
         "{c.rollout:partial_rollout}: true does not wait for the longest responses of a step, so it has no parts; set "
         "{c.rollout:schedule} to synchronous or one_step_off"),
    Rule("rollout.partial_rollout.tokens data.max_response_length", LM_RL,
         lambda c: c.rollout.partial_rollout and c.data.max_response_length % c.rollout.partial_rollout.tokens,
         " does not divide data.max_response_length={c.data.max_response_length}"),
    Rule("parallel.rollout_unsharded rollout.engine", LM,
         lambda c: not c.parallel.rollout_unsharded and c.rollout.facts.weights == "policy",
         " would gather weights for each token, but ranks decode different numbers of tokens; set it to true"),
    Rule("reward.model.sleep rollout.sleep rollout.engine reward.model.engine", LM_RL, _two_sleep,
         " does not work with {c.rollout:sleep}=true, because vLLM lets only one engine per process sleep; set one of "
         "the two to false, or reward.model.engine=transformers"),
    Rule("rollout.schedule rollout.max_staleness", RL,
         lambda c: c.rollout.schedule == "one_step_off" and c.rollout.max_staleness == 0,
         " trains on samples that are one step old; set {c.rollout:max_staleness} to 1"),
    Rule("rollout.schedule actor.ppo_epochs algorithm.name", RL,
         lambda c: c.rollout.schedule == "pipelined" and (c.actor.ppo_epochs > 1 or c.algorithm.needs_critic),
         " trains on each sample once, when it arrives; set {c.actor:ppo_epochs} to 1, and use no critic"),
    Rule("rollout.schedule actor.loss_agg_mode actor.loss_scale_factor", RL,
         lambda c: c.rollout.schedule == "pipelined"
         and c.actor.loss_agg_mode == "seq-mean-token-sum-norm"
         and c.actor.loss_scale_factor is None,
         " trains before the longest sample of a step is known; set {c.actor:loss_scale_factor}"),
    Rule("rollout.branching rollout.init_same_noise", FLOW_RL,
         lambda c: c.rollout.branching and not c.rollout.init_same_noise,
         " takes the steps before the window once; set {c.rollout:init_same_noise}=true"),
    Rule("rollout.branching rollout.max_num_gen_batches rollout.max_draws_per_prompt", FLOW_RL,
         lambda c: c.rollout.branching and redrawn(c),
         "{c.rollout:branching}: true draws all images of a prompt together; set {c.rollout:max_num_gen_batches} and "
         "{c.rollout:max_draws_per_prompt} to 1"),
)  # fmt: skip

START_RULES = (
    Rule("rollout.n rollout.engine data.rejected_key", LM_RL,
         lambda c, a: c.rollout.facts.weights == "none" and c.rollout.n != 2 and c.data.rejected_key is not None,
         "; expected 2 with {c.rollout:engine=} and data.rejected_key: the preferred and the other response"),
    Rule("rollout.schedule algorithm.name algorithm.global_std reward.normalize", RL,
         lambda c, a: c.rollout.schedule == "pipelined" and _trains_on_whole_steps(c, a),
         ": {c.algorithm.name} needs all samples of a step before it trains on the first one (as with global_std); "
         "expected an algorithm such as grpo with {c.algorithm:global_std}=false"),
    Rule("placement rollout.engine algorithm.name", RL,
         lambda c, a: "inference" in str(list(c.placement)) and (c.rollout.facts.exact or a.levels is not None),
         "placement.inference: there are no log-probs to recompute; give its ranks to the rollout"),
    Rule("rollout.engine algorithm.name", FLOW_RL, lambda c, a: a.levels is None and c.rollout.facts.columns,
         " takes images from the data, but {c.algorithm:name=} trains on sampled denoising steps; use one that trains "
         "on images, such as diffusion_dpo"),
    Rule("rollout.n rollout.engine", FLOW_RL, _other_number_of_images,
         "; expected {x[0]} with {c.rollout:engine=}: the {x[1]} one"),
    Rule("rollout.noise_level algorithm.name", FLOW_RL,
         lambda c, a: a.levels is None and c.rollout.noise_level == 0,
         "; expected more than 0, since {c.algorithm:name=} trains denoising steps, which have no probability without "
         "noise"),
    Rule("rollout.sde_window_range rollout.sde_type", FLOW_RL, _last_step,
         " contains the last step, which has no log-probability under cps; expected an end of at most {x}"),
    Rule("rollout.correction algorithm.name", FLOW_RL,
         lambda c, a: c.algorithm.name in ("opd", "flow_sdft") and c.rollout.correction not in ("rescore", "none"),
         " weights a policy gradient, which {c.algorithm:name=} does not have; set it to rescore or none"),
    Rule("rollout.engine rollout.noise_level rollout.solver reward.normalize placement "
         f"{CONTEXT} algorithm.name", FLOW_RL, _not_differentiated,
         "{x[0]}: {x[1]} does not work with {c.algorithm:name=}, which differentiates the reward; {x[2]}"),
    Rule("algorithm.last_steps rollout.num_inference_steps", FLOW_RL,
         lambda c, a: a.last_steps > c.rollout.num_inference_steps,
         "{c.algorithm:last_steps}: {a.last_steps} is more than {c.rollout:num_inference_steps=}; lower it"),
    Rule("rollout.solver rollout.noise_level algorithm.name", FLOW_RL,
         lambda c, a: a.levels is not None and c.rollout.noise_level > 0 and c.rollout.solver != "euler",
         " takes steps without noise, but with {c.algorithm.name} all steps have "
         "{c.rollout:noise_level}={c.rollout.noise_level:g}; set that to 0, or {c.rollout:solver}=euler"),
    Rule("rollout.init_same_noise rollout.noise_level algorithm.name", FLOW_RL,
         lambda c, a: a.levels is not None and c.rollout.noise_level == 0 and c.rollout.init_same_noise,
         " makes all images of a prompt equal, because {c.algorithm.name} samples without noise; set it to false"),
)  # fmt: skip
