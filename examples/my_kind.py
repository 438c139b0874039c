"""A kind of policy, complete: a tiny recurrent writer of words, which is trained, evaluated, exported and planned.

An action is a letter; a word ends with a full stop, which is an action, too, or at LIMIT letters.

A model's folder has a file letters.txt with its letters, the last of which ends a word.

    python examples/my_kind.py model.path=words data.train_files=[words/train.txt] algorithm.name=letters.py ...
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.fields import arg
from phalanx.config.run import RLConfig, RunConfig
from phalanx.config.trained_model import ModelConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in
from phalanx.models.trained import TrainedModel
from phalanx.run import rl
from phalanx.run.cli import parse, run
from phalanx.run.disaggregated.role_batches import part_of
from phalanx.run.kind import KINDS, PolicyKind
from phalanx.run.world import lone_world
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.layout import Cluster, CountedPolicy
from phalanx.tools.plan.ledger import META, Ledger
from phalanx.tools.plan.rehearsal import RLRehearsal, longest_prompts
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Each, Prompt, Replay, Samples

KINDS["words"] = f"{__name__}:Words"  # the registration
FILE, LIMIT = "letters.txt", 7


@dataclass
class WordModelConfig(ModelConfig):
    """The model that is trained."""

    units: int = arg(16, "units of the recurrent layer", ge=1)


@dataclass
class WordRunConfig(RunConfig):
    """Sections that evaluation and export read."""

    kind: ClassVar[str] = "words"
    model: WordModelConfig = field(default_factory=WordModelConfig)


@dataclass
class WordConfig(WordRunConfig, RLConfig):
    """Configuration of reinforcement learning."""


class Writer(nn.Module):
    """Logits [B, T, V] of the letters that follow each of the letters [B, T]."""

    def __init__(self, config: WordModelConfig) -> None:
        super().__init__()
        self.letters = (Path(config.path) / FILE).read_text().strip()
        self.embed = nn.Embedding(len(self.letters), 12)
        self.block = nn.GRU(12, config.units, batch_first=True)
        self.head = nn.Linear(config.units, len(self.letters))

    def forward(self, letters: Tensor) -> Tensor:
        states, _ = self.block(self.embed(letters))
        return self.head(states)


@dataclass(frozen=True)
class Trace:
    """letters [B, P + A]: a prompt of P letters, then the actions, padded with full stops."""

    letters: Tensor
    prompt: int

    def select(self, rows: Tensor) -> "Trace":
        return Trace(self.letters[rows], self.prompt)

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> "Trace":
        return self


class WordPolicy:
    """See phalanx.training.components.TrainedPolicy."""

    trace_type = Trace

    def __init__(self, trained: TrainedModel) -> None:
        self.trained, self.world = trained, trained.world

    def replay(self, trace: Trace) -> Replay:
        logits = self.trained.module(trace.letters[:, :-1]).float().log_softmax(-1)
        chosen = logits.gather(2, trace.letters[:, 1:, None])[..., 0]
        return Replay(chosen[:, trace.prompt - 1 :])

    def unsharded(self) -> AbstractContextManager[None]:
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        return self.trained.using(weights)

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        weights = sum(p.numel() for p in self.trained.module.parameters())
        return round(2 * weights * count * actions * (1 + references + 3 * updates))


class WordRollout:
    """See phalanx.types.Rollout. Each word has a separate random stream."""

    facts, exact, fps, noun = EngineFacts(), True, 1, "words"

    def __init__(self, policy: Any, cfg: RunConfig, micro_batch_size: int) -> None:
        self.policy, self.cfg, self.world, self.micro_batch_size = policy, cfg, policy.world, micro_batch_size

    def prepare(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Nothing is cheaper ahead of time."""

    def close(self) -> None:
        """Nothing goes on in the background."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad(), self.policy.unsharded():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        n, share = self.cfg.rollout.n, len(prompts) * self.cfg.rollout.n // self.world.size
        index = torch.arange(self.world.rank * share, (self.world.rank + 1) * share)
        mine = [prompts[i // n] for i in index.tolist()]
        words = self.write(mine, [fold_in(seed, step, i) for i in index.tolist()])
        each(self.spell(words), mine)
        actions = words.letters[:, words.prompt :]
        stops = (actions == len(self.policy.trained.module.letters) - 1).int()
        mask = stops.cumsum(1) - stops == 0  # up to the first full stop
        return Samples(mine, [], self.policy.replay(words).log_prob, mask, words, index)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        val, several = self.cfg.rollout.val, [prompt for prompt in prompts for _ in range(self.cfg.rollout.val.n)]
        words = self.write(several, [fold_in(val.seed, p.group_id, i % val.n) for i, p in enumerate(several)])
        each(self.spell(words), several)

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        return {"response/length_mean": float(samples.mask.sum(1).float().mean())}

    def spell(self, words: Trace) -> list[str]:
        """The texts of the words, up to their full stops."""
        letters: str = self.policy.trained.module.letters
        texts = ["".join(letters[c] for c in row) for row in words.letters[:, words.prompt :].tolist()]
        return [text.split(letters[-1])[0] + letters[-1] * (letters[-1] in text) for text in texts]

    def write(self, prompts: list[Prompt], seeds: list[int]) -> Trace:
        """Words that begin with these prompts."""
        rows, module = [], self.policy.trained.module
        stop = len(module.letters) - 1
        for prompt, seed in zip(prompts, seeds, strict=True):  # one by one: the last bits depend on batch shapes
            stream = torch.Generator().manual_seed(seed)
            row = torch.tensor([[module.letters.index(c) for c in prompt.text]])
            while row.shape[1] < len(prompt.text) + LIMIT:
                odds = module(row)[0, -1].float().softmax(-1)
                chosen = stop if int(row[0, -1]) == stop else int(torch.multinomial(odds, 1, generator=stream))
                row = torch.cat([row, torch.tensor([[chosen]])], 1)
            rows.append(row)
        return Trace(torch.cat(rows), len(prompts[0].text))


class Words(PolicyKind):
    """The kind: see phalanx.run.kind."""

    schemas = (WordRunConfig,)
    noun = drawn = "words"
    planner = f"{__name__}:rehearsed"

    @classmethod
    def owns(cls, folder: Path) -> bool:
        return (folder / FILE).is_file()

    def load_policy(self, world: World, plan: BatchPlan | None = None, *, frozen: bool = False) -> WordPolicy:
        return WordPolicy(self.writer(world, frozen=frozen))

    def writer(self, world: World, *, frozen: bool = False) -> TrainedModel:
        """A new writer over the mesh."""
        cfg, options = self.cfg, {"seed": self.cfg.trainer.seed, "frozen": frozen}
        torch.manual_seed(cfg.trainer.seed)
        module = Writer(cfg.model)
        return TrainedModel(module, [module.block], world, cfg.model, cfg.parallel, torch.float32, **options)

    def train_rollout(self, policy: Any, plan: BatchPlan, algorithm: Any, *, learns: bool = True) -> WordRollout:
        return WordRollout(policy, self.cfg, part_of(plan, self.cfg, policy.world).per_rank)

    def val_rollout(self, policy: Any) -> WordRollout:
        return WordRollout(policy, self.cfg, self.together)

    def files(self, config: Any) -> Any:
        return WordFiles


class WordFiles:
    """The files of a model: see phalanx.models.flow.model_files.ModelFiles."""

    @staticmethod
    def load_base(config: WordModelConfig, dtype: torch.dtype | None, names: Any) -> nn.Module:
        return Writer(config).to(dtype)

    @staticmethod
    def export_model(folder: Path, config: WordModelConfig, module: Writer) -> None:
        (folder / FILE).write_text(module.letters)
        save_file(module.state_dict(), folder / "model.safetensors")

    @staticmethod
    def how_to_load(folder: Path) -> None:
        return None


class PlannedPolicy(CountedPolicy, WordPolicy):
    """The policy on the meta device."""

    def replay(self, trace: Trace) -> Replay:
        self.ledger.phase.passes += 1
        return super().replay(trace)

    def update_rows(self, p: Any) -> list[tuple[str, str]]:
        return [("micro-batch", f"{p.plan.first(1)} words of {LIMIT} letters")]

    def input_rows(self, p: Any) -> list[tuple[str, str]]:
        return []


class PlannedRollout(WordRollout):
    """The longest words, which nobody reads."""

    def write(self, prompts: list[Prompt], seeds: list[int]) -> Trace:
        return Trace(torch.zeros(len(prompts), 2 + LIMIT, dtype=torch.long, device=META), 2)

    def spell(self, words: Trace) -> list[str]:
        return []


def rehearsed(kind: Words, cluster: Cluster, plan: BatchPlan, *, teaches: bool, learns: bool) -> RLRehearsal:
    """A planned step: see phalanx.tools.plan.jobs."""
    cfg, ledger = kind.cfg, Ledger()
    with META:
        policy = PlannedPolicy(kind.writer(lone_world(cfg.parallel, cluster.ranks, 0, META), frozen=not learns))
    policy.lay_out(cfg, cluster, ledger, [policy.trained.module.block])
    rollout = PlannedRollout(policy, cfg, plan.per_rank)
    with ledger, ledger.uncounted():
        prompts = longest_prompts(policy, plan.samples // cfg.rollout.n)
        return RLRehearsal(cfg, plan, kind.build_algorithm(), policy, rollout, prompts, learns=learns)


if __name__ == "__main__":
    run(lambda cfg: rl.build(cfg).run, parse(WordConfig, __doc__ or "", plan=plan_job))
