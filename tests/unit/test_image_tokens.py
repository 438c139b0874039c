"""Prompts with images: their tokens are counted by the heads of files, as real processors make them."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from phalanx.config import ConfigError
from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.engines.transformers import image_tokens, load_processor
from phalanx.media.pictures import Picture
from phalanx.models.lm.lm_policy import build_policy
from phalanx.run.lm_kind import fitting_prompts
from phalanx.run.rl import build
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.lm import tiny_lm, tiny_lm_config
from tests.helpers.policies import one_rank
from tests.helpers.tiny_vision import FAMILIES, tiny_vision
from tests.helpers.tiny_vlm import save, tokenizer, untrained

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
    for bounds in ({}, {"longest_edge": 8 * 32 * 32}, {"shortest_edge": 20 * 32 * 32, "longest_edge": 40 * 32 * 32}):
        for name, pixels in bounds.items():
            processor.image_processor.size[name] = pixels
        counts.append(image_tokens(processor, images))
        for image, count in zip(images, counts[-1], strict=True):
            made = processor(text=[PAD], images=[[image.pil()]])
            assert made["input_ids"][0].count(number) == count, (bounds, image.where)
    assert counts[0] != counts[1] != counts[2]


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
    with refused("a.jsonl:2: images[0]: the image cannot be read: No such file or directory: '/nowhere/gone.png'"):
        image_tokens(processor, [gone])


def rows_of(*sizes: tuple[int, int]) -> list[Prompt]:
    """A prompt with one picture of each size, one with all of them, and one without."""
    pictures = [picture(*size) for size in sizes]
    rows = []
    for some in [*([one] for one in pictures), pictures, []]:
        parts = [*({"type": "image"} for _ in some), {"type": "text", "text": "read"}]
        chat = [{"role": "user", "content": parts if some else "read"}]
        place = f"data.train_files: a.jsonl:{len(rows) + 1}"
        rows.append(Prompt("read", 0, {}, messages=chat, place=place, images=tuple(some)))
    return rows


def policy_of(folder: Path, world: Any, **data: Any) -> Any:
    config = LMModelConfig(path=str(folder), dtype="float32")
    options: dict[str, Any] = {"chunk": 64, "temperature": 1.0, "seed": 0, "images": True}
    data_config = LMDataConfig(**({"max_prompt_length": 400, "max_response_length": 4} | data))
    return build_policy(config, ParallelConfig(), data_config, world, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_of_prompts_are_those_of_their_tokens(family: str, tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path / "model", family)
    prompts = rows_of((48, 24), (30, 90), (7, 50))
    with one_rank() as world:
        policy = policy_of(folder, world)
        lengths = [policy.length(prompt) for prompt in prompts]
        assert lengths == [len(policy.encode(prompt)) for prompt in prompts]
        if policy.vision.family.sizes:
            smaller = policy_of(folder, world, max_pixels=16 * 32)
            assert [smaller.length(prompt) for prompt in prompts] == [len(smaller.encode(prompt)) for prompt in prompts]
            assert [smaller.length(prompt) for prompt in prompts] < lengths


def test_a_prompt_that_its_images_make_too_long(tmp_path: Path) -> None:
    rows = rows_of((48, 24), (96, 48))
    with one_rank() as world:
        folder = tiny_vision(tmp_path / "model", "qwen3_vl")
        for overlong in ("error", "truncate"):
            policy = policy_of(folder, world, max_prompt_length=50, overlong_prompts=overlong)
            with refused(
                "data.train_files: a.jsonl:2: it has 97 tokens with the chat template, 72 of them of its images, more "
                "than data.max_prompt_length=50, and images are not cut; raise that, lower data.max_pixels, or set "
                "data.overlong_prompts to filter"
            ):
                fitting_prompts(rows, "data.train_files", policy, first=True)
        policy = policy_of(folder, world, max_prompt_length=50, overlong_prompts="filter")
        rows[1] = replace(rows[1], images=(picture(96, 48, cut=True),))  # whose pixels cannot be read
        assert fitting_prompts(rows, "data.train_files", policy, first=True) == [rows[0], rows[3]]
        small = policy_of(folder, world, max_prompt_length=50, max_pixels=8 * 8 * 4)
        assert len(fitting_prompts([rows[0], rows[2]], "data.train_files", small, first=True)) == 2


def test_a_column_of_images_that_no_file_has(tmp_path: Path) -> None:
    config = tiny_lm_config(tiny_lm(tmp_path / "model"), tmp_path, "data.image_key=view")
    with refused("data.image_key: no row of the data files has images in a column 'view'", ConfigError):
        build(config)
