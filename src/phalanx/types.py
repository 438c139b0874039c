"""The data types of the training loop, and the protocols of its components: policy, rollout and algorithm.

All policies share one contract: a rollout samples trajectories of *actions* (stochastic denoising steps or tokens), and
the policy replays them and returns the log-probability of each action. Nothing here depends on the kind of model.

Shapes: B is the number of samples on this rank, N the number on all ranks, and A the number of actions per sample.
Samples with fewer actions are padded to A, and a mask marks the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from phalanx.config.engine_facts import EngineFacts

if TYPE_CHECKING:
    from torch import Tensor

# Generated images [B, 3, H, W] or videos [B, F, 3, H, W] with values in 0..1 on the CPU, or B completions.
Outputs: TypeAlias = "Tensor | list[str]"


class JobError(RuntimeError):
    """A failure of a running job, such as an exception in a reward; its message explains it in one line."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and the data that its reward needs.

    `group_id` numbers the prompts of one step across all ranks; `meta` holds `ground_truth`, `data_source`, and all
    other columns of the data file. `negative` is the negative prompt, None for the model family's default. `messages`
    is the whole chat as {role, content} messages, if the data contains chats; `text` is then the last user message.
    `place` is the configuration key, file and line that the prompt comes from, for error messages. `images` are the
    input images of a language model, in order: the content of a message with images is a list of parts,
    {"type": "image"} or {"type": "text", "text": ...}. `teacher` names the teacher that evaluates the samples of this
    prompt; empty: all teachers do. `told` are the tokens of this prompt for a teacher that reads more than the policy,
    or its text for a flow model's.
    """

    text: str
    group_id: int
    meta: dict[str, Any]
    negative: str | None = None
    messages: list[dict[str, Any]] | None = None
    place: str = field(default="", compare=False)
    images: tuple[Any, ...] = field(default=(), compare=False)  # phalanx.media.pictures.Picture
    teacher: str = ""
    told: tuple[int, ...] | str = field(default=(), compare=False)


def copied(value: Any) -> Any:
    """A copy of metadata that a reward may modify: nested dicts and lists are copied; their leaves, such as images on
    disk, are immutable.
    """
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


class Trace(Protocol):
    """The values from which a policy replays the actions of B samples; opaque to everything but that kind of policy."""

    def select(self, rows: Tensor) -> Self:
        """The trace of the samples in `rows` [b]."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate several traces of one rollout."""

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> Self:
        """The trace after the policy has replayed all samples; replays[i] belongs to the rows parts[i]. See
        phalanx.rollout.rescore.
        """


class Corrupted(Protocol):
    """Final samples with fresh corruption (noised latents or masked tokens), on which forward-process algorithms train.

    mask [B, A] bool: the corruption levels that are trained.
    """

    @property
    def mask(self) -> Tensor: ...

    def select(self, rows: Tensor) -> Self:
        """The corrupted samples in `rows` [b]."""


@dataclass(frozen=True)
class Samples:
    """The samples of this rank: their outputs, log_prob [B, A] of their actions under the weights that drew them, and
    mask [B, A] bool, which is True for real actions that are trained.

    `index` [B] numbers the samples of a step across all ranks; sample i belongs to group i // n. `weight` [B, A] holds
    the importance weights of rollout.correction, which multiply the policy's term of the loss. `exact`: a replay
    reproduces log_prob bit for bit, if the rollout is exact at all; False on all ranks once tensor shapes have changed
    since sampling. `lengths` [B, 3], on the CPU, for samples made of tokens: the tokens of each prompt, the tokens
    after it, and how many of the latter were sampled. `on_policy`: each sample is trained once, by the weights that
    drew it; log_prob is then NaN here and taken from the training pass. `positions` [B], on the CPU: the positions that
    each sample occupies in a pass, if that is not its number of tokens. `action_reward` [B, A]: the parts of each
    sample's reward that belong to single actions, if any. `lost` [B] bool, on the CPU: samples to exclude from
    advantages and loss whatever their reward, if any. `version` [B], or [B, A] per action, on the CPU: the training
    step of the weights that drew each sample, set if these may be older than the policy's.
    """

    prompts: list[Prompt]
    outputs: Outputs
    log_prob: Tensor
    mask: Tensor
    trace: Any  # a Trace
    index: Tensor
    weight: Tensor | None = None
    exact: bool = True
    lengths: Tensor | None = None
    on_policy: bool = False
    positions: Tensor | None = None
    version: Tensor | None = None
    lost: Tensor | None = None
    action_reward: Tensor | None = None

    @property
    def tokens(self) -> Tensor | None:
        """The length [B] of each sample in a pass, including its prompt; None if samples are not made of tokens."""
        if self.positions is not None:
            return self.positions
        return None if self.lengths is None else self.lengths[:, :2].sum(1)


@dataclass(frozen=True)
class Collected:
    """Samples of this rank, the rewards [N] of all ranks' samples (all zeros without reward functions, NaN for samples
    to skip), and metrics, equal on all ranks. `pending`: what KeepsSamples.in_flight returned after these samples.
    """

    samples: Samples
    reward: Tensor
    row: dict[str, float]
    pending: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """The policy's evaluation of given actions: log_prob [B, A] float32, with a gradient. Policies extend it."""

    log_prob: Tensor


T = TypeVar("T")


@dataclass(frozen=True)
class Batch(Generic[T]):
    """The samples of one forward and backward pass.

    log_prob and mask [B, A] are those of `Samples`; forward-process algorithms use the mask of `corrupted` and no
    log_prob. advantage is [B], or [B, A] for an algorithm with `per_action`. weight [U, A] is the weight of each action
    of each unit (a sample, or the samples that the algorithm's `units` trains together) in the loss: it includes the
    denominator over all ranks, and is 0 for actions that do not count. `reference_outputs` maps names of weights to
    the results of the algorithm's `reference_output` for these samples. `on_policy`: see `Samples`. `correction`
    [B, A]: the importance weights, for an algorithm that `corrects`. `score`: for an algorithm with `last_steps`, a
    function that returns the differentiable reward [k b] of images [k b, 3, H, W] or videos, k of each sample.
    """

    trace: T
    log_prob: Tensor
    mask: Tensor
    advantage: Tensor
    weight: Tensor
    reference_outputs: dict[str, Tensor]
    corrupted: Any = None  # a Corrupted
    on_policy: bool = False
    correction: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Metric:
    """A metric of a micro-batch before its reduction over all that counts: see phalanx.functional.aggregation.

    values: one per action of each unit [U, A] or sample [B, A], or one per unit [U] or sample [B]. reduction: mean, std
    (of the population), max, or first_max, the maximum in the first optimizer step of a training step, which is logged
    as first_<name>. where: bool, like `values`, those that the metric is about; None: all.
    """

    values: Tensor | float
    reduction: str = "mean"
    where: Tensor | None = None


# Metrics by name. A tensor is a mean of its values; a number is a mean that the algorithm has taken over a micro-batch,
# and counts once for each of its actions.
Metrics: TypeAlias = "dict[str, Metric | Tensor | float]"


@dataclass(frozen=True)
class Scored:
    """All samples of this rank after scoring and before training.

    `advantage` [B] comes from `Algorithm.advantage`. The other tensors are [B, A]: log_prob; mask bool, the trained
    actions of samples that count; `reference_outputs` by name of weights; the critic's `values`, None without a critic;
    `action_reward`, see Samples.
    """

    advantage: Tensor
    log_prob: Tensor
    mask: Tensor
    reference_outputs: dict[str, Tensor]
    values: Tensor | None = None
    action_reward: Tensor | None = None


@dataclass(frozen=True)
class Credit:
    """Credit assignment per action: advantage [B, A]; returns [B, A], the critic's regression targets; and metrics,
    equal on all ranks.
    """

    advantage: Tensor
    returns: Tensor
    metrics: dict[str, float]


TEACHER = "teacher"
ASKED = "asked"  # key of `Batch.reference_outputs`, with several teachers: the index [B] of each sample's teacher


@dataclass(frozen=True)
class Teacher:
    """A frozen model of the policy's family, used beside it.

    `path` is its model folder or hub id, as given by the configuration's `key`; `guidance` is its guidance scale (None:
    the rollout's), and `revision` the hub revision (None: the main branch). `rows`: a column of the data, and its value
    in the rows that this teacher evaluates; None: all rows. The outputs of all teachers with `rows` are combined in
    `Batch.reference_outputs[TEACHER]`: each sample has the output of the teacher that evaluated it.
    """

    name: str
    path: str
    key: str
    guidance: float | None = None
    revision: str | None = None
    rows: tuple[str, str] | None = None


class Policy(Protocol):
    """The trained model, as algorithms and rollouts see it. `trace_type` is the class of its traces."""

    @property
    def trace_type(self) -> type: ...

    def replay(self, trace: Any) -> Any:
        """Evaluate the actions of a Trace; returns a Replay."""

    def predict(self, trace: Any, corrupted: Any) -> Tensor:
        """The model's prediction [B, A, ...] float32 for corrupted final samples."""

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Any:
        """Corrupt each final sample at `levels` levels, with noise from one seed per sample; returns a Corrupted."""

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are gathered, for forward passes without gradients."""

    def using(self, weights: str) -> AbstractContextManager[None]:
        """A context in which the policy uses other weights: "reference", "ema", or an average of the algorithm."""


Each: TypeAlias = "Callable[[Outputs, list[Prompt]], None]"


class Rollout(Protocol):
    """Draws samples from the policy.

    `facts`: the properties of the sampling engine. `fps`: frames per second of videos, 1 for all else. `noun`: the
    plural word for samples in metrics and messages, such as "images". `micro_batch_size`: how many samples are drawn
    together.
    """

    facts: EngineFacts
    fps: int
    micro_batch_size: int
    noun: str

    @property
    def exact(self) -> bool:
        """Whether log_prob of the samples is the policy's own, to the last bit."""

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Called before step `step` is sampled: do work that is cheaper ahead of time, for steps before `end`.
        batches(k) returns the prompts of step k.
        """

    def awake(self) -> AbstractContextManager[None]:
        """A context in which the engine is ready to sample with the policy's current weights."""

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Draw this rank's share of the samples of a training step; `prompts` are those of all ranks.

        `each(outputs, prompts)` is called after every micro-batch, equally often on all ranks.
        """

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """Give the samples of the last `sample` new prompts (those of all ranks); `resample` then redraws the samples
        whose prompts have changed.
        """

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """Redraw the samples that `stale` [N] bool marks. Also returns the sample numbers [D] in the order in which
        `each` saw them, -1 for padding that is dropped.
        """

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """Draw rollout.val.n samples per prompt, prompt by prompt."""

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of a step's samples; reward [N] covers the samples of all ranks."""

    def close(self) -> None:
        """Called at the end of a job, before its process exits: wait for background work."""


@runtime_checkable
class KeepsSamples(Protocol):
    """A rollout that keeps some samples for later steps: see phalanx.training.components.Sampling."""

    def begin(self, step: int, kept: Sequence[Tensor]) -> None:
        """Called once, before the first training step after a start or resume; `kept` is what the checkpoint contains
        of `in_flight`.
        """

    def of_version(self, version: int) -> None:
        """The next samples are of weights that were trained for `version` steps, not for as many as `step` says."""

    def in_flight(self, step: int) -> Tensor:
        """The serialized samples of all ranks, [K] uint8, that are pending after `step` training steps."""


class Algorithm(Protocol):
    """The learning rule: a pure function of the samples of all ranks. Rewards are [N], ordered by sample number.

    `levels`: corruption levels at which each final sample is trained (Batch.corrupted); None: train on the sampled
    actions. `last_steps`: with `levels`, the loss differentiates the reward, starting from the states of this many last
    denoising steps, which the rollout keeps; 0: only the value of the reward is used.
    `behaviour`: the weights that sample; None: the policy's own. `references`: the weights whose outputs the loss needs
    in Batch.reference_outputs: "policy" (the weights before the first update of the step, or with `levels` before that
    of each pass over the samples), "reference", or names of `averages` or `teachers`. `averages`: copies of the weights
    that the algorithm keeps, also in the checkpoint; after training step `step` (from 1) each becomes
    decay * itself + (1 - decay) * policy. `teachers`: frozen models beside the policy.
    `samples_per_unit`: samples of a prompt that are trained as one unit, 0 for all of them. `needs_reward`: False if
    nothing is learned from rewards. `per_action`: each action has a separate advantage, computed by `credit`.
    `corrects`: the loss applies `Batch.correction` to the policy's term only; otherwise rollout.correction weights the
    whole loss. `clip_range`: the distance from 1 at which the loss clips a likelihood ratio, or, for a loss without
    clipping, beyond which samples do not count as on-policy; if the policy's replay of its own samples is off by more
    than a tenth of it, old log-probs are recomputed. `max_ratio`: if the mean ratio of an update exceeds it, the
    remaining updates of the step are skipped; None: never.
    """

    levels: int | None
    last_steps: int
    behaviour: str | None
    references: tuple[str, ...]
    averages: tuple[str, ...]
    teachers: tuple[Teacher, ...]
    samples_per_unit: int
    needs_reward: bool
    per_action: bool
    corrects: bool
    clip_range: float
    max_ratio: float | None

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """The advantages [N] float32."""

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """The samples to train on, [N] bool."""

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """Sample numbers [U, samples_per_unit]: the samples of a row are one unit, adjacent in a Batch."""

    def credit(self, scored: Scored, total: Callable[[Tensor], Tensor]) -> Credit:
        """With `per_action`: assign credit to the actions of this rank; `total` sums a CPU tensor over all ranks."""

    def decay(self, name: str, step: int) -> float:
        """The decay of an average after training step `step`: see `averages`."""

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> Any:
        """With `levels`: corrupt the samples for a pass over them, with noise from one seed per sample."""

    def reference_output(self, policy: Policy, batch: Batch) -> Tensor:
        """The output [B, ...] that the loss needs of one of `references`; `policy` currently uses these weights."""

    def loss(self, policy: Policy, batch: Batch) -> tuple[Tensor, Metrics]:
        """The unweighted loss [U, A] of each unit and action, and metrics, neither reduced over samples and actions."""
