"""Keys of other trainers: the message about each gives its name here."""

import re
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.aliases import foreign_keys
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.lm_supervised import DPOConfig, SFTConfig
from phalanx.config.load import help_text
from phalanx.config.messages import UnknownKeys
from phalanx.config.tasks import GenerateConfig, SampleConfig
from phalanx.run.rules import load_config
from tests.helpers.checks import refused
from tests.helpers.configs import refusal

# The keys of VeRL-Omni's FlowGRPO recipe for several nodes, run_qwen_image_ocr_lora_multi_node.sh.
KEYS = foreign_keys()
OF_ENVIRONMENTS = KEYS["of_environments"]
ROLLOUT = (
    "name n agent.num_workers load_format layered_summon log_prob_micro_batch_size_per_gpu data_parallel_size "
    "tensor_model_parallel_size pipeline.true_cfg_scale pipeline.max_sequence_length algo.noise_level algo.sde_type "
    "algo.sde_window_size algo.sde_window_range val_kwargs.pipeline.num_inference_steps val_kwargs.algo.noise_level "
    "engine_kwargs.vllm_omni.max_num_seqs engine_kwargs.vllm_omni.request_batch_max_wait_ms"
)
ACTOR = (
    "optim.lr optim.weight_decay ppo_mini_batch_size ppo_micro_batch_size_per_gpu fsdp_config.fsdp_size "
    "fsdp_config.reshard_after_forward fsdp_config.offload_policy fsdp_config.param_offload "
    "fsdp_config.optimizer_offload fsdp_config.model_dtype"
)
MODEL = "algorithm path lora_rank lora_alpha target_modules attn_backend"
REWARD = (
    "reward_model.enable reward_model.model_path reward_model.rollout.name "
    "reward_model.rollout.tensor_model_parallel_size custom_reward_function.path custom_reward_function.name"
)
MULTI_NODE = [
    *(f"actor_rollout_ref.rollout.{key}" for key in ROLLOUT.split()),
    *(f"actor_rollout_ref.actor.{key}" for key in ACTOR.split()),
    *(f"actor_rollout_ref.model.{key}" for key in MODEL.split()),
    *(f"reward.{key}" for key in REWARD.split()),
    *["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "trainer.nnodes", "trainer.n_gpus_per_node"],
]


@pytest.mark.parametrize("key", MULTI_NODE)
def test_every_key_of_another_trainers_recipe_says_what_it_is_called_here(key: str) -> None:
    said = refusal(f"{key}=1")
    assert said.startswith(f"unknown key {key}; here "), said


@pytest.mark.parametrize("schema", [SampleConfig, GenerateConfig])
def test_tasks_that_take_one_policy_of_a_joint_run(schema: type) -> None:
    with pytest.raises(ConfigError, match=r"^unknown key policy; of a joint run, tasks/sample\.py takes the painter"):
        load_config(schema, None, ["checkpoint=x", "prompts=[a]", "policy=writer"])


# The keys in verl's examples and documentation of GRPO on GSM8K, in their old and new spellings.
VERL = {
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.rollout.enforce_eager": "rollout.enforce_eager",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": "rollout.top_k",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "rollout.val.top_p",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "environment.max_turns",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "environment.tool_config_path",
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "optim.lr_warmup_steps, a number of updates",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_loss_type, k1, k2, k3 (low_var_kl), or k3+ (low_var_kl+)",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_loss_coef, 0 without a KL",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coeff",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_ratio_high",
    "actor_rollout_ref.actor.loss_agg_mode": "actor.loss_agg_mode",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "parallel.param_offload",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "model.lora_rank",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.filter_groups.enable": "rollout.max_num_gen_batches",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.truncation": "data.overlong_prompts",
    "custom_reward_function.path": "path of an entry of reward.functions",
    "trainer.n_gpus_per_node": "the environment variable NPROC_PER_NODE",
    "trainer.default_local_dir": "trainer.output_dir",
    "global_profiler.steps": "trainer.profile_steps",
    "global_profiler.save_path": "trainer.output_dir, with the folder profiles",
}
NOTHING = (
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.log_prob_micro_batch_size "
    "actor_rollout_ref.ref.fsdp_config.param_offload "
    "actor_rollout_ref.model.use_shm data.shuffle data.val_batch_size "
    "actor_rollout_ref.actor.fsdp_config.grad_offload global_profiler.tool actor_rollout_ref.actor.profiler.enable"
)


@pytest.mark.parametrize("key", [*VERL, *NOTHING.split()])
def test_verls_keys_of_language_models_say_what_they_are_called_here(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(LMRLConfig, None, ["model.path=x", f"{key}=1"])
    here = f"here it is {VERL[key]}" if key in VERL else "here there is nothing to set for it"
    assert str(error.value) == f"unknown key {key}; {here}"


def test_aliases_are_keys() -> None:
    text = help_text(LMRLConfig, "", None, ["algorithm.name=ppo"])
    for name in (KEYS["of_language_models"] | OF_ENVIRONMENTS).values():
        first = name.split(",")[0].split(" ")[0].rstrip(";")
        assert f"\n  {first}: " in text or first == "path", name
    text += help_text(FlowRLConfig, "", None, [])
    for name in KEYS["renamed"].values():
        first = name.split(",")[0].split(" ")[0]
        assert f"\n  {first}: " in text or first in ("the", "path"), name


@pytest.mark.parametrize("key", OF_ENVIRONMENTS)
def test_keys_of_conversations_say_what_they_are_called_here(key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(LMRLConfig, None, ["model.path=x", f"{key}=1"])
    assert str(error.value) == f"unknown key {key}; here it is {OF_ENVIRONMENTS[key]}"


def test_jobs_without_environments_name_none() -> None:
    for config in (FlowRLConfig, BlockDiffusionTaskConfig):
        with pytest.raises(ConfigError) as error:
            load_config(config, None, ["model.path=x", "environment_factory=x"])
        assert "environment." not in str(error.value)


def test_all_unknown_keys_are_answered_at_once(tmp_path: Path) -> None:
    """A recipe of another trainer takes one start, with a line for each of its keys, whether a trainer has it or not."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "actor_rollout_ref: {actor: {optim: {lr: 1e-6}, nonsense: 3}}\n"
        "reward: {functions: [{name: gsm8k, wieght: 2}]}\ntrainer: {nnodes: 1, sed: 3}\n"
    )
    with refused(
        "7 unknown keys\n"
        "  actor_rollout_ref.actor.optim.lr: here it is optim.lr\n"
        "  actor_rollout_ref.actor.nonsense: there is no such key here\n"
        "  reward.functions[0].wieght: did you mean reward.functions[0].weight?\n"
        "  trainer.nnodes: here it is the environment variable NNODES\n"
        "  trainer.sed: did you mean trainer.seed?\n"
        "  num_generations: here it is rollout.n\n"
        "  +bf16: here it is model.dtype, bfloat16",
        UnknownKeys,
    ):
        load_config(LMRLConfig, str(path), ["model.path=x", "num_generations=8", "+bf16=true"])


TRAINERS = {
    "trl": LMRLConfig, "rlinf": LMRLConfig, "openrlhf": LMRLConfig, "ms_swift": LMRLConfig, "flow_grpo": FlowRLConfig,
    "dfactory": BlockDiffusionTaskConfig, "trl_supervised": DPOConfig, "verl_sft": SFTConfig,
}  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
def test_keys_of_further_trainers(trainer: str) -> None:
    schema = TRAINERS[trainer]
    algorithm = ["algorithm.name=ppo"] if schema is LMRLConfig else []
    known = help_text(schema, "", None, algorithm)
    for key, name in KEYS[f"of_{trainer}"].items():
        first = name.split(" ")[0].rstrip(",;")
        assert f"\n  {first}: " in known or first in ("weight", "the"), key
    keys = [*KEYS[f"of_{trainer}"]]
    for entry in KEYS[f"nothing_to_set_of_{trainer}"]:
        keys.append(f"{entry}x" if entry.endswith(".") else entry)
    with pytest.raises(UnknownKeys) as error:
        load_config(schema, None, ["model.path=x", *(f"{key}=1" for key in keys)])
    answers = dict(line.strip().split(": ", 1) for line in str(error.value).splitlines()[1:])
    for key in keys:
        assert re.match("here (it is|there is nothing)", answers.get(key, "")), key
