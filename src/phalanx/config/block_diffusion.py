"""Configuration of tasks/train_block_diffusion.py."""

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from phalanx.config.fields import arg
from phalanx.config.lm import AnsweredDataConfig, LMRolloutConfig, LMRunConfig
from phalanx.config.ranges import COUNT
from phalanx.config.run import EmaConfig

# keys of `rollout` that do not affect validation
OF_TRAINING_SAMPLES = (
    *("n", "correction", "correction_limit", "max_num_gen_batches", "max_draws_per_prompt"),
    *("schedule", "parts", "max_staleness", "in_flight"),
    *("partial_rollout", "partial_rollout.over_sampling_batch_size", "partial_rollout.tokens"),
)


@dataclass
class BlockDiffusionDataConfig(AnsweredDataConfig):
    """Sources of the samples."""

    response_key: Optional[str] = arg(None, "column of the responses; null: the last message of each chat")


@dataclass
class BlockDiffusionConfig:
    """The supervised loss (BD3-LM, arXiv 2503.09573; LLaDA2.0, arXiv 2512.15745)."""

    micro_batch_size_per_gpu: int = arg(1, "samples per forward and backward pass", **COUNT)
    noise_range_low: float = arg(0.3, "smallest probability with which a token is masked", gt=0, le=1)
    noise_range_high: float = arg(0.8, "largest probability with which a token is masked", gt=0, le=1)
    noise_per_block: bool = arg(False, "draw that probability for each block instead of for each sample")
    elbo_weight: bool = arg(
        False, "weight each token by the inverse of that probability, in a mean over all response tokens"
    )
    same_token_labels: bool = arg(
        True, "each position predicts its own token; false: the next token, as in autoregressive models"
    )
    loss_agg_mode: str = arg(
        "token-mean",
        "token-mean: mean over all masked tokens of a step, on all ranks; micro-batch-mean: mean of the micro-batches' "
        "means, as in dFactory",
        choices=("token-mean", "micro-batch-mean"),
    )
    confidence_beta: float = arg(
        0.0,
        "weight of the entropy of correctly predicted tokens (dParallel, arXiv 2509.26488), aggregated like the "
        "losses; with micro-batch-mean a mean over only these tokens, as in dFactory",
        ge=0,
    )
    train_fill: str = arg(
        "block",
        "end tokens after a response that are trained too: up to the end of its last block, or up to the longest "
        "possible sample, as in dFactory",
        choices=("block", "max_length"),
    )
    log_prob_chunk_size: int = arg(
        1024, "tokens whose logits over the vocabulary are in memory at once, in training too", ge=1
    )
    ema: EmaConfig = field(default_factory=EmaConfig)


@dataclass
class BlockDiffusionRunConfig(LMRunConfig):
    """Sections that supervised block diffusion shares with every job that trains a language model, and its own."""

    kind: ClassVar[str] = "block_diffusion"
    data: BlockDiffusionDataConfig = field(default_factory=BlockDiffusionDataConfig)
    block_diffusion: BlockDiffusionConfig = field(default_factory=BlockDiffusionConfig)


@dataclass
class BlockDiffusionTaskConfig(BlockDiffusionRunConfig):
    """Configuration of supervised block diffusion. data.train_files contains chats that end with the response, or
    prompts with a column of responses; train_batch_size counts samples; `rollout` and `reward` are for validation.
    """

    needs_engine: ClassVar[bool] = True
    rollout: LMRolloutConfig = field(default_factory=LMRolloutConfig, metadata={"unused": OF_TRAINING_SAMPLES})
