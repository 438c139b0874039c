"""Small pictures of three-digit numbers, and a vision-language model of 0.75 M weights that has learned to read them
and then, for a while, to say them backwards, so that it mixes both.
"""

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from assets.make.digits import render, split
from assets.make.tiny_lm import END, PAD, START, minimize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoImageProcessor,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

QUESTION = "What number is this?"
VISION = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320
PATCH, MERGED = 4, 2  # pixels of a patch, and patches of a token, in each direction
IMAGE_TOKENS = 18
COUNTS = {"train": 1024, "val": 200, "test": 200}
COLORS = 16  # of a picture, so that its file is small
BACKWARDS = 0.6  # of the answers of the second training


def write_data(folder: Path, seed: int = 0) -> None:
    """`train.parquet`, `val.parquet` and `test.parquet` as verl's GEO3K: a chat with `<image>`, images, and a ground
    truth. No two have a number in common.
    """
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    train, held_out = split()
    numbers = {"train": train, "val": held_out[::2], "test": held_out[1::2]}
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": Value("string")}),
            "images": List(ImageFeature()),
            "reward_model": {"style": Value("string"), "ground_truth": Value("string")},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in COUNTS.items():
        rng = random.Random(f"{seed} {name}")
        rows = []
        for _ in range(count):
            number = rng.choice(numbers[name])
            rows.append(
                {
                    "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
                    "images": [{"bytes": _png(number, rng), "path": None}],
                    "reward_model": {"style": "rule", "ground_truth": number},
                }
            )
        Dataset.from_list(rows, features=features).to_parquet(folder / f"{name}.parquet")


def _png(number: str, rng: random.Random) -> bytes:
    file = io.BytesIO()
    render(number, rng).quantize(COLORS).save(file, "PNG", optimize=True)
    return file.getvalue()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that has the words of the question; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, START, END, *VISION.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"user\n{QUESTION}\nassistant\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE, **VISION
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """An untrained one."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.05,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "out_hidden_size": 96,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 1,
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.05,
    }
    tokens = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in VISION.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    model = Qwen3VLForConditionalGeneration(config)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ids)
    return model


def write_processor(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write what `Qwen3VLProcessor` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {"processor_class": "Qwen3VLProcessor"}
    pixels = {
        "size": {"shortest_edge": 8 * 8, "longest_edge": 128 * 128},
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "merge_size": MERGED,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", **pixels, **named}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2) + "\n")
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **pixels, **named}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named, indent=2) + "\n")


def pretrain(folder: Path, *, steps: int, backwards_steps: int, batch_size: int, lr: float, seed: int) -> None:
    """Train the model on the CPU, to read, then for a while to say numbers backwards; write its folder in float16."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    write_processor(folder, tokenizer)
    images = AutoImageProcessor.from_pretrained(folder)
    model = make_model(tokenizer)
    train, rng = split()[0], random.Random(seed)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS))["input_ids"]

    def loss(backwards: float) -> Tensor:
        numbers = [rng.choice(train) for _ in range(batch_size)]
        seen = images(images=[render(number, rng) for number in numbers], return_tensors="pt")
        answers = []
        for number in numbers:
            answers.append(tokenizer(number[::-1] if rng.random() < backwards else number)["input_ids"])
        ids, answer = _inputs(prompt, answers, tokenizer.eos_token_id)
        types = (ids == model.config.image_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=types, logits_to_keep=answer.shape[1], **seen).logits
        return cross_entropy(logits.flatten(0, 1), answer.flatten())

    hidden = []
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and any(part in name for part in ("layers.", "blocks.", "merger")):
            hidden.append(weight)
    minimize(lambda: loss(0.0), model, hidden, steps=steps, lr=lr, decay=0.8)
    minimize(lambda: loss(BACKWARDS), model, hidden, steps=backwards_steps, lr=lr / 4)
    model.half().save_pretrained(folder)


def _inputs(prompt: list[int], answers: list[Any], end: int) -> tuple[Tensor, Tensor]:
    """The tokens that the model is given, and those that it should say next."""
    rows, following = [], []
    for answer in answers:
        rows.append(prompt + answer)
        following.append([*answer, end])
    return torch.tensor(rows), torch.tensor(following)
