"""The reward of a job: its terms, and the model that judging rewards query."""

from dataclasses import dataclass, field
from typing import Any, Optional

from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT, DTYPES, INTERVAL, SEEDS, WARM


@dataclass
class RewardFunctionConfig:
    """One term of the reward."""

    name: Optional[str] = arg(None, "built-in reward (module of phalanx.rewards), or the term's name in the logs")
    path: Optional[str] = arg(None, "a custom reward: module:function or path/to/file.py:function")
    weight: float = arg(1.0, "weight in the sum")
    initial_weight: Optional[float] = arg(
        None, "weight in the first step, which then changes linearly to `weight`; null: `weight` throughout"
    )
    weight_steps: int = arg(0, "training steps over which the weight changes", ge=0)
    clip: Optional[list[float]] = arg(
        None, "[low, high]: scores are clamped to this range; null: no clamping", valid=INTERVAL
    )
    kwargs: dict[str, Any] = arg({}, "keyword arguments of the reward")
    per_sample: Optional[bool] = arg(
        None,
        "whether a sample's score depends only on that sample, so that reward.num_workers threads may share a call; "
        "null: true for built-in rewards on the CPU, except http, which sends its requests concurrently itself",
    )


@dataclass
class RewardModelConfig:
    """The model that judging rewards such as vlm_ocr query. It runs within the ranks."""

    path: Optional[str] = arg(None, "model folder, or hub id if the hub is reachable; null: no model", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: its main branch")
    engine: str = arg(
        "vllm",
        "vllm, which needs the extra vllm, or transformers, slower but without extras; inside each rank's process",
        choices=("vllm", "transformers"),
    )
    tensor_parallel_size: int = arg(1, "neighbouring ranks of a node that share the model", ge=1)
    placement: str = arg(
        "colocate", "colocate: on all ranks; ranks a-b: on these ranks of each node, such as ranks 6-7"
    )
    dtype: str = arg("bfloat16", "dtype of the computation", choices=DTYPES)
    gpu_memory_utilization: float = arg(
        0.3, "vllm: fraction of a GPU's memory for model and KV cache; the rest is for training", gt=0, lt=1
    )
    micro_batch_size: int = arg(16, "transformers: number of questions answered at once", **COUNT)
    sleep: bool = arg(
        True,
        "keep the model in CPU memory while it does not score (GPUs only); if it scores during the rollout, it is "
        "awake from the first samples to the last score",
    )
    max_model_len: Optional[int] = arg(None, "tokens of question, sample and answer; null: the model's own limit", ge=1)
    max_tokens: int = arg(512, "longest answer, in tokens", ge=1)
    temperature: float = arg(0.0, "sampling temperature of the answers; 0: greedy", valid=WARM, ge=0)
    seed: int = arg(0, "seed of each answer: equal questions about equal samples get equal answers", **SEEDS)
    unparseable_score: float = arg(0.0, "score if the judge's answer cannot be parsed; such answers are counted")


@dataclass
class RewardConfig:
    """The reward that is optimized."""

    functions: list[RewardFunctionConfig] = arg([], "terms of the reward, weighted and summed")
    normalize: str = arg(
        "none",
        "each term before the sum: as it is (none); minus the mean and over the std of its prompt's group (group); "
        "gdpo: as group, and advantages are the sum over the std of all samples (algorithm.global_std)",
        choices=("none", "group", "gdpo"),
    )
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    overlap: bool = arg(True, "score a micro-batch on worker threads while the next one is sampled")
    num_workers: int = arg(1, "worker threads per rank", ge=1, le=1024)
    timeout_s: float = arg(300.0, "longest call of a reward, in seconds", gt=0)
    on_error: str = arg(
        "fail",
        "if a reward raises or returns NaN or infinity: fail ends the job; zero sets the score to 0; skip leaves the "
        "samples out of advantages and loss",
        choices=("fail", "zero", "skip"),
    )
    max_error_fraction: float = arg(
        0.1, "largest fraction of failed samples per scoring that zero and skip tolerate; more end the job", gt=0, lt=1
    )
