"""Tiny untrained vision-language models of five families, with real classes, processors and chat templates."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from tests.helpers.tiny import byte_tokenizer

QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
GEMMA_TOKENS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
SMOL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
PARTS = (
    "{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{{% for c in m.content %}}"
    "{{% if c.type == 'image' %}}{image}{{% elif c.type == 'text' %}}{{{{ c.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
)
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + PARTS.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    + PARTS.format(image="<start_of_image>")
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SMOL_CHAT = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}:"
    + PARTS.format(image="<image>")
    + "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
VISION = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.1}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}  # 8 pixels per token
TILES = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}  # 4 tokens per 16 pixels
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# model, tokenizer, and the settings of the image processor and of the whole processor
Made = tuple[Any, Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """A family, and its number of image tokens for a picture of 24 x 48 pixels."""

    make: Callable[[], Made]
    image_tokens: int


def tiny_vision(folder: Path, family: str) -> Path:
    """Write the folder of a family's model as `AutoModelForImageTextToText` and `load_processor` load it: 0.1 M weights
    in float32, one token per byte, and prompts of about 60 tokens.
    """
    torch.manual_seed(1)  # with this seed, the greedy answers of all families depend on their prompts
    model, tokenizer, pixels, whole = FAMILIES[family].make()
    with torch.no_grad():  # makes some answers end early
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 3
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = {"processor_class": whole["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | named))
    (folder / "processor_config.json").write_text(json.dumps(whole))
    if "video_pad" in str(tokenizer.all_special_tokens):
        video = {"video_processor_type": "Qwen2VLVideoProcessor", **_qwen_pixels(), **named}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named))
    return folder


def picture(width: int = 48, height: int = 24, seed: int = 0) -> Image.Image:
    """An image of random pixels."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def shown_prompts(folder: Path, name: str) -> Path:
    """Write a data file of 8 prompts: every other one has no image, and the others have one or two of several sizes."""
    sizes = ((48, 24), (64, 32), (40, 24), (48, 48))
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(8):
        files = [f"{i}_{j}.png" for j in range((1, 0, 2, 0)[i % 4])]
        for j, file in enumerate(files):
            picture(*sizes[(i + j) % 4], seed=10 * i + j).save(folder / file)
        rows.append({"prompt": "<image>" * len(files) + "read" + " it" * (i % 3), "images": files})
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def chat(text: str, images: int = 1) -> list[dict[str, Any]]:
    """A user's message: images, then a text."""
    return [{"role": "user", "content": [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]}]


def _tokenizer(tokens: tuple[str, ...], template: str, eos: str, **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer([], list(tokens)).backend_tokenizer,
        eos_token=eos,
        pad_token=tokens[0],
        extra_special_tokens=list(tokens[1:]),
        chat_template=template,
        padding_side="left",
        **names,
    )


def _qwen_pixels() -> dict[str, Any]:
    size = {"shortest_edge": 8 * 8, "longest_edge": 128 * 128}
    return {"size": size, "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, **HALVES}


def _qwen(family: str, vision: dict[str, Any], interleaved: bool = False) -> Made:
    tokenizer = _tokenizer(
        QWEN_TOKENS,
        QWEN_CHAT,
        "<|im_end|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    number = dict(zip(QWEN_TOKENS, tokenizer.convert_tokens_to_ids(list(QWEN_TOKENS)), strict=True))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if interleaved:
        rope["mrope_interleaved"] = True
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**TEXT, **ids, "vocab_size": len(tokenizer), "rope_parameters": rope}
    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config={**PATCHES, "depth": 2, "num_heads": 2, "initializer_range": 0.1, **vision},
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    pixels = {"image_processor_type": "Qwen2VLImageProcessor", **_qwen_pixels()}
    return model, tokenizer, pixels, {"processor_class": f"{family}Processor"}


def _qwen2_vl() -> Made:
    return _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2})


def _qwen2_5_vl() -> Made:
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen("Qwen2_5_VL", {**VISION, **windows, "out_hidden_size": 64})


def _qwen3_vl() -> Made:
    deep = {"num_position_embeddings": 144, "deepstack_visual_indexes": [0]}
    return _qwen("Qwen3VL", {**VISION, **deep, "out_hidden_size": 64}, interleaved=True)


def _gemma3() -> Made:
    images = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(GEMMA_TOKENS, GEMMA_CHAT, "<end_of_turn>", bos_token="<bos>", **images)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "query_pre_attn_scalar": 32}
    config = transformers.Gemma3Config(
        text_config={**TEXT, **ids, **layers, "vocab_size": len(tokenizer)},
        vision_config={**VISION, **TILES, "vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids(images["boi_token"]),
        eoi_token_index=tokenizer.convert_tokens_to_ids(images["eoi_token"]),
        image_token_index=tokenizer.convert_tokens_to_ids(images["image_token"]),
        tie_word_embeddings=True,
        **ids,
    )
    pixels = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}, **HALVES}
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # zeros by default
    return model, tokenizer, pixels, whole


def _smolvlm() -> Made:
    """With the processor of the first generation of SmolVLM: that of the second needs torchvision and num2words."""
    tokenizer = _tokenizer(SMOL_TOKENS, SMOL_CHAT, "<end_of_utterance>", image_token="<image>")
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT, **ids, "vocab_size": len(tokenizer)},
        vision_config={**VISION, **TILES},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    edges = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True}
    pixels = {"image_processor_type": "Idefics3ImageProcessor", **edges, **HALVES}
    whole = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    return transformers.SmolVLMForConditionalGeneration(config), tokenizer, pixels, whole


FAMILIES = {
    "qwen2_vl": Family(_qwen2_vl, image_tokens=18),
    "qwen2_5_vl": Family(_qwen2_5_vl, image_tokens=18),
    "qwen3_vl": Family(_qwen3_vl, image_tokens=18),
    "smolvlm": Family(_smolvlm, image_tokens=12),
    "gemma3": Family(_gemma3, image_tokens=4),
}
