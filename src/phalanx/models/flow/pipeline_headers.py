"""Checks of diffusers model folders by names and headers, before anything is loaded.

Without them, an incomplete download would end in a library's traceback, or in random weights.
"""

import importlib
from pathlib import Path
from typing import Any

from phalanx.config.messages import cut, shown
from phalanx.models.headers import (
    check_files,
    check_numbers,
    check_weights,
    local_folder,
    read_json,
    read_object,
    require,
)

LIBRARIES = ("diffusers", "transformers")
# modules with components of single pipelines, by their names in a model_index.json
_PIPELINES = {"ltx2": "diffusers.pipelines.ltx2"}
# settings of a scheduler with one supported value
_FIXED = {"prediction_type": "flow_prediction", "final_sigmas_type": "zero", "num_train_timesteps": 1000}
_SHIFTS = {"shift", "flow_shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"}
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
# other schedulers whose noise levels a family supports, by the pipeline's class
OTHER_SCHEDULERS = {"WanPipeline": "UniPCMultistepScheduler", "WanImageToVideoPipeline": "UniPCMultistepScheduler"}
# optional components that older folders do not name, by the pipeline's class
_UNNAMED = {"StableDiffusion3Pipeline": ("text_encoder_3", "tokenizer_3")}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def local_index(path: str) -> dict[str, Any] | None:
    """The model_index.json of a folder, after a check of its components; None for what may be a hub id.

    Raises ValueError for a path that is neither, and for a folder with a missing or damaged component.
    """
    written = "from_single_file(file).save_pretrained(folder) of the pipeline's class writes"
    folder = local_folder(path, "model.path", f"a diffusers model folder, such as {written}")
    if folder is None:
        return None
    index = read_index(folder)
    check_components(folder, index)
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a local folder, without a check of its components; raises ValueError if it has none.

    A component is [library, class] or [null, null]. Only known libraries are accepted, because diffusers would import,
    and so run, any library that is named here.
    """
    file = folder / "model_index.json"
    if not file.is_file():
        raise ValueError(f"model.path: '{folder}' is not a diffusers model folder: it has no model_index.json")
    return check_index(read_json(file), str(folder))


def check_index(index: Any, folder: str) -> dict[str, Any]:
    """Check the content of a model_index.json, and return it; raises ValueError if diffusers must not read it."""
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ValueError(f"model.path: {folder}/model_index.json names no _class_name")
    for name, value in index.items():
        if not isinstance(value, list) or value == [None, None]:
            continue
        if not name.isidentifier() or len(value) != 2 or not all(isinstance(word, str) for word in value):
            raise ValueError(
                f"model.path: {folder}/model_index.json: {name!r} is {cut(repr(value))}; expected [library, class]"
            )
        library = value[0]
        if library not in (*LIBRARIES, *_PIPELINES):
            raise ValueError(
                f"model.path: '{folder}' has its {name} from {cut(library)}; known: {', '.join(LIBRARIES)}"
            )
    return {name: [None, None] for name in _UNNAMED.get(index["_class_name"], ())} | index


def module_of(library: str) -> Any:
    """The module with the classes of a library that a model_index.json names."""
    return importlib.import_module(_PIPELINES.get(library, library))


def component_names(index: dict[str, Any]) -> list[str]:
    """Names of the components, which are those of their folders too."""
    return [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]


def absent_components(index: dict[str, Any]) -> dict[str, None]:
    """Components that the folder leaves out, as the arguments of from_pretrained that say so."""
    return {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}


def check_components(folder: Path, index: dict[str, Any]) -> None:
    """Raise ValueError for the first component of a model_index.json that the folder lacks, or that is damaged."""
    for name in ("transformer", "vae", "scheduler"):
        if name not in component_names(index):
            raise ValueError(f"model.path: {folder / 'model_index.json'} names no {name}")
    for name in component_names(index):
        part, called = folder / name, str(index[name][1])
        if not part.is_dir():
            raise ValueError(f"model.path: '{folder}' lacks the folder {name!r} that its model_index.json names")
        check_files(part)
        for file in sorted(part.glob("*.json")):
            content = read_object(file)
            if file.name in ("config.json", "scheduler_config.json"):
                check_numbers(content, str(file))
        if name == "scheduler":
            if called not in (SCHEDULER, OTHER_SCHEDULERS.get(index["_class_name"])):
                raise ValueError(f"model.path: '{folder}' has the scheduler {called}; expected {SCHEDULER}")
            require(part, "scheduler_config.json")
            _check_scheduler(part / "scheduler_config.json")
        elif "Tokenizer" in called:
            # ByT5's tokens are bytes, so it has no vocabulary file
            require(part, *(["tokenizer_config.json"] if called == "ByT5Tokenizer" else _TOKENIZER_FILES))
        elif name == "guider":
            require(part, "guider_config.json")
        elif "Processor" not in called and "FeatureExtractor" not in called:
            require(part, "config.json")
            check_weights(part)


def _check_scheduler(file: Path) -> None:
    """Raise ValueError for settings that give no noise levels from 1 down to 0, or that are not supported."""
    config = read_object(file)
    for name in _SHIFTS & config.keys():
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"model.path: {file}: {name} is {shown(value)}; expected a number more than 0")
    # whatever the stock pipeline does, steps here follow dx = v dsigma from 1 down to 0, or the rollout's SDE
    refused = ["stochastic_sampling", "invert_sigmas", "thresholding"]
    if "use_flow_sigmas" in config:
        # for these, the multistep solver uses the noise of diffusion models, whose levels are not those of a flow
        refused += ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"]
    for name in refused:
        if config.get(name):
            raise ValueError(f"model.path: {file}: {name} is {shown(config[name])}; only false is supported")
    for name, expected in _FIXED.items():
        value = config.get(name, expected)
        if value != expected:
            raise ValueError(f"model.path: {file}: {name} is {shown(value)}; expected {expected}")
