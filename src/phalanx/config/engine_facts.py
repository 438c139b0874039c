"""The facts of a sampling engine on which the rest of Phalanx depends, and the memory that it takes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a sampling engine: the class attribute `facts` of its class. The rest of Phalanx depends only on
    these, not on which engine it is. The defaults describe an engine that samples in the policy's modules.

    exact: its log-probabilities equal the policy's bit by bit; otherwise rollout.correction decides about recomputing
        them.
    weights: it samples with the modules of the "policy", with a whole "copy" per rank, updated before each rollout, or
        with "none".
    adapters: its copy is of dequantized weights, beside which it may keep a LoRA (rollout.lora_sync).
    redraws: its `resample` may be called.
    videos: it can sample more than one frame.
    columns: flow models: its samples are images of the data, one from each of these columns, the preferred one first,
        and have no actions.
    blocks: language models: it samples from block diffusion models only.
    exclusive: it has process-wide state, so that no reward model may answer while it samples.
    tensor_parallel: rollout.tensor_parallel_size neighbouring ranks share one copy of the weights.
    reserves: copy and cache always take the fraction rollout.gpu_memory_utilization of a GPU's memory.
    sleeps: it frees its memory between rollouts, unless there is a key rollout.sleep and it is false.
    package: import name of a library that must be installed; `install` says how to install it.
    """

    exact: bool = True
    weights: Literal["policy", "copy", "none"] = "policy"
    adapters: bool = False
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
    """Memory of a sampling engine.

    ranks: number of ranks that share one copy of the weights. reserved: fraction of a GPU's memory that it takes in any
    case; 0: only as much as it needs. sleeps: it frees its memory between rollouts. keeps: while it sleeps, its weights
    are in main memory; None: if they are the base of a LoRA, which it `adapts`, held beside them.
    """

    ranks: int = 1
    reserved: float = 0.0
    sleeps: bool = False
    keeps: bool | None = False
    adapts: bool = False
