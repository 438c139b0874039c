"""Checks of flow-matching models with their data, which every job and command makes."""

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from phalanx.config.flow import FlowRolloutConfig, FlowRunConfig
from phalanx.config.messages import ConfigError, cut
from phalanx.config.trained_model import FlowModelConfig
from phalanx.data.prompts import DataError
from phalanx.distributed.context_parallel import KEY
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.flow.registry import families, family_of
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.types import Prompt

log = logging.getLogger(__name__)


def check_plan(cfg: FlowRunConfig) -> None:
    """Raise ConfigError for context parallelism of a model family without a plan of how to split its tokens."""
    size = cfg.parallel.ulysses_sequence_parallel_size
    if size == 1 or family_of(cfg.model).transformer_class._cp_plan is not None:
        return
    able = [name for name, model in families().items() if model.transformer_class._cp_plan]
    raise ConfigError(
        f"{KEY}: {size} needs a plan of how to split tokens, which neither diffusers nor Phalanx has for "
        f"{cfg.model:path} {cfg.model.path!r}; set it to 1, or use one of the families {', '.join(able)}"
    )


def check_references(config: FlowModelConfig, rows: Iterable[Prompt]) -> None:
    """ConfigError if the model cannot take model.reference_count images, ValueError if a row has more or fewer."""
    family, count = family_of(config), config.reference_count
    if count > 1 and not family.takes_several:
        most = "no image" if family.image_column is None else "one image"
        raise ConfigError(
            f"model.reference_count: {count}, but {family.pipeline_class} takes {most} per row; set it to 1"
        )
    if family.image_column is not None:
        for row in rows:
            row.meta[family.image_column].check_count(count, f"{config:reference_count}")


def name_unused_columns(parts: Iterable[tuple[Iterable[Prompt], bool]], model: FlowModel) -> None:
    """Log, in one line each, columns that are meant for the samples of some rows, but have no effect on them.

    parts: rows, and whether these are sampled with guidance.
    """
    negative = last = 0
    for rows, guided in parts:
        for row in rows:
            negative += row.negative is not None and not guided
            last += row.meta.get("last_image") is not None and model.image_column is not None
    if negative:
        off = f"there is no guidance: {model.guidance_key} is not above 1"
        off = "the model is distilled to do without guidance" if model.distilled else off
        log.warning("data: %d rows have a negative_prompt, which has no effect, since %s", negative, off)
    if last:
        log.warning("data: %d rows have a last_image, which has no effect, since a last frame is not supported", last)


def sampled_parts(
    rows: Iterable[Prompt], val_sets: Mapping[str, Iterable[Prompt]], config: FlowRolloutConfig, model: FlowModel
) -> list[tuple[Iterable[Prompt], bool]]:
    """The rows of training and of validation, for `name_unused_columns`."""
    train, val = train_sampler(config, model), val_sampler(config, model)
    return [(rows, train.guided), (chain(*val_sets.values()), val.guided)]


def keep_last_steps(policy: FlowPolicy, rollout: PolicyRollout, last_steps: int, config: FlowModelConfig) -> None:
    """For an algorithm that differentiates the reward through the last denoising steps: keep the states of these steps,
    and turn on gradient checkpointing of the VAE if the model uses it and diffusers supports it.
    """
    rollout.last_steps, vae = last_steps, policy.model.vae
    if last_steps:
        rollout.check_steps(rollout.stochastic_steps(0, 0))
    if last_steps and config.gradient_checkpointing and vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()


def fitting(rows: list[Prompt], key: str, model: FlowModel, cfg: FlowRunConfig, *, first: bool) -> list[Prompt]:
    """The rows to use according to data.overlong_prompts.

    key: the configuration key of the rows' files. first: whether this rank logs how many prompts are cut or left out.
    Raises DataError for an overlong prompt if data.overlong_prompts is `error`, and if no row is left.
    """
    data = cfg.data
    tokenizer, tokens, limit = model.text_tokens([row.text for row in rows], data.max_prompt_length)
    overlong = [i for i in range(len(rows)) if len(tokens[i]) > limit]
    if not overlong:
        return rows
    needed = max(map(len, tokens))
    remedy = f"{data:max_prompt_length}={needed} holds all"
    if limit < data.max_prompt_length:
        remedy = f"the text encoders of {cfg.model:path} read no more than {limit}"
    where = f"prompt {overlong[0]} ({cut(repr(rows[overlong[0]].text))})"
    count = f"{key}: {len(overlong)} of {len(rows)} prompts have more than {limit} tokens"
    if data.overlong_prompts == "error":
        raise DataError(f"{count}, first {where}; {remedy}, or set data.overlong_prompts to filter or truncate")
    if data.overlong_prompts == "filter":
        if len(overlong) == len(rows):
            raise DataError(f"{count}, and data.overlong_prompts=filter leaves none; {remedy}")
        if first:
            log.warning("%s and are left out, first %s; %s", count, where, remedy)
        return [row for row, ids in zip(rows, tokens, strict=True) if len(ids) <= limit]
    lost = 0  # prompts whose ground truth is only in the part that is cut off
    for i in overlong:
        truth = _plain(rows[i].meta.get("ground_truth", ""))
        lost += truth in _plain(rows[i].text) and truth not in _plain(tokenizer.decode(tokens[i][:limit]))
    unseen = f"; the ground truth of {lost} of them is in the part that is cut off" if lost else ""
    if first:
        log.warning("%s and are cut there, first %s%s; %s", count, where, unseen, remedy)
    return rows


def _plain(text: Any) -> str:
    """The text without case and whitespace, which tokenizers may change."""
    return "".join(str(text).lower().split())
