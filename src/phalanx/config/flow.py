"""Keys that jobs with flow-matching models of images and videos add to phalanx.config.run."""

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from phalanx.config.choices import WINDOW
from phalanx.config.engines import FORMS
from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT, SDE_TYPES, STEPS, TIMES
from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.config.run import ActorConfig, DataConfig, EmaConfig, RLConfig, RolloutConfig, RunConfig, ValRolloutConfig
from phalanx.config.trained_model import FlowModelConfig

SOLVERS = ("euler", "dpm_solver++")
ENGINES = {
    "policy": "phalanx.rollout.flow.in_policy:PolicyRollout",
    "vllm_omni": "phalanx.zoo.engines.vllm_omni:VllmOmniRollout",
    "dataset": "phalanx.rollout.flow.dataset:DatasetRollout",
}


@dataclass
class FlowDataConfig(DataConfig):
    """Sources of the prompts."""

    overlong_prompts: str = arg(
        "truncate",
        "prompts of more than max_prompt_length tokens: error ends the job; filter leaves them out; truncate keeps "
        "their first tokens and reports how many prompts were truncated",
        choices=("error", "filter", "truncate"),
    )
    embeds_cache_dir: Optional[str] = arg(
        None, "folder in which prompt embeddings are cached between runs; null: cache them in memory only", path=True
    )
    text_length_multiple: int = arg(
        32,
        "texts with masked attention (Qwen-Image, Z-Image, HunyuanVideo) are padded to a multiple of this number of "
        "tokens, so that there are few shapes, but never beyond the longest possible text; 1: to the longest text of "
        "the step",
        **COUNT,
    )


@dataclass
class FlowValRolloutConfig(ValRolloutConfig):
    """Sampling in validation; null: the value of the same key in `rollout`."""

    n: int = arg(1, "images per prompt", **COUNT)
    num_inference_steps: Optional[int] = arg(None, "denoising steps; null: rollout's", **TIMES)
    height: Optional[int] = arg(None, "height in pixels; null: rollout's", **COUNT)
    width: Optional[int] = arg(None, "width in pixels; null: rollout's", **COUNT)
    num_frames: Optional[int] = arg(None, "frames of a video; null: rollout's", **COUNT)
    guidance_scale: Optional[float] = arg(
        None, "scale of classifier-free guidance, or guidance input of FLUX; null: rollout's"
    )
    guidance_scale_2: Optional[float] = arg(
        None, "guidance scale in the steps of Wan 2.2 A14B's transformer_2; null: rollout's"
    )
    true_cfg_scale: Optional[float] = arg(None, "scale of true classifier-free guidance; null: rollout's")
    noise_level: float = arg(0.0, "eta of the sampler; 0: the ODE", ge=0)
    solver: Optional[str] = arg(None, "solver of the ODE; null: rollout's", choices=SOLVERS)


@dataclass
class FlowRolloutConfig(RolloutConfig):
    """Sampling of images for training."""

    ENGINES: ClassVar[dict[str, str]] = ENGINES
    REGISTRY: ClassVar[str] = "phalanx.rollout.flow"

    engine: str = arg(
        "policy",
        "policy: sample in the trained modules; vllm_omni: in vLLM-omni, with a copy of the weights; dataset: do not "
        "sample, but take the pairs `chosen` and `rejected` of data.train_files as images; or a custom class",
        choices=tuple(ENGINES),
        forms=FORMS,
    )
    n: int = arg(16, "images per prompt, the group within which advantages are computed", ge=2, le=65536)
    num_inference_steps: int = arg(10, "denoising steps", **TIMES)
    height: int = arg(512, "height in pixels", **COUNT)
    width: int = arg(512, "width in pixels", **COUNT)
    num_frames: int = arg(1, "frames of a video, one more than a multiple of 4 for Wan; 1: an image", **COUNT)
    guidance_scale: float = arg(
        1.0,
        "scale of classifier-free guidance for SD3, Z-Image, FLUX.2 Klein base and videos, where 1 is off; guidance "
        "input of FLUX.1-dev, FLUX.1 Kontext and FLUX.2-dev",
    )
    guidance_scale_2: Optional[float] = arg(
        None, "guidance scale in the steps of Wan 2.2 A14B's transformer_2; null: guidance_scale, as in diffusers"
    )
    true_cfg_scale: float = arg(1.0, "scale of true classifier-free guidance for Qwen-Image and FLUX.1; 1: off")
    noise_level: float = arg(0.7, "eta of the stochastic steps; 0: the ODE, which has no transitions to train", ge=0)
    sde_type: str = arg("sde", "form of the stochastic step", choices=SDE_TYPES)
    sde_window_size: Optional[int] = arg(
        2, "number of consecutive steps that are stochastic and trained; null: all but the last", ge=1
    )
    sde_window_range: Optional[list[int]] = arg(
        None, "[a, b]: the window lies within steps a .. b-1; null: within all steps but the last", valid=STEPS
    )
    timestep_fraction: float = arg(
        1.0, "fraction of the stochastic steps that is trained, drawn anew in each training step", gt=0, le=1
    )
    window_schedule: str = arg(
        "random", "start of the window: random per step, or progressive (MixGRPO)", choices=("random", "progressive")
    )
    window_iters: int = arg(25, "training steps after which a progressive window moves", ge=1)
    window_stride: Optional[int] = arg(
        None, "denoising steps by which a progressive window moves; null: its size", ge=1
    )
    init_same_noise: bool = arg(False, "start all images of a prompt from the same noise")
    branching: bool = arg(
        False,
        "take the steps before the window once for all images of a prompt, which start from the same noise and branch "
        "in the window (TempFlow-GRPO)",
        only=(WINDOW,),
    )
    solver: str = arg(
        "euler",
        "solver of the deterministic steps after the window, or of all steps if none is stochastic: euler, or "
        "dpm_solver++ of second order",
        choices=SOLVERS,
    )
    ode_compression: float = arg(
        1.0, "fraction of the steps after the window that are taken; 1: all", only=(WINDOW,), gt=0, le=1
    )
    micro_batch_size_per_gpu: Optional[int] = arg(
        None, "images sampled together; null: ppo_micro_batch_size_per_gpu x window, for exact log-probs", **COUNT
    )
    vae_batch_size: Optional[int] = arg(
        None, "images that the VAE decodes at once; null: the whole micro-batch", **COUNT
    )
    val: FlowValRolloutConfig = field(default_factory=FlowValRolloutConfig)


# Keys of `rollout` that do not affect validation: files may set them, but --help leaves them out.
OF_TRAINING_SAMPLES = (
    *("n", "correction", "correction_limit", "max_num_gen_batches", "max_draws_per_prompt"),
    *("schedule", "parts", "max_staleness", "in_flight", "init_same_noise", "branching", "noise_level"),
    *("sde_window_size", "sde_window_range", "timestep_fraction", "window_schedule", "window_iters", "window_stride"),
    "ode_compression",
)


@dataclass
class FlowActorConfig(ActorConfig):
    """Updates of the policy."""

    detach_uncond: bool = arg(
        False, "do not backpropagate through the unconditional branch of guidance: cheaper, but a different gradient"
    )


@dataclass
class FlowRewardFunctionConfig(RewardFunctionConfig):
    """One term of the reward of images or videos."""

    frames: int = arg(
        8,
        "evenly spaced frames of a video that are scored and averaged; unused by rewards that score whole videos",
        **COUNT,
    )


@dataclass
class FlowRewardConfig(RewardConfig):
    """The reward that is optimized."""

    functions: list[FlowRewardFunctionConfig] = arg([], "terms of the reward, weighted and summed")  # type: ignore[assignment]


@dataclass
class FlowRunConfig(RunConfig):
    """Sections of every job that trains a flow-matching model."""

    kind: ClassVar[str] = "flow"
    model: FlowModelConfig = field(default_factory=FlowModelConfig)
    data: FlowDataConfig = field(default_factory=FlowDataConfig)
    rollout: FlowRolloutConfig = field(default_factory=FlowRolloutConfig)
    reward: FlowRewardConfig = field(default_factory=FlowRewardConfig)


@dataclass
class FlowRLConfig(FlowRunConfig, RLConfig):
    """Configuration of reinforcement learning of a flow-matching model."""

    actor: FlowActorConfig = field(default_factory=FlowActorConfig)


@dataclass
class FlowMatchingConfig:
    """The supervised loss (rectified flow; SD3, arXiv 2403.03206, section 3.1)."""

    micro_batch_size_per_gpu: int = arg(8, "images per forward and backward pass", **COUNT)
    logit_mean: float = arg(0.0, "noise levels are sigmoid(N(logit_mean, logit_std)), then shifted as by the scheduler")
    logit_std: float = arg(1.0, "see logit_mean", gt=0)
    prompt_dropout: float = arg(
        0.1, "fraction of images whose prompt is replaced by the empty one, for guidance", ge=0, lt=1
    )
    cache_latents: bool = arg(True, "encode all images once at the start and keep their latents in memory")
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class FlowMatchingTaskConfig(FlowRunConfig):
    """Configuration of supervised flow matching.

    data.train_files contains images with prompts, and data.train_batch_size counts images. `rollout` and `reward` are
    for validation; images have rollout.height x rollout.width pixels.
    """

    kind: ClassVar[str] = "flow_matching"
    needs_engine: ClassVar[bool] = True
    rollout: FlowRolloutConfig = field(default_factory=FlowRolloutConfig, metadata={"unused": OF_TRAINING_SAMPLES})
    flow_matching: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
