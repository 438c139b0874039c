"""A tiny Qwen-Image-Edit folder of real classes, and data for it."""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from phalanx.media.pictures import Picture, in_memory
from phalanx.types import Prompt
from phalanx.zoo.families.qwen_image_edit import ImageProcessor
from tests.helpers.pairs import png
from tests.helpers.tiny import (
    CHAT_TOKENS,
    byte_alphabet,
    byte_tokenizer,
    drawn_by,
    load_pipeline,
    qwen_encoder,
    save,
    tiny_qwen_image,
)

PREFIX_TOKENS = 64  # tokens of the template's prefix, which the pipeline drops
SPECIAL = [*CHAT_TOKENS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
INSTRUCTIONS = ["make it red", "x", "a wider sky, and two more trees", "no cat"]


def tokenizer(prefix: str, tokens: int) -> Qwen2Tokenizer:
    """Bytes, and merges for the words of a template's prefix, which has `tokens` tokens as with the real tokenizer."""
    split = Qwen2Tokenizer(vocab={c: i for i, c in enumerate(byte_alphabet())}, merges=[]).backend_tokenizer
    texts = [text for text in re.split(r"<\|im_\w+\|>", prefix) if text]
    pieces = [piece for text in texts for piece, _ in split.pre_tokenizer.pre_tokenize_str(text)]
    pieces.sort(key=lambda piece: piece[0] != "\u0120")  # merges of pieces that begin with a space go first
    merges: dict[tuple[str, str], None] = {}
    for piece in pieces:
        if set(piece) == {"\u0120"}:  # spaces, which the first of these merges turns into pairs
            merges |= {(piece[:i], piece[:i]): None for i in (1, 2, 4) if 2 * i <= len(piece)}
        else:
            merges |= {(piece[:i], piece[i]): None for i in range(1, len(piece))}
    made = byte_tokenizer(list(merges), SPECIAL, 4096)
    assert len(made(prefix).input_ids) == tokens
    return made


def text_encoder(words: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Two layers, 64 wide, and a vision tower of one layer."""
    with drawn_by(seed):
        return qwen_encoder(
            words,
            seed + 1,
            image_token_id=words.convert_tokens_to_ids("<|image_pad|>"),
            video_token_id=len(words) + 1,  # no video ever enters the encoder
            vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
            vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
        )


def tiny_qwen_image_edit(folder: Path, *, first: bool = False, zero_cond_t: bool = False, seed: int = 0) -> Path:
    """Save a tiny QwenImageEditPlusPipeline, or (`first`) the earlier QwenImageEditPipeline: as `tiny_qwen_image`, with
    a text encoder that reads images. `zero_cond_t`: tokens of the reference are at level 0, as in version 2511.
    """
    from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    base = load_pipeline(tiny_qwen_image(folder.with_name(f"{folder.name}_base"), seed))
    kind = QwenImageEditPipeline if first else QwenImageEditPlusPipeline
    parts = {"transformer": base.transformer, "vae": base.vae, "scheduler": base.scheduler}
    empty = kind(text_encoder=None, tokenizer=None, processor=None, **parts)
    words = tokenizer(empty.prompt_template_encode.split("<|vision_start|>")[0].split("{}")[0], PREFIX_TOKENS)
    pixels = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 1280})
    parts |= {"text_encoder": text_encoder(words, seed + 10), "processor": ImageProcessor(pixels, words)}
    save(kind(tokenizer=words, **parts), folder)
    if zero_cond_t:
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"zero_cond_t": True}))
    return folder


def load_edit_pipeline(folder: Path):
    """Load a folder with stock diffusers in float32."""
    return load_pipeline(folder, processor=ImageProcessor.from_pretrained(folder, subfolder="processor"))


def photo(number: int, width: int = 96, height: int = 64) -> Image.Image:
    """A picture that depends on `number`: noise, smooth enough to survive scaling."""
    rng = random.Random(number)
    return Image.frombytes("RGB", (6, 4), rng.randbytes(72)).resize((width, height), Image.Resampling.BICUBIC)


def write_edits(folder: Path, count: int = len(INSTRUCTIONS), each: int = 1) -> Path:
    """Write a .jsonl file of instructions with a path, or a list of `each` paths, and the pictures next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, text in enumerate(INSTRUCTIONS[:count]):
        photo(i).save(folder / f"{i}.png")
        image: Any = f"{i}.png"
        if each > 1:
            image = [f"{(i + j) % count}.png" for j in range(each)]
        lines.append(json.dumps({"prompt": text, "image": image}))
    file = folder / "edits.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def edits(count: int = 3, each: int = 1) -> list[Prompt]:
    """Prompts of different lengths, each with one picture or `each` pictures; the second has a negative prompt."""

    def one(i: int) -> Prompt:
        if each > 1:
            files = [png(photo(10 * i + j)) for j in range(each)]
            meta = {"image": Picture(partial(in_memory, files), Path(), f"edits {i}")}
            return Prompt(INSTRUCTIONS[i], i, meta, negative="blur" if i == 1 else None)
        picture = Picture(lambda: b"", Path(), f"edits {i}")
        object.__setattr__(picture, "pil", lambda: photo(i))
        return Prompt(INSTRUCTIONS[i], i, {"image": picture}, negative="blur" if i == 1 else None)

    return [one(i) for i in range(count)]
