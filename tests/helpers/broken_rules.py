"""Configurations that break each rule across keys, and the beginning of its message."""

from typing import Any

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.tasks import EvaluateConfig, GenerateConfig, PrepareDataConfig, SampleConfig
from phalanx.run.rules import Ranks

PPO_OF_ONE = ("algorithm.name=ppo", "rollout.n=1")
DPO = ("algorithm.name=diffusion_dpo", "rollout.n=2", "rollout.noise_level=0")
OPD = ("algorithm.name=opd", "algorithm.teacher_path=x")
BLOCKS = ("model.block_size=4", "data.max_response_length=8")
IN_BLOCKS = "rollout.engine='phalanx.rollout.lm.in_blocks:BlockDiffusionRollout'"
PIPELINED = "rollout.schedule=pipelined"
CONTEXT = "parallel.ulysses_sequence_parallel_size=2"
SWEEP, LORA = "sweep.optim.lr=[1e-4,3e-4]", "model.lora_rank=4"
EXPORT = "trainer.export_each_save=true"
KEEP = "trainer.keep_best=val/a/reward/mean"
OF_CONTEXT = CONTEXT.replace("=", ": ")

# schema, overrides, and the beginning of the message
LOADED: list[tuple[type, tuple[str, ...], str]] = [
    (FlowRLConfig, (SWEEP,), "sweep: its runs share a frozen base, on which each trains a LoRA; set model.lora_rank"),
    (FlowRLConfig, (SWEEP, LORA, "model.compile=true"), "sweep: its runs share passes, which are not compiled"),
    (
        FlowMatchingTaskConfig,
        ("sweep.trainer.seed=[0,1]", LORA, "model.lora_init=pissa"),
        "sweep.trainer.seed: with model.lora_init=pissa each seed has another base",
    ),
    (LMRLConfig, (SWEEP, LORA, "rollout.engine=vllm"), "sweep: its runs sample in the trained modules"),
    (LMRLConfig, (SWEEP, LORA, "placement={rollout: 0, actor: 1}"), "sweep: its runs both sample and train on all"),
    (
        FlowRLConfig,
        ("trainer.end_below={reward/mean: 0.1}", "placement={rollout: 0, actor: 1}"),
        "trainer.end_below: ranks with other roles run to the last step",
    ),
    (FlowRLConfig, (EXPORT, LORA, "trainer.save_freq=-1"), "trainer.export_each_save: true exports checkpoints; set"),
    (FlowRLConfig, (EXPORT,), "trainer.export_each_save: true exports LoRAs, and model.lora_rank=0 trains all"),
    (
        FlowRLConfig,
        (EXPORT, LORA, "model.lora_init=pissa"),
        "trainer.export_each_save: true exports LoRAs without loading the base, which model.lora_init=pissa needs",
    ),
    (
        JointConfig,
        (EXPORT, "writer.model.lora_rank=4"),
        "trainer.export_each_save: exports LoRAs, and painter.model.lora_rank=0 trains all weights",
    ),
    (FlowRLConfig, ("trainer.keep_best_mode=min",), "trainer.keep_best_mode: min is of trainer.keep_best"),
    (FlowRLConfig, (KEEP, "trainer.save_freq=-1"), "trainer.keep_best: val/a/reward/mean needs checkpoints"),
    (FlowRLConfig, (KEEP,), "trainer.keep_best: val/a/reward/mean is measured in validations"),
    (
        FlowRLConfig,
        (KEEP, "trainer.test_freq=50"),
        "trainer.keep_best: val/a/reward/mean is measured by reward.functions, which is empty",
    ),
    (
        FlowRLConfig,
        (KEEP, "trainer.test_freq=20", "reward.functions=[{name: ocr}]"),
        "trainer.keep_best: val/a/reward/mean is measured every 20 steps (trainer.test_freq); expected "
        "trainer.save_freq, 50, to be a multiple",
    ),
    (LMRLConfig, (SWEEP, LORA, "parallel.expert_parallel=true"), "sweep: its runs share a base, but not experts"),
    (FlowRLConfig, (SWEEP, LORA, CONTEXT), "sweep: its runs share passes, but not the positions of samples"),
    (JointConfig, ("painter.rollout.max_draws_per_prompt=2",), "painter.rollout.max_draws_per_prompt: 2 would draw"),
    (JointConfig, ("writer.rollout.schedule=one_step_off",), "writer.rollout.schedule: one_step_off needs ranks that"),
    (JointConfig, ("writer.rollout.partial_rollout=true",), "writer.rollout.partial_rollout: true would leave texts"),
    (
        JointConfig,
        ("painter.rollout.engine=vllm_omni",),
        "painter.rollout.engine: vllm_omni does not support rewritten",
    ),
    (JointConfig, ("writer.model.block_size=4",), "writer.model.block_size: 4 is for block diffusion, which joint"),
    (JointConfig, ("writer.algorithm.name=ppo",), "writer.algorithm.name: ppo needs a critic"),
    (
        JointConfig,
        ("painter.algorithm.name=opd", "painter.algorithm.teacher_path=x"),
        "painter.algorithm.name: opd has a teacher",
    ),
    (
        JointConfig,
        ("painter.algorithm.name=dgpo", "painter.algorithm.reference_guidance=4.5"),
        "painter.algorithm.reference_guidance: 4.5 is not supported in a joint run; set it to null",
    ),
    (FlowRLConfig, ("algorithm.name=opd",), "algorithm.teacher_path is not set; give algorithm.teacher_path=..., or"),
    (LMRLConfig, ("algorithm.name=distillation",), "algorithm.teacher_path is not set; give algorithm.teacher_path="),
    (
        FlowRLConfig,
        (*OPD, "algorithm.teachers={a: x}", "algorithm.teacher_key=t"),
        "algorithm.teachers: takes the place",
    ),
    (FlowRLConfig, (OPD[0], "algorithm.teachers={a: x}"), "algorithm.teacher_key: null; expected the column of the"),
    (FlowRLConfig, ("rollout.branching=true",), "rollout.branching: true takes the steps before the window once"),
    (
        FlowRLConfig,
        ("algorithm.name=tempflow_grpo", "rollout.max_draws_per_prompt=2"),
        "rollout.branching: true draws all images of a prompt together",
    ),
    (JointConfig, ("writer.rollout.engine=dataset",), "writer.rollout.engine: dataset takes responses from the data"),
    (JointConfig, ("painter.algorithm.name=draft",), "painter.algorithm.name: draft differentiates the reward"),
    (
        JointConfig,
        ("painter.algorithm.name=diffusion_dpo", "painter.rollout.n=2", "diffusion_group_scope=prompt"),
        "diffusion_group_scope: prompt would compare images of different texts",
    ),
    (
        JointConfig,
        ("painter.algorithm.name=dgpo", "diffusion_group_scope=prompt"),
        "diffusion_group_scope: prompt would compare images of different texts with painter.algorithm.name=dgpo",
    ),
    (
        FlowRLConfig,
        ("actor.ppo_mini_batch_size=8", "actor.ppo_mini_batch_size_per_gpu=2"),
        "actor.ppo_mini_batch_size_per_gpu: 2 conflicts",
    ),
    (FlowRLConfig, ("actor.ppo_mini_batch_size_per_gpu=2",), "actor.ppo_mini_batch_size_per_gpu: 2 grows"),
    (
        FlowMatchingTaskConfig,
        ("data.train_batch_size=8", "data.train_batch_size_per_gpu=2"),
        "data.train_batch_size_per_gpu: 2 conflicts",
    ),
    (
        LMRLConfig,
        ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=9"),
        "actor.ppo_max_token_len_per_gpu: 9 tokens are too few for a sample, which may have 2048",
    ),
    (LMRLConfig, ("data.min_pixels=9", "data.max_pixels=8"), "data.min_pixels: 9 is more than data.max_pixels=8"),
    (
        FlowRLConfig,
        ("trainer.profile_steps=[2,9]", "trainer.total_training_steps=8"),
        "trainer.profile_steps: [2, 9] goes beyond trainer.total_training_steps=8",
    ),
    (LMRLConfig, ("rollout.n=1",), "rollout.n: 1 leaves algorithm.name=grpo nothing"),
    (LMRLConfig, (*PPO_OF_ONE, "reward.normalize=group"), "rollout.n: 1 leaves reward.normalize=group no group"),
    (LMRLConfig, (*PPO_OF_ONE, "rollout.max_num_gen_batches=2"), "rollout.n: 1 leaves rollout.max_num_gen_batches=2"),
    (LMRLConfig, (*PPO_OF_ONE, "rollout.max_draws_per_prompt=2"), "rollout.n: 1 leaves rollout.max_draws_per_prompt=2"),
    (
        LMRLConfig,
        ("environment.path=a:B", "environment.tool_config_path=t.yaml"),
        "environment.tool_config_path: t.yaml cannot be combined with environment.path",
    ),
    (LMRLConfig, ("environment.tools=[calculator]", *BLOCKS, IN_BLOCKS), "environment.path: block diffusion"),
    (
        LMRLConfig,
        ("reward.functions=[{name: environment}]",),
        "reward.functions: the reward environment comes from an environment; set environment.path",
    ),
    (
        LMRLConfig,
        ("reward.functions=[{name: environment}]", "environment.tools=[calculator]"),
        "reward.functions: the reward environment comes from an environment, and environment.tools have no state",
    ),
    (
        LMRLConfig,
        ("algorithm.name=ppo", "trainer.critic_warmup=4", "trainer.total_training_steps=3"),
        "trainer.critic_warmup: 4 is beyond trainer.total_training_steps=3; expected fewer",
    ),
    (
        LMRLConfig,
        ("reward.functions=[{name: gsm8k, initial_weight: 2}]",),
        "reward.functions[0].initial_weight: 2.0 with weight_steps 0 is only half of a schedule",
    ),
    (
        FlowMatchingTaskConfig,
        ("reward.functions=[{name: ocr, weight_steps: 2}]",),
        "reward.functions[0].initial_weight: None with weight_steps 2 is only half of a schedule",
    ),
    (
        FlowRLConfig,
        ("rollout.max_num_gen_batches=2", "rollout.max_draws_per_prompt=2"),
        "rollout.max_num_gen_batches: 2 draws new prompts",
    ),
    (FlowRLConfig, ("reward.normalize=gdpo", "algorithm.global_std=false"), "algorithm.global_std: false contradicts"),
    (FlowRLConfig, ("algorithm.name=grpo_guard", "rollout.sde_type=cps"), "rollout.sde_type: cps does not work"),
    (
        FlowRLConfig,
        ("algorithm.importance=sequence", "algorithm.timestep_weight=noise"),
        "algorithm.timestep_weight: noise weights",
    ),
    (BlockDiffusionTaskConfig, (), "model.block_size is missing"),
    (
        LMRLConfig,
        ("rollout.engine=vllm", "reward.model.path=x"),
        "reward.model.sleep: true does not work with rollout.sleep=true, because vLLM lets only one engine per process "
        "sleep; set one of ",
    ),
    (LMRLConfig, (IN_BLOCKS,), "rollout.engine: phalanx.rollout.lm.in_blocks:BlockDiffusionRollout is for block"),
    (LMRLConfig, ("model.block_size=4", "data.max_response_length=3"), "data.max_response_length: 3 tokens are no"),
    (LMRLConfig, (*BLOCKS, "rollout.val.max_response_length=9"), "rollout.val.max_response_length: 9 tokens are no"),
    (LMRLConfig, (*BLOCKS, "rollout.denoising_steps_per_block=5"), "rollout.denoising_steps_per_block: 5 is more"),
    (LMRLConfig, (*BLOCKS, "rollout.val.denoising_steps_per_block=5"), "rollout.val.denoising_steps_per_block: 5 is"),
    (LMRLConfig, (*BLOCKS, "algorithm.name=ppo"), "algorithm.name: ppo trains a critic"),
    (LMRLConfig, (*BLOCKS, "rollout.engine=vllm"), "rollout.engine: vllm does not work with block diffusion"),
    (LMRLConfig, (*BLOCKS, "rollout.min_p=0.1"), "rollout.min_p: 0.1 does not work with block diffusion"),
    (LMRLConfig, (*BLOCKS, "model.use_remove_padding=true"), "model.use_remove_padding: true does not work"),
    (LMRLConfig, (*BLOCKS, "model.attn_implementation=flash_attention_2"), "model.attn_implementation: flash_att"),
    (
        BlockDiffusionTaskConfig,
        (*BLOCKS, "block_diffusion.noise_range_low=0.9"),
        "block_diffusion.noise_range_low: 0.9 is above noise_range_high 0.8",
    ),
    (
        BlockDiffusionTaskConfig,
        (*BLOCKS, "data.max_prompt_length=7", "block_diffusion.train_fill=max_length"),
        "data.max_prompt_length: with data.max_response_length it makes 15 tokens",
    ),
    (
        BlockDiffusionTaskConfig,
        (*BLOCKS, "block_diffusion.same_token_labels=false", "data.val_files=[x]"),
        "block_diffusion.same_token_labels: false",
    ),
    (FlowRLConfig, ("rollout.correction=none",), "rollout.correction: none has nothing to correct"),
    (
        FlowRLConfig,
        ("rollout.engine=dataset", "rollout.max_num_gen_batches=2"),
        "rollout.max_num_gen_batches: 2 needs an engine that draws again, such as rollout.engine=policy",
    ),
    (
        FlowRLConfig,
        ("rollout.engine=dataset", "rollout.max_draws_per_prompt=2"),
        "rollout.max_draws_per_prompt: 2 needs an engine that draws again, such as rollout.engine=policy",
    ),
    (
        FlowRLConfig,
        ("rollout.engine=dataset", "rollout.num_frames=5"),
        "rollout.num_frames: 5 needs rollout.engine=policy; dataset samples images, not videos",
    ),
    (FlowMatchingTaskConfig, ("rollout.num_frames=5",), "rollout.num_frames: 5: flow matching trains on images"),
    (
        LMRLConfig,
        ("rollout.engine=vllm", "rollout.correction=none", "rollout.top_k=1"),
        "rollout.top_k: 1 needs the policy's own log-probs",
    ),
    (
        LMRLConfig,
        ("rollout.partial_rollout=true", PIPELINED),
        "rollout.partial_rollout: true does not wait for the longest responses of a step",
    ),
    (LMRLConfig, ("parallel.rollout_unsharded=false",), "parallel.rollout_unsharded: false would gather"),
    (LMRLConfig, ("rollout.schedule=one_step_off", "rollout.max_staleness=0"), "rollout.schedule: one_step_off trains"),
    (LMRLConfig, (PIPELINED, "actor.ppo_epochs=2"), "rollout.schedule: pipelined trains on each sample once"),
    (
        LMRLConfig,
        (PIPELINED, "actor.loss_agg_mode=seq-mean-token-sum-norm"),
        "rollout.schedule: pipelined trains before the longest sample",
    ),
    (JointConfig, (CONTEXT,), f"{OF_CONTEXT} is only for jobs with one policy"),
    (
        LMRLConfig,
        (CONTEXT, "model.attn_implementation=flex_attention"),
        f"{OF_CONTEXT} does not work with model.attn_implementation=flex_attention; expected sdpa or eager",
    ),
    (SampleConfig, (CONTEXT,), f"{OF_CONTEXT} is only for training"),
    (FlowRLConfig, (CONTEXT, "rollout.engine=vllm_omni"), f"{OF_CONTEXT} needs an engine that samples in the policy"),
    (FlowRLConfig, (CONTEXT, "model.compile=true"), f"{OF_CONTEXT} exchanges tokens"),
    (
        FlowRLConfig,
        ("parallel.param_offload=true", "parallel.expert_parallel=true"),
        "parallel.param_offload: true does not work with parallel.expert_parallel",
    ),
    (
        FlowRLConfig,
        ("model.quantization=nf4", "model.lora_rank=4", "rollout.engine=vllm_omni"),
        "model.quantization: nf4 needs sampling in the trained modules, but vllm_omni has a separate",
    ),
    (
        LMRLConfig,
        ("model.quantization=nf4", "model.lora_rank=4", "model.lora_init=pissa"),
        "model.lora_init: pissa moves a part of the base into the LoRA",
    ),
    (
        LMRLConfig,
        ("model.use_prefix_grouper=true", "model.use_remove_padding=false"),
        "model.use_prefix_grouper: true needs model.use_remove_padding",
    ),
    (SampleConfig, ("prompts=[a]", "prompt_file=x"), "prompts and prompt_file are both set"),
    (SampleConfig, (), "neither prompts nor prompt_file is set"),
    (SampleConfig, ("prompts=[a]", "model.path=null"), "neither model.path nor checkpoint is set"),
    (SampleConfig, ("prompts=[a]", "weights=ema"), "weights: ema needs a checkpoint"),
    (GenerateConfig, ("prompts=[a]", "prompt_file=x"), "prompts and prompt_file are both set"),
    (GenerateConfig, (), "neither prompts nor prompt_file is set"),
    (GenerateConfig, ("prompts=[a]", "model.path=null"), "neither model.path nor checkpoint is set"),
    (GenerateConfig, ("prompts=[a]", "weights=ema"), "weights: ema needs a checkpoint"),
    (EvaluateConfig, ("model.path=null",), "neither model.path nor checkpoint is set"),
    (EvaluateConfig, ("weights=ema",), "weights: ema needs a checkpoint"),
    (EvaluateConfig, ("n=4", "k=[1,8]"), "k: 8 is not between 1 and n"),
    (PrepareDataConfig, (), "give either source, a file, or reasoning_gym"),
    (PrepareDataConfig, ("source=x", "reasoning_gym=[y]"), "give either source, a file, or reasoning_gym"),
    (
        LMRLConfig,
        ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=300"),
        "rollout.partial_rollout.tokens: 300 does not divide data.max_response_length=1024",
    ),
]
STARTED: list[tuple[type, tuple[str, ...], str]] = [
    (FlowRLConfig, (), "data.train_files: [] names no prompts"),
    (FlowMatchingTaskConfig, (), "data.train_files: [] names no images"),
    (BlockDiffusionTaskConfig, BLOCKS, "data.train_files: [] names no samples"),
    (FlowRLConfig, (), "trainer.total_training_steps: null needs trainer.total_epochs"),
    (FlowRLConfig, ("trainer.test_freq=5",), "trainer.test_freq: 5 needs data.val_files"),
    (
        FlowRLConfig,
        (),
        "reward.functions: [] leaves nothing to optimise; give at least one, e.g. reward.functions=[{name:",
    ),
    (
        LMRLConfig,
        ("reward.functions=[{name: gsm8k, weight: 0}, {name: format, weight: 0}]",),
        "reward.functions: all weights are 0",
    ),
    (FlowRLConfig, (PIPELINED, "algorithm.global_std=true"), "rollout.schedule: pipelined: flow_grpo needs all"),
    (FlowRLConfig, ("placement={inference: 1}",), "placement.inference: there are no log-probs"),
    (FlowRLConfig, ("rollout.engine=dataset",), "rollout.engine: dataset takes images"),
    (FlowRLConfig, (*DPO, "rollout.engine=dataset", "rollout.n=3"), "rollout.n: 3; expected 2"),
    (FlowRLConfig, ("rollout.noise_level=0",), "rollout.noise_level: 0.0; expected more than 0"),
    (
        FlowRLConfig,
        ("rollout.sde_type=cps", "rollout.sde_window_range=[6,10]"),
        "rollout.sde_window_range: [6, 10] contains the last step",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=opd", "algorithm.teacher_path=x", "rollout.engine=vllm_omni", "rollout.correction=rejection"),
        "rollout.correction: rejection weights a policy gradient",
    ),
    (
        LMRLConfig,
        ("algorithm.name=sdft", "model.block_size=4"),
        "algorithm.name: sdft reads a response behind two prompts",
    ),
    (LMRLConfig, ("algorithm.name=sdpo", "algorithm.context=[environment]"), "algorithm.context: [environment] is"),
    (LMRLConfig, ("algorithm.name=sdpo", "reward.functions=[]"), "algorithm.context: peers and feedback need rewards"),
    (
        LMRLConfig,
        ("algorithm.name=dpo", "actor.loss_agg_mode=token-mean"),
        "actor.loss_agg_mode: token-mean would weigh",
    ),
    (
        LMRLConfig,
        ("algorithm.name=dpo", "rollout.engine=vllm", "rollout.correction=token_tis"),
        "rollout.correction: token_tis weighs single responses",
    ),
    (
        LMRLConfig,
        ("rollout.engine=dataset", "data.response_key=chosen", "data.rejected_key=rejected", "rollout.n=3"),
        "rollout.n: 3; expected 2 with rollout.engine=dataset",
    ),
    (FlowRLConfig, ("algorithm.name=draft", "rollout.noise_level=0.7"), "rollout.noise_level: 0.7 does not work with"),
    (FlowRLConfig, ("algorithm.name=refl", "rollout.engine=vllm_omni"), "rollout.engine: vllm_omni does not work with"),
    (
        FlowRLConfig,
        ("algorithm.name=draft", "rollout.solver=dpm_solver++"),
        "rollout.solver: dpm_solver++ does not work",
    ),
    (FlowRLConfig, ("algorithm.name=draft", "reward.normalize=group"), "reward.normalize: group does not work with"),
    (FlowRLConfig, ("algorithm.name=draft", "placement={rollout: 1}"), "placement: rollout does not work with"),
    (FlowRLConfig, ("algorithm.name=draft", CONTEXT), f"{CONTEXT.replace('=', ': ')} does not work with"),
    (FlowRLConfig, ("algorithm.name=draft", "algorithm.last_steps=11"), "algorithm.last_steps: 11 is more than"),
    (
        FlowRLConfig,
        ("algorithm.name=awm", "rollout.noise_level=0.7", "rollout.solver=dpm_solver++"),
        "rollout.solver: dpm_solver++ takes steps without noise",
    ),
    (
        FlowRLConfig,
        ("algorithm.name=awm", "rollout.noise_level=0", "rollout.init_same_noise=true"),
        "rollout.init_same_noise: true makes",
    ),
]
NODE = Ranks(width=4, node=4, sampling_node=4, apart=False, restarts=False)
LAUNCHED: list[tuple[type, tuple[str, ...], Ranks, str]] = [
    (FlowRLConfig, (CONTEXT.replace("2", "3"),), NODE, "parallel.ulysses_sequence_parallel_size: 3 does not divide"),
    (
        FlowRLConfig,
        ("parallel.param_offload=true",),
        Ranks(1, 4, 4, apart=False, restarts=False),
        "parallel.param_offload: true needs parallel.fsdp_size > 1",
    ),
    (FlowRLConfig, ("optim.name=muon",), NODE, "optim.name: muon orthogonalizes whole matrices, which 4 ranks"),
    (
        LMRLConfig,
        ("rollout.engine=vllm", "rollout.tensor_parallel_size=3"),
        NODE,
        "rollout.tensor_parallel_size: 3 does not divide the 4 ranks of a node; nearest that does: 2 or 4",
    ),
    (LMRLConfig, (PIPELINED,), NODE, "rollout.schedule: pipelined needs ranks that only sample"),
    (
        FlowRLConfig,
        ("trainer.resume=never",),
        Ranks(4, 4, 4, apart=False, restarts=True),
        "trainer.resume: never would begin from there again",
    ),
    (
        FlowRLConfig,
        (),
        Ranks(8, 4, 4, apart=False, restarts=True, in_place=True),
        "parallel.fsdp_size: null: 8 ranks share the weights, and IN_PLACE=1 needs a whole copy on each node of 4",
    ),
]
MODELS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("threshold=0.5",), {}, "threshold: 0.5 is for block diffusion"),
    (("max_response_length=7",), {"block_size": 4}, "max_response_length: 7 tokens are not a whole number of blocks"),
    (("denoising_steps_per_block=5",), {"block_size": 4}, "denoising_steps_per_block: 5 is more than"),
    ((), {"block_size": 4, "attn_implementation": "flash_attention_2"}, "model.attn_implementation: flash_attention_2"),
]
