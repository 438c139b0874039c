"""HPS v2 and v3 at tiny size with random weights, and the conversion of open_clip's weights, each against a plain
computation of its own: open_clip's model in torch's layers, and Qwen2-VL one image at a time with PIL's resize.
"""

import hashlib
import shlex
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny import byte_alphabet, clip_tokenizer
from tests.unit.test_rewards_clip import (
    DIM,
    EDGE,
    PATCH,
    PROMPTS,
    TEXT_WIDTH,
    TOKENS,
    WIDTH,
    build,
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
    """The image, its longer side EDGE pixels long, in the middle of a black square."""
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
    from phalanx.rewards.image.hps_v2 import letterbox

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


def test_converted_weights_keep_their_dtype_and_load_without_a_word(open_clip: OpenClip, clip_base: Path) -> None:
    """As a module of its own in a fresh process, as a user runs it."""
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
    other = "give the base of its architecture"
    assert message(None) == f"{source} is not a file; expected a .safetensors file with the weights of open_clip's CLIP"
    source.write_bytes(b"\xff" * 100)
    assert message(None).startswith(f"{source} is not a safetensors file: ")
    assert message({**state, "visual.head.weight": torch.zeros(1)}) == (
        f"{source} has visual.head.weight, which is not a weight of open_clip's CLIP"
    )
    assert message({k: v for k, v in state.items() if k != "ln_final.bias"}) == (
        f"{source} is another CLIP than --base {clip_base}: no weights for text_model.final_layer_norm.bias; {other}"
    )
    deeper = {
        k.replace(".0.", ".2."): v.clone() for k, v in state.items() if k.startswith("transformer.resblocks.0.ln_1")
    }
    assert message({**state, **deeper}) == (
        f"{source} is another CLIP than --base {clip_base}: weights for "
        f"text_model.encoder.layers.2.layer_norm1.bias, which it does not have; {other}"
    )
    assert message({**state, "visual.proj": torch.zeros(WIDTH, DIM + 1)}) == (
        f"{source} is another CLIP than --base {clip_base}: visual_projection.weight is [25, 48] rather than [24, 48]; "
        f"{other}"
    )
    assert message(state, base="/no/clip").startswith("--base /no/clip does not load: ")
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


# --- HPSv3

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SIZE = 448  # pixels of a square image after Qwen2-VL's resize
TEMPLATE = "\nGrade it.\nTextual prompt - {prompt}\n\nThe grade: <|Reward|>\n\nEND\n"
# What the template of Qwen2-VL-Instruct does for one turn of one image and one text.
QWEN_CHAT = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and tokenizer of a tiny Qwen2-VL, a token a byte; without weights."""
    from transformers import Qwen2Tokenizer, Qwen2VLConfig

    tokens = [*byte_alphabet(), *SPECIAL]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        extra_special_tokens=SPECIAL[1:],
        padding_side="left",  # as Qwen's own
        chat_template=QWEN_CHAT,
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2VLConfig(
        text_config={**text, **ids, "num_key_value_heads": 1, "rope_parameters": rope, "vocab_size": len(tokens) + 40},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=len(tokens) + 30,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    folder = tmp_path_factory.mktemp("qwen2_vl")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hps_v3_state(qwen_base: Path) -> State:
    """Random weights under the published names, with a row for the reward token."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig.from_pretrained(qwen_base)
    config.text_config.vocab_size = 256 + len(SPECIAL) + 1
    shapes = {"rm_head.0": (12, 32), "rm_head.3": (5, 12), "rm_head.5": (2, 5)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen2VLForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, mean=float("norm" in name and "weight" in name), std=0.15)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for name, shape in shapes.items():
            state |= {f"{name}.weight": torch.randn(shape) / 2, f"{name}.bias": torch.randn(shape[0]) / 2}
    return {
        k.replace("model.visual.", "visual.").replace("model.language_model.", "model."): v for k, v in state.items()
    }


@pytest.fixture(scope="module")
def hps_v3_file(hps_v3_state: State, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hps_v3") / "HPSv3.safetensors"
    save_file(hps_v3_state, path)
    return path


def v3(images: Tensor, prompts: list[str], model: Path, base: Path, **kwargs: Any) -> Tensor:
    options = {"template": TEMPLATE, "dtype": "float32", **kwargs}
    return score("hps_v3", images, prompts, model=model, base=base, **options)


def plainly(base: Path, state: State, image: Image.Image, prompt: str, template: str, dimensions: int = 1) -> float:
    """HPSv3 for one image: transformers' image processor and chat template, the embeddings merged by hand.

    `dimensions` 3: with Qwen2-VL's own positions in time, height and width.
    """
    from transformers import AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = Qwen2VLConfig.from_pretrained(base)
    config.text_config.vocab_size = len(state["lm_head.weight"])
    model = Qwen2VLModel(config).eval()
    model.language_model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    )
    model.visual.load_state_dict({k.removeprefix("visual."): v for k, v in state.items() if k.startswith("visual.")})
    area = {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}
    seen = Qwen2VLImageProcessorPil(size=area)(images=[image], return_tensors="pt")
    grid = seen.image_grid_thw
    content = [{"type": "image"}, {"type": "text", "text": template.format(prompt=prompt)}]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<|Reward|>"], special_tokens=True)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    chat = chat.replace("<|image_pad|>", "<|image_pad|>" * (int(grid.prod()) // 4))
    ids = tokenizer(chat, return_tensors="pt").input_ids
    with torch.no_grad():
        embeddings = model.language_model.embed_tokens(ids)
        embeddings[ids == config.image_token_id] = model.visual(seen.pixel_values, grid_thw=grid).pooler_output
        positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        if dimensions == 3:
            kinds = (ids == config.image_token_id).int()
            positions, _ = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        hidden = model.language_model(inputs_embeds=embeddings, position_ids=positions).last_hidden_state
    x = hidden[0, ids[0].tolist().index(len(tokenizer) - 1)]
    x = torch.relu(state["rm_head.0.weight"] @ x + state["rm_head.0.bias"])
    x = torch.relu(state["rm_head.3.weight"] @ x + state["rm_head.3.bias"])
    return (state["rm_head.5.weight"] @ x + state["rm_head.5.bias"])[0].item()


@pytest.mark.parametrize(("size", "tolerance"), [((SIZE, SIZE), 1e-4), ((96, 96), 2e-3), ((300, 530), 2e-3)])
def test_hps_v3_is_the_plain_computation(
    qwen_base: Path, hps_v3_state: State, hps_v3_file: Path, size: tuple[int, int], tolerance: float
) -> None:
    images = random_images(*size)
    found = v3(images, PROMPTS, hps_v3_file, qwen_base)
    pairs = list(zip(pil(images), PROMPTS, strict=True))
    expected = torch.tensor([plainly(qwen_base, hps_v3_state, *pair, TEMPLATE) for pair in pairs])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    assert (found[0] - found[2]).abs() > 3 * tolerance  # one prompt, two images
    otherwise = torch.tensor([plainly(qwen_base, hps_v3_state, *pair, TEMPLATE, 3) for pair in pairs])
    assert (otherwise - expected).abs().max() > 3 * tolerance  # positions matter


def test_hps_v3_with_its_own_template_and_in_bfloat16(qwen_base: Path, hps_v3_state: State, hps_v3_file: Path) -> None:
    from phalanx.rewards.image._hps_v3_text import TEMPLATE as OFFICIAL

    images = random_images(SIZE, SIZE, 1)
    expected = plainly(qwen_base, hps_v3_state, pil(images)[0], PROMPTS[0], OFFICIAL)
    found = score("hps_v3", images, PROMPTS[:1], model=hps_v3_file, base=qwen_base, dtype="float32")
    assert found.item() == pytest.approx(expected, abs=1e-4)
    reward = build("hps_v3", model=hps_v3_file, base=qwen_base).terms[0].function
    assert {p.dtype for p in reward._backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in reward._head.parameters()} == {torch.float32}
    half = reward(images, PROMPTS[:1], [{}])
    assert half.dtype == torch.float32 and half.item() == pytest.approx(expected, abs=0.1)
    assert half.item() != found.item()


def test_hps_v3_in_batches_and_another_order(qwen_base: Path, hps_v3_file: Path) -> None:
    """Prompts of other lengths are padded; neither they nor the neighbours change a score."""
    images = random_images(64, 80, 5)
    prompts = ["a", "a much longer prompt, " * 9, "a red cat", "a", "x" * 70]
    at_once = v3(images, prompts, hps_v3_file, qwen_base, micro_batch_size=8)
    assert at_once.std() > 0.01 and (at_once[0] - at_once[3]).abs() > 1e-3
    for size in (1, 2, 5):
        found = v3(images, prompts, hps_v3_file, qwen_base, micro_batch_size=size)
        torch.testing.assert_close(found, at_once, atol=2e-5, rtol=0)
    back = v3(images.flip(0), prompts[::-1], hps_v3_file, qwen_base, micro_batch_size=3)
    torch.testing.assert_close(back.flip(0), at_once, atol=2e-5, rtol=0)


def test_special_tokens_in_a_prompt_are_text(qwen_base: Path, hps_v3_state: State, hps_v3_file: Path) -> None:
    images = random_images(SIZE, SIZE, 2)
    prompts = ["<|Reward|> a <|image_pad|> {prompt} {image}<|im_end|>", "a red cat"]
    plain = ["< |Reward|> a < |image_pad|> {prompt} {image}< |im_end|>", "a red cat"]
    expected = [plainly(qwen_base, hps_v3_state, *p, TEMPLATE) for p in zip(pil(images), plain, strict=True)]
    torch.testing.assert_close(v3(images, prompts, hps_v3_file, qwen_base), torch.tensor(expected), atol=1e-4, rtol=0)


def test_weights_in_shards_and_under_the_names_of_today(
    qwen_base: Path, hps_v3_state: State, hps_v3_file: Path, tmp_path: Path
) -> None:
    renamed = {
        k.replace("model.", "model.language_model.", 1).replace("visual.", "model.visual.", 1): v
        for k, v in hps_v3_state.items()
    }
    assert "model.visual.patch_embed.proj.weight" in renamed and "model.language_model.norm.weight" in renamed
    names = sorted(renamed)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: renamed[name] for name in part}, tmp_path / f"model-{i}.safetensors")
    images = random_images(64, 64)
    found = v3(images, PROMPTS, tmp_path, qwen_base)
    assert torch.equal(found, v3(images, PROMPTS, hps_v3_file, qwen_base))
    assert torch.equal(found, v3(images, PROMPTS, hps_v3_file.parent, qwen_base))


def test_sizes_and_patches_are_those_of_the_image_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    from phalanx.rewards.image.hps_v3 import patches_of, resized

    area = 256 * 28 * 28
    sides = (30, 64, 448, 449, 512, 768, 1000, 1024, 1328, 1664)
    for height in sides:
        for width in sides:
            assert resized(height, width, 28, area) == smart_resize(height, width, 28, area, area), (height, width)
    assert resized(512, 512, 28, area) == resized(1024, 1024, 28, area) == (448, 448)
    assert resized(20, 3000, 28, area) == (56, 5488)
    with pytest.raises(ValueError, match="an image of 3000 x 14 pixels is more than 200 times as long as wide"):
        resized(3000, 14, 28, area)

    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": area, "longest_edge": area})
    for size in ((SIZE, SIZE), (96, 200), (700, 500)):
        images = random_images(*size)
        expected = processor(images=pil(images), return_tensors="pt")
        pixels, grid = patches_of(images, 14, 2, 2)
        assert torch.equal(grid, expected.image_grid_thw)
        levels = (pixels - expected.pixel_values).abs() * 0.28 * 255
        assert levels.max() < (0.01 if size == (SIZE, SIZE) else 2.1) and levels.mean() < 0.25


def test_the_template_is_the_one_that_the_model_was_trained_with() -> None:
    """A slip in it, or an editor that strips spaces, would shift all scores without an error."""
    from phalanx.rewards.image._hps_v3_text import TEMPLATE as OFFICIAL

    digest = hashlib.sha256(OFFICIAL.encode()).hexdigest()
    assert digest == "e61d58f3c7d3be656ccd024f5c0cd8c001cf9a2122305d52b59e60d94147e0f2"


def test_bad_weights_of_hps_v3(qwen_base: Path, hps_v3_state: State, tmp_path: Path) -> None:
    path, right = tmp_path / "HPSv3.safetensors", "expected HPSv3.safetensors of MizzenAI/HPSv3, or its folder"

    def message(state: State | None = None) -> str:
        if state is not None:
            save_file(state, path)
        return error_of("hps_v3", model=path, base=qwen_base).removeprefix(f"model='{path}'")

    def without(start: str) -> State:
        return {k: v for k, v in hps_v3_state.items() if not k.startswith(start)}

    assert message() == f" has no .safetensors file; {right}"
    assert error_of("hps_v3", model=tmp_path, base=qwen_base) == f"model='{tmp_path}' has no .safetensors file; {right}"
    path.write_bytes(b"\xff" * 100)
    assert message().startswith(": HPSv3.safetensors is not a safetensors file: ")
    assert message(without("rm_head.")) == f" has no weights rm_head.0.weight (and 5 more): no reward model; {right}"
    assert message(without("rm_head.5.bias")) == f" has no weights rm_head.5.bias: no reward model; {right}"
    assert (
        message({**hps_v3_state, "rm_head.7.bias": torch.zeros(1)})
        == f" has another head, with rm_head.7.bias; {right}"
    )
    assert message({**hps_v3_state, "film.weight": torch.zeros(1)}) == (
        f" has film.weight, which is not a weight of HPSv3; {right}"
    )
    assert message(without("model.embed_tokens")) == f" has no weights model.embed_tokens.weight; {right}"
    assert message(without("model.norm")) == f" has no weights language_model.norm.weight; {right}"
    assert message(without("visual.blocks.1.mlp")) == (
        f" has no weights visual.blocks.1.mlp.fc1.bias (and 3 more); {right}"
    )
    other = f"does not go with base='{qwen_base}'; expected the base that the model was trained from"
    deeper = {"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}
    assert message({**hps_v3_state, **deeper}) == f" has language_model.layers.2.mlp.up_proj.weight, which {other}"
    assert message({**hps_v3_state, "model.norm.weight": torch.ones(31)}) == (
        f" has language_model.norm.weight of [31] rather than [32], which {other}"
    )
    rows = hps_v3_state["model.embed_tokens.weight"][:-1].clone()
    assert message({**hps_v3_state, "model.embed_tokens.weight": rows}) == (
        f" embeds 262 tokens, and <|Reward|> is number 262 of base='{qwen_base}'; expected the base that the model was "
        "trained from"
    )


def test_bad_kwargs_of_hps_v3(qwen_base: Path, hps_v3_file: Path, clip_base: Path, tmp_path: Path) -> None:
    def message(**kwargs: Any) -> str:
        return error_of("hps_v3", **{"model": hps_v3_file, "base": qwen_base, **kwargs})

    assert error_of("hps_v3") == (
        "reward.functions[0].kwargs: hps_v3(**kwargs): missing a required argument: 'model'; its kwargs: model, base, "
        "template, reward_token, micro_batch_size, dtype"
    )
    assert message(dtype="int8") == "dtype='int8'; expected one of bfloat16, float16, float32"
    assert message(micro_batch_size=0) == "micro_batch_size=0; expected a number of images, at least 1"
    for template in ("{prompt}", "<|Reward|>", "{prompt} <|Reward|> <|Reward|>"):
        assert message(template=template) == (
            f"template has to have {{prompt}} and <|Reward|> once each, and is '{template}'"
        )
    assert message(base="./no") == (
        "base='./no' is not a folder; give a folder with the configuration and tokenizer of Qwen2-VL, or a hub id"
    )
    assert message(base=tmp_path).startswith(f"base='{tmp_path}' does not load as AutoConfig: ")
    assert message(base=clip_base) == f"base='{clip_base}' is a model of type clip; expected a qwen2_vl"
    (tmp_path / "config.json").write_bytes((qwen_base / "config.json").read_bytes())
    assert message(base=tmp_path) == (
        f"base='{tmp_path}' has no tokenizer of Qwen2-VL: <|image_pad|> is not its image token"
    )
