"""Find a model's family by the pipeline class in its folder."""

from pathlib import Path
from typing import Any

import diffusers

from phalanx.config.messages import ConfigError
from phalanx.config.registry import known_modules, resolve_registry
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.folder import model_index
from phalanx.models.flow.pipeline_headers import read_index

FAMILIES = "phalanx.zoo.families"


def families() -> dict[str, type[FlowModel]]:
    """The classes `Model` of all modules in FAMILIES, except those that need a newer diffusers than is installed."""
    known: dict[str, type[FlowModel]] = {}
    # by importing all modules, so that adding a family takes only a new file
    for name in known_modules(FAMILIES):
        try:
            module = resolve_registry(FAMILIES, name, "model.family")
        except ConfigError as error:
            if isinstance(error.__cause__, ImportError) and error.__cause__.name == "diffusers":
                continue
            raise
        if "Model" in vars(module):
            known[name] = module.Model
    return known


def family_of(config: FlowModelConfig) -> type[FlowModel]:
    """The class `Model` of the model's family; raises ValueError for a pipeline that no family supports."""
    name = config.family
    if name is None:
        name = known_family(config.path, model_index(config.path, config.revision))
    module = resolve_registry(FAMILIES, name, "model.family")
    if "Model" not in vars(module):
        raise ValueError(f"model.family: {name!r} has no class Model")
    folder = Path(config.path).expanduser()
    if config.family in known_modules(FAMILIES) and (folder / "model_index.json").is_file():
        # some families have their own transformer class, derived from diffusers'
        kinds = [kind.__name__ for kind in module.Model.transformer_class.__mro__]
        transformer = (read_index(folder).get("transformer") or ["", None])[1]
        if transformer not in kinds:
            raise ValueError(
                f"model.family: {name} has no {transformer}, which {config.path!r} has; leave it out, or name another"
            )
    return module.Model


def known_family(path: str, index: dict[str, Any]) -> str:
    """The module in FAMILIES for a folder's model_index.json; raises ValueError if there is none."""
    name = index["_class_name"]
    known: dict[str, str] = {}
    for family, model in families().items():
        known.setdefault(model.pipeline_class, family)  # flux2 before flux2_edit, a variant with the same pipeline
    if name not in known:
        older = "" if name in dir(diffusers) else f", which diffusers {diffusers.__version__} does not have"
        raise ValueError(f"model.path: {path!r} is a {name}{older}; supported: {', '.join(sorted(known))}")
    return known[name]


def image_columns(config: FlowModelConfig) -> tuple[str, ...]:
    """Columns of the data with images for the model; raises as `family_of` does."""
    column = family_of(config).image_column
    return () if column is None else (column,)
