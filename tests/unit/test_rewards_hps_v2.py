"""HPS v2 at tiny size with random weights, and the conversion of open_clip's weights, each against open_clip's model in
torch's own layers.
"""

import shlex
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.helpers.tiny import clip_tokenizer
from tests.helpers.tiny_qwen2_vl import tiny_qwen2_vl
from tests.unit.test_rewards_clip import (
    DIM,
    EDGE,
    PATCH,
    PROMPTS,
    TEXT_WIDTH,
    TOKENS,
    WIDTH,
    error_of,
    pil,
    random_images,
    save_clip_base,
    score,
)

State = dict[str, Tensor]


# --- open_clip's CLIP, in torch's own layers: the names of its weights are those of its modules


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        layers = {"c_fc": nn.Linear(width, 4 * width), "gelu": nn.GELU(), "c_proj": nn.Linear(4 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width, heads) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.empty(WIDTH))
        self.positional_embedding = nn.Parameter(torch.empty((EDGE // PATCH) ** 2 + 1, WIDTH))
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.transformer = Transformer(WIDTH, 3)
        self.proj = nn.Parameter(torch.empty(WIDTH, DIM))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.visual = Vision()
        self.transformer = Transformer(TEXT_WIDTH, 2)
        self.token_embedding = nn.Embedding(vocabulary, TEXT_WIDTH)
        self.positional_embedding = nn.Parameter(torch.empty(TOKENS, TEXT_WIDTH))
        self.ln_final = nn.LayerNorm(TEXT_WIDTH)
        self.text_projection = nn.Parameter(torch.empty(TEXT_WIDTH, DIM))
        self.logit_scale = nn.Parameter(torch.tensor(0.0))

    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids [B, n], of which the end of the text is the largest."""
        n = tokens.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(tokens) + self.positional_embedding[:n], mask)
        return self.ln_final(x)[torch.arange(len(x)), tokens.argmax(1)] @ self.text_projection


@pytest.fixture(scope="module")
def open_clip() -> OpenClip:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OpenClip(len(clip_tokenizer())).eval()
        for name, parameter in model.named_parameters():  # large enough for scores that differ clearly
            nn.init.normal_(parameter, mean=float("ln_" in name and "weight" in name), std=0.35)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def clip_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def hps_v2_folder(open_clip: OpenClip, clip_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of open_clip, converted by the command."""
    from phalanx.tools.convert_open_clip import main

    folder = tmp_path_factory.mktemp("hps_v2")
    save_file(open_clip.state_dict(), folder / "HPS.safetensors")
    assert main([str(folder / "HPS.safetensors"), str(folder / "clip"), "--base", str(clip_base)]) == 0
    return folder / "clip"


def black_bars(image: Image.Image) -> Image.Image:
    """The image, resized to EDGE pixels on its longer side, in the middle of a black square."""
    scale = EDGE / max(image.size)
    small = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (EDGE, EDGE))
    square.paste(small, ((EDGE - small.width) // 2, (EDGE - small.height) // 2))
    return square


def cosines(model: OpenClip, base: Path, images: Tensor, prompts: list[str]) -> Tensor:
    """HPS v2 by open_clip's model, with PIL's resize and transformers' own normalisation."""
    from transformers import CLIPProcessor

    inputs = CLIPProcessor.from_pretrained(base)(
        text=prompts,
        images=[black_bars(image) for image in pil(images)],
        padding=True,
        truncation=True,
        max_length=TOKENS,
        return_tensors="pt",
    )
    return torch.cosine_similarity(model.visual(inputs.pixel_values), model.encode_text(inputs.input_ids))


@pytest.mark.parametrize(
    ("size", "tolerance"), [((EDGE, EDGE), 1e-5), ((80, 80), 2e-2), ((40, 90), 2e-2), ((101, 37), 2e-2)]
)
def test_hps_v2_is_the_cosine_of_open_clips_model(
    open_clip: OpenClip, clip_base: Path, hps_v2_folder: Path, size: tuple[int, int], tolerance: float
) -> None:
    images, prompts = random_images(*size), [*PROMPTS[:2], "a long prompt " * 9]
    found = score("hps_v2", images, prompts, model=hps_v2_folder)
    torch.testing.assert_close(found, cosines(open_clip, clip_base, images, prompts), atol=tolerance, rtol=0)
    turned = score("hps_v2", images, prompts[1:] + prompts[:1], model=hps_v2_folder)
    assert (turned - found).abs().max() > 0.05 and found.std() > 0.05  # the tolerances tell images and prompts apart


@pytest.mark.parametrize("size", [(EDGE, EDGE), (64, 64), (40, 90), (101, 37), (9, 300)])
def test_letterbox(size: tuple[int, int]) -> None:
    from phalanx.zoo.rewards.image.hps_v2 import letterbox

    images = random_images(*size)
    found = letterbox(images, EDGE).mul(255)
    expected = torch.stack([torch.tensor(list(black_bars(i).tobytes())).view(EDGE, EDGE, 3) for i in pil(images)])
    difference = (found.permute(0, 2, 3, 1) - expected).abs()
    assert difference.max() <= 2.01 and difference.mean() < 0.25
    assert torch.equal(found, found.round())


def test_hps_v2_with_the_processor_of_another_folder(hps_v2_folder: Path, clip_base: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((hps_v2_folder / file).read_bytes())
    images = random_images(EDGE, EDGE)
    found = score("hps_v2", images, PROMPTS, model=tmp_path, processor=clip_base)
    assert torch.equal(found, score("hps_v2", images, PROMPTS, model=hps_v2_folder))
    assert error_of("hps_v2", model=tmp_path).startswith(f"model='{tmp_path}' does not load as ")
    assert error_of("hps_v2", model=tmp_path, processor="./no") == (
        "processor='./no' is not a folder; give a folder with a CLIP model, or a hub id"
    )


# --- the conversion


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


@pytest.mark.full
def test_converted_weights_keep_their_dtype_and_load_without_a_word(open_clip: OpenClip, clip_base: Path) -> None:
    """Run in a separate process, as a user does."""
    folder = clip_base.parent / "half"
    folder.mkdir()
    save_file({k: v.half() for k, v in open_clip.state_dict().items()}, folder / "half.safetensors")
    command = [sys.executable, "-m", "phalanx.tools.convert_open_clip", folder / "half.safetensors", folder / "clip"]
    ran = subprocess.run([*command, "--base", clip_base], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == f"{folder / 'clip'}\n"
    state = load_file(folder / "clip" / "model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float16}
    from transformers import CLIPModel

    _, info = CLIPModel.from_pretrained(folder / "clip", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_what_cannot_be_converted(
    open_clip: OpenClip, clip_base: Path, qwen_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from phalanx.tools.convert_open_clip import main

    def message(state: State | None, name: str = "a.safetensors", target: str = "out", base: object = clip_base) -> str:
        if state is not None:
            save_file(state, tmp_path / name)
        assert main([str(tmp_path / name), str(tmp_path / target), "--base", str(base)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and not (tmp_path / "out").exists()
        return err.removeprefix("error: ").rstrip("\n")

    state, source = open_clip.state_dict(), tmp_path / "a.safetensors"
    right = f"expected open_clip's weights of the architecture of --base {clip_base}"
    assert message(None) == f"{source} does not exist; expected a .safetensors file or its folder"
    source.write_bytes(b"\xff" * 100)
    assert message(None).startswith(f"{source} is not a safetensors file: ")
    assert message({**state, "visual.head.weight": torch.zeros(1)}) == f"{source} has visual.head.weight; {right}"
    assert message({k: v for k, v in state.items() if k != "ln_final.bias"}) == (
        f"{source} has nothing for text_model.final_layer_norm.bias; {right}"
    )
    deeper = {
        k.replace(".0.", ".2."): v.clone() for k, v in state.items() if k.startswith("transformer.resblocks.0.ln_1")
    }
    assert message({**state, **deeper}) == f"{source} has transformer.resblocks.2.ln_1.bias; {right}"
    assert message({**state, "visual.proj": torch.zeros(WIDTH, DIM + 1)}) == (
        f"{source} has visual.proj of [25, 48] rather than [24, 48]; {right}"
    )
    assert message(state, base="/no/clip") == (
        "--base='/no/clip' is not a folder; give a folder with a CLIP model, or a hub id"
    )
    assert message(state, base=qwen_base) == f"--base {qwen_base} is a model of type qwen2_vl; expected clip"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert message(state, target="full") == f"{tmp_path}/full exists and is not an empty folder; give another DST"


def test_a_pickle_is_not_read_and_the_command_that_it_gets_works(
    open_clip: OpenClip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from phalanx.tools.convert_open_clip import main

    path = tmp_path / "HPS_v2.1_compressed.pt"
    for saved in ({"state_dict": open_clip.state_dict(), "epoch": 1}, open_clip.state_dict()):
        torch.save(saved, path)
        assert main([str(path), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        head = f"error: {path} is a pickle, which can run code; convert it once: python -c "
        assert error.startswith(head)
        exec(shlex.split(error.removeprefix(head))[0], {})
        written = path.with_suffix(".safetensors")
        assert load_file(written).keys() == open_clip.state_dict().keys()
        written.unlink()
