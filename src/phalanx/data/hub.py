"""Data sets of the Hugging Face hub: entries `hf://owner/name` of the data files, read by the library `datasets`."""

import logging
import re
from typing import Any
from urllib.parse import parse_qsl

from phalanx.config.messages import reason
from phalanx.data.parquet import DataError

SCHEME = "hf://"
FORM = "hf://owner/name/subset:split, where the subset and the split may be left out"
_ENTRY = re.compile(
    r"hf://(?P<name>[^/@:?]+/[^/@:?]+)(@(?P<revision>[^/:?]+))?(/(?P<subset>[^/@:?]+))?(:(?P<split>[^?]+))?"
    r"(\?(?P<columns>.+))?"
)


def named(entry: str, place: str) -> dict[str, Any]:
    """The parts of an entry: name, revision, subset and split, None if left out, and columns, a new name for each
    column that gets one. Raises DataError. place: the entry in messages.

    The form is hf://owner/name[@revision][/subset][:split][?new=old&…].
    """
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise DataError(f"{place} is not the name of a data set; expected {FORM}")
    parts: dict[str, Any] = match.groupdict()
    columns: dict[str, str] = {}
    for new, old in parse_qsl(parts["columns"] or "", keep_blank_values=True):
        columns[old] = new
    if "" in (*columns, *columns.values()) or len(columns) != (parts["columns"] or "").count("="):
        raise DataError(f"{place}: expected columns as in ?prompt=question&ground_truth=answer, new=old, and each once")
    return parts | {"columns": columns}


def set_name(entry: str, place: str) -> tuple[str, str]:
    """The name of an entry's validation set, such as gsm8k_test, and its owner."""
    parts = named(entry, place)
    owner, _, name = parts["name"].partition("/")
    return re.sub(r"\W+", "_", "_".join(filter(None, (name, parts["split"])))).strip("_"), owner


def load_named(entry: str, place: str) -> Any:
    """The data set of an entry, from the cache of `datasets` or the hub, with its columns renamed. Raises DataError.

    Several ranks of a node may call it: `datasets` locks its cache, so that one of them downloads.
    """
    import datasets

    parts = named(entry, place)
    datasets.disable_progress_bars()  # every rank would show one
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
    try:
        dataset = datasets.load_dataset(
            parts["name"], parts["subset"], split=parts["split"], revision=parts["revision"]
        )
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise DataError(
            f"{place} is neither on the hub, as far as it can be reached, nor in the cache of datasets "
            f"({reason(error)}); download it once with network, or name a folder"
        ) from error
    except Exception as error:  # a damaged file, a subset or split that does not exist, or another format
        raise DataError(f"{place}: {reason(error)}") from error
    if isinstance(dataset, dict):
        if len(dataset) > 1:
            raise DataError(
                f"{place} has the splits {', '.join(dataset)}; name one, e.g. {entry}:{next(iter(dataset))}"
            )
        dataset = next(iter(dataset.values()))
    return _rename_columns(dataset, parts["columns"], place)


def _rename_columns(dataset: Any, columns: dict[str, str], place: str) -> Any:
    """The data set with other names of some columns; DataError for one that is missing or would be there twice."""
    for old, new in columns.items():
        if old not in dataset.column_names:
            raise DataError(f"{place} has no column {old!r}; it has {', '.join(dataset.column_names)}")
        if new in dataset.column_names and new not in columns:
            raise DataError(f"{place} would have the column {new!r} twice; give the other one a name too: &other={new}")
    return dataset.rename_columns(columns) if columns else dataset
