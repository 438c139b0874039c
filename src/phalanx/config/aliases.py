"""Keys of other trainers, and what they are called here: verl and VeRL-Omni, and flow_grpo.

docs/coming-from-verl-omni.md says where a key of the same meaning has another default or unit.
"""

from collections.abc import Collection

# The longest that fits counts; then the leaf, unless RENAMED has the whole key.
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
    "trainer.n_gpus_per_node": "the environment variable NPROC_PER_NODE",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.resume_mode": "trainer.resume",
    "trainer.resume_from_path": "trainer.resume",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.use_kl_in_reward": "algorithm.kl_reward_coef of ppo and reinforce_plus_plus, 0 without a KL",
    "algorithm.kl_penalty": "algorithm.kl_reward_type of ppo and reinforce_plus_plus",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef of ppo and reinforce_plus_plus",
    "algorithm.filter_groups.enable": "rollout.max_num_gen_batches",
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_num_gen_batches",
    "reward.custom_reward_function.path": "path of an entry of reward.functions",
    "reward.custom_reward_function.name": "path of an entry of reward.functions, as file.py:name",
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
    "train.lora_path": "trainer.resume",
    "train.max_grad_norm": "optim.grad_clip",
}


# Of verl and VeRL-Omni, where the rollout is an engine beside the trainer.
NOTHING_TO_SET = (
    "actor_rollout_ref.actor.fsdp_config.offload_policy",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.agent.",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.layered_summon",
    "actor_rollout_ref.rollout.load_format",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.mode",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.step_execution",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "critic.enable",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.shuffle",
    "critic.strategy",
    "ray_kwargs.",
    "trainer.use_v1",
)


def alias(key: str, known: Collection[str]) -> str | None:
    """What became of a key of another trainer, in words, where `known` are the keys here; None for any other key."""
    if key.startswith("critic.") and "critic.optim.lr" not in known:
        return None  # of a job that has no critic
    if key in RENAMED:
        return f"here it is {RENAMED[key]}"
    if key.startswith(NOTHING_TO_SET):
        return "here there is nothing to set for it"
    heads = [head for head in PREFIXES if key.startswith(head)]
    if not heads:
        return None
    head = max(heads, key=len)
    ours = PREFIXES[head] + key.removeprefix(head)
    return f"here it is {ours}" if ours in known else None
