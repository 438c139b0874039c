"""A plan of a training job on a cluster: its groups, batches, memory and messages. `--plan` prints it.

It needs no GPU, process group or weights: the arithmetic is that of the job, and memory is counted on tensors of
torch's meta device, which have only shapes.
"""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from phalanx.cli import PLAN_SECONDS
from phalanx.config import ConfigError
from phalanx.config.flow import FlowRunConfig
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRunConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.launch import Launch
from phalanx.plan.blueprint import family_name, fetch
from phalanx.plan.jobs import parts_of, task_of
from phalanx.plan.layout import Cluster
from phalanx.plan.lm import FILES
from phalanx.plan.pace import Gpu, given_seconds
from phalanx.plan.text import describe, sizes
from phalanx.telemetry.flops import known_gpus, named_peak_flops
from phalanx.training import joint

_NUMBERS = {
    "gpu_memory_gb": "GB (10^9 bytes) of a GPU, such as 80",
    "gpu_hour_price": "the price of a GPU for an hour, such as 2.5",
    **dict.fromkeys(PLAN_SECONDS, "seconds of the phase if all ranks did it, such as 30"),
}


def plan_job(cfg: FlowRunConfig | LMRunConfig | JointConfig, words: Mapping[str, str]) -> str:
    """The plan as text. `words` may hold nnodes, nproc_per_node (or nproc), gpu, gpu_memory_gb, gpu_hour_price and the
    seconds of phases; the others come from train.sh's variables, and from the local GPU.

    Of several sizes the largest that works is described. Raises ValueError, with one line, where the job itself would
    be refused, or the model folder cannot be read.
    """
    asked, gpu, given = clusters(words, os.environ), gpu_of(words), numbers(words)
    cfg = deepcopy(cfg)
    cfg.trainer.output_dir = "."  # that of the cluster need not be here
    # of a joint run, what is said of all ranks is said of the painter's job
    whole: RunConfig
    check: Callable[..., object]
    if isinstance(cfg, JointConfig):
        whole, check = cfg.of_painter(), partial(joint.check, installed=False)
        for name, part in cfg.parts().items():
            with joint.about(name):
                _find(part)
    else:
        whole, check = cfg, task_of(cfg).check
        _find(cfg)
    refused: dict[Cluster, str] = {}
    for cluster in asked:
        # restarts, and the range of an elastic job, are those of the present environment
        launch = replace(Launch.from_env(), world_size=cluster.ranks, local_world_size=cluster.per_node)
        try:
            check(cfg, launch)
        except ConfigError as error:
            refused[cluster] = str(error)
    if len(refused) == len(asked):
        none = f"no number of nodes from {asked[0].nodes} to {asked[-1].nodes} works: " if len(asked) > 1 else ""
        raise ConfigError(none + refused[asked[0]])
    largest = [cluster for cluster in asked if cluster not in refused][-1]
    known = given_seconds(given, cfg, largest)
    text = describe(cfg, largest, parts_of(cfg, largest), gpu, known)
    return text if len(asked) == 1 else f"{sizes(whole, asked, refused)}\n\n{text}"


def _find(cfg: RunConfig) -> None:
    """Have the configuration name local folders of its model, and the family of a flow model."""
    if isinstance(cfg, LMRunConfig):
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision, FILES)
    elif isinstance(cfg, FlowRunConfig):
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision)
        cfg.model.family = family_name(cfg.model)


def clusters(words: Mapping[str, str], env: Mapping[str, str]) -> list[Cluster]:
    """The sizes to plan: one, or each of a range of nodes such as 2:4. Raises ConfigError for other values."""
    given = {"NNODES": env.get("NNODES", "1"), "NPROC_PER_NODE": env.get("NPROC_PER_NODE", "1"), **words}
    name = "nnodes" if "nnodes" in words else "NNODES"
    first, _, last = given[name].partition(":")
    nodes = range(_integer(first), _integer(last or first) + 1)
    if not nodes or nodes[0] == 0:
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 4, or a range, e.g. 2:4")
    name = next(key for key in ("nproc_per_node", "nproc", "NPROC_PER_NODE") if key in given)
    if _integer(given[name]) == 0:
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 8")
    return [Cluster(number, _integer(given[name])) for number in nodes]


def _integer(text: str) -> int:
    """0 for what is none."""
    return int(text) if text.isdecimal() else 0


def gpu_of(words: Mapping[str, str]) -> Gpu:
    """The GPU to plan for: the one that `words` name, or the local one. Its memory and price may be among them.

    Raises ConfigError for a word that cannot be used.
    """
    name = words.get("gpu")
    if name is not None and named_peak_flops(name, torch.bfloat16) is None:
        raise ConfigError(f"gpu={name}: expected a name with one of {', '.join(known_gpus())} in it")
    given = numbers(words)
    memory = int(given["gpu_memory_gb"] * 1e9) if "gpu_memory_gb" in given else None
    if name is None and torch.cuda.is_available():
        local = torch.cuda.get_device_properties(0)
        name, memory = local.name, memory or local.total_memory
    return Gpu(name, memory, given.get("gpu_hour_price"))


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """The words that are numbers above 0; ConfigError for other values."""
    given = {}
    for name, expected in _NUMBERS.items():
        if name in words:
            text = words[name]
            if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
                raise ConfigError(f"{name}={text}: expected {expected}")
            given[name] = float(text)
    return given
