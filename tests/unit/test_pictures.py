"""Images as files between ranks."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from phalanx.media.pictures import Picture, decoded, pil_image, raw_file


def test_a_sampled_image_is_the_same_behind_its_file() -> None:
    image = torch.randint(0, 256, (3, 5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    image[:, 0, 0] = 10  # a line feed, which ends the head of the file
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
