"""Prompts of joint runs, which both policies read."""

from functools import partial
from typing import Any

from phalanx.config.flow import FlowRLConfig
from phalanx.config.joint import JointConfig
from phalanx.config.messages import ConfigError
from phalanx.data.prompts import MARK, load_prompts, validation_sets
from phalanx.distributed.mesh import World
from phalanx.models.flow.registry import image_columns
from phalanx.run.flow_components import check_references
from phalanx.run.start import fitting_sets
from phalanx.run.usable_images import usable_images
from phalanx.types import Prompt


def read_prompts(cfg: JointConfig, painter: FlowRLConfig) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Read the training prompts, and the held-out prompts by name of their set. Raises ValueError for rows that one of
    the policies cannot read.
    """
    data, columns = cfg.data, image_columns(painter.model)
    form: dict[str, Any] = {"images": columns, "prompt": data.prompt_key, "unusable": data.unusable_rows}
    rows = load_prompts(data.train_files, "data.train_files", **form)
    val_sets = validation_sets(data.val_files, **form)
    every = [*rows, *(prompt for prompts in val_sets.values() for prompt in prompts)]
    for row in every:
        if MARK in row.text:
            raise ConfigError(f"{row.place} has a place for an image, {MARK}; the writer of a joint run reads texts")
        if "images" in row.meta:
            raise ConfigError(f"{row.place} has a column images; the writer of a joint run reads texts")
    check_references(painter.model, () if data.unusable_rows == "filter" else every)
    return rows, val_sets


def usable_prompts(
    rows: list[Prompt], val_sets: dict[str, list[Prompt]], painter: FlowRLConfig, world: World
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """The prompts whose images the painter can read; all ranks call this together. Raises DataError for the others
    unless data.unusable_rows is `filter`.
    """
    check = partial(check_references, painter.model)
    usable = partial(usable_images, unusable=painter.data.unusable_rows, world=world, check=check)
    return usable(rows, "data.train_files"), fitting_sets(val_sets, usable)
