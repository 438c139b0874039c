"""Keys that jobs on causal language models add to phalanx.config.run."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from phalanx.config.critic import CriticConfig
from phalanx.config.engines import FORMS, EngineMemory
from phalanx.config.environment import EnvironmentConfig
from phalanx.config.load import arg
from phalanx.config.ranges import COUNT, TIMES
from phalanx.config.run import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    ValRolloutConfig,
)

ESTIMATES = ("trace", "block_mean_field", "mean_field", "coupled", "elbo")  # see phalanx.functional.block_diffusion
TOKEN_CORRECTIONS = ("token_tis", "sequence_tis", "token_mask", "sequence_mask")
ENGINES = {"policy": "phalanx.rollout.lm.in_policy:LMRollout", "vllm": "phalanx.rollout.lm.vllm:VllmRollout"}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
MOST_TOKENS: dict[str, Any] = {"ge": 1, "le": 2**20}


@dataclass
class LMModelConfig(ModelConfig):
    """The model that is trained: a causal language model's folder, as transformers writes it."""

    attn_implementation: str = arg("sdpa", "attention of transformers", choices=ATTENTION)
    use_remove_padding: bool = arg(
        False, "pack the samples of a forward and backward pass into one row, without padding between them"
    )
    use_prefix_grouper: bool = arg(
        False,
        "with use_remove_padding: of the samples of a pass that have the same prompt, compute it once, with its images",
    )
    block_size: Optional[int] = arg(
        None, "block diffusion: tokens of a block, which are denoised together; null: an autoregressive model", **TIMES
    )
    mask_token: Optional[str] = arg(None, "block diffusion: the mask token; null: the tokenizer's")
    experts_implementation: Optional[str] = arg(
        None, "how transformers computes layers with experts; null: its best, grouped_mm", choices=EXPERTS
    )
    freeze_vision_tower: bool = arg(
        True,
        "prompts with images: do not train the vision tower and its projector, as with LoRA; each image "
        "is then encoded once per rollout, independently of its batch. False, verl's default, trains "
        "them",
    )


@dataclass
class LMDataConfig(DataConfig):
    """Sources of the prompts."""

    prompt_key: str = arg("prompt", "column of the prompts in these files: texts, or chats")
    image_key: Optional[str] = arg(
        None,
        "column of the images in prompts, one or a list per row; null: images, or else image, if a file "
        "has one of them",
    )
    min_pixels: Optional[int] = arg(
        None,
        "least pixels of an image as the model reads it, to which smaller ones are enlarged; null: the processor's",
        ge=1,
    )
    max_pixels: Optional[int] = arg(
        None,
        "maximum pixels of an image as the model reads it, to which larger ones are reduced; null: the processor's",
        ge=1,
    )
    max_prompt_length: int = arg(1024, "longest prompt, in tokens with the chat template and images", **MOST_TOKENS)
    max_response_length: int = arg(1024, "longest response, in tokens", **MOST_TOKENS)
    overlong_prompts: str = arg(
        "error",
        "prompts of more than max_prompt_length tokens: error ends the job, filter leaves them out, truncate keeps "
        "their last tokens",
        choices=("error", "filter", "truncate"),
    )
    system_prompt: Optional[str] = arg(None, "system message of prompts that have none; null: none")
    chat_template_kwargs: dict[str, Any] = arg(
        {}, "variables that the chat template reads, such as Qwen3's {enable_thinking: false}"
    )
    chat_template_date: Optional[str] = arg(
        None, "day for chat templates that write today's date, as 2026-01-31; null: the day on which the run began"
    )


@dataclass
class LMValRolloutConfig(ValRolloutConfig):
    """Sampling in validation."""

    temperature: float = arg(0.0, "temperature; 0 is greedy", ge=0)
    top_k: int = arg(-1, "sample from this many of the most likely tokens; -1 and 0: all", ge=-1)
    top_p: float = arg(1.0, "sample from the most likely tokens with this total probability", gt=0, le=1)
    min_p: float = arg(0.0, "sample among tokens of at least this share of the largest probability", ge=0, le=1)
    max_response_length: Optional[int] = arg(None, "longest response; null: data.max_response_length", **MOST_TOKENS)
    denoising_steps_per_block: Optional[int] = arg(
        None, "block diffusion: maximum denoising steps per block; null: rollout's", **TIMES
    )
    threshold: Optional[float] = arg(
        None, "block diffusion: probability from which a token is sure; null: rollout's", gt=0, le=1
    )


@dataclass
class LMRolloutConfig(RolloutConfig):
    """Sampling of responses for training."""

    ENGINES: ClassVar[dict[str, str]] = ENGINES
    REGISTRY: ClassVar[str] = "phalanx.rollout.lm"

    n: int = arg(8, "responses per prompt: the group that the advantage compares, if it does", **COUNT)
    engine: str = arg(
        "policy",
        "policy: in the very modules that are trained; vllm: in vLLM inside each rank, on a copy of the weights that "
        "is proven after each renewal; or a class of your own",
        choices=tuple(ENGINES),
        forms=FORMS,
    )
    correction: str = arg(
        "rescore",
        "old log-probs of samples that vLLM drew: the policy's (rescore), also with truncated importance weights of "
        "tokens or responses (token_tis, sequence_tis), or without tokens or responses that are too far off "
        "(token_mask, sequence_mask), or vLLM's (none)",
        choices=("rescore", "none", *TOKEN_CORRECTIONS),
    )
    correction_limit: float = arg(2.0, "largest ratio of policy and vLLM, and its inverse the smallest", gt=1)
    tensor_parallel_size: int = arg(1, "vllm: neighboring ranks of a node that hold a copy together", ge=1)
    gpu_memory_utilization: float = arg(
        0.5, "vllm: fraction of a GPU's memory for its weights and cache, beside the training", gt=0, lt=1
    )
    sleep: bool = arg(True, "vllm: give the memory back while nothing is sampled (GPUs only)")
    max_sync_error: float = arg(
        0.02, "vllm: largest mean difference of log-probs to the policy, on a probe after each renewal", gt=0
    )
    temperature: float = arg(
        1.0, "temperature of sampling, by which the policy's log-probs are divided as well", ge=0.01
    )
    top_k: int = arg(
        -1,
        "sample from this many of the most likely tokens, over which log-probs are renormalised; -1 and 0: all",
        ge=-1,
    )
    top_p: float = arg(
        1.0,
        "sample from the most likely tokens with this total probability, over which log-probs are renormalised",
        gt=0,
        le=1,
    )
    min_p: float = arg(
        0.0,
        "sample among tokens of at least this share of the largest probability, of which log-probs are then, too",
        ge=0,
        le=1,
    )
    denoising_steps_per_block: Optional[int] = arg(
        None,
        "block diffusion: maximum denoising steps per block, each of which unmasks at least an equal "
        "share of it; null: one per token",
        **TIMES,
    )
    threshold: float = arg(
        0.9, "block diffusion: tokens above this probability are unmasked at once; 1: none is", gt=0, le=1
    )
    confidence: str = arg(
        "distribution",
        "block diffusion: the confidence compared with the threshold: the largest probability at a "
        "position, or that of the sampled token (LLaDA2), which makes old log-probs inexact",
        choices=("distribution", "token"),
    )
    partial_rollout: bool = arg(
        False,
        "do not wait for the longest responses: draw those to more prompts than a step trains, train the groups that "
        "are complete, and go on with the others in the next step, by its weights",
    )
    over_sampling_batch_size: Optional[int] = arg(
        None,
        "partial_rollout: prompts whose responses are sampled at once; null: twice those of a training step",
        **COUNT,
    )
    partial_rollout_tokens: int = arg(
        512,
        "partial_rollout: tokens that each response gets before the ranks see whether there are enough complete groups",
        **MOST_TOKENS,
    )
    stop: list[str] = arg([], "texts that end a response, in validation too; the token that completes one is its last")
    stop_token_ids: list[int] = arg([], "tokens that end a response, in validation too, beside those of the model")
    limit_images: Optional[int] = arg(
        None, "maximum images per prompt, for which vLLM also reserves memory; null: any number", **COUNT
    )
    mask_truncated: bool = arg(False, "do not train on responses that max_response_length cut (DAPO's overlong filter)")
    micro_batch_size_per_gpu: Optional[int] = arg(None, "responses decoded together; null: all of the rank", **COUNT)
    val: LMValRolloutConfig = field(default_factory=LMValRolloutConfig)

    @property
    def engine_memory(self) -> EngineMemory:
        facts = self.facts
        ranks = self.tensor_parallel_size if facts.tensor_parallel else 1
        reserved = self.gpu_memory_utilization if facts.reserves else 0.0
        return EngineMemory(ranks, reserved, facts.sleeps and self.sleep)


@dataclass
class LMAlgorithmConfig(AlgorithmConfig):
    """The algorithm."""

    name: str = arg("grpo", "module of phalanx.algorithms, a dotted module, or path/to/file.py")


@dataclass
class LMActorConfig(ActorConfig):
    """Updates of the policy."""

    use_dynamic_bsz: bool = arg(
        False,
        "split forward and backward passes by tokens, ppo_max_token_len_per_gpu, instead of by "
        "ppo_micro_batch_size_per_gpu samples",
    )
    ppo_max_token_len_per_gpu: int = arg(
        16384,
        "maximum tokens of such a pass, including prompts and padding; each of the ranks that share the "
        "tokens of a sample has this many",
        **MOST_TOKENS,
    )
    log_prob_chunk_size: int = arg(
        1024, "tokens whose logits over the vocabulary are in memory at once, in training too", ge=1
    )
    log_prob_estimate: str = arg(
        "trace",
        "block diffusion: a token's log-prob, in the state in which it was unmasked (trace), with its whole block "
        "masked, with the whole response masked (d1), in two complementary halves (DiffuCoder), or at a random rate",
        choices=ESTIMATES,
    )


@dataclass
class LMTrainerConfig(TrainerConfig):
    """The run."""

    critic_warmup: int = arg(0, "first training steps, in which only the critic is trained", ge=0)
    balance_batch: bool = arg(
        True,
        "in reinforcement learning ranks exchange samples before training, so that each has about equal "
        "work, if passes differ in cost: with actor.use_dynamic_bsz or model.use_remove_padding",
    )


@dataclass
class LMRunConfig(RunConfig):
    """Sections of every job that trains a language model."""

    model: LMModelConfig = field(default_factory=LMModelConfig)
    data: LMDataConfig = field(default_factory=LMDataConfig)
    rollout: LMRolloutConfig = field(default_factory=LMRolloutConfig)
    trainer: LMTrainerConfig = field(default_factory=LMTrainerConfig)


@dataclass
class LMTurnRunConfig(LMRunConfig):
    """Sections of a run whose samples may have several turns: see phalanx.config.tasks.read_run."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


@dataclass
class LMRLConfig(LMRunConfig, RLConfig):
    """Configuration of reinforcement learning of a language model."""

    algorithm: Any = field(default_factory=LMAlgorithmConfig, metadata={"registry": "phalanx.algorithms"})
    actor: LMActorConfig = field(default_factory=LMActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    @property
    def most_states(self) -> int:
        """States of the longest response of block diffusion in a pass, where one token is unmasked at a time."""
        size = self.model.block_size
        assert size is not None, "of block diffusion"
        states = {"trace": self.rollout.denoising_steps_per_block or size, "coupled": 3}
        return states.get(self.actor.log_prob_estimate, 1) * self.data.max_response_length // size

    @property
    def token_budget(self) -> int:
        """The most tokens of a pass, of all ranks that share it."""
        return self.actor.ppo_max_token_len_per_gpu * self.parallel.ulysses_sequence_parallel_size

    @property
    def longest_row(self) -> int:
        """Positions of the longest sample in a pass."""
        length, size = self.data.max_prompt_length + self.data.max_response_length, self.model.block_size
        return length if size is None else length + (self.most_states - 1) * size
