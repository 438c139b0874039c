"""ImageReward at tiny size with random weights, against BLIP in torch's own layers and in those of transformers' BERT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.unit.test_rewards_clip import build, error_of, pil, random_images, score, with_gradient

WIDTH, PATCH, EDGE, LAYERS = 128, 16, 48, 2
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", "two", "dogs", "##s", ",", "one", "of"]
PROMPTS = ["a red cat", "two dogs, one of cats", "a red cat " * 20]
TYPES = "blip.text_encoder.embeddings.token_type_embeddings.weight"  # BERT's, which BLIP lacks
MLP = {"0": 1024, "2": 128, "4": 64, "6": 16, "7": 1}


class Attention(nn.Module):
    """timm's: one matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, WIDTH // 64, 64)).permute(2, 0, 3, 1, 4)
        return self.proj(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](torch.nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, PATCH, PATCH)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.empty(1, (EDGE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Published(nn.Module):
    """The names of the published weights. BLIP's text tower is a copy of BERT with attention to another sequence."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        bert = BertConfig(
            vocab_size=len(WORDS) + 2, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=WIDTH // 64,
            intermediate_size=4 * WIDTH, max_position_embeddings=64, is_decoder=True, add_cross_attention=True,
            attn_implementation="eager",
        )  # fmt: skip
        self.blip = nn.ModuleDict(
            {"visual_encoder": Vision(), "text_encoder": BertModel(bert, add_pooling_layer=False)}
        )
        self.blip["vision_proj"] = nn.Linear(WIDTH, 8)  # not used by the reward
        widths = [WIDTH, *MLP.values()]
        layers = dict(zip(MLP, map(nn.Linear, widths, widths[1:]), strict=False))
        self.mlp = nn.ModuleDict({"layers": nn.ModuleDict(layers)})

    def forward(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        """Images of the tower's size and tokens without padding -> scores."""
        # a mask of four dimensions is used as it is: each token sees all of them
        visible = torch.zeros(len(tokens), 1, tokens.shape[1], tokens.shape[1])
        image = self.blip["visual_encoder"](pixels)
        out = self.blip["text_encoder"](tokens, attention_mask=visible, encoder_hidden_states=image, use_cache=False)
        x = out.last_hidden_state[:, 0]
        for layer in self.mlp["layers"].values():
            x = layer(x)
        return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072


@pytest.fixture(scope="module")
def published() -> Published:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Published().eval()
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name.lower()), std=0.1)
        torch.nn.init.zeros_(model.get_parameter(TYPES))
    return model


@pytest.fixture(scope="module")
def folder(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights under the published names, and a tokenizer of BERT."""
    from transformers import BertTokenizer

    folder = tmp_path_factory.mktemp("image_reward")
    state = {name: value.clone() for name, value in published.state_dict().items() if name != TYPES}
    save_file(
        state | {"blip.text_encoder.embeddings.position_ids": torch.arange(64)[None]},
        folder / "ImageReward.safetensors",
    )
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


def kwargs(folder: Path) -> dict[str, Any]:
    return {"model": folder / "ImageReward.safetensors", "tokenizer": folder}


@pytest.mark.parametrize("size", [(EDGE, EDGE), (60, 90)])
def test_scores_are_those_of_the_published_model(folder: Path, published: Published, size: tuple[int, int]) -> None:
    from transformers import BertTokenizer, CLIPImageProcessor

    images = random_images(*size)
    processor = CLIPImageProcessor(size={"shortest_edge": EDGE}, crop_size={"height": EDGE, "width": EDGE})
    pixels = processor(images=pil(images), return_tensors="pt").pixel_values
    tokenizer = BertTokenizer.from_pretrained(folder)
    expected = []
    for i, prompt in enumerate(PROMPTS):
        tokens = tokenizer(prompt, truncation=True, max_length=35, return_tensors="pt").input_ids
        with torch.no_grad():
            expected.append(float(published(pixels[i : i + 1], tokens)))
    assert len(tokenizer(PROMPTS[2]).input_ids) > 35
    actual = score("image_reward", images, PROMPTS, **kwargs(folder))
    tolerance = 1e-4 if size == (EDGE, EDGE) else 3e-2
    torch.testing.assert_close(actual, torch.tensor(expected), atol=tolerance, rtol=tolerance)
    assert torch.tensor(expected).std() > 0.1


def test_the_gradient_is_that_of_the_scores(folder: Path) -> None:
    images = 0.1 + 0.8 * random_images(EDGE, EDGE)
    reward = build("image_reward", **kwargs(folder))
    reward.check_gradients()
    _, gradient = with_gradient(reward, images, PROMPTS)
    step = 0.01 * gradient / gradient.abs().max()
    moved = with_gradient(reward, images + step, PROMPTS)[0] - with_gradient(reward, images - step, PROMPTS)[0]
    assert float(moved.sum()) == pytest.approx(2 * float((gradient * step).sum()), rel=0.2)


def test_other_weights(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "ImageReward.safetensors")
    file = tmp_path / "other.safetensors"

    def message(state: dict[str, Tensor], tokenizer: Path = folder) -> str:
        save_file(state, file)
        return error_of("image_reward", model=file, tokenizer=tokenizer)

    expected = "expected the weights of THUDM/ImageReward"
    short = {name: value for name, value in state.items() if "patch_embed" not in name}
    assert message(short) == (f"model='{file}' has no weights of BLIP's embeddings.patch_embedding.weight; {expected}")
    other = message({name: value for name, value in state.items() if "crossattention.self.key" not in name})
    assert other.startswith(f"model='{file}' has other weights (Error(s) in loading state_dict for BlipTextModel:")
    assert other.endswith(expected)
    assert message({"mlp.layers.0.weight": state["mlp.layers.0.weight"]}).startswith(
        f"model='{file}' has other layers ("
    )
    (tmp_path / "bare").mkdir()
    assert message(state, tmp_path / "bare").startswith(f"tokenizer='{tmp_path}/bare' ")
