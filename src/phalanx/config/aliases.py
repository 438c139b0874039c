"""Keys of other trainers (verl, VeRL-Omni, flow_grpo and others) and their names in Phalanx.

docs/coming-from-verl-omni.md and docs/coming-from-language-model-trainers.md list keys of the same meaning whose
defaults or units differ.
"""

from collections.abc import Collection

# The longest matching prefix is replaced and the rest of the key kept, unless RENAMED has the whole key.
PREFIXES = {
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.actor.diffusion_loss.": "algorithm.",
    "actor_rollout_ref.actor.fsdp_config.": "parallel.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.rollout.": "rollout.",
    "actor_rollout_ref.rollout.algo.": "rollout.",
    "actor_rollout_ref.rollout.pipeline.": "rollout.",
    "actor_rollout_ref.rollout.val_kwargs.": "rollout.val.",
    "actor_rollout_ref.rollout.val_kwargs.algo.": "rollout.val.",
    "actor_rollout_ref.rollout.val_kwargs.pipeline.": "rollout.val.",
    "sample.": "rollout.",
}
RENAMED = {
    "trainer.nnodes": "the environment variable NNODES",
    "cluster.num_nodes": "the environment variable NNODES",
    "cluster.component_placement.actor": "placement",
    "cluster.component_placement.rollout": "placement",
    "cluster.component_placement.inference": "placement",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "parallel.ulysses_sequence_parallel_size",
    "trainer.n_gpus_per_node": "the environment variable NPROC_PER_NODE",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.resume_mode": "trainer.resume",
    "trainer.resume_from_path": "trainer.resume",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints",
    "global_profiler.steps": "trainer.profile_steps",
    "global_profiler.save_path": "trainer.output_dir, with the folder profiles",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.use_kl_in_reward": "algorithm.kl_reward_coef of ppo and reinforce_plus_plus, 0 without a KL",
    "algorithm.kl_penalty": "algorithm.kl_reward_type of ppo and reinforce_plus_plus",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef of ppo and reinforce_plus_plus",
    "algorithm.filter_groups.enable": "rollout.max_num_gen_batches",
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_num_gen_batches",
    "reward.custom_reward_function.path": "path of an entry of reward.functions",
    "reward.custom_reward_function.name": "path of an entry of reward.functions, as file.py:name",
    "reward_model.overlong_buffer.len": "the overlong_buffer_len of the reward overlong, in reward.functions",
    "reward_model.overlong_buffer.penalty_factor": "the weight of the reward overlong, in reward.functions",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "the overlong_buffer_len of the reward overlong",
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": "the weight of the reward overlong, in reward.functions",
    "reward.reward_functions": "reward.functions, a list",
    "reward.reward_model.enable": "reward.model.path, null without one",
    "reward.reward_model.model_path": "reward.model.path",
    "reward.reward_model.model.path": "reward.model.path",
    "reward.reward_model.rollout.name": "reward.model.engine",
    "reward.reward_model.rollout.tensor_model_parallel_size": "reward.model.tensor_parallel_size",
    "reward.reward_model.rollout.gpu_memory_utilization": "reward.model.gpu_memory_utilization",
    "reward.reward_model.rollout.free_cache_engine": "reward.model.sleep",
    "reward.reward_model.rollout.prompt_length": "reward.model.max_model_len, of question and answer",
    "reward.reward_model.rollout.response_length": "reward.model.max_tokens",
    "reward.reward_model.enable_resource_pool": "reward.model.placement",
    "reward.reward_model.nnodes": "reward.model.placement",
    "reward.reward_model.n_gpus_per_node": "reward.model.placement",
    "critic.grad_clip": "critic.optim.grad_clip",
    "critic.optim.clip_grad": "critic.optim.grad_clip",
    "critic.optim.lr_scheduler_type": "critic.optim.lr_scheduler",
    "critic.model.enable_gradient_checkpointing": "critic.model.gradient_checkpointing",
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size, of policy and critic",
    "critic.ppo_micro_batch_size_per_gpu": "actor.ppo_micro_batch_size_per_gpu, of policy and critic",
    "actor_rollout_ref.model.algorithm": "algorithm.name",
    "actor_rollout_ref.model.lora_adapter_path": "model.lora_path",
    "actor_rollout_ref.model.lora_init_weights": "model.lora_init",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "model.dtype",
    "actor_rollout_ref.actor.diffusion_loss.loss_mode": "algorithm.name",
    "actor_rollout_ref.actor.grad_clip": "optim.grad_clip",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_loss_coef",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_loss_coef, 0 without a KL",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_ratio",
    "actor_rollout_ref.actor.optim.clip_grad": "optim.grad_clip",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optim.lr_scheduler",
    "actor_rollout_ref.rollout.pipeline.max_sequence_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.algo.sample_strategy": "rollout.window_schedule",
    "actor_rollout_ref.rollout.algo.iters_per_group": "rollout.window_iters",
    "actor_rollout_ref.rollout.algo.sde_window_seed": "trainer.seed",
    "actor_rollout_ref.rollout.seed": "trainer.seed",
    "load_in_4bit": "model.quantization, nf4",
    "bnb_4bit_quant_type": "model.quantization",
    "pretrained.model": "model.path",
    "resolution": "rollout.height and rollout.width",
    "sample.eval_num_steps": "rollout.val.num_inference_steps",
    "sample.global_std": "algorithm.global_std",
    "sample.num_image_per_prompt": "rollout.n",
    "sample.num_steps": "rollout.num_inference_steps",
    "sample.train_batch_size": "rollout.micro_batch_size_per_gpu",
    "train.adv_clip_max": "algorithm.adv_clip_max",
    "train.batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "train.beta": "algorithm.kl_loss_coef",
    "train.clip_range": "algorithm.clip_ratio",
    "train.ema": "actor.ema.decay",
    "train.learning_rate": "optim.lr",
    "train.lora_path": "model.lora_path",
    "train.max_grad_norm": "optim.grad_clip",
}

# Keys of verl and EasyR1, for jobs that train language models.
OF_LANGUAGE_MODELS = {
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_ratio_c",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_ratio_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coeff",
    "actor_rollout_ref.actor.freeze_vision_tower": "model.freeze_vision_tower",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_loss_type, k1, k2, k3 (low_var_kl), or k3+ (low_var_kl+)",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "optim.lr_warmup_steps, a number of updates",
    "actor_rollout_ref.actor.optim.warmup_style": "optim.lr_scheduler",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm.name",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.use_torch_compile": "model.compile",
    "actor_rollout_ref.rollout.free_cache_engine": "rollout.sleep",
    "actor_rollout_ref.rollout.max_model_len": "data.max_prompt_length and data.max_response_length",
    "actor_rollout_ref.rollout.multi_turn.enable": "environment.path or environment.tools, null and [] without turns",
    "actor_rollout_ref.rollout.multi_turn.format": "environment.format",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "environment.path, a class with the method step",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "environment.max_calls_per_turn",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "environment.max_observation_length, in tokens",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": "environment.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "environment.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": (
        "environment.truncate_side, the part that is left out: left there is right here"
    ),
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "rollout.val.temperature, 0 takes the likeliest token",
    "algorithm.rollout_correction.rollout_is": "rollout.correction",
    "algorithm.rollout_correction.rollout_is_threshold": "rollout.correction_limit",
    "custom_reward_function.name": "path of an entry of reward.functions, as file.py:name",
    "custom_reward_function.path": "path of an entry of reward.functions",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.format_prompt": "data.system_prompt, or a part of the prompts",
    "data.image_dir": "data.train_files, to which the paths of images are relative",
    "data.truncation": "data.overlong_prompts",
    "reward_model.enable": "reward.model.path, null without one",
    "reward_model.model.path": "reward.model.path",
    "reward_model.reward_manager": "reward.functions, a list",
    "reward.reward_manager.name": "reward.functions, a list",
    "worker.actor.model.freeze_vision_tower": "model.freeze_vision_tower",
}

# Keys of verl and TRL, for jobs whose language models interact with environments.
OF_ENVIRONMENTS = {
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": "environment.tools, a list of file.py:function",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "data.tool_config_path": "environment.tool_config_path",
    "environment_factory": "environment.path",
    "max_tool_calling_iterations": "environment.max_turns, which is one more",
    "tools": "environment.tools",
}

# Keys of verl and VeRL-Omni without a counterpart; many configure a rollout engine outside the trainer.
NOTHING_TO_SET = (
    "actor_rollout_ref.actor.checkpoint.",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch",
    "actor_rollout_ref.actor.fsdp_config.grad_offload",
    "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.",
    "actor_rollout_ref.actor.profiler.",
    "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.use_shm",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.agent.",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.disable_log_stats",
    "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.enable_chunked_prefill",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.layered_summon",
    "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.log_prob_",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.mode",
    "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.profiler.",
    "actor_rollout_ref.rollout.step_execution",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "critic.enable",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.profiler.",
    "critic.shuffle",
    "critic.strategy",
    "data.return_multi_modal_inputs",
    "data.return_raw_chat",
    "data.reward_fn_key",
    "data.shuffle",
    "data.trust_remote_code",
    "data.val_batch_size",
    "global_profiler.",
    "ray_kwargs.",
    "trainer.balance_batch",
    "trainer.default_hdfs_dir",
    "trainer.use_v1",
)

# Sections of jobs with one policy that joint runs do not have.
NOT_JOINT = {
    "placement": "a joint run has no ranks of other roles: both policies are sampled and trained on all ranks",
    "environment": "the writer of a joint run answers once, without tools or turns",
    "critic": "no policy of a joint run has a critic; writer.algorithm.name is such as grpo",
    "filter_groups": "a joint run draws no samples again",
}


def _joint(key: str, known: Collection[str]) -> str | None:
    """Like `alias`, for the keys of a joint run."""
    name = key.removeprefix("writer.").removeprefix("painter.")
    for section, reason in NOT_JOINT.items():
        if section in name.split("."):
            return reason
    if name in known:
        return f"both policies have one {name}"
    of_policies = [f"{part}.{name}" for part in ("writer", "painter") if f"{part}.{name}" in known]
    if of_policies and key == name:
        return f"here it is {' or '.join(of_policies)}"
    message = alias(name, {other.removeprefix("writer.").removeprefix("painter.") for other in known})
    return message if message is None else f"{message}, which a joint run has below writer and painter"


def alias(key: str, known: Collection[str]) -> str | None:
    """The message about a key of another trainer, or about a key that a joint run lacks or has in another section.

    known: the keys of this job. Returns None for any other key.
    """
    if "painter.model.path" in known:
        return _joint(key, known)
    if key == "policy" and "prompts" in known:
        return "of a joint run, tasks/sample.py takes the painter and tasks/generate.py the writer; leave it out"
    if key.startswith("critic.") and "critic.optim.lr" not in known:
        return None  # this job has no critic
    renamed = RENAMED | OF_LANGUAGE_MODELS if "data.max_response_length" in known else RENAMED
    if "environment.path" in known:
        renamed = renamed | OF_ENVIRONMENTS
    if key in renamed:
        return f"here it is {renamed[key]}"
    head = max((head for head in PREFIXES if key.startswith(head)), key=len, default=None)
    ours = None if head is None else PREFIXES[head] + key.removeprefix(head)
    if ours in known:
        return f"here it is {ours}"
    return "here there is nothing to set for it" if key.startswith(NOTHING_TO_SET) else None
