"""Checks of a job's inputs before any rank starts: data files and the headers of model folders, without torch.

The ranks check again in more detail: images, classes of libraries, and tensors.
"""

import os
from collections.abc import Iterable
from itertools import chain
from typing import Any

from phalanx.config.environment import EnvironmentConfig
from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRunConfig
from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.distributed.launch_env import Launch
from phalanx.models.flow.pipeline_headers import local_index
from phalanx.models.lm.lm_folder import check_folder
from phalanx.run.roles import roles_of
from phalanx.types import Prompt


def given(**values: Any) -> dict[str, Any]:
    """The keys of a task that are not None, with which it changes a run's configuration."""
    return {name: value for name, value in values.items() if value is not None}


def model_changes(section: Any) -> dict[str, Any]:
    """The changes to a run's section `model`; a new path drops the revision, which belongs to the run's model."""
    changes = given(**vars(section))
    return {"revision": None} | changes if "path" in changes else changes


def check_flow(cfg: FlowRunConfig, *, prompts: bool = True) -> None:
    """Raise ValueError, with one line, if files of a flow-matching job cannot be read. prompts: whether the training
    files contain prompts.
    """
    check_placement(cfg)
    local_index(cfg.model.path)
    form: dict[str, Any] = {"prompt": cfg.data.prompt_key, "unusable": cfg.data.unusable_rows}
    if prompts and cfg.data.train_files:
        load_prompts(cfg.data.train_files, "data.train_files", **form)
    validation_sets(cfg.data.val_files, **form)


def check_lm(cfg: LMRunConfig, *, answered: bool = False) -> None:
    """Raise ValueError, with one line, if files of a language model cannot be read; `answered`: see load_prompts."""
    check_placement(cfg)
    check_folder(cfg.model.path)
    key, image_key = cfg.data.prompt_key, cfg.data.image_key
    form: dict[str, Any] = {"prompt": key, "quoted": False, "answered": answered, "image_key": image_key}
    form["unusable"] = cfg.data.unusable_rows
    rows = load_prompts(cfg.data.train_files, "data.train_files", **form) if cfg.data.train_files else []
    sets = validation_sets(cfg.data.val_files, **form)
    if cfg.talks:
        _check_environment(vars(cfg)["environment"], chain(rows, *sets.values()))


def _check_environment(cfg: EnvironmentConfig, rows: Iterable[Prompt]) -> None:
    """Raise ConfigError for environments, tools, a format of calls or rows that the ranks would refuse."""
    # only here, since they load much that other jobs do not need
    from phalanx.environments.environments import Environments, with_tools
    from phalanx.models.lm.calls import parser

    environments = Environments(cfg)
    parser(cfg.format)
    with_tools(rows, environments)


def check_placement(cfg: RunConfig) -> None:
    """Raise ConfigError if the placement fits none of the world sizes that train.sh's environment allows."""
    placement = vars(cfg).get("placement")
    if not placement or "NPROC_PER_NODE" not in os.environ:
        return
    nodes, node = os.environ.get("NNODES", "1"), int(os.environ["NPROC_PER_NODE"])
    problems: list[ConfigError] = []
    counts = range(int(nodes.split(":")[0]), int(nodes.split(":")[-1]) + 1)
    for count in counts:
        try:
            roles_of(placement, Launch(0, count * node, 0, node, nodes=nodes if ":" in nodes else ""))
        except ConfigError as error:
            problems.append(error)
    if len(problems) == len(counts):
        raise problems[0]
