"""Flow-GRPO (arXiv 2505.05470) in one file: sample, score, compare, replay, step. One process, one update per step.

    python examples/flowgrpo_in_one_file.py configs/flowgrpo/quickstart.yaml trainer.total_training_steps=3

The components, and the gradient, are those of the training job. The job adds many ranks, checkpoints, validation, logs,
several updates per step, EMA, and checks of everything that can go wrong.
"""

import sys

import torch

from phalanx.config.flow import FlowRLConfig
from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.functional.advantage import group_advantage, has_signal
from phalanx.functional.losses import clipped_surrogate
from phalanx.models.flow.policy import build_policy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.run.rules import load_config
from phalanx.run.start import build_rewards, start_job
from phalanx.training.optim import Optimizer

cfg = load_config(FlowRLConfig, sys.argv[1], sys.argv[2:])
n, window, micro = cfg.rollout.n, cfg.rollout.sde_window_size, cfg.actor.ppo_micro_batch_size_per_gpu
seed, steps = cfg.trainer.seed, cfg.trainer.total_training_steps

world = start_job(cfg)
policy = build_policy(cfg.model, cfg.parallel, cfg.data, world, seed=seed, detach_uncond=cfg.actor.detach_uncond)
rollout = PolicyRollout(policy, cfg.rollout, world, micro * window)
rewards = build_rewards(cfg, world)
prompts = PromptStream(load_prompts(cfg.data.train_files, "data.train_files"), cfg.data.train_batch_size, cfg.data.seed)
optimizer = Optimizer(cfg.optim, policy.trained.sharded, steps)

for step in range(steps):
    # n images per prompt, with noise in W of the denoising steps: log_prob [B, W] has one value per noisy step
    rollout.prepare(prompts.batch, step, step + 1)
    with rollout.awake():
        samples = rollout.sample(prompts.batch(step), seed=seed, step=step, each=rewards.submit)
    reward = rewards.weighted(rewards.collect())  # [B]

    # A = (r - mean) / std over the images of a prompt; prompts whose images all have the same reward are left out
    group = torch.arange(len(reward)) // n
    advantage = group_advantage(reward, group).clamp(-5, 5)  # [B]
    counted = has_signal(reward, group)  # [B] bool
    weight = counted / (counted.sum() * samples.log_prob.shape[1])  # [B]: a mean over images and steps

    # L = mean of max(-A rho, -A clip(rho, 1 - eps, 1 + eps)), where rho is the replayed over the old probability
    total, errors = torch.zeros(()), []
    for rows in torch.arange(len(reward)).split(micro):
        replay = policy.replay(samples.trace.select(rows))  # log_prob [b, W] of the same noisy steps, with a gradient
        old, clip = samples.log_prob[rows], cfg.algorithm.clip_ratio
        loss, stats = clipped_surrogate(replay.log_prob, old, advantage[rows], clip_ratio=clip)  # [b, W]
        loss = (loss * weight[rows, None]).sum()
        loss.backward()
        total += loss.detach()
        errors.append(float(stats["ratio_error"].values.max()))
    norm = float(optimizer.step(total)["grad_norm"])
    print(f"step {step + 1}: reward {reward.mean():.4f}, ratio_error {max(errors):.1e}, grad_norm {norm:.9g}")
