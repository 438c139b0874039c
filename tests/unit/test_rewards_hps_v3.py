"""HPSv3 at tiny size with random weights, against Qwen2-VL one image at a time with PIL's resize."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers.tiny_qwen2_vl import SPECIAL, tiny_qwen2_vl
from tests.unit.test_rewards_clip import PROMPTS, build, error_of, pil, random_images, save_clip_base, score

State = dict[str, Tensor]
SIZE = 448  # pixels of a square image after Qwen2-VL's resize
TEMPLATE = "\nGrade it.\nTextual prompt - {prompt}\n\nThe grade: <|Reward|>\n\nEND\n"


@pytest.fixture(scope="module")
def clip_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


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
    from phalanx.zoo.rewards.image.hps_v3 import TEMPLATE as OFFICIAL

    images = random_images(SIZE, SIZE, 1)
    expected = plainly(qwen_base, hps_v3_state, pil(images)[0], PROMPTS[0], OFFICIAL)
    found = score("hps_v3", images, PROMPTS[:1], model=hps_v3_file, base=qwen_base, dtype="float32")
    assert found.item() == pytest.approx(expected, abs=1e-4)
    reward = build("hps_v3", model=hps_v3_file, base=qwen_base).terms[0].function
    assert {p.dtype for p in reward._trunk.backbone.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in reward._trunk.heads["rm_head"].parameters()} == {torch.float32}
    half = reward(images, PROMPTS[:1], [{}])
    assert half.dtype == torch.float32 and half.item() == pytest.approx(expected, abs=0.1)
    assert half.item() != found.item()


def test_hps_v3_in_batches_and_another_order(qwen_base: Path, hps_v3_file: Path) -> None:
    """Neither padding for prompts of other lengths nor the neighbours in a batch change a score."""
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

    from phalanx.zoo.rewards.image._qwen_vl import patches_of, resized

    area = 256 * 28 * 28
    sides = (30, 64, 448, 449, 512, 768, 1000, 1024, 1328, 1664)
    for height in sides:
        for width in sides:
            assert resized(height, width, 28, area, area) == smart_resize(height, width, 28, area, area), (
                height,
                width,
            )
    assert resized(512, 512, 28, area, area) == resized(1024, 1024, 28, area, area) == (448, 448)
    assert resized(20, 3000, 28, area, area) == (56, 5488)
    with pytest.raises(ValueError, match="one side of an image of 3000 x 14 pixels is more than 200 times the other"):
        resized(3000, 14, 28, area, area)

    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": area, "longest_edge": area})
    for size in ((SIZE, SIZE), (96, 200), (700, 500)):
        images = random_images(*size)
        expected = processor(images=pil(images), return_tensors="pt")
        pixels, grid = patches_of(images[:, None], 14, 2, 2)
        assert torch.equal(grid, expected.image_grid_thw)
        levels = (pixels - expected.pixel_values).abs() * 0.28 * 255
        assert levels.max() < (0.01 if size == (SIZE, SIZE) else 2.1) and levels.mean() < 0.25


def test_the_template_is_the_one_that_the_model_was_trained_with() -> None:
    """A typing error in it, or an editor that strips spaces, would shift all scores without an error."""
    from phalanx.zoo.rewards.image.hps_v3 import TEMPLATE as OFFICIAL

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
    lacks = ": not a reward model"
    assert message(without("rm_head.")) == f" has no weights rm_head.0.weight (and 5 more){lacks}; {right}"
    assert message(without("rm_head.5.bias")) == f" has no weights rm_head.5.bias{lacks}; {right}"
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
    other = f"does not match base='{qwen_base}'; expected the base that the model was trained from"
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
    for template in ("{prompt}", "<|Reward|>", "{prompt} <|Reward|> <|Reward|>"):
        assert message(template=template) == (f"template='{template}'; expected {{prompt}} and <|Reward|> once each")
    assert message(base="./no") == (
        "base='./no' is not a folder; give a folder with the configuration and tokenizer of Qwen2-VL, or a hub id"
    )
    assert message(base=tmp_path).startswith(f"base='{tmp_path}' does not load as AutoConfig: ")
    assert message(base=clip_base) == f"base='{clip_base}' is a model of type clip; expected a qwen2_vl"
    (tmp_path / "config.json").write_bytes((qwen_base / "config.json").read_bytes())
    assert message(base=tmp_path) == (
        f"base='{tmp_path}' has no tokenizer of Qwen2-VL: <|image_pad|> is not its image token"
    )
