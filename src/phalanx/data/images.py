"""Images with prompts for supervised training."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.data.data_files import DataError, json_objects, load_dataset, locate, with_pictures
from phalanx.data.unusable import UnusableRows
from phalanx.media.pictures import Picture, in_memory

TEXT_COLUMNS = ("prompt", "text", "caption")


class ImageTextData:
    """Pairs of an image and its prompt.

    They are read from `.jsonl` files (`image`: a path relative to the file, and `prompt`) and Hugging Face dataset
    folders (columns `image`, and `prompt`, `text` or `caption`). Raises DataError for a file that cannot be used.
    """

    def __init__(
        self, files: list[str], height: int, width: int, key: str = "data.train_files", unusable: str = "error"
    ) -> None:
        """unusable: data.unusable_rows, here for lines that cannot be used."""
        self.height, self.width = height, width
        self._rows: list[tuple[Picture, str]] = []
        drop = UnusableRows(key, unusable)
        for file in files:
            self._rows += _read_rows(file, key, drop)
        drop.report(len(self._rows))
        if not self._rows:
            raise DataError(f"{key}: {files} contain no images")

    def keep(self, usable: Callable[[list[list[Picture]]], list[int]]) -> None:
        """Keep only the rows that `usable`, given the images of each row, returns."""
        self._rows = [self._rows[i] for i in usable([[picture] for picture, _ in self._rows])]

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, i: int) -> str:
        """The prompt of image i."""
        return self._rows[i][1]

    def image(self, i: int) -> Tensor:
        """Image i, [3, H, W] float32 in 0..1, scaled to cover the target size and center-cropped."""
        try:
            return self._rows[i][0].pixels(self.height, self.width)
        except ValueError as error:
            raise DataError(str(error)) from None


def _read_rows(file: str, key: str, drop: UnusableRows) -> Iterator[tuple[Picture, str]]:
    for place, (path, split) in locate(file, key):
        if path.is_dir():
            yield from _dataset_rows(load_dataset(path, split, f"{key}: {place}"), path, f"{key}: {place}")
        elif path.suffix == ".jsonl":
            for where, row in json_objects(path, place, drop):
                if not all(isinstance(row.get(name), str) for name in ("image", "prompt")):
                    drop(DataError(f'{where}: expected {{"image": "path", "prompt": "text"}}'))
                    continue
                yield Picture(partial(in_memory, row["image"]), path.parent, where), row["prompt"]
        else:
            raise DataError(f"{key}: {place}: expected a .jsonl file or a Hugging Face dataset folder")


def _dataset_rows(dataset: Any, path: Path, place: str) -> Iterator[tuple[Picture, str]]:
    columns = dataset.column_names
    text = next((name for name in TEXT_COLUMNS if name in columns), None)
    if "image" not in columns or text is None:
        raise DataError(f"{place} has columns {columns}; it needs image and one of {', '.join(TEXT_COLUMNS)}")
    for _, row in with_pictures(dataset.select_columns(["image", text]), path, place, ["image"]):
        yield row["image"], row[text]
