"""A tiny Qwen3-VL of real classes that is taught in seconds to answer about simple pictures, so answers can be checked.

A picture is black except for some quarters in red, green or blue. Asked to read, the model names the color; asked for
grades, it answers 1 + the number of lit quarters.
"""

import json
import math
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from phalanx.engines.transformers import load_processor
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "[UNK]",
]
COLOURS = ("red", "green", "blue")
BLACK = "black"
LEARNT = 0.005  # mean loss per token of the answers; one wrong grade among the pictures costs ten times that
PICTURES = [(colour, lit) for colour in range(3) for lit in range(5)]
QUESTIONS = (VlmOcr.template, UnifiedReward.template)
SIZE = 32  # pixels of an image, which the model sees as one token
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PIXELS = {
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": SIZE * SIZE, "longest_edge": 16 * SIZE * SIZE},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def grades(grade: int) -> str:
    """The answer to the request for grades."""
    return f"Alignment Score (1-5): {grade}\nCoherence Score (1-5): {grade}\nStyle Score (1-5): 3"


def name(colour: int, lit: int) -> str:
    """The answer to the request for the text."""
    return COLOURS[colour] if lit else BLACK


def picture(colour: int, lit: int, size: int = SIZE) -> Tensor:
    """A black image [3, size, size] in 0..1 whose first `lit` quarters have color channel `colour`, 0..2."""
    image = torch.zeros(3, size, size)
    half = size // 2
    for quarter in range(lit):
        top, left = half * (quarter // 2), half * (quarter % 2)
        image[colour, top : top + half, left : left + half] = 1.0
    return image


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per question without its caption, which speeds up teaching, and otherwise one per word
    or white space. Its words are those of the judges and the answers.
    """
    text = "\n".join(
        [CHAT, VlmOcr.template, UnifiedReward.template.format(prompt=""), *COLOURS, BLACK, *"12345", grades(1)]
    )
    text += " system user assistant "
    asked = "|".join(re.escape(part) for part in (VlmOcr.template, *UnifiedReward.template.split("{prompt}")))
    split = pre_tokenizers.Split(Regex(rf"{asked}|\w+ Score \(1-5\): |\s+|[\[\]{{}}]"), "isolated")
    words = dict.fromkeys(piece for piece, _ in split.pre_tokenize_str(text) if piece not in SPECIAL)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = split
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="[UNK]",
        additional_special_tokens=SPECIAL[1:-1],
        chat_template=CHAT,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )


def untrained(words: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """The untrained model of 2 layers in float32; its 4 attention heads can be sharded."""
    number = {token: words.convert_tokens_to_ids(token) for token in SPECIAL}
    text = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "pad_token_id": number["<|endoftext|>"],
        "eos_token_id": number["<|im_end|>"],
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "in_channels": 3,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config)


def save(folder: Path, model: Qwen3VLForConditionalGeneration, words: PreTrainedTokenizerFast) -> None:
    """Save a model folder that transformers and vLLM load."""
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    image = {"image_processor_type": "Qwen2VLImageProcessor", **PIXELS}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    video = {"video_processor_type": "Qwen3VLVideoProcessor", **PIXELS}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    (folder / "chat_template.jinja").write_text(CHAT)
    names = folder / "tokenizer_config.json"
    names.write_text(json.dumps(json.loads(names.read_text()) | {"processor_class": "Qwen3VLProcessor"}))


def build(folder: Path, steps: int = 3000) -> None:
    """Teach the model in at most `steps` steps, and save it."""
    words = tokenizer()
    model = untrained(words)
    save(folder, model, words)
    teach(model, folder, steps)
    model.save_pretrained(folder)


def teach(model: Qwen3VLForConditionalGeneration, folder: Path, steps: int) -> None:
    """Train on all pictures, with the processor of `folder`, until both answers are learnt."""
    processor = load_processor(str(folder))
    pictures = [picture(colour, lit) for colour, lit in PICTURES]
    named = [name(colour, lit) for colour, lit in PICTURES]
    graded = [grades(1 + lit) for _, lit in PICTURES]
    batches = [examples(processor, VlmOcr.template, pictures, named)]
    for words in (1, 3, 5):  # words of a caption: unknown words, so that any caption works
        question = UnifiedReward.template.format(prompt=" ".join("x" * words))
        batches.append(examples(processor, question, pictures, graded))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = [math.inf] * len(batches)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        loss = model(**batches[step % len(batches)]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step % len(batches)] = loss.item()
        if max(losses) < LEARNT:
            return
    raise AssertionError(f"not learnt in {steps} steps: losses {losses}")


def examples(processor, question, images, answers):
    """A batch whose loss covers only the answers' tokens."""
    talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    head = processor.apply_chat_template(talk, add_generation_prompt=True)
    pictures = [(image * 255).round().byte() for image in images]
    texts = [head + answer + "<|im_end|>" for answer in answers]
    batch = processor(text=texts, images=pictures, return_tensors="pt", padding=True)
    prompt = processor(text=[head], images=pictures[:1], return_tensors="pt").input_ids.shape[1]
    labels = batch["input_ids"].clone()
    labels[:, :prompt] = -100
    labels[batch["attention_mask"] == 0] = -100
    return {**batch, "labels": labels}
