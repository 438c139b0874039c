"""Images of data files: found at once, read when needed, so that a dataset may exceed memory."""

import base64
import hashlib
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

from phalanx.config.messages import cut

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "the bytes of an image file, its path beside the data file, or {bytes, path}"
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")  # of a file on another machine
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")  # a file within its address


@dataclass(frozen=True)
class Picture:
    """An image of a data file. `where` names its place in messages.

    `source()` returns what the file, which is in `folder`, holds of it: bytes, a path, or, as
    Hugging Face stores images, {"bytes": ..., "path": ...} with one of them; or a list of these. Where that has
    several, there are only `parts`, `count`, `digest` and `file_size`.
    """

    source: Callable[[], Any]
    folder: Path
    where: str
    length: int | None = None  # images of that list, where the file's columns say so; else it has to be read

    @property
    def count(self) -> int:
        """Images of this place: those of a list, or 1."""
        if self.length is not None:
            return self.length
        value = self.source()
        return len(value) if isinstance(value, list) else 1

    def check_count(self, expected: int) -> None:
        """Raise ValueError for another number of images: all rows of a batch have one."""
        if self.count != expected:
            raise ValueError(f"{self.where} holds {self.count} images; model.reference_count is {expected}")

    @property
    def parts(self) -> list["Picture"]:
        """The images of a list, one by one; or this one."""
        value = self.source()
        if not isinstance(value, list):
            return [self]
        return [Picture(partial(in_memory, each), self.folder, f"{self.where}[{i}]") for i, each in enumerate(value)]

    def pixels(self, height: int, width: int) -> "Tensor":
        """[3, H, W]; see `to_size`. Raises ValueError as `pil` does."""
        return to_size(self.pil(), height, width)

    def pil(self) -> Image.Image:
        """The image; see `upright`. Raises ValueError, with one line, if it cannot be read."""
        with self._opened() as image:
            return upright(image)

    @cached_property
    def size(self) -> tuple[int, int]:
        """(height, width) of the image; only the head of its file is read, but for TIFF. Raises ValueError as `pil`
        does.
        """
        with self._opened() as image:
            if image.format == "TIFF":  # which PIL turns as it reads the pixels
                image = ImageOps.exif_transpose(image)
                return image.height, image.width
            # the method of PIL's PNGs would read the pixels in search of it
            turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            return (image.width, image.height) if turned else (image.height, image.width)

    def thumbnail(self, side: int) -> NDArray[np.uint8]:
        """[h, w, 3] of the image, reduced to at most `side` pixels. Raises ValueError as `pil` does."""
        image = self.pil()
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        return np.asarray(image)

    @contextmanager
    def _opened(self) -> "Iterator[Image.Image]":
        """The image as PIL opens it; what PIL raises in the block is a ValueError with one line."""
        file = self._file(self.source())
        try:
            with Image.open(file) as image:
                if image.format == "EPS":
                    raise ValueError("EPS is a program, and is not run")
                yield image
        except UnidentifiedImageError:
            is_empty = self.file_size == 0
            reason = "its file is empty" if is_empty else "its format is unknown"
            raise ValueError(f"{self.where}: the image cannot be read: {reason}") from None
        except (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            # of damaged files: PIL raises SyntaxError for a PNG, RuntimeError for an AVIF, ValueError for a PPM
            raise self._unreadable(error) from None

    @cached_property
    def digest(self) -> str:
        """A name of the image by its pixels. Raises ValueError as `pil` does."""
        if self.count > 1:
            return hashlib.sha256(" ".join(part.digest for part in self.parts).encode()).hexdigest()
        image = self.pil()
        return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()

    def encoded(self) -> bytes:
        """The image's file. Raises ValueError, with one line, where there is none."""
        file = self._file(self.source())
        try:
            return file.read_bytes() if isinstance(file, Path) else file.getvalue()
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    @cached_property
    def file_size(self) -> int:
        """Bytes of the image's file. Raises ValueError, with one line, where there is none."""
        if self.count > 1:
            return sum(part.file_size for part in self.parts)
        file = self._file(self.source())
        try:
            return file.stat().st_size if isinstance(file, Path) else len(file.getvalue())
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> ValueError:
        """The error of an image's file in one line."""
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename is not None:
            reason = f"{error.strerror}: {cut(str(error.filename))!r}"
        return ValueError(f"{self.where}: the image cannot be read: {reason}")

    def _file(self, value: Any) -> Path | BytesIO:
        """The argument for Image.open."""
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict) and value and value.keys() <= {"bytes", "path"}:
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return BytesIO(value)
        if isinstance(value, str) and value:
            if data := _DATA.match(value):
                return BytesIO(self._decoded(value[data.end() :]))
            value = value.removeprefix("file://")
            if _ADDRESS.match(value):
                raise ValueError(
                    f"{self.where}: {cut(value)!r} is an address, and nothing is downloaded; expected {FORMS}"
                )
            return self.folder / value
        form = f"a list of {len(value)}" if isinstance(value, list) else f"of type {type(value).__name__}"
        if isinstance(value, dict):
            form = f"an object with {', '.join(map(str, value)) or 'nothing'}"
        form = "empty" if value in ("", None) else form
        raise ValueError(f"{self.where} is {form}; expected {FORMS}")

    def _decoded(self, text: str) -> bytes:
        """The file that stands in base64."""
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise ValueError(f"{self.where}: the image is not in base64: {error}") from None


def in_memory(value: Any) -> Any:
    """The source of a Picture whose value is in memory: `partial(in_memory, value)` can be sent to other ranks."""
    return value


def upright(image: Image.Image) -> Image.Image:
    """The image in RGB, rotated as its EXIF data say, on white where it is transparent; of an animation the first
    frame. Raises ValueError for pixels that are 32-bit numbers beyond 0..255.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # of whose 65536 grays PIL makes all but the 256 darkest white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        # the colors of transparent pixels are whatever a program has left there
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if low < 0 or not (high == 0 or 1 < high <= 255):  # PIL would cut them off
            raise ValueError(
                f"its pixels are 32-bit numbers from {low:g} to {high:g}; expected 0 to 255, or 16 bits in PNG or TIFF"
            )
    return image.convert("RGB")


def to_size(image: Image.Image, height: int, width: int) -> "Tensor":
    """An RGB image as [3, H, W] float32 in 0..1: scaled to cover the size, and center-cropped."""
    scale = max(height / image.height, width / image.width)
    if scale != 1:
        # rounding must not leave a side one pixel short
        scaled_width = max(round(image.width * scale), width)
        scaled_height = max(round(image.height * scale), height)
        image = image.resize((scaled_width, scaled_height), Image.Resampling.LANCZOS)
    import torch  # reading only the files does not need it

    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def to_uint8(images: "Tensor") -> "Tensor":
    """Images [B, 3, H, W] in 0..1 -> uint8 [B, 3, H, W], as a PNG of the image would hold them."""
    return images.mul(255).round().clamp(0, 255).byte()


def raw_file(image: "Tensor") -> bytes:
    """An image, uint8 [3, H, W], as a PPM file: its pixels, not compressed, behind a head with their size."""
    height, width = image.shape[1:]
    return b"P6 %d %d 255\n" % (width, height) + image.permute(1, 2, 0).contiguous().numpy().tobytes()


def decoded(file: bytes, where: str) -> Image.Image:
    """The image of a file, upright and in RGB. Raises ValueError, with one line that begins with `where`, if it cannot
    be read.
    """
    return Picture(lambda: file, Path(), where).pil()


def pil_image(image: "Tensor") -> Image.Image:
    """An image, uint8 [3, H, W], as a PIL image."""
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
