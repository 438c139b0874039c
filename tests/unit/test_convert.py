"""`phalanx convert`: a sample of each trainer's files becomes a configuration that loads, and none of them is run."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.config.aliases import foreign_keys
from phalanx.config.load import rows_of
from phalanx.run.rules import load_config
from phalanx.tools.convert import convert, schema_of

VERL = r"""
# GRPO of Qwen2 on GSM8K, with balanced sequences
set -x

rollout_mode="async"
rollout_name="vllm" # or sglang
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    offload=True
else
    offload=False
fi
LENGTHS=(
    data.max_prompt_length=512
    data.max_response_length=2048
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files="['$HOME/data/gsm8k/test.parquet']" \
    data.train_batch_size=1024 \
    "${LENGTHS[@]}" \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    data.shuffle=False \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen2-7B-Instruct} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    # actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+ \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.fsdp_config.param_offload=$offload \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=$rollout_name \
    actor_rollout_ref.rollout.mode=$rollout_mode \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.agent.num_workers=$((NUM / 2)) \
    custom_reward_function.path=pkg://rewards.answers \
    trainer.logger=['console','wandb'] \
    trainer.experiment_name=$(touch executed) \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=2 \
    trainer.resume_mode=disable \
    trainer.balance_batch=sometimes \
    trainer.total_epochs=15 $@
"""
VERL_YAML = """
data: {train_files: train.parquet, train_batch_size: 64}
actor_rollout_ref:
  model: {path: base, lora_rank: 32}
  actor: {ppo_mini_batch_size: 64, clip_ratio_high: 0.28}
  rollout: {n: 8, response_length: "${data.max_response_length}"}
algorithm: {adv_estimator: gae, use_kl_in_reward: false}
reward: {custom_reward_function: {path: score.py}}
critic: {optim: {lr: 1e-5}}
"""
VERL_OMNI = r"""
WORKSPACE=${WORKSPACE:-$HOME}
ocr_train_path=$WORKSPACE/data/ocr/train.parquet
ENGINE=vllm_omni
python3 -m verl_omni.trainer.main_diffusion \
    data.train_files=$ocr_train_path \
    data.train_batch_size=32 \
    actor_rollout_ref.model.algorithm=flow_grpo \
    actor_rollout_ref.model.path=Qwen/Qwen-Image \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.target_modules="['to_q','to_k']" \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.04 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=$ENGINE \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
    actor_rollout_ref.rollout.algo.noise_level=1.2 \
    actor_rollout_ref.rollout.algo.sde_window_range="[0,5]" \
    actor_rollout_ref.rollout.val_kwargs.pipeline.num_inference_steps=50 \
    reward.reward_model.enable=True \
    reward.reward_model.model_path=Qwen/Qwen3-VL-8B-Instruct \
    reward.custom_reward_function.path=verl_omni/utils/reward_score/genrm_ocr.py \
    reward.custom_reward_function.name=compute_score_ocr \
    trainer.n_gpus_per_node=4 trainer.total_training_steps=300 "$@"
"""
RLINF = """
cluster: {num_nodes: 1, component_placement: {"actor,rollout,reward": all}}
runner:
  task_type: reasoning
  logger: {logger_backends: [tensorboard], experiment_name: "${runner.experiment_name}"}
  max_epochs: 5
  max_steps: -1
  seq_length: 18432
  experiment_name: grpo-1.5b
algorithm:
  group_size: 8
  n_minibatches: 4
  recompute_logprobs: True
  kl_beta: 0.001
  kl_penalty_type: low_var_kl
  clip_ratio_c: null
  adv_type: grpo
  sampling_params: {temperature: 0.9, max_new_tokens: "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"}
rollout: {model: {model_path: /models/R1, precision: fp16}, rollout_backend: vllm, tensor_parallel_size: 2}
data: {max_prompt_length: 1024, rollout_batch_size: 512, train_data_paths: [/data/boba.jsonl], shuffle: True}
actor:
  model: {model_path: /models/R1}
  optim: {lr: 2e-05, adam_beta1: 0.9, adam_beta2: 0.95, clip_grad: 0.8}
  lr_sched: {lr_warmup_fraction: null, lr_warmup_iters: 10, lr_decay_style: cosine}
reward: {reward_type: math, reward_scale: 5.0}
"""
TRL = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

open("executed", "w")
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
rate = 1e-5

def short(completions, **kwargs):
    return [-len(text) for text in completions]

args = GRPOConfig(
    output_dir="Qwen2-GRPO", learning_rate=rate, num_generations=4, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, loss_type="dr_grpo", scale_rewards="none", beta=0.04, warmup_ratio=0.1,
    use_vllm=True, vllm_mode="colocate", logging_steps=10, report_to="wandb", nonsense=3,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=short, args=args, train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=24, target_modules=["q_proj", "v_proj"], lora_dropout=0.05),
)
trainer.train()
"""
TRL_SFT = """
from datasets import load_dataset
from trl import SFTTrainer

trainer = SFTTrainer(model="Qwen/Qwen2.5-0.5B", train_dataset=load_dataset("trl-lib/Capybara", split="train"))
trainer.train()
"""
TRL_DPO = r"""
accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
    --dataset_name argilla/Preferences --beta 0.2 --bf16 --loss_type ipo --hub-token hf_secret \
    --per_device_train_batch_size 2 --output_dir Qwen2.5-DPO > log.txt 2>&1
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: openai/gsm8k
dataset_config: main
num_generations: 16
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
epsilon_high: 0.28
"""
MS_SWIFT = r"""
SYSTEM_PROMPT="You solve problems. # 1 is the first,
'2' the second."

CUDA_VISIBLE_DEVICES=0,1,2,3 \
NPROC_PER_NODE=4 \
swift rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen3-2B \
    --external_plugins plugin.py \
    --reward_funcs gsm8k_accuracy gsm8k_format \
    --enable_thinking false \
    --use_vllm true \
    --vllm_gpu_memory_utilization 0.4 --sleep_level 0 \
    --train_type full \
    --torch_dtype bfloat16 \
    --dataset train.jsonl \
    --max_completion_length 8192 \
    --per_device_train_batch_size 4 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --num_generations 8 \
    --system "$SYSTEM_PROMPT" \
    --report_to tensorboard swanlab \
    --epsilon_high 0.28 \
    --scale_rewards none
"""
FLOW_GRPO = """
import imp, os

open("executed", "w")
base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))

def compressibility():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.dataset = os.path.join(os.getcwd(), "dataset/pickscore")
    config.use_lora = True
    config.prompt_fn = "general_ocr"
    config.reward_fn = {"jpeg_compressibility": 1}
    return config

def general_ocr_sd3():
    gpu_number = 32
    config = compressibility()
    config.dataset = os.path.join(os.getcwd(), "dataset/ocr")
    config.sample.num_steps = 10
    config.sample.eval_num_steps = 40
    config.sample.guidance_scale = 4.5
    config.resolution = 512
    config.sample.train_batch_size = 9
    config.sample.num_image_per_prompt = 24
    config.sample.num_batches_per_epoch = int(48/(gpu_number*config.sample.train_batch_size/config.sample.num_image_per_prompt))
    config.train.batch_size = config.sample.train_batch_size
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.timestep_fraction = 0.99
    config.train.beta = 0.04
    config.sample.global_std = True
    config.train.ema = True
    config.save_dir = f'logs/{config.prompt_fn}'
    config.reward_fn = {"ocr": 1.0, "pickscore": 0.5}
    if os.environ.get("LONG"):
        config.save_freq = 1000
    return config
"""
FLOW_FACTORY = """
launcher: accelerate
num_processes: 8
mixed_precision: bf16
data:
  datasets:
    - {name: default, dataset_dir: dataset/pickscore}
model:
  finetune_type: lora
  lora_rank: 64
  target_modules: default
  model_name_or_path: stabilityai/stable-diffusion-3.5-medium
log: {run_name: null, logging_backend: wandb, save_freq: 0}
train:
  trainer_type: nft
  resolution: 384
  group_size: 16
  unique_sample_num_per_epoch: 48
  gradient_step_per_epoch: 2
  ema_decay: 0.9
  ema_update_interval: 4
  num_inference_steps: 8
scheduler: {dynamics_type: ODE}
eval: {num_inference_steps: 40, eval_freq: 20}
rewards: [{name: aligned, reward_model: PickScore, weight: 0.5}]
optimizers: [{name: default, learning_rate: 1.0e-5, betas: [0.9, 0.95]}]
"""
DFACTORY = """
model: {config_path: ./configs/llada2, model_path: ./LLaDA2.0-mini, moe_implementation: fused}
data: {train_path: train.jsonl, text_keys: messages, max_seq_len: 2048, noise_range_low: 0.2, num_workers: 16}
train:
  output_dir: ./outputs
  global_batch_size: 16
  micro_batch_size: 2
  num_train_epochs: 1
  beta1: 0.9
  beta2: 0.95
  lr: 1.0e-5
  lr_decay_style: cosine
  lr_warmup_ratio: 0.03
  block_diffusion_mode: true
  block_size: 32
  use_wandb: true
"""


def converted(folder: Path, name: str, content: str, function: str = "", trainer: str | None = None) -> tuple[Any, str]:
    """The configuration that the task in the first line loads, and the text."""
    (folder / name).write_text(content)
    text = convert(f"{folder / name}{function}", trainer)
    task = text.splitlines()[0].partition("phalanx train ")[2].split()[0]
    (folder / "config.yaml").write_text(text)
    return load_config(schema_of(task), str(folder / "config.yaml"), []), text


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, text = converted(tmp_path, "run.sh", VERL)
    assert text.startswith("# NNODES=2 NPROC_PER_NODE=8 phalanx train grpo config.yaml\n")
    assert (config.model.path, config.algorithm.name) == ("Qwen/Qwen2-7B-Instruct", "grpo")
    assert "train_files: [~/data/gsm8k/train.parquet]" in text
    assert "val_files: [~/data/gsm8k/test.parquet]" in text
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (1024, 256, 5)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (512, 2048)  # of the array
    assert (config.data.overlong_prompts, config.data.chat_template_kwargs) == ("filter", {"enable_thinking": False})
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_loss_type) == (0.002, "k3+")
    assert config.algorithm.importance == "sequence"
    assert (config.rollout.engine, config.rollout.tensor_parallel_size) == ("vllm", 2)
    assert (config.optim.lr, config.optim.weight_decay) == (1e-6, 0.01)  # the second by verl's default
    assert config.reward.functions[0].path == "rewards.answers:compute_score"
    assert (config.trainer.logger, config.trainer.resume) == (["console", "wandb"], "never")
    lines = text.splitlines()
    assert "# data.shuffle=False" in lines
    assert (
        "# trainer.experiment_name=$(touch executed)  # the shell computes its value; here it is trainer.experiment_name"
        in lines
    )
    assert (
        "# actor_rollout_ref.actor.fsdp_config.param_offload=$offload  # the value of $offload is decided when the script runs; "
        "here it is parallel.param_offload" in lines
    )
    refusal = "# trainer.balance_batch: sometimes  # trainer.balance_batch: expected true or false, got 'sometimes'"
    assert refusal in lines
    assert not (tmp_path / "executed").exists()


def test_a_supervised_script_of_verl(tmp_path: Path) -> None:
    script = """torchrun --nnodes=1 --nproc-per-node=4 -m verl.trainer.sft_trainer data.train_files=$HOME/train.parquet \\
        data.messages_key=chat data.max_length=2048 data.micro_batch_size_per_gpu=8 optim.lr=1e-4 engine=fsdp \\
        engine.ulysses_sequence_parallel_size=2 model.path=base model.lora_rank=32 trainer.resume_mode=disable"""
    config, text = converted(tmp_path, "sft.sh", script)
    assert text.startswith("# NNODES=1 NPROC_PER_NODE=4 phalanx train sft config.yaml\n")
    assert (config.model.path, config.model.lora_rank, config.optim.lr) == ("base", 32, 1e-4)
    assert (config.data.prompt_key, config.parallel.ulysses_sequence_parallel_size) == ("chat", 2)
    assert (config.actor.ppo_micro_batch_size_per_gpu, config.actor.ppo_mini_batch_size) == (8, 256)  # verl's default
    assert (config.trainer.total_epochs, config.trainer.resume) == (4, "never")
    assert "# data.max_length=2048  # here it is data.max_prompt_length and data.max_response_length\n" in text
    assert "no equal here" not in text


def test_a_quoted_text_may_have_lines_that_look_like_comments(tmp_path: Path) -> None:
    prompt = "Let's solve it. End with:\n#### 42"
    script = f'# don\'t\nPROMPT="{prompt}"\nswift sft --model base \\\n  # --model other \\\n  --system "$PROMPT" # 1'
    config, _ = converted(tmp_path, "sft.sh", script)
    assert (config.model.path, config.data.system_prompt) == ("base", prompt)


def test_a_configuration_of_verl(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "ppo.yaml", VERL_YAML)
    assert (config.algorithm.name, config.critic.optim.lr, config.model.lora_rank) == ("ppo", 1e-5, 32)
    assert (config.algorithm.clip_ratio_high, config.rollout.n, config.trainer.total_epochs) == (0.28, 8, 30)
    assert config.reward.functions[0].path == "score.py:compute_score"
    assert "response_length: ${data.max_response_length}  # its value is computed elsewhere" in text


def test_a_script_of_verl_omni(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "run.sh", VERL_OMNI)
    assert text.startswith("# NPROC_PER_NODE=4 phalanx train flowgrpo config.yaml\n")
    assert (config.model.path, config.model.lora_rank) == ("Qwen/Qwen-Image", 64)
    assert config.model.target_modules == ["to_q", "to_k"]
    assert "train_files: [~/data/ocr/train.parquet]" in text
    assert (config.rollout.true_cfg_scale, config.rollout.noise_level, config.rollout.n) == (4.0, 1.2, 16)
    assert (config.rollout.sde_window_range, config.rollout.val.num_inference_steps) == ([0, 5], 50)
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_convention) == (0.04, "flow_grpo")
    assert config.reward.functions[0].name == "vlm_ocr"
    assert config.reward.model.path == "Qwen/Qwen3-VL-8B-Instruct"
    assert (config.rollout.engine, config.trainer.total_training_steps) == ("policy", 300)
    assert config.actor.ppo_micro_batch_size_per_gpu == 1
    assert "ppo_micro_batch_size_per_gpu=16  # a pass has all trained steps of its images here" in text


def test_a_configuration_of_rlinf(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "grpo.yaml", RLINF)
    assert (config.model.path, config.data.train_files) == ("/models/R1", ["/data/boba.jsonl"])
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (512, 128, 8)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 17408)
    assert (config.optim.lr, config.optim.betas, config.optim.grad_clip) == (2e-5, [0.9, 0.95], 0.8)
    assert (config.optim.lr_scheduler, config.optim.lr_warmup_steps) == ("cosine", 10)
    assert (config.algorithm.kl_loss_type, config.algorithm.clip_ratio_c) == ("k3", None)
    assert (config.rollout.engine, config.rollout.temperature) == ("vllm", 0.9)
    assert [(term.name, term.weight) for term in config.reward.functions] == [("math", 5.0)]
    assert (config.trainer.experiment_name, config.trainer.logger) == ("grpo-1.5b", ["tensorboard"])
    assert "# rollout.model.precision: fp16  # here it is model.dtype, bfloat16 or float32\n" in text


def test_a_script_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, text = converted(tmp_path, "train.py", TRL)
    assert (config.model.path, config.model.lora_rank, config.model.lora_alpha) == ("Qwen/Qwen2-0.5B-Instruct", 16, 24)
    assert config.data.train_files == ["hf://trl-lib/DeepMath-103K:train"]
    assert (config.data.train_batch_size_per_gpu, config.actor.ppo_mini_batch_size_per_gpu) == (4, 4)
    assert (config.optim.lr, config.algorithm.kl_loss_coef, config.actor.ppo_micro_batch_size_per_gpu) == (
        1e-5,
        0.04,
        8,
    )
    assert (config.actor.loss_agg_mode, config.algorithm.norm_adv_by_std_in_grpo) == ("seq-mean-token-sum-norm", False)
    assert (config.data.max_response_length, config.optim.lr_scheduler) == (256, "linear")  # TRL's defaults
    assert "# warmup_ratio=0.1  # here it is optim.lr_warmup_steps, a number of updates\n" in text
    assert "# nonsense=3  # no equal here\n" in text
    assert (
        "# reward_funcs=short  # short has no plain value in the file; here it is reward.functions, a list of names, or "
        "of {path: file.py:function}\n" in text
    )
    assert not (tmp_path / "executed").exists()


def test_supervised_jobs_of_trl(tmp_path: Path) -> None:
    sft, text = converted(tmp_path, "sft.py", TRL_SFT)
    assert "phalanx train sft config.yaml" in text
    assert (sft.model.path, sft.optim.lr, sft.data.train_batch_size_per_gpu) == ("Qwen/Qwen2.5-0.5B", 2e-5, 8)
    dpo, text = converted(tmp_path, "dpo.sh", TRL_DPO)
    assert text.startswith("# NPROC_PER_NODE=4 phalanx train dpo config.yaml\n")
    assert (dpo.algorithm.beta, dpo.algorithm.loss_type, dpo.optim.lr) == (0.2, "ipo", 1e-6)
    assert (dpo.data.train_batch_size_per_gpu, dpo.actor.ppo_micro_batch_size_per_gpu) == (2, 4)  # pairs, and responses
    assert dpo.trainer.output_dir == "Qwen2.5-DPO"
    assert "hf_secret" not in text
    assert "--hub-token …" in text


def test_a_batch_that_only_all_ranks_divide(tmp_path: Path) -> None:
    """Half a prompt for each rank: without their number it is a comment."""
    config, text = converted(tmp_path, "grpo.yaml", TRL_YAML)
    assert config.data.train_files == ["hf://openai/gsm8k/main:train"]
    assert config.data.train_batch_size_per_gpu is None
    assert "data.train_batch_size_per_gpu would be 0.5, which is no integer" in text
    words = " ".join(f"--{line.replace(':', '')}" for line in TRL_YAML.strip().splitlines())
    config, _ = converted(tmp_path, "grpo.sh", f"accelerate launch --num_processes 8 grpo.py {words} # from trl")
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (4, 4)


def test_a_script_of_ms_swift(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "grpo.sh", MS_SWIFT)
    assert text.startswith("# NPROC_PER_NODE=4 phalanx train grpo config.yaml\n")
    assert (config.model.path, config.model.lora_rank, config.rollout.engine) == ("Qwen/Qwen3-2B", 0, "vllm")
    assert (config.data.train_batch_size_per_gpu, config.data.max_response_length) == (2, 8192)
    assert config.data.system_prompt == "You solve problems. # 1 is the first,\n'2' the second."
    assert (config.optim.lr, config.optim.betas) == (1e-5, [0.9, 0.95])  # ms-swift's defaults, the first without a LoRA
    assert (config.trainer.logger, config.rollout.sleep) == (["tensorboard", "swanlab"], False)
    assert config.rollout.micro_batch_size_per_gpu is None
    assert "# --reward_funcs gsm8k_accuracy gsm8k_format  # no reward here is its gsm8k_accuracy;" in text
    config, _ = converted(tmp_path, "sft.sh", "swift sft --model base --dataset team/chats --lora_rank 16 \\")
    assert config.data.train_files == []  # a data set of another hub
    assert (config.model.lora_rank, config.model.lora_alpha, config.optim.lr) == (16, 32, 1e-4)


def test_a_function_of_flow_grpo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, text = converted(tmp_path, "grpo.py", FLOW_GRPO, ":general_ocr_sd3")
    assert (config.model.path, config.model.lora_rank) == ("stabilityai/stable-diffusion-3.5-medium", 32)
    assert (config.data.train_files, config.data.val_files) == (["dataset/ocr/train.txt"], ["dataset/ocr/test.txt"])
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (48, 24, 24)
    assert (config.rollout.num_inference_steps, config.rollout.val.num_inference_steps) == (10, 40)
    assert (config.rollout.height, config.rollout.width, config.rollout.sde_window_size) == (512, 512, None)
    assert (config.algorithm.kl_loss_coef, config.algorithm.kl_convention) == (0.04, "flow_grpo")
    assert (config.actor.ema.decay, config.actor.ema.update_interval, config.optim.lr) == (0.9, 8, 3e-4)
    assert [(term.name, term.weight) for term in config.reward.functions] == [("ocr", 1.0), ("pickscore", 0.5)]
    assert config.trainer.output_dir == "logs/general_ocr"
    assert "# config.save_freq = 1000  # it is set within a condition; here it is trainer.save_freq\n" in text
    assert not (tmp_path / "executed").exists()


def test_a_configuration_of_flow_factory(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "nft.yaml", FLOW_FACTORY)
    assert text.startswith("# NPROC_PER_NODE=8 phalanx train flowgrpo config.yaml\n")
    assert (config.algorithm.name, config.model.dtype, config.model.lora_rank) == ("diffusion_nft", "bfloat16", 64)
    assert (config.data.train_files, config.data.train_batch_size) == (["dataset/pickscore/train.jsonl"], 48)
    assert (config.rollout.height, config.rollout.n, config.actor.ppo_mini_batch_size) == (384, 16, 24)
    assert (config.optim.lr, config.optim.betas, config.actor.ema.update_interval) == (1e-5, [0.9, 0.95], 8)
    assert [(term.name, term.weight) for term in config.reward.functions] == [("pickscore", 0.5)]
    assert (config.trainer.save_freq, config.trainer.test_freq, config.trainer.logger) == (-1, 20, ["console", "wandb"])
    assert "\n# launcher: accelerate\n" in text and "\n# scheduler.dynamics_type: ODE\n" in text


def test_a_configuration_of_dfactory(tmp_path: Path) -> None:
    config, text = converted(tmp_path, "sft.yaml", DFACTORY)
    assert "phalanx train block_diffusion config.yaml" in text
    assert (config.model.path, config.model.block_size) == ("./LLaDA2.0-mini", 32)
    assert (config.data.train_batch_size, config.block_diffusion.micro_batch_size_per_gpu) == (16, 2)
    assert (config.block_diffusion.noise_range_low, config.data.prompt_key) == (0.2, "messages")
    assert (config.optim.lr, config.optim.betas, config.optim.lr_scheduler) == (1e-5, [0.9, 0.95], "cosine")
    assert config.model.experts_implementation == "grouped_mm"
    assert "# data.max_seq_len: 2048  # here it is data.max_prompt_length and data.max_response_length\n" in text


def test_every_setting_of_the_tables_is_a_key() -> None:
    """Of the job of the trainer; keys of an algorithm belong to its default."""
    tables = foreign_keys()
    tasks = {"verl": ("grpo",), "trl": ("grpo", "dpo"), "ms_swift": ("grpo",), "trl_supervised": ("dpo",)}
    for section, rules in tables.items():
        if section.startswith("settings_of_"):
            trainer = section.removeprefix("settings_of_")
            known = {"note"}
            for task in tasks.get(trainer) or (tables["tasks"][trainer],):
                known |= {row.key for row in rows_of(schema_of(task), None, [])}
            for choices in rules.values():
                for settings in choices.values():
                    assert {*settings} <= known, (section, settings)
