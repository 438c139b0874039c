"""Sections of every training job, for any kind of policy: keys with types, defaults and help texts.

The classes are plain dataclasses that import quickly, so that a mistake in a YAML file is reported within a second,
before torch is imported or a process group or model is created. Key names follow VeRL-Omni and verl where possible.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from phalanx.config.choices import READ, REFERENCE, REWARDS, WINDOW
from phalanx.config.engine_facts import EngineFacts, EngineMemory
from phalanx.config.engines import check_engine_class, engine_class, facts_of
from phalanx.config.fields import arg
from phalanx.config.grid import dotted
from phalanx.config.optimizer import OptimConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.ranges import CORRECTIONS, COUNT, FREQUENCY, LOSS_AGG_MODES, SCHEDULES, SDE_TYPES, SEEDS, TIMES
from phalanx.config.reward import RewardConfig
from phalanx.config.section import Section
from phalanx.config.trained_model import ModelConfig


@dataclass
class DataConfig(Section, name="data"):
    """Sources of the prompts."""

    train_files: list[str] = arg(
        [],
        "training prompts: files, folders or patterns of .txt, .jsonl, .json, .csv and .parquet, Hugging Face dataset "
        "folders, data sets of the hub (hf://owner/name:split), or a function that returns rows (path/to/file.py:name)",
        path=True,
        single=".*",
    )
    val_files: list[str] = arg(
        [], "held-out prompts in the same formats, one validation set per entry", path=True, single=".*"
    )
    prompt_key: str = arg("prompt", "column of the prompts in data.train_files and data.val_files")
    train_batch_size: int = arg(32, "prompts per training step, across all ranks", **COUNT)
    train_batch_size_per_gpu: Optional[int] = arg(
        None,
        "instead of train_batch_size: prompts per training step and rank, so that the batch grows with the ranks",
        **COUNT,
    )
    max_prompt_length: int = arg(256, "maximum number of tokens of a prompt that the model sees", **COUNT)
    unusable_rows: str = arg(
        "error",
        "rows that cannot be used, such as one without a prompt, or whose image is missing or cut off: error ends the "
        "job before the first step; filter leaves them out and reports how many",
        choices=("error", "filter"),
    )
    seed: int = arg(0, "seed of the order in which prompts are drawn", **SEEDS)

    def batch_size(self, ranks: int) -> int:
        """Prompts per training step on this number of ranks."""
        each = self.train_batch_size_per_gpu
        return self.train_batch_size if each is None else each * ranks


@dataclass
class ValRolloutConfig(Section, name="rollout.val"):
    """Sampling in validation."""

    n: int = arg(1, "samples per prompt", **COUNT)
    seed: int = arg(1234, "seed of the noise, different for each prompt and the same in each validation", **SEEDS)


@dataclass
class RolloutConfig(Section, name="rollout"):
    """Sampling of the policy for training."""

    ENGINES: ClassVar[dict[str, str]] = {}  # maps the names of engines for this kind of policy to module:Class
    REGISTRY: ClassVar[str] = ""  # the package that checks and builds these engines

    engine: str = arg("policy", "policy: sample in the trained modules themselves", choices=("policy",))
    correction: str = arg(
        "rescore",
        "old log-probs of samples from an engine other than the policy: rescore: recompute them with the policy; "
        "truncated_is: also weight actions by truncated importance ratios; rejection: also drop actions whose "
        "log-probs differ too much; none: use the engine's",
        only=(WINDOW,),
        choices=CORRECTIONS,
    )
    correction_limit: float = arg(
        1e-3, "truncated_is and rejection: largest difference between the policy's and the engine's log-probs", gt=0
    )
    n: int = arg(16, "samples per prompt, the group within which advantages are computed", ge=2, le=65536)
    max_num_gen_batches: int = arg(
        1,
        "maximum number of times per step that prompts are drawn: new prompts replace those whose samples all have the "
        "same reward (DAPO's dynamic sampling); 1: no replacement",
        only=(REWARDS,),
        **TIMES,
    )
    max_draws_per_prompt: int = arg(
        1,
        "maximum number of times that a prompt is sampled if its samples all have the same reward; 1: once",
        only=(REWARDS,),
        **TIMES,
    )
    micro_batch_size_per_gpu: Optional[int] = arg(None, "samples drawn together; null: chosen by the engine", **COUNT)
    schedule: str = arg(
        "synchronous",
        "synchronous: sampling and training alternate; with ranks that only sample (placement) also pipelined: train "
        "on a step's first samples while the others are drawn; one_step_off: sample the next step while training on "
        "this one",
        choices=SCHEDULES,
    )
    parts: int = arg(4, "number of parts into which the pipelined schedule divides a step", **TIMES)
    max_staleness: int = arg(1, "maximum age of samples relative to the weights, in training steps", ge=0)
    in_flight: str = arg(
        "finish",
        "one_step_off: samples that are being drawn at a checkpoint or a stop; finish: wait for them and save them in "
        "the checkpoint; drop: draw them again after a restart, with the newer weights",
        choices=("finish", "drop"),
    )
    val: ValRolloutConfig = field(default_factory=ValRolloutConfig)

    @property
    def facts(self) -> EngineFacts:
        """Facts of the engine. Imports its class unless the engine is the policy; raises ConfigError if that fails."""
        if self.engine == "policy":
            return EngineFacts()
        return facts_of(engine_class(self.engine, self.ENGINES, f"{self:engine}"))

    @property
    def engine_memory(self) -> EngineMemory:
        """Memory of the engine according to the keys of this section."""
        return EngineMemory(sleeps=self.facts.sleeps)


# of the field of an algorithm, whose keys are those of its module
ALGORITHM: dict[str, Any] = {"registry": "phalanx.algorithms", "only": (READ,)}


@dataclass
class AlgorithmConfig(Section, name="algorithm"):
    """The algorithm. Its own keys are in the same section as `name`; see its file in phalanx.algorithms."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}  # defaults for keys of other sections, such as {"rollout.sde_type": "cps"}
    unused: ClassVar[tuple[str, ...]] = ()  # inherited keys that the algorithm never reads
    bounds_stds: ClassVar[bool] = False  # adv_clip_max counts stds, so it applies only to advantages divided by one
    sde_types: ClassVar[tuple[str, ...]] = SDE_TYPES  # values of rollout.sde_type for which its loss is derived

    name: str = arg("flow_grpo", "algorithm: a module of phalanx.algorithms, a dotted module, or path/to/file.py")

    @property
    def needs_groups(self) -> bool:
        """Whether the algorithm compares samples of the same prompt, so that it needs at least two."""
        return True

    @property
    def needs_critic(self) -> bool:
        """Whether the algorithm uses the values of a critic."""
        return False


@dataclass
class EmaConfig:
    """Exponential moving average of the trained weights, used in validation and export."""

    decay: Optional[float] = arg(None, "decay of the average per update; null: no average", ge=0, lt=1)
    warmup: bool = arg(True, "use a smaller decay at first: min(decay, (1 + updates) / (10 + updates))")
    update_interval: int = arg(1, "optimizer steps between updates of the average (8 in Flow-GRPO)", ge=1)


@dataclass
class ActorConfig(Section, name="actor"):
    """Updates of the policy."""

    ppo_mini_batch_size: int = arg(16, "prompts per optimizer step, each with rollout.n samples", **COUNT)
    ppo_mini_batch_size_per_gpu: Optional[int] = arg(
        None, "instead of ppo_mini_batch_size: prompts per optimizer step and rank", **COUNT
    )
    ppo_micro_batch_size_per_gpu: int = arg(
        8, "samples per forward and backward pass on each rank, each with all its trained actions", **COUNT
    )
    ppo_epochs: int = arg(1, "passes over the samples of a training step", **TIMES)
    loss_agg_mode: str = arg(
        "token-mean",
        "aggregation of the loss of actions (denoising steps, tokens) over all ranks: mean over all actions; mean over "
        "samples of each one's sum, or of each one's mean; or each sample's sum divided by a constant (Dr.GRPO)",
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: Optional[float] = arg(
        None, "constant that seq-mean-token-sum-norm divides by; null: the maximum number of actions per sample", gt=0
    )
    ref_model_sync_steps: Optional[int] = arg(
        None,
        "every this many training steps, the current weights become the reference; null: never",
        only=(REFERENCE,),
        ge=1,
    )
    ema: EmaConfig = field(default_factory=EmaConfig)

    def mini_batch_size(self, ranks: int) -> int:
        """Prompts per optimizer step on this number of ranks."""
        each = self.ppo_mini_batch_size_per_gpu
        return self.ppo_mini_batch_size if each is None else each * ranks


@dataclass
class TrainerConfig:
    """The run."""

    total_training_steps: Optional[int] = arg(None, "number of training steps; null: computed from total_epochs", ge=0)
    total_epochs: Optional[float] = arg(None, "passes over the training prompts, if total_training_steps is null", gt=0)
    save_freq: int = arg(50, "training steps between checkpoints, with one at the end; -1: never", valid=FREQUENCY)
    test_freq: int = arg(-1, "training steps between validations, with one at the end; -1: never", valid=FREQUENCY)
    val_before_train: bool = arg(True, "validate before the first training step, if data.val_files is set")
    log_val_generations: int = arg(16, "number of samples stored from each validation", ge=0)
    logger: list[str] = arg(
        ["console"],
        "where metrics are logged, in addition to metrics.jsonl: modules of phalanx.telemetry.loggers, such as console "
        "and wandb, module:Class, or path/to/file.py:Class",
    )
    project_name: str = arg("phalanx", "project name in the loggers and in the default output_dir")
    experiment_name: str = arg("run", "name of the run in the loggers and in the default output_dir")
    output_dir: str = arg(
        "outputs/${trainer.project_name}/${trainer.experiment_name}", "folder for all files of the run", path=True
    )
    seed: int = arg(0, "seed of the sampling noise, the windows and the LoRA initialization", **SEEDS)
    resume: str = arg("auto", "auto: from the newest complete checkpoint, if any; never; or a checkpoint's path")
    max_bad_steps: int = arg(
        10, "end the run after this many consecutive steps with a NaN or infinite loss or gradient", ge=1
    )
    undo_steps: Optional[bool] = arg(
        None,
        "before a step with several updates, keep a copy of weights, optimizer state and averages, to which a "
        "signal to stop returns at once instead of after the step; null: for LoRAs, and with trainer.peer_copy",
    )
    peer_copy: bool = arg(
        False,
        "with IN_PLACE=1, send each rank's part of weights, optimizer state and averages to another node after each "
        "step, so that a lost node costs no step where parallel.fsdp_size is more than the ranks of a node",
    )
    end_below: dict[str, float] = arg(
        {},
        "metrics with their lowest values, such as {reward/mean: 0.3}: a run that logs a lower one ends there, with a "
        "checkpoint; for runs of a sweep that have no chance",
    )
    end_below_from: int = arg(1, "first training step after which trainer.end_below may end the run", ge=1)
    max_checkpoints: int = arg(2, "number of newest checkpoints to keep; older ones are deleted", ge=1)
    keep_best: Optional[str] = arg(
        None,
        "metric whose best checkpoint is kept besides the newest, such as val/held_out/reward/mean; commands find it "
        "as output_dir/best; null: none",
    )
    keep_best_mode: str = arg("max", "which value of trainer.keep_best is the best one", choices=("max", "min"))
    export_each_save: bool = arg(
        False,
        "also write the LoRA of each checkpoint to export/ in output_dir, as `phalanx export` does, for stock peft or "
        "diffusers",
    )
    profile_steps: list[int] = arg(
        [],
        "training steps, counted from 1, that are profiled: each rank writes a trace, a table of the most expensive "
        "operations and, on GPUs, a memory snapshot to profiles/ in output_dir",
        each={"ge": 1},
    )
    deterministic: bool = arg(False, "use torch.use_deterministic_algorithms: bitwise reproducible, but slower on GPUs")


@dataclass
class RunConfig:
    """Sections that every training job has."""

    kind: ClassVar[str] = ""  # the kind of its policy, or of its job: see KINDS of phalanx.run.kind
    needs_engine: ClassVar[bool] = False  # whether it samples; an export, which reads a run's configuration, does not
    runs: ClassVar[dict[str, Any]] = {}  # of a sweep: the configuration of each run by its name
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sweep: dict[str, Any] = arg(
        {},
        "keys with lists of values, such as {optim.lr: [1e-4, 3e-4]}: a LoRA is trained for each combination, all of "
        "them on one base, each in a folder of its own below trainer.output_dir, see docs/sweeps.md",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for an engine class that is needed and cannot be used."""
        self.sweep = dict(dotted(self.sweep))
        if self.needs_engine:
            check_engine_class(self.rollout)


@dataclass
class RLConfig(RunConfig):
    """Configuration of reinforcement learning."""

    needs_engine: ClassVar[bool] = True
    algorithm: Any = field(default_factory=AlgorithmConfig, metadata=ALGORITHM)
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: dict[str, Any] = arg(
        {}, "ranks of each role, such as {rollout: 0-5, actor: 6-7}, see docs/placement.md; {}: all ranks do everything"
    )

    def __post_init__(self) -> None:
        """Set algorithm.global_std if reward.normalize implies it."""
        super().__post_init__()
        a = self.algorithm
        has_std = "global_std" in vars(a) and "global_std" not in a.unused
        if self.reward.normalize == "gdpo" and has_std and a.global_std is None:
            a.global_std = True
