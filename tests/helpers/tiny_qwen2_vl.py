"""Folders of a tiny Qwen2-VL and Qwen2.5-VL without weights, as base models of HPSv3, EditReward and VideoReward."""

from pathlib import Path

from tests.helpers.tiny import byte_alphabet

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
# equivalent to the template of Qwen2-VL-Instruct for one turn with one image and one text
QWEN_CHAT = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

VISION = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "fullatt_block_indexes": [1],
    },
}


def tiny_qwen2_vl(folder: Path, kind: str = "qwen2_vl", videos: bool = False) -> Path:
    """Save configuration and tokenizer, one token per byte; `kind` may also be qwen2_5_vl. `videos`: has a video token."""
    from transformers import CONFIG_MAPPING, Qwen2Tokenizer

    special = [*SPECIAL, "<|video_pad|>"] if videos else SPECIAL
    tokens = [*byte_alphabet(), *special]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        extra_special_tokens=special[1:],
        padding_side="left",  # as Qwen's own
        chat_template=QWEN_CHAT,
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = CONFIG_MAPPING[kind](
        text_config={**text, **ids, "num_key_value_heads": 1, "rope_parameters": rope, "vocab_size": len(tokens) + 40},
        vision_config=VISION[kind],
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=len(tokens) - 1 if videos else len(tokens) + 30,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
