"""Reward: ImageReward (arXiv 2304.05977), a BLIP whose text tower attends to the image, and an MLP on its first token.

As in the code of github.com/THUDM/ImageReward, prompts are truncated to 35 tokens, images are resized and cropped to
the vision tower's square input, and the score is the MLP's output, normalised by its mean and standard deviation. The
published weights have the names of BLIP's own code, which are mapped to those of transformers.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Pixels, load_part, load_whole, openai_colours
from phalanx.zoo.rewards.image.aesthetic import linear_layers, read_published

_MEAN, _STD = 0.16717362830052426, 1.0333394966054072  # of the MLP's output, over the authors' training data
_MAX_TOKENS = 35
_HEAD_WIDTH = 64  # of all attention heads in BLIP
_VISION = "blip.visual_encoder."
_TEXT = "blip.text_encoder."
_MLP = "mlp."
_NAMES = {  # published names of weights of the vision tower -> those of transformers
    r"patch_embed\.proj\.": "embeddings.patch_embedding.",
    r"cls_token": "embeddings.class_embedding",
    r"pos_embed": "embeddings.position_embedding",
    r"norm\.": "post_layernorm.",
    r"blocks\.(\d+)\.norm([12])\.": r"encoder.layers.\1.layer_norm\2.",
    r"blocks\.(\d+)\.attn\.qkv\.": r"encoder.layers.\1.self_attn.qkv.",
    r"blocks\.(\d+)\.attn\.proj\.": r"encoder.layers.\1.self_attn.projection.",
    r"blocks\.(\d+)\.mlp\.": r"encoder.layers.\1.mlp.",
}
_EXPECTED = "expected the weights of THUDM/ImageReward"


class ImageReward(DifferentiableReward):
    """`model`: the published weights as a .safetensors file (or the folder of one); `tokenizer`: folder or hub id."""

    def __init__(self, model: str, tokenizer: str = "google-bert/bert-base-uncased", device: str = "cpu") -> None:
        from transformers import AutoTokenizer

        where = f"model={model!r}"
        state = read_published(model, where)
        vision = {_vision_name(name): value for name, value in _prefixed_weights(state, _VISION).items()}
        text = _prefixed_weights(state, _TEXT)
        text.pop("embeddings.position_ids", None)  # the numbers 0, 1, 2, ...
        self._layers = linear_layers(_prefixed_weights(state, _MLP), where).to(device)
        self._vision, edge = _vision_tower(vision, where)
        self._text = _text_tower(text, vision, where)
        self._vision.to(device)
        self._text.to(device)
        self._tokenizer = load_part(AutoTokenizer, tokenizer, "tokenizer", "BERT's tokenizer")
        rows = len(text["embeddings.word_embeddings.weight"])
        if not 2 < len(self._tokenizer) <= rows or self._tokenizer.cls_token_id is None:
            # transformers silently makes an empty tokenizer if the folder has none
            raise ValueError(
                f"tokenizer={tokenizer!r} has {len(self._tokenizer)} tokens, and the model embeds {rows}; expected "
                "the tokenizer of bert-base-uncased"
            )
        self._device = torch.device(device)
        self._pixels = Pixels(edge, (edge, edge), (edge, edge), *openai_colours(device))

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B], about -2..2, of images [B, 3, H, W] in 0..1."""
        tokens = self._tokenizer(
            prompts, padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        patches = self._vision(self._pixels(images.to(self._device))).last_hidden_state  # [B, patches + 1, D]
        hidden = self._text(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, encoder_hidden_states=patches
        ).last_hidden_state
        scores: Tensor = self._layers(hidden[:, 0])  # [B, 1]
        return (scores.squeeze(-1) - _MEAN) / _STD


def _prefixed_weights(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights under a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _vision_name(name: str) -> str:
    for published, ours in _NAMES.items():
        if re.match(published, name):
            return re.sub(f"^{published}", ours, name)
    return name  # an unknown name, which loading will report


def _vision_tower(state: dict[str, Tensor], where: str) -> tuple[nn.Module, int]:
    """BLIP's vision tower, with its size inferred from the weights, and the edge of its square input in pixels."""
    from transformers import BlipVisionConfig, BlipVisionModel

    patches = _find_weight(state, "embeddings.patch_embedding.weight", where)
    positions = _find_weight(state, "embeddings.position_embedding", where)
    width, _, side, _ = patches.shape
    edge = side * round((positions.shape[1] - 1) ** 0.5)
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=len(_find_weight(state, "encoder.layers.0.mlp.fc1.weight", where)),
        num_hidden_layers=_count_layers(state, "encoder.layers"),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=edge,
        patch_size=side,
        layer_norm_eps=1e-6,
    )
    return load_whole(BlipVisionModel(config), state, f"{where} has other weights", _EXPECTED), edge


def _text_tower(state: dict[str, Tensor], vision: dict[str, Tensor], where: str) -> nn.Module:
    """BLIP's text tower with cross-attention to the image, with its size inferred from the weights."""
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    words = _find_weight(state, "embeddings.word_embeddings.weight", where)
    config = BlipTextConfig(
        vocab_size=len(words),
        hidden_size=words.shape[1],
        encoder_hidden_size=len(vision["post_layernorm.weight"]),
        intermediate_size=len(_find_weight(state, "encoder.layer.0.intermediate.dense.weight", where)),
        num_hidden_layers=_count_layers(state, "encoder.layer"),
        num_attention_heads=words.shape[1] // _HEAD_WIDTH,
        max_position_embeddings=len(_find_weight(state, "embeddings.position_embeddings.weight", where)),
    )
    tower = BlipTextModel(config, add_pooling_layer=False)
    return load_whole(tower, state, f"{where} has other weights", _EXPECTED)


def _count_layers(state: dict[str, Tensor], prefix: str) -> int:
    return len({name.partition(".")[0] for name in _prefixed_weights(state, f"{prefix}.")})


def _find_weight(state: dict[str, Tensor], name: str, where: str) -> Tensor:
    if name not in state:
        raise ValueError(f"{where} has no weights of BLIP's {name}; {_EXPECTED}")
    return state[name]
