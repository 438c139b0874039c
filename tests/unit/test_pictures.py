"""Images as files between ranks."""

import base64
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from phalanx.media.pictures import Picture, decoded, in_memory, pil_image, raw_file


def test_a_sampled_image_is_the_same_behind_its_file() -> None:
    image = torch.randint(0, 256, (3, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image[:, 0, 0] = 10  # a line feed, which also ends the header of the file
    read, plain = decoded(raw_file(image), "here"), pil_image(image)
    assert (read.mode, read.size, read.tobytes()) == (plain.mode, plain.size, plain.tobytes())


def test_an_image_of_the_data_is_as_upright_behind_its_file(tmp_path: Path) -> None:
    turned = Image.new("RGB", (6, 4), "red")
    turned.putpixel((0, 0), (0, 0, 255))
    turned.getexif()[274] = 6
    turned.save(tmp_path / "a.png", exif=turned.getexif())
    picture = Picture(lambda: "a.png", tmp_path, "row 0")
    read = decoded(picture.encoded(), "here")
    assert (read.size, read.tobytes()) == (picture.pil().size, picture.pil().tobytes()) and read.size == (4, 6)


def test_a_file_that_is_no_image_is_told() -> None:
    file = BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    with pytest.raises(ValueError, match=r"^here: the image cannot be read: "):
        decoded(file.getvalue()[:200], "here")
    with pytest.raises(ValueError, match=r"^here: the image cannot be read: its format is unknown$"):
        decoded(b"no image", "here")


def stored(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_what_is_transparent_is_white() -> None:
    """The colours of transparent pixels in the file are not visible in any viewer."""
    mask = Image.new("L", (4, 2), 255)
    mask.putpixel((0, 0), 0)
    red = Image.new("RGB", (4, 2), "red")
    red.putalpha(mask)
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.putpixel((0, 0), 0)
    gray = Image.new("L", (4, 2), 76)
    gray.putalpha(mask)
    for file in (stored(red), stored(palette, transparency=0), stored(palette, "GIF", transparency=0), stored(gray)):
        read = decoded(file, "here")
        assert (read.mode, read.getpixel((0, 0))) == ("RGB", (255, 255, 255))
        assert read.getpixel((1, 0)) in ((255, 0, 0), (76, 76, 76))
    red.putalpha(51)  # a fifth
    assert decoded(stored(red), "here").getpixel((0, 0)) == (255, 204, 204)


def test_pictures_of_other_modes() -> None:
    noise = Image.effect_noise((8, 4), 50)
    for mode in ("1", "L", "P", "CMYK"):
        image = noise.convert("RGB").convert(mode)
        file = stored(image, "TIFF")
        assert decoded(file, "here").tobytes() == image.convert("RGB").tobytes()
    film = stored(noise.convert("RGB"), "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 4))], lossless=True)
    assert decoded(film, "here").tobytes() == noise.convert("RGB").tobytes()  # the first frame
    deep = Image.fromarray(np.full((4, 8), 200 * 256 + 17, np.uint16))
    assert decoded(stored(deep), "here").getpixel((0, 0)) == (200, 200, 200)
    assert decoded(stored(deep, transparency=5), "here").getpixel((0, 0)) == (200, 200, 200)
    for dtype, value in ((np.int32, 300), (np.float32, 0.5)):
        with pytest.raises(ValueError, match=r"^here: the image cannot be read: its pixels are 32-bit numbers from"):
            decoded(stored(Image.fromarray(np.full((4, 8), value, dtype)), "TIFF"), "here")
    for value in (0, 200):
        within = stored(Image.fromarray(np.full((4, 8), value, np.int32)), "TIFF")
        assert decoded(within, "here").getpixel((0, 0)) == (value,) * 3


def test_addresses(tmp_path: Path) -> None:
    file = stored(Image.new("RGB", (4, 2), "red"))
    (tmp_path / "a.png").write_bytes(file)
    for value in (f"data:image/png;base64,{base64.b64encode(file).decode()}", f"file://{tmp_path}/a.png"):
        assert Picture(partial(in_memory, value), tmp_path, "row 0").size == (2, 4)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 24\n%%EndComments\nshowpage\n"
    forms = "; expected the bytes of an image file, its path beside the data file, or {bytes, path}"
    wrong: list[tuple[Any, str]] = [
        ("https://a.b/c.png", f": 'https://a.b/c.png' is a URL, and nothing is downloaded{forms}"),
        ("data:image/png;base64,!", ": the image is not in base64: Only base64 data is allowed"),
        ("data:image/png;base64,", ": the image cannot be read: its file is empty"),
        (eps, ": the image cannot be read: EPS is a program, and is not run"),
        ("no.png", f": the image cannot be read: No such file or directory: '{tmp_path}/no.png'"),
        ({"bytes": None, "path": None}, f" is empty{forms}"),
        ({"url": "a"}, f" is an object with url{forms}"),
        ("", f" is empty{forms}"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError) as error:
            Picture(partial(in_memory, value), tmp_path, "row 0").pil()
        assert str(error.value) == f"row 0{message}"
