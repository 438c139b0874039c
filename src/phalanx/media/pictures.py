"""Lazily loaded images of data files, so that a dataset may be larger than memory."""

import base64
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from phalanx.config.files import kind
from phalanx.config.messages import cut

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "the bytes of an image file, its path beside the data file, or {bytes, path}"
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")  # a URL of a file on another machine
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82", "GIF": b";"}  # last bytes of a file that is not cut off
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")  # a data URL, which contains the file


@dataclass(frozen=True)
class Picture:
    """An image of a data file. `where` is its location, for messages.

    `source()` returns the value in the data file, which is in `folder`: bytes, a path, or {"bytes": ..., "path": ...}
    with one of the two, as Hugging Face stores images; or a list of these. A list of several images supports only
    `parts`, `count`, `digest` and `file_size`.
    """

    source: Callable[[], Any]
    folder: Path
    where: str
    length: int | None = None  # the length of that list, if it is known without reading the value

    @property
    def count(self) -> int:
        """The number of images: the length of a list, or 1."""
        if self.length is not None:
            return self.length
        value = self.source()
        return len(value) if isinstance(value, list) else 1

    def check_count(self, expected: int, key: str = "model.reference_count") -> None:
        """Raise ValueError if `count` is not as expected by `key`: all rows of a batch need as many images."""
        if self.count != expected:
            raise ValueError(f"{self.where} holds {self.count} images; {key} is {expected}")

    @property
    def parts(self) -> list["Picture"]:
        """The images of a list as separate pictures; otherwise this picture."""
        value = self.source()
        if not isinstance(value, list):
            return [self]
        return [Picture(partial(in_memory, each), self.folder, f"{self.where}[{i}]") for i, each in enumerate(value)]

    def pixels(self, height: int, width: int) -> "Tensor":
        """The image as a tensor [3, H, W]; see `to_size`. Raises ValueError like `pil`."""
        return to_size(self.pil(), height, width)

    def pil(self) -> Image.Image:
        """The image in RGB; see `upright`. Raises ValueError, with one line, if it cannot be read."""
        with self._open_image() as image:
            return upright(image)

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image; reads only the file's header, except for TIFF. Raises ValueError like
        `pil`.
        """
        with self._open_image() as image:
            if image.format == "TIFF":  # PIL rotates TIFFs when it reads their pixels
                whole = ImageOps.exif_transpose(image)
                return whole.height, whole.width
            # not image.getexif(), which for PNGs reads the pixels to look for EXIF data behind them
            turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            return (image.width, image.height) if turned else (image.height, image.width)

    def thumbnail(self, side: int) -> NDArray[np.uint8]:
        """The image as an array [h, w, 3], scaled down to at most `side` pixels. Raises ValueError like `pil`."""
        image = self.pil()
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return np.asarray(image)

    def check(self) -> None:
        """Raise ValueError like `pil` for a file that is missing, of an unknown format or cut off. Reads the header
        and the last bytes, and the pixels only where these do not tell.
        """
        for part in self.parts:
            with part._open_image() as image:
                end = _ENDS.get(image.format or "")
                if image.fp is None or end is None or image.mode in ("I", "F"):
                    upright(image)
                    continue
                place = image.fp.tell()
                image.fp.seek(-len(end), os.SEEK_END)
                is_whole = image.fp.read() == end
                image.fp.seek(place)
                if not is_whole:
                    image.load()

    @contextmanager
    def _open_image(self) -> "Iterator[ImageFile]":
        """Open the image with PIL; exceptions in the block are handled as in `_reading_errors`."""
        file = self._image_file(self.source())
        with self._reading_errors(), Image.open(file) as image:
            if image.format == "EPS":
                raise ValueError("EPS is a program, and is not run")
            yield image

    @contextmanager
    def _reading_errors(self) -> "Iterator[None]":
        """Turn exceptions of files and of PIL in the block into ValueErrors with one line."""
        try:
            yield
        except UnidentifiedImageError:
            is_empty = self.file_size == 0
            reason = "its file is empty" if is_empty else "its format is unknown"
            raise ValueError(f"{self.where}: the image cannot be read: {reason}") from None
        except (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            # for damaged files PIL raises SyntaxError (PNG), RuntimeError (AVIF) or ValueError (PPM)
            reason = " ".join(str(error).split())
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.strerror}: {cut(str(error.filename))!r}"
            raise ValueError(f"{self.where}: the image cannot be read: {reason}") from None

    @cached_property
    def digest(self) -> str:
        """A hash of the image's pixels. Raises ValueError like `pil`."""
        if self.count > 1:
            return hashlib.sha256(" ".join(part.digest for part in self.parts).encode()).hexdigest()
        image = self.pil()
        return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()

    def encoded(self) -> bytes:
        """The content of the image's file. Raises ValueError, with one line, if it cannot be read."""
        file = self._image_file(self.source())
        with self._reading_errors():
            return file.read_bytes() if isinstance(file, Path) else file.getvalue()

    @cached_property
    def file_size(self) -> int:
        """The size of the image's file in bytes. Raises ValueError, with one line, if it cannot be read."""
        if self.count > 1:
            return sum(part.file_size for part in self.parts)
        file = self._image_file(self.source())
        with self._reading_errors():
            return file.stat().st_size if isinstance(file, Path) else len(file.getvalue())

    def _image_file(self, value: Any) -> Path | BytesIO:
        """The argument for Image.open."""
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict) and value and value.keys() <= {"bytes", "path"}:
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return BytesIO(value)
        if isinstance(value, str) and value:
            if data := _DATA.match(value):
                return BytesIO(self._decode_base64(value[data.end() :]))
            value = value.removeprefix("file://")
            if _ADDRESS.match(value):
                raise ValueError(f"{self.where}: {cut(value)!r} is a URL, and nothing is downloaded; expected {FORMS}")
            path = self.folder / value
            with self._reading_errors():
                kind(path)  # refuses pipes and devices, whose reading would not end
            return path
        form = f"a list of {len(value)}" if isinstance(value, list) else f"of type {type(value).__name__}"
        if isinstance(value, dict):
            form = f"an object with {', '.join(map(str, value)) or 'nothing'}"
        form = "empty" if value in ("", None) else form
        raise ValueError(f"{self.where} is {form}; expected {FORMS}")

    def _decode_base64(self, text: str) -> bytes:
        """Decode a file from base64."""
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise ValueError(f"{self.where}: the image is not in base64: {error}") from None


def in_memory(value: Any) -> Any:
    """The source of a Picture whose value is in memory. `partial(in_memory, value)` can be pickled for other ranks."""
    return value


def upright(image: Image.Image) -> Image.Image:
    """Convert an image to RGB, rotated according to its EXIF data, with transparent pixels on white; of an animation,
    the first frame. Raises ValueError for 32-bit pixels outside 0..255.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # PIL would turn all but the 256 darkest of the 65536 grays white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        # the colours of fully transparent pixels are arbitrary
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or not (high == 0 or 1 < high <= 255):  # PIL would clip them
            raise ValueError(
                f"its pixels are 32-bit numbers from {low:g} to {high:g}; expected 0 to 255, or 16 bits in PNG or TIFF"
            )
    return image.convert("RGB")


def to_size(image: Image.Image, height: int, width: int) -> "Tensor":
    """Convert an RGB image to [3, H, W] float32 in 0..1, scaled to cover the size and center-cropped."""
    scale = max(height / image.height, width / image.width)
    if scale != 1:
        # rounding must not leave a side one pixel short
        scaled_width = max(round(image.width * scale), width)
        scaled_height = max(round(image.height * scale), height)
        image = image.resize((scaled_width, scaled_height), Image.Resampling.LANCZOS)
    import torch  # not needed to read files

    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def to_uint8(images: "Tensor") -> "Tensor":
    """Convert images [B, 3, H, W] in 0..1 to uint8 [B, 3, H, W], the values that a PNG file contains."""
    return images.mul(255).round().clamp(0, 255).byte()


def raw_file(image: "Tensor") -> bytes:
    """Encode an image, uint8 [3, H, W], as a PPM file: uncompressed pixels after a header with their size."""
    height, width = image.shape[1:]
    return b"P6 %d %d 255\n" % (width, height) + image.permute(1, 2, 0).contiguous().numpy().tobytes()


def decoded(file: bytes, where: str) -> Image.Image:
    """Decode an image file to an upright RGB image. Raises ValueError, with one line that begins with `where`, if it
    cannot be read.
    """
    return Picture(lambda: file, Path(), where).pil()


def encode_image(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an image, uint8 [H, W, 3], as a PNG file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pil_image(image: "Tensor") -> Image.Image:
    """Convert an image, uint8 [3, H, W], to a PIL image."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
