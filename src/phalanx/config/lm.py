"""Keys that jobs with causal language models add to phalanx.config.run."""

from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Optional

from phalanx.config.choices import BLOCKS, CRITIC, DRAWN, ENVIRONMENT, IMAGES, NOT_BLOCKS, NOT_JOINT, WRITTEN
from phalanx.config.critic import CriticConfig
from phalanx.config.engine_facts import EngineMemory
from phalanx.config.engines import FORMS
from phalanx.config.environment import EnvironmentConfig
from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT, ESTIMATES, TEXTS, TIMES, TOKEN_CORRECTIONS, WARM
from phalanx.config.run import (
    ALGORITHM,
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    ValRolloutConfig,
)
from phalanx.config.trained_model import LMModelConfig

ENGINES = {
    "policy": "phalanx.rollout.lm.in_policy:LMRollout",
    "vllm": "phalanx.rollout.lm.vllm_rollout:VllmRollout",
    "dataset": "phalanx.rollout.lm.given_responses:DatasetRollout",
}
MOST_TOKENS: dict[str, Any] = {"ge": 1, "le": 2**20}


def _expected_day(text: str) -> str | None:
    """The expected value in words, unless the text is a date."""
    with suppress(ValueError):
        date.fromisoformat(text)
        return None
    return "a day such as 2026-01-31"


@dataclass
class LMDataConfig(DataConfig):
    """Sources of the prompts."""

    prompt_key: str = arg("prompt", "column of the prompts in the data files: texts or chats")
    response_key: Optional[str] = arg(
        None,
        "column of the responses to train on; null: what the assistant says in the chats of prompt_key",
        only=(WRITTEN, NOT_JOINT),
    )
    rejected_key: Optional[str] = arg(
        None,
        "column of responses to which those of response_key are preferred, for pairs; null: none",
        only=(WRITTEN, NOT_JOINT, NOT_BLOCKS),
    )
    image_key: Optional[str] = arg(
        None,
        "column of the images of prompts, one or a list per row; null: images, or else image, if there is one",
        only=(IMAGES,),
    )
    min_pixels: Optional[int] = arg(
        None,
        "minimum pixels of an image as the model sees it, to which smaller ones are enlarged; null: the processor's",
        only=(IMAGES,),
        ge=1,
    )
    max_pixels: Optional[int] = arg(
        None,
        "maximum pixels of an image as the model sees it, to which larger ones are reduced; null: the processor's",
        only=(IMAGES,),
        ge=1,
    )
    max_prompt_length: int = arg(1024, "longest prompt, in tokens with the chat template and images", **MOST_TOKENS)
    max_response_length: int = arg(1024, "longest response, in tokens", **MOST_TOKENS)
    overlong_prompts: str = arg(
        "error",
        "prompts of more than max_prompt_length tokens: error ends the job; filter leaves them out; truncate keeps "
        "their last tokens",
        choices=("error", "filter", "truncate"),
    )
    system_prompt: Optional[str] = arg(None, "system message for prompts without one; null: none")
    chat_template_kwargs: dict[str, Any] = arg(
        {}, "variables for the chat template, such as Qwen3's {enable_thinking: false}"
    )
    chat_template_date: Optional[str] = arg(
        None,
        "date for chat templates that contain today's, such as 2026-01-31; null: the day on which the run began",
        valid=_expected_day,
    )


@dataclass
class AnsweredDataConfig(LMDataConfig):
    """Sources of prompts with responses."""

    prompt_key: str = arg("messages", "column of the chats or prompts in the data files")


@dataclass
class LMValRolloutConfig(ValRolloutConfig):
    """Sampling in validation."""

    temperature: float = arg(0.0, "sampling temperature; 0: greedy", valid=WARM, ge=0)
    top_k: int = arg(-1, "sample from this number of most likely tokens; -1 or 0: from all", ge=-1)
    top_p: float = arg(1.0, "sample from the most likely tokens up to this total probability", gt=0, le=1)
    min_p: float = arg(0.0, "sample from tokens with at least this fraction of the largest probability", ge=0, le=1)
    max_response_length: Optional[int] = arg(None, "longest response; null: data.max_response_length", **MOST_TOKENS)
    denoising_steps_per_block: Optional[int] = arg(
        None, "block diffusion: maximum denoising steps per block; null: rollout's", only=(BLOCKS,), **TIMES
    )
    threshold: Optional[float] = arg(
        None,
        "block diffusion: probability from which tokens are unmasked at once; null: rollout's",
        only=(BLOCKS,),
        gt=0,
        le=1,
    )


@dataclass
class PartialRolloutConfig:
    """Rollouts that do not wait for the longest responses."""

    over_sampling_batch_size: Optional[int] = arg(
        None, "prompts whose responses are sampled at once; null: twice those of a training step", **COUNT
    )
    tokens: int = arg(
        512, "tokens sampled per response before the ranks check if enough groups are complete", **MOST_TOKENS
    )


@dataclass
class LMRolloutConfig(RolloutConfig):
    """Sampling of responses for training."""

    ENGINES: ClassVar[dict[str, str]] = ENGINES
    REGISTRY: ClassVar[str] = "phalanx.rollout.lm"

    n: int = arg(8, "responses per prompt, the group that advantages compare, if they do", **COUNT)
    engine: str = arg(
        "policy",
        "policy: sample in the trained modules themselves; vllm: in vLLM within each rank, with a copy of the weights "
        "that is verified after each update; dataset: train on responses of the data; or a custom class",
        choices=tuple(ENGINES),
        forms=FORMS,
    )
    correction: str = arg(
        "rescore",
        "old log-probs of samples from vLLM: recomputed with the policy (rescore), also with truncated importance "
        "weights of tokens or responses (token_tis, sequence_tis) or without tokens or responses whose ratio is too "
        "far from 1 (token_mask, sequence_mask), or vLLM's (none)",
        choices=("rescore", "none", *TOKEN_CORRECTIONS),
    )
    correction_limit: float = arg(
        2.0, "largest ratio of probabilities of policy and vLLM; masks also bound it below by its inverse", gt=1
    )
    tensor_parallel_size: int = arg(1, "vllm: neighbouring ranks of a node that share one copy of the weights", ge=1)
    gpu_memory_utilization: float = arg(
        0.5, "vllm: fraction of a GPU's memory for its weights and cache; the rest is for training", gt=0, lt=1
    )
    sleep: bool = arg(True, "vllm: release its memory while nothing is sampled (GPUs only)")
    sleep_level: Optional[int] = arg(
        None,
        "vllm: what becomes of its weights while it sleeps: 2 discards them, since each rollout brings them; 1 keeps "
        "them in main memory; null: 1 if rollouts bring only a LoRA (lora_sync), else 2",
        ge=1,
        le=2,
    )
    lora_sync: str = arg(
        "merged",
        "vllm: how a LoRA reaches it: merged into all weights at each rollout (merged), or as it is, beside the base, "
        "which vLLM gets once and keeps (adapter), unless vLLM takes no such LoRA",
        choices=("merged", "adapter"),
    )
    enforce_eager: bool = arg(
        False, "vllm: neither compile nor capture CUDA graphs; policy: no graphs; slower, for finding faults"
    )
    max_sync_error: Optional[float] = arg(
        None,
        "vllm: largest mean difference from the policy's log-probs, on a probe after each weight update; later ones "
        "may also be 5 times the first; null: 0.02 in float32, 0.3 in other dtypes",
        gt=0,
    )
    temperature: float = arg(
        1.0, "sampling temperature, by which the policy's logits are divided as well", only=(DRAWN,), ge=0.01
    )
    top_k: int = arg(
        -1,
        "sample from this number of most likely tokens and renormalize log-probs over them; -1 or 0: from all",
        only=(DRAWN,),
        ge=-1,
    )
    top_p: float = arg(
        1.0,
        "sample from the most likely tokens up to this total probability and renormalize log-probs over them",
        only=(DRAWN,),
        gt=0,
        le=1,
    )
    min_p: float = arg(
        0.0,
        "sample from tokens with at least this fraction of the largest probability and renormalize over them",
        only=(DRAWN,),
        ge=0,
        le=1,
    )
    denoising_steps_per_block: Optional[int] = arg(
        None,
        "block diffusion: maximum number of denoising steps per block, each of which unmasks at least an equal share "
        "of it; null: one per token",
        only=(BLOCKS,),
        **TIMES,
    )
    threshold: float = arg(
        0.9, "block diffusion: tokens above this probability are unmasked at once; 1: none", only=(BLOCKS,), gt=0, le=1
    )
    confidence: str = arg(
        "distribution",
        "block diffusion: the confidence that is compared with the threshold: the largest probability at a position, "
        "or the probability of the sampled token (LLaDA2), which makes old log-probs inexact",
        choices=("distribution", "token"),
        only=(BLOCKS,),
    )
    refill: Optional[bool] = arg(
        None,
        "engine policy: responses that wait take the places of those that have ended, so which ones are decoded "
        "together depends on their lengths; null: unless micro_batch_size_per_gpu fixes which",
    )
    partial_rollout: Optional[PartialRolloutConfig] = arg(
        None,
        "a section, or true for its defaults: do not wait for the longest responses, but sample for more prompts than "
        "a step trains on, train on the groups that are complete, and resume the others in the next step with its "
        "weights",
        only=(DRAWN,),
    )
    stop: list[str] = arg(
        [], "texts that end a response, in validation too; the token that completes one is its last", valid=TEXTS
    )
    stop_token_ids: list[int] = arg(
        [], "tokens that end a response, in validation too, besides the model's own", each={"ge": 0}
    )
    limit_images: Optional[int] = arg(
        None, "maximum images per prompt, for which vLLM also reserves memory; null: no limit", **COUNT
    )
    mask_truncated: bool = arg(
        False, "do not train on responses cut at max_response_length (DAPO's overlong filtering)"
    )
    micro_batch_size_per_gpu: Optional[int] = arg(
        None,
        "responses decoded together; null: all of the rank; in the trained modules on GPUs "
        "no more than have room for their keys and values in 30 % of the memory",
        **COUNT,
    )
    val: LMValRolloutConfig = field(default_factory=LMValRolloutConfig)

    @property
    def engine_memory(self) -> EngineMemory:
        facts = self.facts
        ranks = self.tensor_parallel_size if facts.tensor_parallel else 1
        reserved = self.gpu_memory_utilization if facts.reserves else 0.0
        sleeps = facts.sleeps and self.sleep
        adapts = facts.adapters and self.lora_sync == "adapter"
        keeps = None if self.sleep_level is None and adapts else self.sleep_level == 1
        return EngineMemory(ranks, reserved, sleeps, keeps if sleeps and facts.reserves else False, adapts)


@dataclass
class LMAlgorithmConfig(AlgorithmConfig):
    """The algorithm."""

    name: str = arg("grpo", "algorithm: a module of phalanx.algorithms, a dotted module, or path/to/file.py")


@dataclass
class LMActorConfig(ActorConfig):
    """Updates of the policy."""

    use_dynamic_bsz: bool = arg(
        False,
        "divide forward and backward passes by tokens (ppo_max_token_len_per_gpu) instead of samples "
        "(ppo_micro_batch_size_per_gpu)",
    )
    ppo_max_token_len_per_gpu: int = arg(
        16384,
        "use_dynamic_bsz: maximum tokens of a pass on each rank, including prompts and padding; ranks that share the "
        "tokens of samples have this many each",
        **MOST_TOKENS,
    )
    log_prob_chunk_size: int = arg(
        1024, "tokens whose logits over the vocabulary are in memory at once, in training too", ge=1
    )
    log_prob_estimate: str = arg(
        "trace",
        "block diffusion: a token's log-prob, in the state in which it was unmasked (trace), with its whole block "
        "masked, with the whole response masked (d1), in two complementary halves (DiffuCoder), or at a random masking "
        "rate",
        choices=ESTIMATES,
        only=(BLOCKS,),
    )


@dataclass
class LMTrainerConfig(TrainerConfig):
    """The run."""

    critic_warmup: int = arg(0, "first training steps, in which only the critic is trained", only=(CRITIC,), ge=0)
    balance_batch: bool = arg(
        True,
        "reinforcement learning: exchange samples between ranks before training so that all have about equal work; "
        "applies with actor.use_dynamic_bsz or model.use_remove_padding, where passes differ in cost",
    )


@dataclass
class LMRunConfig(RunConfig):
    """Sections of every job that trains a language model."""

    model: LMModelConfig = field(default_factory=LMModelConfig)
    data: LMDataConfig = field(default_factory=LMDataConfig)
    rollout: LMRolloutConfig = field(default_factory=LMRolloutConfig)
    trainer: LMTrainerConfig = field(default_factory=LMTrainerConfig)

    @property
    def kind(self) -> str:  # type: ignore[override]
        """See RunConfig."""
        return "lm" if self.model.block_size is None else "blocks"

    @property
    def talks(self) -> bool:
        """Whether samples are conversations with an environment."""
        environment = vars(self).get("environment")
        return environment is not None and environment.used


@dataclass
class LMTurnRunConfig(LMRunConfig):
    """Sections of a run whose samples may have several turns: see phalanx.config.tasks.read_run."""

    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


@dataclass
class LMRLConfig(LMRunConfig, RLConfig):
    """Configuration of reinforcement learning of a language model."""

    algorithm: Any = field(default_factory=LMAlgorithmConfig, metadata=ALGORITHM)
    actor: LMActorConfig = field(default_factory=LMActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig, metadata={"only": (CRITIC,)})
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig, metadata={"only": (ENVIRONMENT,)})

    @property
    def most_states(self) -> int:
        """Block diffusion: number of states of the longest response in a pass if tokens are unmasked one at a time."""
        size = self.model.block_size
        assert size is not None, "of block diffusion"
        states = {"trace": self.rollout.denoising_steps_per_block or size, "coupled": 3}
        return states.get(self.actor.log_prob_estimate, 1) * self.data.max_response_length // size

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of a pass, summed over the ranks that share it."""
        return self.actor.ppo_max_token_len_per_gpu * self.parallel.ulysses_sequence_parallel_size

    @property
    def longest_row(self) -> int:
        """Number of positions that the longest sample takes in a pass."""
        length, size = self.data.max_prompt_length + self.data.max_response_length, self.model.block_size
        return length if size is None else length + (self.most_states - 1) * size
