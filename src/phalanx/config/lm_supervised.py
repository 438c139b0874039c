"""Configurations of tasks/train_sft.py and tasks/train_dpo.py, which train on responses of the data."""

from dataclasses import dataclass, field
from typing import Any, Optional

from phalanx.config.choices import WRITTEN
from phalanx.config.engines import FORMS
from phalanx.config.fields import arg
from phalanx.config.lm import ENGINES, AnsweredDataConfig, LMDataConfig, LMRLConfig, LMRolloutConfig
from phalanx.config.ranges import COUNT
from phalanx.config.run import ALGORITHM, AlgorithmConfig


@dataclass
class SFTRolloutConfig(LMRolloutConfig):
    """The responses of the data; `val` samples from the policy."""

    n: int = arg(1, "times that each response is trained in a step", **COUNT)
    engine: str = arg("dataset", "dataset: train on responses of the data", choices=("dataset",), forms=FORMS)


@dataclass
class SFTAlgorithmConfig(AlgorithmConfig):
    """The algorithm."""

    name: str = arg("cross_entropy", "algorithm: cross_entropy, a dotted module, or path/to/file.py")


@dataclass
class SFTConfig(LMRLConfig):
    """Configuration of supervised training of a language model on the responses of data.train_files."""

    data: AnsweredDataConfig = field(default_factory=AnsweredDataConfig)
    rollout: SFTRolloutConfig = field(default_factory=SFTRolloutConfig)
    algorithm: Any = field(default_factory=SFTAlgorithmConfig, metadata=ALGORITHM)


@dataclass
class DPODataConfig(LMDataConfig):
    """Sources of the pairs."""

    response_key: Optional[str] = arg("chosen", "column of the preferred responses", only=(WRITTEN,))
    rejected_key: Optional[str] = arg("rejected", "column of the other responses", only=(WRITTEN,))


@dataclass
class DPORolloutConfig(LMRolloutConfig):
    """The pairs of the data, or responses of the policy, the best and worst of which are a pair (online DPO)."""

    n: int = arg(2, "responses per prompt", **COUNT)
    engine: str = arg(
        "dataset",
        "dataset: pairs of the data; others: the policy's own responses, see LMRolloutConfig",
        choices=tuple(ENGINES),
        forms=FORMS,
    )


@dataclass
class DPOAlgorithmConfig(AlgorithmConfig):
    """The algorithm."""

    name: str = arg("dpo", "algorithm: dpo, a dotted module, or path/to/file.py")


@dataclass
class DPOConfig(LMRLConfig):
    """Configuration of direct preference optimisation of a language model."""

    data: DPODataConfig = field(default_factory=DPODataConfig)
    rollout: DPORolloutConfig = field(default_factory=DPORolloutConfig)
    algorithm: Any = field(default_factory=DPOAlgorithmConfig, metadata=ALGORITHM)
