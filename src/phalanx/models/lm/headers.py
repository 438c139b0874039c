"""Folders of language models, looked at by their headers, without torch."""

from pathlib import Path

from phalanx.models.headers import check_weights, read_json, require

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how the classes of causal language models end


def check_folder(path: str, key: str = "model.path") -> None:
    """Raise ValueError, in one line that begins with `key`, for a path that is neither a causal language model's folder
    nor a hub id.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise ValueError(f"{key}: {path!r}: no such folder")
        return
    if (folder / "model_index.json").is_file():
        raise ValueError(f"{key}: {path!r} is a diffusers pipeline; expected a causal language model's folder")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {path!r} is an adapter of peft; expected a whole model, with the adapter merged")
    require(folder, "config.json", key=key)
    settings = read_json(folder / "config.json", key)
    names = settings.get("architectures") if isinstance(settings, dict) else None
    if isinstance(names, list) and names and not any(str(name).endswith(_CAUSAL) for name in names):
        raise ValueError(f"{key}: {path!r} is a {names[0]}; expected a causal language model")
    check_weights(folder, key)
