"""The values that flow through the loop, and the protocols of the parts that produce them.

The contract that all kinds of policy share: a rollout samples trajectories of *actions* (stochastic denoising steps,
tokens), and the policy replays them and gives the log-probability of each action. Nothing here depends on the kind.

Shapes: B samples of this rank, N of all ranks, A actions of a sample. Samples may have different numbers of actions:
they are padded to A, and a mask says which are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeAlias, TypeVar

from phalanx.config.engines import EngineFacts

if TYPE_CHECKING:
    from torch import Tensor

# What a policy makes: images [B, 3, H, W] or videos [B, F, 3, H, W] in 0..1 on the CPU, or B completions.
Outputs: TypeAlias = "Tensor | list[str]"


class JobError(RuntimeError):
    """A failure of the running job that its message explains in one line, such as a reward that raises."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its reward needs.

    `group_id` numbers the prompts of one step across all ranks; `meta` holds `ground_truth`, `data_source`, and all
    other columns of the data file. `negative` is the negative prompt, None for the model family's default. `messages`
    is the whole chat, {role, content} each, where the data has one; `text` is then its last user message. `place` is
    its key, file and line, for messages. `images` are those that a language model reads, in order: a content of
    `messages` with images is a list of parts, {"type": "image"} for each and {"type": "text", "text": ...}. `teacher`:
    the name of the teacher that is asked about its samples, empty where all are.
    """

    text: str
    group_id: int
    meta: dict[str, Any]
    negative: str | None = None
    messages: list[dict[str, Any]] | None = None
    place: str = field(default="", compare=False)
    images: tuple[Any, ...] = field(default=(), compare=False)  # phalanx.media.pictures.Picture
    teacher: str = ""


class Trace(Protocol):
    """The values from which a policy replays the actions of B samples; read only by the kind of policy that made it."""

    def select(self, rows: Tensor) -> Self:
        """The samples in `rows` [b]."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The samples of several traces of one rollout, one after the other."""

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> Self:
        """The trace after the policy itself has replayed all samples, those in the rows `parts` one by one: see
        phalanx.rollout.correction.
        """


class Corrupted(Protocol):
    """Final samples, corrupted anew, as forward-process algorithms train on them: noised latents, masked tokens.

    mask [B, A] bool: the levels of corruption that are trained.
    """

    @property
    def mask(self) -> Tensor: ...

    def select(self, rows: Tensor) -> Self:
        """The samples in `rows` [b]."""


@dataclass(frozen=True)
class Samples:
    """The samples of this rank: the outputs, log_prob [B, A] of their actions under the weights that sampled, and mask
    [B, A] bool, the actions that are real and trained.

    `index` [B] is each sample's number in the step across all ranks; sample i belongs to group i // n. `weight` [B, A]
    are factors of the policy's term of the loss where another engine drew the samples. `exact`: a replay repeats
    log_prob to the last bit where the rollout's are exact at all; False on all ranks where the shapes have changed
    since. `lengths` [B, 3], on the CPU, are the tokens of each prompt, those behind it, and those of these that were
    drawn, where samples are made of tokens. `on_policy`: each of them is trained once, by the weights that drew it, so
    that log_prob is that of the pass that trains it, NaN here. `positions` [B] of each sample in a pass, on the CPU,
    where those are not its tokens.
    `action_reward` [B, A]: the parts of each sample's reward that came with single actions, None for none.
    `lost` [B] bool, on the CPU: samples that are left out of advantages and loss whatever their reward, None for none.
    `version` [B], or [B, A] of each action, on the CPU: the training steps of the weights that drew them, where those
    may be older than the policy's.
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
        """[B] of the samples in a pass, with their prompts."""
        if self.positions is not None:
            return self.positions
        return None if self.lengths is None else self.lengths[:, :2].sum(1)


@dataclass(frozen=True)
class Replay:
    """The policy's view of given actions: log_prob [B, A] float32, with a gradient. Kinds of policy add to it."""

    log_prob: Tensor


T = TypeVar("T")


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Samples of one forward and backward pass.

    log_prob and mask [B, A] are those of `Samples` (of `corrupted` for forward-process algorithms, without log_prob);
    advantage [B], or [B, A] of an algorithm with `per_action`. weight [U, A] is that of each action of each unit (a
    sample, or the samples that the algorithm's `units` trains together): it already holds the denominator over all
    ranks, and is 0 for what does not count. `reference_outputs` holds what the algorithm's `reference_output` returned
    for these samples, by names of weights. `on_policy`: see `Samples`. `score`: with the algorithm's `last_steps`, the
    reward [k b] of images [k b, 3, H, W] or videos, k of each of these samples, with a gradient.
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
class Scored:
    """All samples of this rank once they have rewards, before any of them is trained.

    `advantage` [B] is that of `Algorithm.advantage`. The others are [B, A]: log_prob; mask bool, the actions that are
    trained, of samples that count; `reference_outputs` by names of weights; the critic's `values`, None without one;
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
    """The value of each action: advantage [B, A]; returns [B, A], which a critic learns; and metrics, equal on all
    ranks.
    """

    advantage: Tensor
    returns: Tensor
    metrics: dict[str, float]


TEACHER = "teacher"
ASKED = "asked"  # of `Batch.reference_outputs`, with several teachers: [B], the place among them of each sample's own


@dataclass(frozen=True)
class Teacher:
    """A frozen model beside the policy, of its family: a model folder or hub id, which the configuration's `key` names,
    its guidance scale (None: the rollout's), and the hub's revision (None: its main branch). `rows`: a column of the
    data and its value in the rows that the teacher is asked about; None: all. The outputs of all teachers with `rows`
    are together `Batch.reference_outputs[TEACHER]`, each sample's of the teacher that was asked about it.
    """

    name: str
    path: str
    key: str
    guidance: float | None = None
    revision: str | None = None
    rows: tuple[str, str] | None = None


class Policy(Protocol):
    """The trained model, as algorithms and rollouts see it. `trace_type`: the class of its traces."""

    @property
    def trace_type(self) -> type: ...

    def replay(self, trace: Any) -> Any:
        """The Replay of a Trace."""

    def predict(self, trace: Any, corrupted: Any) -> Tensor:
        """The model's prediction [B, A, ...] float32 for corrupted final samples."""

    def corrupt(self, samples: Samples, seeds: Sequence[int], *, levels: int, distribution: str) -> Any:
        """Final samples corrupted at `levels` levels each, a function of one seed per sample: a Corrupted."""

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are gathered, for forward passes without gradients."""

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Other weights for a while: "reference", "ema", or those of the algorithm."""


Each: TypeAlias = "Callable[[Outputs, list[Prompt]], None]"


class Rollout(Protocol):
    """Samples from the policy.

    `facts`: what all else asks of an engine; `exact` is among them. `fps`: frames per second of videos, 1 for all else.
    `noun`: what a sample is called in metrics and messages, in the plural. `micro_batch_size`: samples that are drawn
    together.
    """

    facts: EngineFacts
    fps: int
    micro_batch_size: int
    noun: str

    @property
    def exact(self) -> bool:
        """Whether the log-probabilities are the policy's own."""

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Before the samples of training step `step`: work that is cheaper done ahead, up to step `end`. `batches(k)`
        are the prompts of step k.
        """

    def awake(self) -> AbstractContextManager[None]:
        """For the time of the block the policy's weights, as they are now, are where samples are drawn."""

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """This rank's share of the samples of a training step; `prompts` are those of all ranks.

        `each(outputs, prompts)` is called after every micro-batch, equally often on all ranks.
        """

    def renew(self, samples: Samples, prompts: list[Prompt]) -> Samples:
        """The samples of the last `sample` with other prompts, all ranks' again, before `resample` draws those anew
        whose prompt is another one.
        """

    def resample(self, samples: Samples, stale: Tensor, attempt: int, *, each: Each) -> tuple[Samples, Tensor]:
        """The samples with those that `stale` [N] bool names drawn anew, and the numbers [D] of what `each` saw, -1 for
        what is dropped.
        """

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """rollout.val.n samples per prompt, one prompt's after the other."""

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of a step's samples; reward [N] is that of all ranks' samples."""

    def close(self) -> None:
        """At the end of a job, before its process ends: wait for what goes on beside it."""


class KeepsSamples(Protocol):
    """A rollout some of whose samples wait for later steps: see phalanx.training.job.Sampling."""

    def begin(self, step: int, kept: Sequence[Tensor]) -> None:
        """Once, before the first training step of this start of the job, with what a checkpoint has of them."""

    def in_flight(self, step: int) -> Tensor | None:
        """Bytes [K] uint8 of those that wait after `step` training steps; None for none."""


class Algorithm(Protocol):
    """The learning rule: pure, over the samples of all ranks. Rewards are [N], in the order of the samples' numbers.

    `levels`: levels of corruption at which each final sample is trained (Batch.corrupted); None: it trains on the
    sampled actions. `behaviour`: the weights that sample; None: the policy's own. `references`: the weights whose
    output the loss wants, in Batch.reference_outputs: "policy" (as they are before the step's first update, with
    `levels` before that of each pass), "reference", or names of `averages` or `teachers`. `teachers`: frozen models
    beside the policy. `averages`: copies of the weights that the algorithm keeps, in the checkpoint too; after training
    step number `step` (from 1) each becomes decay * itself + (1 - decay) * the policy's. `samples_per_unit`: samples of
    a prompt that are trained as one, 0 for all of them. `needs_reward`: False where nothing is learned from rewards.
    `per_action`: each action has a separate advantage, which `credit` gives. `corrects`: the loss has its policy's term
    weighed by `Batch.correction`; else rollout.correction weighs the whole of it. `clip_range`: how far from 1 a
    likelihood ratio may be before the loss clips it, or where it does not clip, before samples are no longer taken for
    on-policy; where the policy's replay of its own samples is off by a tenth of it, old log-probs are taken again.
    `max_ratio`: the mean ratio of an update above which what is left of a step's updates is left out; None: never.
    `last_steps`: with `levels`, the loss differentiates the reward, from states of this many of the last denoising
    steps on, which the rollout keeps; 0: it wants only the reward's value.
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
        """[N] float32."""

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: the samples that are trained on."""

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[U, samples_per_unit] numbers of samples: each row is trained as one, its samples side by side in a Batch."""

    def credit(self, scored: Scored, total: Callable[[Tensor], Tensor]) -> Credit:
        """With `per_action`: what this rank's actions are worth; `total` sums a CPU tensor over all ranks."""

    def decay(self, name: str, step: int) -> float:
        """See `averages`."""

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> Any:
        """With `levels`: the samples as they are trained on in a pass, a function of one seed per sample."""

    def reference_output(self, policy: Policy, batch: Batch) -> Tensor:
        """[B, ...] what the loss wants of other weights, computed by a policy that has them for now."""

    def loss(self, policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [U, A] of each unit and action, before its weight, and detached scalars."""
