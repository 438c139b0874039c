"""A plan of a training job on a cluster: its groups, batches, memory and messages. `--plan` prints it.

It needs no GPU, process group or weights: the arithmetic is that of the job, and memory is counted on tensors of
torch's meta device, which have only shapes.
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from phalanx.cli import PLAN_SECONDS
from phalanx.config import ConfigError
from phalanx.config.flow import FlowRunConfig
from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRunConfig
from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.launch import Launch
from phalanx.plan.blueprint import family_name, fetch
from phalanx.plan.jobs import planned, planned_joint, planned_role, task_of
from phalanx.plan.layout import Cluster
from phalanx.plan.lm import FILES
from phalanx.plan.pace import Gpu, assumed_seconds, given_seconds, schedules
from phalanx.plan.tables import listed
from phalanx.plan.text import OF_A_RANK, describe, describe_joint, describe_parts, roles_on, sizes
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
    asked, gpu = clusters(words, os.environ), gpu_of(words)
    cfg = deepcopy(cfg)
    cfg.trainer.output_dir = "."  # that of the cluster need not be here
    # of a joint run, what is said of all ranks is said of the painter's job
    whole = cfg.of_painter() if isinstance(cfg, JointConfig) else cfg
    check = partial(joint.check, installed=False) if isinstance(cfg, JointConfig) else task_of(cfg).check
    if isinstance(cfg, JointConfig):
        for name, part in cfg.parts().items():
            with joint.about(name):
                _find(part)
    else:
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
    text = _described(cfg, largest, gpu, words)
    return text if len(asked) == 1 else f"{sizes(whole, asked, refused)}\n\n{text}"


def _find(cfg: RunConfig) -> None:
    """Have the configuration name local folders of its model, and the family of a flow model."""
    if isinstance(cfg, LMRunConfig):
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision, FILES)
    elif isinstance(cfg, FlowRunConfig):
        cfg.model.path = fetch(cfg.model.path, cfg.model.revision)
        cfg.model.family = family_name(cfg.model)


def _described(
    cfg: FlowRunConfig | LMRunConfig | JointConfig, cluster: Cluster, gpu: Gpu, words: Mapping[str, str]
) -> str:
    if isinstance(cfg, JointConfig):
        word = next((name for name in PLAN_SECONDS if name in words), None)
        if word is not None:
            raise ConfigError(f"{word}: the ranks of a joint run have no roles; leave it out")
        return describe_joint(cfg, planned_joint(cfg, cluster), cluster, gpu)
    roles = roles_on(cfg, cluster)
    given = given_seconds(numbers(words), cfg, roles)
    if not isinstance(cfg, RLConfig):  # then all ranks train, and given_seconds refuses seconds
        return describe(planned(cfg, cluster), gpu)
    if not roles.collocated:
        parts = []
        for role in OF_A_RANK:
            if role in roles.ranks:
                parts.append(planned_role(cfg, cluster, roles, role))
        time = schedules(cfg, cluster, roles, given or assumed_seconds(parts, gpu), gpu)
        return describe_parts(parts, cluster, roles, gpu, time)
    text = describe(planned(cfg, cluster), gpu)
    if given is not None:
        title, rows = schedules(cfg, cluster, roles, given, gpu)
        text = "\n".join([text, "", title, *listed(rows)])
    return text


def clusters(words: Mapping[str, str], env: Mapping[str, str]) -> list[Cluster]:
    """The sizes to plan: one, or each of a range of nodes such as 2:4. Raises ConfigError for other values."""
    given = {"NNODES": env.get("NNODES", "1"), "NPROC_PER_NODE": env.get("NPROC_PER_NODE", "1"), **words}
    name = "nnodes" if "nnodes" in words else "NNODES"
    first, _, last = given[name].partition(":")
    last = last or first
    if not (_positive(first) and _positive(last) and int(first) <= int(last)):
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 4, or a range, e.g. 2:4")
    name = next(key for key in ("nproc_per_node", "nproc", "NPROC_PER_NODE") if key in given)
    if not _positive(given[name]):
        raise ConfigError(f"{name}={given[name]}: expected an integer, e.g. 8")
    return [Cluster(nodes, int(given[name])) for nodes in range(int(first), int(last) + 1)]


def _positive(text: str) -> bool:
    return text.isdecimal() and int(text) > 0


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
