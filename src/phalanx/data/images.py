"""Images with prompts for supervised training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from phalanx.config.files import kind
from phalanx.config.messages import cut
from phalanx.data.files import DataError, json_objects, load_dataset
from phalanx.media.pictures import to_size, upright

TEXT_COLUMNS = ("prompt", "text", "caption")


class ImageTextData:
    """Pairs of an image and its prompt.

    They are read from `.jsonl` files (`image`: a path relative to the file, and `prompt`) and Hugging Face dataset
    folders (columns `image`, and `prompt`, `text` or `caption`). Raises DataError for a file that cannot be used.
    """

    def __init__(self, files: list[str], height: int, width: int, key: str = "data.train_files") -> None:
        self.height, self.width = height, width
        self._rows: list[tuple[Any, str, str]] = []  # image or its path, prompt, place for messages
        for file in files:
            self._rows += _rows(file, key)
        if not self._rows:
            raise DataError(f"{key}: {files} contain no images")

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, i: int) -> str:
        """The prompt of image i."""
        return self._rows[i][1]

    def image(self, i: int) -> Tensor:
        """Image i, [3, H, W] float32 in 0..1, scaled to cover the target size and center-cropped."""
        source, _, where = self._rows[i]
        try:
            image = upright(source if isinstance(source, Image.Image) else Image.open(source))
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{where}: the image cannot be read: {error}") from None
        return to_size(image, self.height, self.width)


def _rows(file: str, key: str) -> Iterator[tuple[Any, str, str]]:
    path = Path(file)
    try:
        form = kind(path)
    except OSError as error:
        raise DataError(f"{key}: {cut(file)} cannot be read: {error.strerror}") from None
    path = path.expanduser()
    if form == "folder":
        yield from _dataset_rows(path, file, key)
    elif form is None:
        raise DataError(f"{key}: {file}: no such file or folder")
    elif path.suffix == ".jsonl":
        for where, row in json_objects(path, file):
            yield _json_row(row, where, path.parent)
    else:
        raise DataError(f"{key}: {file}: expected a .jsonl file or a Hugging Face dataset folder")


def _json_row(row: dict[str, Any], where: str, folder: Path) -> tuple[Path, str, str]:
    if not all(isinstance(row.get(name), str) for name in ("image", "prompt")):
        raise DataError(f'{where}: expected {{"image": "path", "prompt": "text"}}')
    return folder / row["image"], row["prompt"], where


def _dataset_rows(path: Path, file: str, key: str) -> Iterator[tuple[Any, str, str]]:
    from datasets import Dataset

    data = load_dataset(
        path, f"{key}: {file}", f"{key}: {file} is not a Hugging Face dataset folder (written by save_to_disk)"
    )
    if not isinstance(data, Dataset):
        raise DataError(f"{key}: {file} contains the splits {sorted(data)}; give the folder of one of them")
    texts = [c for c in TEXT_COLUMNS if c in data.column_names]
    if "image" not in data.column_names or not texts:
        raise DataError(
            f"{key}: {file} has columns {data.column_names}; it needs image and one of {', '.join(TEXT_COLUMNS)}"
        )
    for number, row in enumerate(data):
        yield row["image"], row[texts[0]], f"{file} row {number}"
