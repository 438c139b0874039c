"""Choices that give keys a meaning: a key or section with `only=(CHOICE,)` exists only where the choice is made.

A file may still set such a key to its default, as the saved configurations of runs do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """A choice in a job.

    schema: name of the schema whose jobs have it; it also applies to schemas derived from that.
    name: the choice in words, for the documentation.
    made: function of the configuration `c` and the leaf of the key, `key`, whether the key exists.
    message: the rest of the line about a key that is set without it, a format string of c.
    fact: whether `made` has a third argument `a`, the algorithm, an instance with the facts of phalanx.types.Algorithm.
    """

    schema: str
    name: str
    made: Callable[..., Any]
    message: str
    fact: bool = False


# fmt: off
BLOCKS = Choice("LMRunConfig", "block diffusion, `model.block_size`",
                lambda c, key: c.model.block_size is not None,
                "is for block diffusion; set {c.model:block_size}, or leave it out")
CRITIC = Choice("LMRLConfig", "an algorithm with a critic, such as ppo",
                lambda c, key: c.algorithm.needs_critic,
                "configures a critic, but {c.algorithm:name=} has none; leave it out, or set {c.algorithm:name}=ppo")
ENVIRONMENT = Choice("LMRLConfig", "`environment.path`, `environment.tools` or `environment.tool_config_path`",
                     lambda c, key: c.environment.used,
                     "configures an environment; set environment.path, environment.tools or "
                     "environment.tool_config_path, or leave it out")
READ = Choice("RLConfig", "an algorithm that reads it",
              lambda c, key: key not in c.algorithm.unused,
              "is not used by {c.algorithm:name=}; leave it out")
STDS = Choice("RLConfig", "advantages that are divided by a standard deviation",
              lambda c, key: not c.algorithm.bounds_stds or c.algorithm.norm_adv_by_std_in_grpo,
              "clamps advantages that were divided by a std, but {c.algorithm:norm_adv_by_std_in_grpo}=false does not "
              "divide; leave it out")
DECAY = Choice("FlowRLConfig", "`algorithm.old_decay` slow or late",
               lambda c, key: c.algorithm.old_decay != "zero",
               "has no effect with {c.algorithm:old_decay}=zero; set old_decay to slow or late, or leave it out")
ONE_STEP = Choice("FlowRLConfig", "`algorithm.last_steps=1`",
                  lambda c, key: c.algorithm.last_steps == 1,
                  "draws repeat only the last denoising step; set {c.algorithm:last_steps} to 1, or leave it out")
LORA = Choice("RunConfig", "a LoRA, `model.lora_rank`",
              lambda c, key: c.model.lora_rank > 0,
              "is for the frozen weights under a LoRA; set {c.model:lora_rank}, for example to 32, or leave it out")
FULL = Choice("RunConfig", "training of all weights, `model.lora_rank=0`",
              lambda c, key: c.model.lora_rank == 0 or (key == "freeze_vision_tower" and "actor" not in vars(c)),
              "is only for training all weights, not for a LoRA; leave it out")
IMAGES = Choice("JointConfig", "a job with one policy",
                lambda c, key: False,
                "is for prompts with images, but the writer of a joint run reads only text; set it to null")
WRITTEN = Choice("LMRLConfig", "`rollout.engine=dataset`",
                 lambda c, key: c.rollout.facts.weights == "none",
                 "is for responses of the data; set {c.rollout:engine}=dataset, or leave it out")
DRAWN = Choice("LMRLConfig", "an engine that samples",
               lambda c, key: c.rollout.facts.weights != "none",
               "is for sampled responses, but {c.rollout:engine=} takes them from the data; leave it out")
NOT_BLOCKS = Choice("BlockDiffusionTaskConfig", "a job that trains on pairs",
                    lambda c, key: False,
                    "is for pairs, on which supervised block diffusion does not train; leave it out")
NOT_JOINT = Choice("JointConfig", "a job with one policy",
                   lambda c, key: False,
                   "is for responses of the data, which a joint run does not train on; leave it out")
TWO_POLICIES = Choice("JointConfig", "two trained policies",
                      lambda c, key: len(c.train) > 1,
                      "needs two trained policies; set it to null, or train=[writer, painter]")
FOLDER = Choice("EvaluateConfig", "a model folder instead of a checkpoint",
                lambda c, key: c.checkpoint is None,
                "is only for a model folder, because the run of a checkpoint determines its kind; leave it out")
CHECKPOINT = Choice("EvaluateConfig", "a checkpoint",
                    lambda c, key: c.checkpoint is not None,
                    "is for the checkpoint of a joint run; set checkpoint, or leave it out")
REWARDS = Choice("RLConfig", "an algorithm that learns from rewards",
                 lambda c, key, a: a.needs_reward,
                 "depends on rewards, from which {c.algorithm.name} does not learn; set it to 1", fact=True)
REFERENCE = Choice("RLConfig", "a loss that reads a reference, `algorithm.kl_loss_coef`",
                   lambda c, key, a: "reference" in a.references,
                   "has no reference to sync; set {c.algorithm:kl_loss_coef} > 0, or leave it out", fact=True)
WINDOW = Choice("FlowRLConfig", "an algorithm that trains on the log-probs of a window of denoising steps",
                lambda c, key, a: a.levels is None,
                "needs log-probs of a window of steps, which {c.algorithm.name} does not use; leave it out", fact=True)
# fmt: on
