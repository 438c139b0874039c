"""The plan of a training job on a cluster, which `--plan` prints: its groups, batches, memory, messages and time.

It needs no GPU, process group or weights: the arithmetic is that of the job, and memory is counted on tensors of
torch's meta device, which have only shapes.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import torch

from phalanx.config import ConfigError
from phalanx.config.joint import JointConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.launch import Launch
from phalanx.run.cli import PLAN_SECONDS
from phalanx.telemetry.flops import known_gpus, named_peak_flops
from phalanx.tools.plan.jobs import check, locate, parts_of, policies_of
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.pace import Gpu, given_seconds
from phalanx.tools.plan.text import describe, sizes

_NUMBERS = {
    "gpu_memory_gb": "GB (10^9 bytes) of a GPU, such as 80",
    "gpu_hour_price": "the price of a GPU for an hour, such as 2.5",
    **dict.fromkeys(PLAN_SECONDS, "seconds of the phase if all ranks did it, such as 30"),
}


def plan_job(cfg: RunConfig | JointConfig, words: Mapping[str, str]) -> str:
    """The plan as text. `words` may contain nnodes, nproc_per_node (or nproc), gpu, gpu_memory_gb, gpu_hour_price and
    the seconds of phases; missing ones come from train.sh's variables and from the local GPU.

    Of several sizes the largest that works is described. Raises ValueError, in one line, if the job itself would be
    refused or the model folder cannot be read.
    """
    gpu, given = gpu_of(words), numbers(words)
    tried = [replace(cluster, gpu_memory=gpu.memory) for cluster in clusters(words, os.environ)]
    cfg = deepcopy(cfg)
    cfg.trainer.output_dir = "."  # the cluster's folder need not exist here
    locate(cfg)
    refused: dict[Cluster, str] = {}
    for cluster in tried:
        # restarts, and the range of an elastic job, are those of the present environment
        launch = replace(Launch.from_env(), world_size=cluster.ranks, local_world_size=cluster.per_node)
        try:
            check(cfg, launch)
        except ConfigError as error:
            refused[cluster] = str(error)
    if len(refused) == len(tried):
        none = f"no number of nodes from {tried[0].nodes} to {tried[-1].nodes} works: " if len(tried) > 1 else ""
        raise ConfigError(none + refused[tried[0]])
    largest = [cluster for cluster in tried if cluster not in refused][-1]
    known = given_seconds(given, cfg, largest)
    alternate = isinstance(cfg, JointConfig) and cfg.alternate is not None
    text = describe(largest, parts_of(cfg, largest), gpu, known, alternate=alternate)
    if len(tried) == 1:
        return text
    *_, last = policies_of(cfg).values()  # statements about all ranks of a joint run are about the painter's job
    return f"{sizes(last, tried, refused)}\n\n{text}"


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
    """The number that a text spells; 0 for other texts."""
    return int(text) if text.isdecimal() else 0


def gpu_of(words: Mapping[str, str]) -> Gpu:
    """The GPU to plan for: the one that `words` name, or the local one, with their memory and price if given. Raises
    ConfigError for a word that cannot be used.
    """
    name, given = words.get("gpu"), numbers(words)
    if name is not None and named_peak_flops(name, torch.bfloat16) is None:
        raise ConfigError(f"gpu={name}: expected a name with one of {', '.join(known_gpus())} in it")
    memory = int(given["gpu_memory_gb"] * 1e9) if "gpu_memory_gb" in given else None
    if name is None and torch.cuda.is_available():
        local = torch.cuda.get_device_properties(0)
        name, memory = local.name, memory or local.total_memory
    return Gpu(name, memory, given.get("gpu_hour_price"))


def numbers(words: Mapping[str, str]) -> dict[str, float]:
    """The words whose values are numbers above 0. Raises ConfigError for other values of these words."""
    given = {}
    for name, expected in _NUMBERS.items():
        if name in words:
            text = words[name]
            if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
                raise ConfigError(f"{name}={text}: expected {expected}")
            given[name] = float(text)
    return given
