"""Keys of joint runs: a language model rewrites prompts and a flow model draws them, both under one reward."""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from phalanx.config.choices import TWO_POLICIES
from phalanx.config.engines import check_engine_class
from phalanx.config.fields import arg
from phalanx.config.flow import FlowActorConfig, FlowDataConfig, FlowRewardConfig, FlowRLConfig, FlowRolloutConfig
from phalanx.config.lm import (
    LMActorConfig,
    LMAlgorithmConfig,
    LMDataConfig,
    LMRLConfig,
    LMRolloutConfig,
    LMTrainerConfig,
)
from phalanx.config.optimizer import OptimConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.ranges import COUNT, expect, some_of
from phalanx.config.run import ALGORITHM, AlgorithmConfig, RLConfig, RunConfig
from phalanx.config.section import copy_with
from phalanx.config.templates import WIDEST, has_fields
from phalanx.config.trained_model import FlowModelConfig, LMModelConfig

WRITER, PAINTER = POLICIES = ("writer", "painter")
OF_IMAGES = ("image_key", "min_pixels", "max_pixels")  # keys of `data` for prompts with images


@dataclass
class WriterConfig:
    """The language model that rewrites prompts: sections of `tasks/train_grpo.py`."""

    model: LMModelConfig = field(default_factory=LMModelConfig)
    rollout: LMRolloutConfig = field(default_factory=LMRolloutConfig)
    algorithm: Any = field(default_factory=LMAlgorithmConfig, metadata=ALGORITHM)
    actor: LMActorConfig = field(default_factory=LMActorConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class PainterConfig:
    """The flow model that generates images of the rewritten prompts: sections of `tasks/train_flowgrpo.py`."""

    model: FlowModelConfig = field(default_factory=FlowModelConfig)
    rollout: FlowRolloutConfig = field(default_factory=FlowRolloutConfig)
    algorithm: Any = field(default_factory=AlgorithmConfig, metadata=ALGORITHM)
    actor: FlowActorConfig = field(default_factory=FlowActorConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass
class JointDataConfig(LMDataConfig):
    """Sources of the prompts and maximum lengths of texts. Keys without `rewrite` in their name are the writer's."""

    max_rewrite_length: int = arg(
        256, "tokens of a rewritten prompt that the painter's T5 or Qwen text encoder sees; the rest is cut", **COUNT
    )
    text_length_multiple: int = arg(
        32, "painter: texts with masked attention are padded to a multiple of this number of tokens", **COUNT
    )


def _expected_pattern(text: str) -> str | None:
    """The expected value in words, unless the text is a regular expression with a group."""
    try:
        reason = None if re.compile(text).groups else "it has no group in parentheses"
    except (re.error, OverflowError, RecursionError) as error:
        reason = str(error)
    return reason and f"a pattern such as '<prompt>(.*?)</prompt>' ({reason})"


@dataclass
class RewriteConfig:
    """Conversion of the writer's response into the painter's prompt."""

    pattern: Optional[str] = arg(
        None,
        "regular expression whose first group, in its last match in the response without think blocks, is the "
        "rewritten prompt; null: the whole response",
        valid=_expected_pattern,
    )
    template: str = arg(
        "{}",
        "text that the painter receives, with {} in place of the rewritten prompt",
        valid=expect(
            f"a text with {{}} once, for the rewritten prompt, filled up to at most {WIDEST} characters", has_fields
        ),
    )
    keep_originals: int = arg(
        0, "original prompts in each group, besides writer.rollout.n rewritten ones", ge=0, le=65535
    )
    validate: list[str] = arg(
        ["rewritten", "original"],
        "validation sets per file: images of rewritten prompts, of original prompts, and swapped: of the next prompt's "
        "rewritten one, scored against this prompt, which shows the score of a painter that ignores its prompt",
        valid=some_of(("rewritten", "original", "swapped")),
    )


@dataclass
class JointConfig:
    """Configuration of a joint run."""

    kind: ClassVar[str] = "joint"
    writer: WriterConfig = field(default_factory=WriterConfig)
    painter: PainterConfig = field(default_factory=PainterConfig)
    train: list[str] = arg(
        list(POLICIES), "policies to train: writer, painter, or both; the others are frozen", valid=some_of(POLICIES)
    )
    alternate: Optional[int] = arg(
        None,
        "training steps after which training switches to the other policy; null: train both in each step",
        only=(TWO_POLICIES,),
        **COUNT,
    )
    diffusion_group_scope: str = arg(
        "rewrite",
        "images that the painter's advantages compare: those of one rewritten prompt (rewrite), or of all prompts made "
        "from one original (prompt)",
        choices=("rewrite", "prompt"),
    )
    rewrite: RewriteConfig = field(default_factory=RewriteConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: JointDataConfig = field(default_factory=JointDataConfig, metadata={"unused": OF_IMAGES})
    reward: FlowRewardConfig = field(default_factory=FlowRewardConfig)
    trainer: LMTrainerConfig = field(default_factory=LMTrainerConfig)

    def __post_init__(self) -> None:
        """Name the sections of the policies; raise ConfigError for an engine class that cannot be used."""
        for part, sections in ((WRITER, self.writer), (PAINTER, self.painter)):
            for section in (*vars(sections).values(), sections.rollout.val):
                section.rename_keys(f"{part}.{section.NAME}")
            check_engine_class(sections.rollout)

    @property
    def rewrites(self) -> int:
        """Number of prompts that the painter gets per original prompt."""
        return self.writer.rollout.n + self.rewrite.keep_originals

    def parts(self) -> dict[str, RLConfig]:
        """Configuration of each policy as that of a separate job; both share all sections that they can."""
        return {WRITER: self.of_writer(), PAINTER: self.of_painter()}

    def _shared_sections(self) -> dict[str, Any]:
        """Sections of both policies."""
        return {"parallel": self.parallel, "reward": self.reward, "trainer": self.trainer}

    def of_writer(self) -> LMRLConfig:
        """Configuration of the writer as a separate job."""
        return LMRLConfig(data=self.data, **vars(self.writer), **self._shared_sections())

    def of_painter(self) -> FlowRLConfig:
        """Configuration of the painter as a separate job, whose prompts are the rewritten ones."""
        d, each = self.data, self.data.train_batch_size_per_gpu
        data = FlowDataConfig(
            train_files=d.train_files,
            val_files=d.val_files,
            prompt_key=d.prompt_key,
            train_batch_size=d.train_batch_size * self.rewrites,
            train_batch_size_per_gpu=None if each is None else each * self.rewrites,
            max_prompt_length=d.max_rewrite_length,
            seed=d.seed,
            unusable_rows=d.unusable_rows,
            text_length_multiple=d.text_length_multiple,
        )
        data.rename_keys(
            "data",
            max_prompt_length="data.max_rewrite_length",
            train_batch_size="data.train_batch_size x (writer.rollout.n + rewrite.keep_originals)",
        )
        return FlowRLConfig(data=data, **vars(self.painter), **self._shared_sections())


JobConfig = RunConfig | JointConfig  # of a training job


def frozen(config: Any) -> Any:
    """A copy of a section `model` for a policy that is not trained: without a LoRA and quantization."""
    return copy_with(config, lora_rank=0, quantization=None)
