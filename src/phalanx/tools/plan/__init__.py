"""The plan of a training job on a cluster, which `--plan` prints: its groups, batches, memory, messages and arithmetic.

It needs no GPU, process group or weights: the arithmetic is that of the job, and memory is counted on tensors of
torch's meta device, which have only shapes.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import torch

from phalanx.config.joint import JointConfig
from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.distributed.launch_env import Launch
from phalanx.run.kind import kind_of
from phalanx.tools.plan.jobs import locate, parts_of, policies_of
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.text import describe, sizes


def plan_job(cfg: RunConfig | JointConfig, words: Mapping[str, str]) -> str:
    """The plan as text. `words` may contain nnodes, nproc_per_node (or nproc) and gpu_memory_gb; missing ones come
    from train.sh's variables and from the local GPU.

    Of several sizes the largest that works is described. Raises ValueError, in one line, if the job itself would be
    refused or the model folder cannot be read.
    """
    gpu_memory = memory_of(words)
    tried = [replace(cluster, gpu_memory=gpu_memory) for cluster in clusters(words, os.environ)]
    cfg = deepcopy(cfg)
    locate(cfg)
    refused: dict[Cluster, str] = {}
    for cluster in tried:
        # restarts, and the range of an elastic job, are those of the present environment
        launch = replace(Launch.from_env(), world_size=cluster.ranks, local_world_size=cluster.per_node)
        try:
            kind_of(cfg).check(launch, installed=False)
        except ConfigError as error:
            refused[cluster] = str(error)
    if len(refused) == len(tried):
        none = f"no number of nodes from {tried[0].nodes} to {tried[-1].nodes} works: " if len(tried) > 1 else ""
        raise ConfigError(none + refused[tried[0]])
    largest = [cluster for cluster in tried if cluster not in refused][-1]
    alternate = vars(cfg).get("alternate") is not None
    text = describe(largest, parts_of(cfg, largest), gpu_memory, alternate=alternate)
    if len(tried) == 1:
        return text
    *_, last = policies_of(cfg).values()  # statements about all ranks of a joint run are about the painter's job
    return f"{sizes(last, tried, refused)}\n\n{text}"


def clusters(words: Mapping[str, str], env: Mapping[str, str]) -> list[Cluster]:
    """The sizes to plan: one, or each of a range of nodes such as 2:4. Raises ConfigError for other values."""
    given = {"NNODES": env.get("NNODES", "1"), "NPROC_PER_NODE": env.get("NPROC_PER_NODE", "1"), **words}
    name = "nnodes" if "nnodes" in words else "NNODES"
    first, _, last = given[name].partition(":")
    nodes = range(_parse_integer(first), _parse_integer(last or first) + 1)
    if not nodes or nodes[0] == 0:
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 4, or a range, e.g. 2:4")
    name = next(key for key in ("nproc_per_node", "nproc", "NPROC_PER_NODE") if key in given)
    if _parse_integer(given[name]) == 0:
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 8")
    return [Cluster(number, _parse_integer(given[name])) for number in nodes]


def _parse_integer(text: str) -> int:
    """The number that a text spells; 0 for other texts."""
    return int(text) if text.isdecimal() else 0


def memory_of(words: Mapping[str, str]) -> int | None:
    """Bytes of a GPU: those of `words`, or of the local GPU; None without either. Raises ConfigError for no number."""
    if "gpu_memory_gb" in words:
        text = words["gpu_memory_gb"]
        if not text.replace(".", "", 1).isdecimal() or float(text) == 0:
            raise ConfigError(f"gpu_memory_gb={text}: expected GB (10^9 bytes) of a GPU, such as 80")
        return int(float(text) * 1e9)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
