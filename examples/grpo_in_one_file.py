"""GRPO of a language model (arXiv 2402.03300) in one file. One process, one update per step.

    python examples/grpo_in_one_file.py configs/grpo/quickstart.yaml trainer.total_training_steps=3

The components, and the gradient, are those of the training job. The job adds many ranks, vLLM, checkpoints, validation,
logs, several updates per step, and checks of everything that can go wrong.
"""

import sys

import torch

from phalanx.config.lm import LMRLConfig
from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.distributed.passes import Passes
from phalanx.functional.advantage import group_advantage, has_signal
from phalanx.functional.losses import clipped_tokens
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.run.kind import kind_of
from phalanx.run.rules import load_config
from phalanx.run.start import build_rewards, start_job
from phalanx.training.optim import Optimizer

cfg = load_config(LMRLConfig, sys.argv[1], sys.argv[2:])
n, micro, clip = cfg.rollout.n, cfg.actor.ppo_micro_batch_size_per_gpu, cfg.algorithm.clip_ratio
seed, steps, data = cfg.trainer.seed, cfg.trainer.total_training_steps, cfg.data

world = start_job(cfg)
policy = kind_of(cfg).load_policy(world)
rollout = LMRollout(policy, cfg.rollout, world, data.train_batch_size * n, Passes(micro))
rewards = build_rewards(cfg, world, outputs="completions")
rows = load_prompts(data.train_files, "data.train_files", prompt=data.prompt_key, quoted=False)
prompts = PromptStream(rows, data.train_batch_size, data.seed)
optimizer = Optimizer(cfg.optim, policy.trained.sharded, steps)

for step in range(steps):
    # n responses per prompt; log_prob and mask [B, A] have one value per token, padded to the longest response
    with rollout.awake():
        samples = rollout.sample(prompts.batch(step), seed=seed, step=step, each=rewards.submit)
    reward = rewards.weighted(rewards.collect())  # [B]

    # A = (r - mean) / std over the responses to a prompt; prompts whose responses all have the same reward are left out
    group = torch.arange(len(reward)) // n
    advantage = group_advantage(reward, group).clamp(-5, 5)  # [B]
    counted = samples.mask & has_signal(reward, group)[:, None]  # [B, A] bool
    weight = counted / counted.sum().clamp(min=1)  # [B, A]: a mean over all tokens

    # L = mean of max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), where rho is the replayed over the old probability
    total, errors = torch.zeros(()), []
    for rows in torch.arange(len(reward)).split(micro):
        mask = samples.mask[rows]
        replay = policy.replay(samples.trace.select(rows))  # log_prob [b, A] of the same tokens, with a gradient
        log_ratio = (replay.log_prob - samples.log_prob[rows]) * mask
        loss, stats = clipped_tokens(log_ratio, advantage[rows], low=clip, high=clip, dual=3.0)  # [b, A]
        loss = (loss * weight[rows]).sum()
        loss.backward()
        total += loss.detach()
        errors.append(float(stats["ratio_error"].values.max()))
    norm = float(optimizer.step(total)["grad_norm"])
    print(f"step {step + 1}: reward {reward.mean():.4f}, ratio_error {max(errors):.1e}, grad_norm {norm:.9g}")
