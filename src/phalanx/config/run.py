"""Sections that every training job has, whatever the kind of policy: keys with types, defaults and meanings.

The classes are plain dataclasses, light to import, so that a typing error in a YAML is reported within a second,
before torch, a process group or a model exists. Names of leaves follow VeRL-Omni and verl where they have one.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional, Protocol

from phalanx.config.engines import EngineFacts, EngineMemory, check_engine_class, engine_class
from phalanx.config.load import arg
from phalanx.config.ranges import COUNT, DTYPES, SEEDS, TIMES
from phalanx.config.reward import RewardConfig

SDE_TYPES = ("sde", "cps", "dance_sde")
SCHEDULES = ("synchronous", "pipelined", "one_step_off")
CORRECTIONS = ("rescore", "none", "truncated_is", "rejection")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass
class ModelConfig:
    """The model that is trained."""

    path: str = arg("???", "model folder (or hub id, if a hub is reachable)", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: its main branch")
    dtype: str = arg("bfloat16", "dtype of computation", choices=DTYPES)
    lora_rank: int = arg(0, "rank of the LoRA; 0 trains all weights", ge=0, le=65536)
    lora_alpha: Optional[float] = arg(None, "LoRA is scaled by lora_alpha / lora_rank; null: 2 x lora_rank", gt=0)
    lora_init: str = arg(
        "gaussian", "initialization of LoRA's A (B is 0)", choices=("gaussian", "kaiming", "orthogonal", "pissa")
    )
    target_modules: Optional[list[str]] = arg(
        None, "module name suffixes that get a LoRA, or all-linear; null: the family's default"
    )
    lora_path: Optional[str] = arg(
        None,
        "LoRA to start from, a file or folder of diffusers or peft, such as an export: it is added to "
        "the weights, including those of the KL's reference",
        path=True,
    )
    lora_dtype: str = arg("float32", "dtype in which LoRA weights are stored and optimized", choices=DTYPES)
    quantization: Optional[str] = arg(
        None,
        "storage of frozen weights under a LoRA: nf4 quantizes the linear layers in the model's blocks "
        "to 4 bits, for both sampling and training; null: model.dtype",
        choices=("nf4",),
    )
    gradient_checkpointing: bool = arg(False, "recompute activations block by block in the backward pass")
    gradient_checkpointing_blocks: Optional[int] = arg(
        None, "with gradient_checkpointing, how many of the first blocks are recomputed; null: all", ge=1
    )
    compile: bool = arg(False, "torch.compile each transformer block")
    cpu_linear: Optional[str] = arg(
        None,
        "library of float32 linear layers on CPUs: torch's or oneDNN's; null: the resumed checkpoint's, or by CPU",
        choices=("torch", "onednn"),
    )

    def recomputed(self, blocks: int) -> int:
        """The number of a model's blocks that are recomputed; ValueError where it has fewer."""
        if not self.gradient_checkpointing:
            return 0
        wanted = self.gradient_checkpointing_blocks
        if wanted is not None and wanted > blocks:
            key = "model.gradient_checkpointing_blocks"
            raise ValueError(f"{key}: {wanted}; expected 1 to {blocks}, the model's blocks")
        return blocks if wanted is None else wanted


@dataclass
class ParallelConfig:
    """Sharding of the weights over the ranks."""

    fsdp_size: Optional[int] = arg(None, "ranks that share one copy of the weights; null: the ranks of a node", ge=1)
    reshard_after_forward: bool = arg(True, "free a block's gathered weights after its forward pass in training")
    sync_each_batch: bool = arg(
        False,
        "under FSDP reduce-scatter gradients after each micro-batch, not once per optimizer step: more "
        "messages, but no unsharded gradients in between",
    )
    rollout_unsharded: bool = arg(True, "gather all weights once for the whole rollout (needs memory for a full copy)")
    lora_sharding: str = arg(
        "shard", "LoRA weights under FSDP: sharded with their block, or replicated", choices=("shard", "replicate")
    )
    expert_parallel: bool = arg(
        False, "under FSDP keep each expert on one rank and send tokens to it, instead of gathering the experts"
    )
    ulysses_sequence_parallel_size: int = arg(
        1,
        "number of neighbouring ranks that hold the same samples, each a part of their tokens: for flow "
        "models and autoregressive language models",
        **COUNT,
    )
    param_offload: bool = arg(False, "keep sharded weights on the CPU between uses (needs fsdp_size > 1)")
    optimizer_offload: bool = arg(False, "keep the optimizer's state and the EMA on the CPU")
    timeout_s: float = arg(600.0, "seconds after which a collective that some rank does not join ends the job", gt=0)
    heartbeat_timeout_s: float = arg(45.0, "seconds without a sign of life after which a rank counts as lost", gt=0)

    def data_ranks(self, ranks: int) -> int:
        """The number of groups of ranks with different samples."""
        return ranks // self.ulysses_sequence_parallel_size


@dataclass
class DataConfig:
    """Sources of the prompts."""

    train_files: list[str] = arg(
        [],
        "training prompts: files, folders or patterns of .txt, .jsonl, .csv and .parquet, Hugging Face dataset folders",
        path=True,
    )
    val_files: list[str] = arg([], "held-out prompts, one validation set per entry", path=True)
    prompt_key: str = arg("prompt", "column of the prompts in these files")
    train_batch_size: int = arg(32, "prompts per training step, across all ranks", **COUNT)
    train_batch_size_per_gpu: Optional[int] = arg(
        None,
        "instead of train_batch_size: prompts per training step and rank; the batch scales with the ranks",
        **COUNT,
    )
    max_prompt_length: int = arg(256, "tokens of a prompt that the model sees", **COUNT)
    seed: int = arg(0, "seed of the order of prompts", **SEEDS)

    def batch_size(self, ranks: int) -> int:
        """Prompts per training step on this number of ranks."""
        each = self.train_batch_size_per_gpu
        return self.train_batch_size if each is None else each * ranks


@dataclass
class ValRolloutConfig:
    """Sampling in validation."""

    n: int = arg(1, "samples per prompt", **COUNT)
    seed: int = arg(1234, "seed of the noise: a different one for each prompt, the same at each validation", **SEEDS)


@dataclass
class RolloutConfig:
    """Sampling of the policy for training.

    ENGINES: the names of its kind of policy's engines, and the module:Class that each stands for; REGISTRY: the package
    that checks and builds them. A job whose rollout is its own has neither.
    """

    ENGINES: ClassVar[dict[str, str]] = {}
    REGISTRY: ClassVar[str] = ""

    engine: str = arg("policy", "policy: in the very modules that are trained", choices=("policy",))
    correction: str = arg(
        "rescore",
        "old log-probs of samples from another engine: the policy's (rescore), also with importance "
        "weights (truncated_is) or without actions that differ too much (rejection), or the engine's "
        "(none)",
        choices=CORRECTIONS,
    )
    correction_limit: float = arg(
        1e-3, "log-probs of policy and engine may differ by this much in truncated_is and rejection", gt=0
    )
    n: int = arg(16, "samples per prompt: the group that the advantage compares", ge=2, le=65536)
    max_num_gen_batches: int = arg(
        1,
        "maximum number of draws of prompts per step: new prompts replace those whose samples' rewards "
        "are all equal (DAPO)",
        **TIMES,
    )
    max_draws_per_prompt: int = arg(
        1, "maximum number of times that a prompt is sampled while all rewards of its samples are equal", **TIMES
    )
    micro_batch_size_per_gpu: Optional[int] = arg(None, "samples drawn together; null: the engine's choice", **COUNT)
    schedule: str = arg(
        "synchronous",
        "with ranks that only sample (placement): synchronous: one phase after the other; pipelined: a "
        "step's first samples are trained while further ones are sampled; one_step_off: the next step is"
        " sampled while this one is trained",
        choices=SCHEDULES,
    )
    parts: int = arg(4, "parts of a step that a pipelined schedule samples one after the other", **TIMES)
    max_staleness: int = arg(1, "maximum age of samples, in training steps, relative to the weights", ge=0)
    in_flight: str = arg(
        "finish",
        "samples in flight (one_step_off) at a checkpoint or a stop: finish waits for them and saves "
        "them in the checkpoint; drop samples them again after a restart, with the newer weights",
        choices=("finish", "drop"),
    )
    val: ValRolloutConfig = field(default_factory=ValRolloutConfig)

    @property
    def facts(self) -> EngineFacts:
        """The facts of the engine, whose class is imported unless it is the policy itself. Raises ConfigError where it
        cannot be.
        """
        if self.engine == "policy":
            return EngineFacts()
        facts: EngineFacts = engine_class(self.engine, self.ENGINES).facts
        return facts

    @property
    def engine_memory(self) -> EngineMemory:
        """The memory of the engine, by the keys of this section."""
        return EngineMemory(sleeps=self.facts.sleeps)


@dataclass
class AlgorithmConfig:
    """The algorithm; its own keys stand beside `name` (see its file in phalanx.algorithms).

    DEFAULTS: its defaults for keys of other sections, such as {"rollout.sde_type": "cps"}; unused: inherited keys that
    it never reads; bounds_stds: whether its adv_clip_max is a number of standard deviations, which bounds nothing else;
    sde_types: values of rollout.sde_type that its loss is derived for.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    unused: ClassVar[tuple[str, ...]] = ()
    bounds_stds: ClassVar[bool] = False
    sde_types: ClassVar[tuple[str, ...]] = SDE_TYPES

    name: str = arg("flow_grpo", "module of phalanx.algorithms, a dotted module, or path/to/file.py")

    @property
    def needs_groups(self) -> bool:
        """Whether the samples of a prompt are compared, of which there must be two then."""
        return True

    @property
    def needs_critic(self) -> bool:
        """Whether it wants a critic's values."""
        return False


@dataclass
class EmaConfig:
    """Exponential moving average of the trained weights, used in validation and export."""

    decay: Optional[float] = arg(None, "decay of the average; null: off", ge=0, lt=1)
    warmup: bool = arg(True, "start with a short memory: min(decay, (1 + updates) / (10 + updates))")
    update_interval: int = arg(1, "optimizer steps between updates of the average; Flow-GRPO has 8", ge=1)


@dataclass
class ActorConfig:
    """Updates of the policy."""

    ppo_mini_batch_size: int = arg(16, "prompts per optimizer step (x rollout.n samples)", **COUNT)
    ppo_mini_batch_size_per_gpu: Optional[int] = arg(
        None, "instead of ppo_mini_batch_size: prompts per optimizer step and rank", **COUNT
    )
    ppo_micro_batch_size_per_gpu: int = arg(
        8, "samples per forward and backward pass, each with all its trained actions", **COUNT
    )
    ppo_epochs: int = arg(1, "passes over the samples of a training step", **TIMES)
    loss_agg_mode: str = arg(
        "token-mean",
        "weights of actions (denoising steps, tokens) in the loss, over all ranks: equal for all "
        "actions, for each sample's sum or for each sample's mean, or each sample's sum over a constant "
        "(Dr.GRPO)",
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: Optional[float] = arg(
        None, "the constant of seq-mean-token-sum-norm; null: the maximum number of actions per sample", gt=0
    )
    ref_model_sync_steps: Optional[int] = arg(
        None, "training steps after which the current weights become the reference; null: never", ge=1
    )
    ema: EmaConfig = field(default_factory=EmaConfig)

    def mini_batch_size(self, ranks: int) -> int:
        """Prompts per optimizer step on this number of ranks."""
        each = self.ppo_mini_batch_size_per_gpu
        return self.ppo_mini_batch_size if each is None else each * ranks


@dataclass
class OptimConfig:
    """The optimizer and its learning rate."""

    name: str = arg(
        "adamw", "adamw, or muon for the matrices of the blocks and AdamW for the rest", choices=("adamw", "muon")
    )
    lr: float = arg(1e-4, "peak learning rate", gt=0)
    betas: list[float] = arg([0.9, 0.999], "AdamW's betas")
    eps: float = arg(1e-8, "AdamW's epsilon", gt=0)
    weight_decay: float = arg(1e-4, "decoupled weight decay", ge=0)
    grad_clip: float = arg(1.0, "maximum norm of the gradient; 0: no clipping", ge=0)
    lr_scheduler: str = arg("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_fraction: float = arg(1.0, "fraction of the steps, at the end, over which the rate decays", gt=0)
    lr_warmup_steps: int = arg(0, "optimizer steps of linear warm-up", ge=0)


@dataclass
class TrainerConfig:
    """The run."""

    total_training_steps: Optional[int] = arg(None, "training steps; null: from total_epochs", ge=0)
    total_epochs: Optional[float] = arg(None, "passes over the training prompts, if total_training_steps is null", gt=0)
    save_freq: int = arg(50, "steps between checkpoints, with one at the end; -1: never")
    test_freq: int = arg(-1, "steps between validations, with one at the end; -1: never")
    val_before_train: bool = arg(True, "validate before the first step")
    log_val_generations: int = arg(16, "number of samples stored from each validation", ge=0)
    logger: list[str] = arg(
        ["console"],
        "modules of phalanx.telemetry.loggers, such as console and wandb, module:Class, or path/to/file.py:Class; "
        "metrics.jsonl is always written",
    )
    project_name: str = arg("phalanx", "project in the loggers")
    experiment_name: str = arg("run", "name of the run")
    output_dir: str = arg(
        "outputs/${trainer.project_name}/${trainer.experiment_name}", "folder for all files of the run", path=True
    )
    seed: int = arg(0, "seed of noise, windows and LoRA initialization", **SEEDS)
    resume: str = arg("auto", "auto: from the newest complete checkpoint, if any; never; or a checkpoint's path")
    max_bad_steps: int = arg(
        10, "consecutive steps without a finite update (NaN in loss or gradient) that end the run", ge=1
    )
    max_checkpoints: int = arg(2, "checkpoints to keep, the newest ones", ge=1)
    profile_steps: list[int] = arg(
        [],
        "training steps, from 1, for which each rank writes a trace, a table of the most expensive "
        "operations and on GPUs a memory snapshot to profiles/ in output_dir",
    )
    deterministic: bool = arg(False, "torch.use_deterministic_algorithms: slower on GPUs, bitwise reproducible")


class JobConfig(Protocol):
    """Sections of a job that its models have in common: see phalanx.training.job."""

    @property
    def parallel(self) -> ParallelConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def reward(self) -> RewardConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...


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

    def __post_init__(self) -> None:
        """Nothing to refuse: where a run is read by another job, such as an export, its engine need not be here."""


@dataclass
class RLConfig(RunConfig):
    """Configuration of reinforcement learning."""

    algorithm: Any = field(default_factory=AlgorithmConfig, metadata={"registry": "phalanx.algorithms"})
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: dict[str, Any] = arg(
        {}, "ranks of each role, such as {rollout: 0-5, actor: 6-7}: see docs/placement.md; {}: all ranks do everything"
    )

    def __post_init__(self) -> None:
        """Fill in what follows from another section, and refuse an engine that cannot be one (ConfigError)."""
        super().__post_init__()
        check_engine_class(self.rollout)
        a = self.algorithm
        has_std = "global_std" in vars(a) and "global_std" not in a.unused
        if self.reward.normalize == "gdpo" and has_std and a.global_std is None:
            a.global_std = True
