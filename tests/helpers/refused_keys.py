"""Configurations with a key whose choice is not made, or with a value out of range, and their messages."""

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRLConfig
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.tasks import EvaluateConfig, GenerateConfig

OPD = ("algorithm.name=opd", "algorithm.teacher_path=x")
REFUSED: list[tuple[type, tuple[str, ...], str]] = [
    (
        JointConfig,
        ("data.response_key=answer",),
        "data.response_key: answer is for responses of the data, which a joint run does not train on; leave it out",
    ),
    (
        BlockDiffusionTaskConfig,
        ("data.rejected_key=worse",),
        "data.rejected_key: worse is for pairs, on which supervised block diffusion does not train; leave it out",
    ),
    (
        LMRLConfig,
        ("data.response_key=answer",),
        "data.response_key: answer is for responses of the data; set rollout.engine=dataset, or leave it out",
    ),
    (JointConfig, ("train=[writer,writer]",), "train: expected some of writer, painter, got ['writer', 'writer']"),
    (
        JointConfig,
        ("train=[painter]", "alternate=2"),
        "alternate: 2 needs two trained policies; set it to null, or train=[writer, painter]",
    ),
    (
        JointConfig,
        ("data.image_key=picture",),
        "data.image_key: picture is for prompts with images, but the writer of a joint run reads only text; set it to null",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=draft", "algorithm.noise_draws=2", "algorithm.last_steps=3"),
        "algorithm.noise_draws: 2 draws repeat only the last denoising step; set algorithm.last_steps to 1, or leave it out",
    ),
    (
        JointConfig,
        ("rewrite.pattern=a",),
        "rewrite.pattern: expected a pattern such as '<prompt>(.*?)</prompt>' (it has no group in parentheses), got 'a'",
    ),
    (
        JointConfig,
        ("rewrite.template=a",),
        "rewrite.template: expected a text with {} once, for the rewritten prompt, filled up to at most 10000 characters, got 'a'",
    ),
    (
        JointConfig,
        ("rewrite.template='{:>999999999}'",),
        "rewrite.template: expected a text with {} once, for the rewritten prompt, filled up to at most 10000 characters, got '{:>999999999}'",
    ),
    (
        JointConfig,
        ("rewrite.validate=[both]",),
        "rewrite.validate: expected some of rewritten, original, swapped, got ['both']",
    ),
    (
        FlowRLConfig,
        ("optim.betas=[0.9,1]",),
        "optim.betas: expected two numbers in 0 .. 1, such as [0.9, 0.999], got [0.9, 1]",
    ),
    (FlowRLConfig, ("trainer.save_freq=0",), "trainer.save_freq: expected -1 (never) or a number of steps, got 0"),
    (FlowRLConfig, ("trainer.test_freq=-2",), "trainer.test_freq: expected -1 (never) or a number of steps, got -2"),
    (LMRLConfig, ("trainer.profile_steps=[2,0]",), "trainer.profile_steps[1]: expected at least 1, got 0"),
    (
        LMRLConfig,
        ("algorithm.name=ppo", "critic.optim.betas=[0.9]"),
        "critic.optim.betas: expected two numbers in 0 .. 1, such as [0.9, 0.999], got [0.9]",
    ),
    (
        LMRLConfig,
        ("trainer.critic_warmup=3",),
        "trainer.critic_warmup: 3 configures a critic, but algorithm.name=grpo has none; leave it out, or set algorithm.name=ppo",
    ),
    (
        LMRLConfig,
        ("critic.optim.lr=1",),
        "critic.optim.lr: 1.0 configures a critic, but algorithm.name=grpo has none; leave it out, or set algorithm.name=ppo",
    ),
    (
        LMRLConfig,
        ("environment.path=3",),
        "environment.path: expected a built-in environment, module:Class, path/to/file.py:Class, or a section that maps names to these, got 3",
    ),
    (
        LMRLConfig,
        ("environment.max_turns=3",),
        "environment.max_turns: 3 configures an environment; set environment.path, environment.tools or environment.tool_config_path, or leave it out",
    ),
    (
        FlowRLConfig,
        ("reward.functions=[{name: ocr}, {name: ocr, clip: [1, 0]}]",),
        "reward.functions[1].clip: expected two numbers, the smaller first, such as [0, 1], got [1, 0]",
    ),
    (
        LMRLConfig,
        ("rollout.val.temperature=1e-30",),
        "rollout.val.temperature: expected 0, or at least 0.01, below which float32 always selects the most likely token, got 1e-30",
    ),
    (
        FlowRLConfig,
        ("reward.model.temperature=0.001",),
        "reward.model.temperature: expected 0, or at least 0.01, below which float32 always selects the most likely token, got 0.001",
    ),
    (
        GenerateConfig,
        ("prompts=[a]", "temperature=0.009"),
        "temperature: expected 0, or at least 0.01, below which float32 always selects the most likely token, got 0.009",
    ),
    (
        LMRLConfig,
        ("algorithm.name=ppo", "algorithm.adv_clip_max=1"),
        "algorithm.adv_clip_max: 1.0 is not used by algorithm.name=ppo; leave it out",
    ),
    (
        LMRLConfig,
        ("algorithm.norm_adv_by_std_in_grpo=false", "algorithm.adv_clip_max=1"),
        "algorithm.adv_clip_max: 1.0 clamps advantages that were divided by a std, but algorithm.norm_adv_by_std_in_grpo=false does not divide; leave it out",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=diffusion_nft", "algorithm.old_decay=zero", "algorithm.old_decay_flat=3"),
        "algorithm.old_decay_flat: 3 has no effect with algorithm.old_decay=zero; set old_decay to slow or late, or leave it out",
    ),
    (
        LMRLConfig,
        ("rollout.threshold=0.5",),
        "rollout.threshold: 0.5 is for block diffusion; set model.block_size, or leave it out",
    ),
    (
        LMRLConfig,
        ("actor.log_prob_estimate=elbo",),
        "actor.log_prob_estimate: elbo is for block diffusion; set model.block_size, or leave it out",
    ),
    (
        LMRLConfig,
        ("data.chat_template_date=today",),
        "data.chat_template_date: expected a day such as 2026-01-31, got 'today'",
    ),
    (LMRLConfig, ("rollout.stop=['']",), "rollout.stop: expected texts that are not empty, got ['']"),
    (
        LMRLConfig,
        ("rollout.partial_rollout_tokens=8",),
        "rollout.partial_rollout_tokens: 8 is now rollout.partial_rollout.tokens, of a section that is left out; set that, or leave it out",
    ),
    (GenerateConfig, ("prompts=[a]", "stop=['']"), "stop: expected texts that are not empty, got ['']"),
    (LMRLConfig, ("rollout.stop_token_ids=[3,-1]",), "rollout.stop_token_ids[1]: expected at least 0, got -1"),
    (FlowRLConfig, ("rollout.sde_window_range=[1]",), "rollout.sde_window_range: expected two numbers [a, b], got [1]"),
    (
        LMRLConfig,
        ("parallel.sync_each_batch=true", "model.lora_rank=4"),
        "parallel.sync_each_batch: true is only for training all weights, not for a LoRA; leave it out",
    ),
    (
        LMRLConfig,
        ("model.freeze_vision_tower=false", "model.lora_rank=4"),
        "model.freeze_vision_tower: false is only for training all weights, not for a LoRA; leave it out",
    ),
    (
        FlowRLConfig,
        ("model.quantization=nf4",),
        "model.quantization: nf4 is for the frozen weights under a LoRA; set model.lora_rank, for example to 32, or leave it out",
    ),
    (
        EvaluateConfig,
        ("policy=writer",),
        "policy: writer is for the checkpoint of a joint run; set checkpoint, or leave it out",
    ),
    (
        EvaluateConfig,
        ("checkpoint=x", "kind=lm"),
        "kind: lm is only for a model folder, because the run of a checkpoint determines its kind; leave it out",
    ),
]
REFUSED_AT_START: list[tuple[type, tuple[str, ...], str]] = [
    (
        FlowRLConfig,
        (*OPD, "rollout.max_num_gen_batches=2"),
        "rollout.max_num_gen_batches: 2 depends on rewards, from which opd does not learn; set it to 1",
    ),
    (
        FlowRLConfig,
        (*OPD, "rollout.max_draws_per_prompt=2"),
        "rollout.max_draws_per_prompt: 2 depends on rewards, from which opd does not learn; set it to 1",
    ),
    (
        FlowRLConfig,
        ("actor.ref_model_sync_steps=5",),
        "actor.ref_model_sync_steps: 5 has no reference to sync; set algorithm.kl_loss_coef > 0, or leave it out",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=awm", "rollout.engine=vllm_omni", "rollout.correction=none"),
        "rollout.correction: none needs log-probs of a window of steps, which awm does not use; leave it out",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=awm", "rollout.branching=true", "rollout.init_same_noise=true"),
        "rollout.branching: true needs log-probs of a window of steps, which awm does not use; leave it out",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=awm", "rollout.ode_compression=0.5"),
        "rollout.ode_compression: 0.5 needs log-probs of a window of steps, which awm does not use; leave it out",
    ),
]
