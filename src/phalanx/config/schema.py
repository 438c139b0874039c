"""Every configuration section that the tasks share: names, types, defaults and meanings.

The classes are plain dataclasses, light to import, so that a typing error in a YAML is reported within a second,
before torch, a process group or a model exists. Names of leaves follow VeRL-Omni where it has one.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from phalanx.config.load import arg

DTYPES = ("float32", "bfloat16")
SDE_TYPES = ("sde", "cps", "dance_sde")
SOLVERS = ("euler", "dpm_solver++")
CORRECTIONS = ("rescore", "none", "truncated_is", "rejection")
SEEDS: dict[str, Any] = {"ge": 0, "lt": 2**63}  # what torch's generators and phalanx.distributed.seed take


@dataclass
class ModelConfig:
    """What is trained."""

    path: str = arg("???", "diffusers model folder (or hub id, where a hub is reachable)", path=True)
    family: Optional[str] = arg(None, "module of phalanx.models (or a dotted module); null: from model_index.json")
    dtype: str = arg("bfloat16", "dtype that the model computes in", choices=DTYPES)
    reference_size: int = arg(
        1024, "square root of the area in pixels at which an editing model's VAE sees the image to be edited", ge=32
    )
    lora_rank: int = arg(0, "rank of the LoRA; 0 trains all weights", ge=0)
    lora_alpha: Optional[float] = arg(None, "LoRA is scaled by lora_alpha / lora_rank; null: 2 x lora_rank")
    lora_init: str = arg(
        "gaussian", "initialisation of LoRA's A (B is 0)", choices=("gaussian", "kaiming", "orthogonal", "pissa")
    )
    target_modules: Optional[list[str]] = arg(None, "module name suffixes that get a LoRA; null: the family's default")
    lora_dtype: str = arg("float32", "dtype in which LoRA weights are kept and optimised", choices=DTYPES)
    attn_backend: Optional[str] = arg(
        None, "attention backend of diffusers' dispatch, e.g. native, flash; null: torch's"
    )
    gradient_checkpointing: bool = arg(False, "recompute activations block by block in the backward pass")
    compile: bool = arg(False, "torch.compile each transformer block")


@dataclass
class ParallelConfig:
    """How the world of ranks is cut."""

    fsdp_size: Optional[int] = arg(None, "ranks that share one copy of the weights; null: the ranks of a node", ge=1)
    reshard_after_forward: bool = arg(True, "free a block's gathered weights after its forward pass in training")
    rollout_unsharded: bool = arg(True, "gather all weights once for the whole rollout (needs memory for a full copy)")
    lora_sharding: str = arg(
        "shard", "LoRA weights under FSDP: sharded with their block, or replicated", choices=("shard", "replicate")
    )
    param_offload: bool = arg(False, "keep sharded weights on the CPU between uses (needs fsdp_size > 1)")
    optimizer_offload: bool = arg(False, "keep the optimizer's state and the EMA on the CPU")
    timeout_s: float = arg(600.0, "seconds after which a collective that some rank does not join ends the job", gt=0)


@dataclass
class DataConfig:
    """Where prompts come from."""

    train_files: list[str] = arg([], "training prompts: .txt, .jsonl, .parquet or a Hugging Face dataset folder")
    val_files: list[str] = arg([], "held-out prompts, a validation set per file")
    train_batch_size: int = arg(32, "prompts a training step, over the world", ge=1)
    max_prompt_length: int = arg(256, "tokens of a prompt that the T5 or Qwen text encoder sees", ge=1)
    seed: int = arg(0, "seed of the order of prompts", **SEEDS)
    embeds_cache_dir: Optional[str] = arg(
        None, "folder where prompt embeddings are kept between runs; null: memory only", path=True
    )


@dataclass
class ValRolloutConfig:
    """Sampling in validation; null takes the value of `rollout`."""

    n: int = arg(1, "images a prompt", ge=1)
    num_inference_steps: Optional[int] = arg(None, "denoising steps", ge=1)
    height: Optional[int] = arg(None, "pixels", ge=1)
    width: Optional[int] = arg(None, "pixels", ge=1)
    num_frames: Optional[int] = arg(None, "frames of a video", ge=1)
    guidance_scale: Optional[float] = arg(None, "classifier-free guidance (SD3, Z-Image, Wan), or FLUX.1-dev's own")
    true_cfg_scale: Optional[float] = arg(None, "true classifier-free guidance (Qwen-Image, FLUX.1)")
    noise_level: float = arg(0.0, "eta of the sampler; 0 is the ODE", ge=0)
    solver: Optional[str] = arg(None, "what takes the steps of the ODE", choices=SOLVERS)
    seed: int = arg(1234, "seed of the noise: a different one for each prompt, the same at each validation", **SEEDS)


@dataclass
class RolloutConfig:
    """How images are sampled for training."""

    engine: str = arg(
        "policy",
        "policy: in the very modules that are trained; vllm_omni: in vLLM-omni, on a copy of the weights; dataset: "
        "nothing is sampled, images are the pairs `chosen` and `rejected` of data.train_files",
        choices=("policy", "vllm_omni", "dataset"),
    )
    correction: str = arg(
        "rescore",
        "old log-probs of vllm_omni's samples: the policy's (rescore), also with importance weights (truncated_is) or "
        "without steps that are too far off (rejection), or the engine's (none)",
        choices=CORRECTIONS,
    )
    correction_limit: float = arg(
        1e-3, "log-probs of policy and engine may differ by this much in truncated_is and rejection", gt=0
    )
    n: int = arg(16, "images a prompt: the group that the advantage compares", ge=2)
    num_inference_steps: int = arg(10, "denoising steps", ge=1)
    height: int = arg(512, "pixels", ge=1)
    width: int = arg(512, "pixels", ge=1)
    num_frames: int = arg(1, "frames of a video, for Wan 1 more than a multiple of 4; 1: an image", ge=1)
    guidance_scale: float = arg(
        1.0, "classifier-free guidance of SD3, Z-Image, Wan, 1 is off; the guidance that FLUX.1-dev takes as input"
    )
    true_cfg_scale: float = arg(1.0, "true classifier-free guidance of Qwen-Image and FLUX.1; 1 is off")
    noise_level: float = arg(0.7, "eta of the stochastic steps; 0 is the ODE, which has no transitions to train", ge=0)
    sde_type: str = arg("sde", "the stochastic step", choices=SDE_TYPES)
    sde_window_size: Optional[int] = arg(
        2, "consecutive steps that are stochastic and trained; null: all but the last", ge=1
    )
    sde_window_range: Optional[list[int]] = arg(
        None, "[a, b]: the window lies in steps a .. b-1; null: all but the last step"
    )
    timestep_fraction: float = arg(
        1.0, "share of the stochastic steps that is trained, drawn anew for each training step", gt=0, le=1
    )
    window_schedule: str = arg(
        "random", "the window's start: random per step, or progressive (MixGRPO)", choices=("random", "progressive")
    )
    window_iters: int = arg(25, "training steps that a progressive window stays in place", ge=1)
    window_stride: Optional[int] = arg(
        None, "denoising steps that a progressive window moves by; null: its own size", ge=1
    )
    init_same_noise: bool = arg(False, "the images of a prompt begin with the same noise")
    solver: str = arg(
        "euler",
        "what takes the deterministic steps behind the window, or all where no step is stochastic: euler, or "
        "dpm_solver++ of second order",
        choices=SOLVERS,
    )
    ode_compression: float = arg(1.0, "share of the steps behind the window that is taken", gt=0, le=1)
    max_num_gen_batches: int = arg(
        1, "times that a prompt's images are sampled, at most, as long as all their rewards are equal", ge=1
    )
    micro_batch_size_per_gpu: Optional[int] = arg(
        None, "images sampled together; null: ppo_micro_batch_size_per_gpu x window, which makes log-probs exact", ge=1
    )
    vae_batch_size: Optional[int] = arg(None, "images that the VAE decodes at once; null: the whole micro-batch", ge=1)
    val: ValRolloutConfig = field(default_factory=ValRolloutConfig)


@dataclass
class AlgorithmConfig:
    """Which algorithm; its own keys stand beside `name` (see its file in phalanx.algorithms).

    DEFAULTS: what the algorithm wants of other sections, such as {"rollout.sde_type": "cps"}, where the user is silent.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    samples_together: ClassVar[int] = 1  # images of a prompt that are trained as one
    needs_reward: ClassVar[bool] = True

    name: str = arg("flow_grpo", "module of phalanx.algorithms, a dotted module, or path/to/file.py")

    def trained_steps(self, rollout: RolloutConfig) -> int | None:
        """Noise levels at which each image is trained; None: the steps of the rollout's window."""
        return None

    def check(self, rollout: RolloutConfig) -> None:
        """Raise ConfigError for what the algorithm cannot work with."""


@dataclass
class EmaConfig:
    """Exponential moving average of the trained weights, used in validation and export."""

    decay: Optional[float] = arg(None, "decay of the average; null: off", ge=0, lt=1)
    warmup: bool = arg(True, "start with a short memory: min(decay, (1 + updates) / (10 + updates))")
    update_interval: int = arg(1, "optimizer steps after which the average moves on; Flow-GRPO has 8", ge=1)


@dataclass
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int = arg(16, "prompts an optimizer step (x rollout.n images)", ge=1)
    ppo_micro_batch_size_per_gpu: int = arg(
        8, "images a forward and backward pass, each with all its window's steps", ge=1
    )
    ppo_epochs: int = arg(1, "passes over a step's samples", ge=1)
    detach_uncond: bool = arg(
        False, "no gradient through the unconditional branch of guidance: cheaper, another gradient"
    )
    ref_model_sync_steps: Optional[int] = arg(
        None, "training steps after which the reference becomes the weights as they are then; null: never", ge=1
    )
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class OptimConfig:
    """The optimizer and its learning rate."""

    name: str = arg(
        "adamw", "adamw, or muon for the blocks' matrices and AdamW for the rest", choices=("adamw", "muon")
    )
    lr: float = arg(1e-4, "peak learning rate", gt=0)
    betas: list[float] = arg([0.9, 0.999], "AdamW's betas")
    eps: float = arg(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = arg(1e-4, "decoupled weight decay", ge=0)
    grad_clip: float = arg(1.0, "maximum norm of the gradient; 0: no clipping", ge=0)
    lr_scheduler: str = arg("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_fraction: float = arg(1.0, "share of the steps, at the end, over which the rate decays", gt=0)
    lr_warmup_steps: int = arg(0, "optimizer steps of linear warm-up", ge=0)


@dataclass
class RewardFunctionConfig:
    """One term of the reward."""

    name: Optional[str] = arg(None, "a built-in reward (module of phalanx.rewards), or the term's name in the logs")
    path: Optional[str] = arg(None, "module:function or path/to/file.py:function")
    weight: float = arg(1.0, "factor in the sum")
    initial_weight: Optional[float] = arg(
        None, "factor in the first step, from which it goes to `weight` on a straight line; null: `weight` throughout"
    )
    weight_steps: int = arg(0, "training steps of that line", ge=0)
    clip: Optional[list[float]] = arg(None, "[low, high]: scores are clamped to this range; null: as they are")
    frames: int = arg(
        8, "evenly spaced frames of a video that are scored, whose mean counts; not of rewards that take videos", ge=1
    )
    kwargs: dict[str, Any] = arg({}, "keyword arguments of the reward")


@dataclass
class RewardModelConfig:
    """The vision-language model that judges ask, such as the reward vlm_ocr; it runs in the ranks themselves."""

    path: Optional[str] = arg(None, "model folder (or hub id, where a hub is reachable); null: no model", path=True)
    engine: str = arg(
        "vllm",
        "vllm, which needs the extra vllm, or transformers, slower and on torch alone; inside each rank's process",
        choices=("vllm", "transformers"),
    )
    tensor_parallel_size: int = arg(1, "neighbouring ranks of a node that hold the model together", ge=1)
    placement: str = arg(
        "colocate", "colocate: on all ranks; ranks a-b: on these ranks of each node, such as ranks 6-7"
    )
    dtype: str = arg("bfloat16", "dtype that the model computes in", choices=DTYPES)
    gpu_memory_utilization: float = arg(
        0.3, "vllm: share of a GPU's memory for the model and its KV cache, beside the training", gt=0, lt=1
    )
    micro_batch_size: int = arg(16, "transformers: questions that are answered at once", ge=1)
    sleep: bool = arg(
        True,
        "the model waits in the CPU's memory while it does not score (GPUs only); where it scores while images are "
        "sampled, it is awake from the first ones to the last score",
    )
    max_model_len: Optional[int] = arg(None, "tokens of question, image and answer; null: the model's own limit", ge=1)
    max_tokens: int = arg(512, "tokens of an answer", ge=1)
    temperature: float = arg(0.0, "of the sampled answers; 0 takes the likeliest token", ge=0)
    seed: int = arg(0, "seed of each answer: equal questions about equal images get equal answers", **SEEDS)
    unparseable_score: float = arg(0.0, "score of an image where a judge cannot read the answer; they are counted")


@dataclass
class RewardConfig:
    """What is optimised."""

    functions: list[RewardFunctionConfig] = arg([], "terms of the reward, weighted and summed")
    normalize: str = arg(
        "none",
        "before the sum, each term: as it is, or centred and divided by its std within each prompt's group (GDPO)",
        choices=("none", "group"),
    )
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlap: bool = arg(True, "score a micro-batch on worker threads while the next one is sampled")
    num_workers: int = arg(1, "worker threads a rank", ge=1)
    timeout_s: float = arg(300.0, "seconds that one call of a reward may take", gt=0)


@dataclass
class TrainerConfig:
    """The run."""

    total_training_steps: Optional[int] = arg(None, "training steps; null: from total_epochs", ge=0)
    total_epochs: Optional[float] = arg(
        None, "passes over the training prompts, where total_training_steps is null", gt=0
    )
    save_freq: int = arg(50, "steps between checkpoints, and one at the end; -1: never")
    test_freq: int = arg(-1, "steps between validations, and one at the end; -1: never")
    val_before_train: bool = arg(True, "validate before the first step")
    log_val_generations: int = arg(16, "validation images kept at each validation", ge=0)
    logger: list[str] = arg(["console"], "console, wandb, tensorboard; metrics.jsonl is always written")
    project_name: str = arg("phalanx", "project in the loggers")
    experiment_name: str = arg("run", "name of the run")
    output_dir: str = arg(
        "outputs/${trainer.project_name}/${trainer.experiment_name}", "where all files of the run go", path=True
    )
    seed: int = arg(0, "seed of noise, windows and LoRA initialisation", **SEEDS)
    resume: str = arg("auto", "auto: from the newest complete checkpoint, if any; never; or a checkpoint's path")
    max_bad_steps: int = arg(
        10, "steps in a row without one finite update (NaN in loss or gradient) that end the run", ge=1
    )
    max_checkpoints: int = arg(2, "newest checkpoints that are kept", ge=1)
    deterministic: bool = arg(False, "torch.use_deterministic_algorithms: slower on GPUs, repeats bit for bit")


@dataclass
class RunConfig:
    """Sections that every training job has."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class TrainConfig(RunConfig):
    """Configuration of reinforcement learning."""

    algorithm: Any = field(default_factory=AlgorithmConfig, metadata={"registry": "phalanx.algorithms"})
    actor: ActorConfig = field(default_factory=ActorConfig)


@dataclass
class FlowMatchingConfig:
    """The supervised loss (rectified flow; SD3, arXiv 2403.03206, section 3.1)."""

    micro_batch_size_per_gpu: int = arg(8, "images a forward and backward pass", ge=1)
    logit_mean: float = arg(
        0.0, "noise levels are sigmoid(N(logit_mean, logit_std)), then shifted as the scheduler does"
    )
    logit_std: float = arg(1.0, "see logit_mean", gt=0)
    prompt_dropout: float = arg(0.1, "share of images whose prompt is the empty one, for guidance", ge=0, lt=1)
    cache_latents: bool = arg(True, "encode all images once at the start and keep their latents in memory")
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class FlowMatchingTaskConfig(RunConfig):
    """Configuration of supervised flow matching. data.train_files holds images and prompts, train_batch_size counts
    images; `rollout` and `reward` serve validation, at rollout.height x width.
    """

    flow_matching: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
