"""The components of every job that trains a flow-matching model."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from phalanx.config.flow import FlowRolloutConfig, FlowRunConfig
from phalanx.config.messages import ConfigError
from phalanx.config.trained_model import FlowModelConfig
from phalanx.data.prompts import validation_sets
from phalanx.distributed.context_parallel import KEY
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.models.flow.registry import families, family_of, image_columns
from phalanx.rollout.flow import build_rollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.run.prompt_lengths import fitting
from phalanx.run.start import JobComponents, build_rewards, fitting_sets, start_job
from phalanx.run.usable_images import usable_images
from phalanx.types import Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlowComponents(JobComponents):
    """JobComponents with a flow policy and its rollout. rows: the training rows that can be used."""

    policy: FlowPolicy
    rollout: PolicyRollout | None
    rows: list[Prompt] = field(default_factory=list)


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


def build_components(
    cfg: FlowRunConfig,
    micro: int,
    rows: Sequence[Prompt] = (),
    *,
    detach_uncond: bool = False,
    window: bool = True,
    last_steps: int = 0,
) -> FlowComponents:
    """Build the components; all ranks call this together.

    Raises a one-line ValueError for the user's mistakes. micro, window: see build_rollout. rows: the training rows, of
    which the components have those that can be used. last_steps: see phalanx.types.Algorithm.
    """
    world = start_job(cfg)
    data, columns = cfg.data, image_columns(cfg.model)
    val_sets = validation_sets(data.val_files, images=columns, prompt=data.prompt_key, unusable=data.unusable_rows)
    check_references(cfg.model, () if data.unusable_rows == "filter" else chain(rows, *val_sets.values()))
    check = partial(check_references, cfg.model)
    usable = partial(usable_images, unusable=data.unusable_rows, world=world, check=check)
    rows, val_sets = usable(list(rows), "data.train_files"), fitting_sets(val_sets, usable)
    rewards = build_rewards(cfg, world, rows, val_sets, gradients=last_steps > 0)
    policy = build_policy(cfg.model, cfg.parallel, cfg.data, world, seed=cfg.trainer.seed, detach_uncond=detach_uncond)
    fit = partial(fitting, model=policy.model, cfg=cfg, first=world.rank == 0)
    val_sets = fitting_sets(val_sets, fit)
    name_unused_columns(sampled_parts(rows, val_sets, cfg.rollout, policy.model), policy.model)
    rollout, exact = None, cfg.rollout.facts.exact
    if world.samples:
        rollout = build_rollout(policy, cfg.rollout, world, micro, window=window)
        exact = rollout.exact
        keep_last_steps(policy, rollout, last_steps, cfg.model)
    return FlowComponents(world, rewards, policy, rollout, val_sets, exact=exact, noun=PolicyRollout.noun, rows=rows)


def keep_last_steps(policy: FlowPolicy, rollout: PolicyRollout, last_steps: int, config: FlowModelConfig) -> None:
    """For an algorithm that differentiates the reward through the last denoising steps: keep the states of these steps,
    and turn on gradient checkpointing of the VAE if the model uses it and diffusers supports it.
    """
    rollout.last_steps, vae = last_steps, policy.model.vae
    if last_steps:
        rollout.check_steps(rollout.stochastic_steps(0, 0))
    if last_steps and config.gradient_checkpointing and vae._supports_gradient_checkpointing:
        vae.enable_gradient_checkpointing()
