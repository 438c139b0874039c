"""Sampling engines as a configuration knows them: the class that `rollout.engine` names, and its facts."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.config.registry import resolve_object

KEY = "rollout.engine"
BLOCK_ENGINES = {"policy": "phalanx.rollout.lm.in_blocks:BlockDiffusionRollout"}  # of block diffusion
TURN_ENGINES = {  # with an environment
    "policy": "phalanx.rollout.lm.conversations:ConversationRollout",
    "vllm": "phalanx.rollout.lm.vllm_conversations:VllmConversationRollout",
}
FORMS = ("module:Class", "path/to/file.py:Class")


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a sampling engine, stated as `facts` of its class; the defaults hold for one that samples in the
    policy's own modules. Nothing else of Phalanx asks which engine it is.

    `exact`: its log-probabilities are the policy's own, to the last bit; else the policy takes them again, as
    rollout.correction says. `weights`: it samples in the modules of the "policy", on a whole "copy" on each rank, which
    each rollout renews, or with "none". `redraws`: its `resample` may be called. `videos`: it samples more than one
    frame. `columns`, of flow models: its samples are images of the data, one of each of these columns, the preferred
    one first, and have no actions. `blocks`, of language models: it samples those of block diffusion, and no others.
    `exclusive`: its state is that of the whole process, so that no reward model answers while it samples.

    Of a copy: `tensor_parallel`: as many neighbouring ranks as rollout.tensor_parallel_size says hold one together;
    `reserves`: with its cache it takes rollout.gpu_memory_utilization of a GPU, whatever is sampled; `sleeps`: it gives
    its memory back between rollouts, as rollout.sleep says where there is that key.

    `package`: the library that must be installed, by the name that it is imported by, and `install`: the words that say
    how to get it.
    """

    exact: bool = True
    weights: Literal["policy", "copy", "none"] = "policy"
    redraws: bool = True
    videos: bool = True
    columns: tuple[str, ...] = ()
    blocks: bool = False
    exclusive: bool = False
    tensor_parallel: bool = False
    reserves: bool = False
    sleeps: bool = False
    package: str | None = None
    install: str = ""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of a sampling engine: `ranks` hold a copy of the weights together; `reserved` is the fraction of a GPU
    that it takes, whatever is sampled, 0 for only as much as it needs; `sleeps`: it frees its memory between rollouts.
    """

    ranks: int = 1
    reserved: float = 0.0
    sleeps: bool = False


def engine_class(engine: str, names: Mapping[str, str]) -> Any:
    """The class that `engine` stands for: one of `names`, module:Class or path/to/file.py:Class. Raises ConfigError,
    with one line, where there is none.
    """
    return resolve_object(names.get(engine, engine), KEY, "class")


def check_engine_class(config: Any) -> None:
    """Raise ConfigError, as a configuration is loaded, for a class of the user's in `config`, a section `rollout`, that
    cannot be an engine.
    """
    if ":" in config.engine and config.REGISTRY:
        package = importlib.import_module(config.REGISTRY)
        package.check_entry(engine_class(config.engine, config.ENGINES), config.engine)
