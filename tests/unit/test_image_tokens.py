"""Prompts with images: their tokens are counted by the heads of files, as real processors make them."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from phalanx.engines.transformers import image_tokens, load_processor
from phalanx.media.pictures import Picture
from tests.checks import refused
from tests.tiny_vlm import save, tokenizer, untrained

PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vlm")
    words = tokenizer()
    save(path, untrained(words), words)
    return path


def picture(width: int, height: int, orientation: int = 1, cut: bool = False) -> Picture:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    Image.effect_noise((width, height), 9).convert("RGB").save(file, "PNG", exif=exif)
    data = file.getvalue()
    return Picture(lambda: data[: len(data) // 2] if cut else data, Path(), f"a.jsonl:1: {width} x {height}")


def test_as_many_tokens_as_the_processor_makes(folder: Path) -> None:
    processor = load_processor(str(folder))
    number = processor.tokenizer.convert_tokens_to_ids(PAD)
    images = [picture(48, 24), picture(300, 50), picture(300, 50, 6), picture(20, 333, 8), picture(7, 7)]
    counts = []
    for options in ({"max_pixels": 8 * 32 * 32}, {}, {"min_pixels": 20 * 32 * 32, "max_pixels": 40 * 32 * 32}):
        counts.append(image_tokens(processor, images, **options))
        for image, count in zip(images, counts[-1], strict=True):
            given = {"images_kwargs": options} if options else {}
            made = processor(text=[PAD], images=[[image.pil()]], **given)
            assert made["input_ids"][0].count(number) == count, (options, image.where)
    assert counts[0] != counts[1] != counts[2]  # and one call leaves none of its bounds to the next


def test_pixels_are_not_read(folder: Path) -> None:
    processor = load_processor(str(folder))
    image = picture(300, 50, cut=True)
    assert image_tokens(processor, [image]) == image_tokens(processor, [picture(300, 50)])
    with pytest.raises(ValueError, match="the image cannot be read"):
        image.pil()


def test_shapes_that_the_processor_refuses(folder: Path) -> None:
    processor = load_processor(str(folder))
    with pytest.raises(ValueError, match=r"^a.jsonl:1: 4000 x 4: absolute aspect ratio must be smaller than 200"):
        image_tokens(processor, [picture(4000, 4)])
    gone = Picture(lambda: "gone.png", Path("/nowhere"), "a.jsonl:2: images[0]")
    with refused(
        "a.jsonl:2: images[0]: the image cannot be read: [Errno 2] No such file or directory: '/nowhere/gone.png'"
    ):
        image_tokens(processor, [gone])
