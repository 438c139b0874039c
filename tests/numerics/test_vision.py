"""Policies that read images compute the same as transformers' own models: in decoding, in replays, and in any batch."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.config.critic import CriticModelConfig
from phalanx.config.lm import LMDataConfig, LMRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.functional.tokens import FAR, Truncation, sampled_from, token_scores
from phalanx.media.pictures import Picture
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.value_model import build_critic
from phalanx.rollout.lm.decode import Decoding, draw
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.types import Prompt, Samples
from tests.helpers.policies import one_rank
from tests.helpers.tiny_vision import FAMILIES, picture, tiny_vision

N = 4
QUICK = pytest.mark.quick("qwen3_vl", "gemma3")  # the families that `make test` runs


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank() as world:
        yield world


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp(request.param) / request.param, request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("qwen") / "qwen3_vl", "qwen3_vl")


def shown(number: int, text: str, *sizes: tuple[int, int]) -> Prompt:
    """A prompt with random pictures of these sizes, followed by a text."""
    pictures = []
    for i, (width, height) in enumerate(sizes):
        file = BytesIO()
        picture(width, height, seed=10 * number + i).save(file, "PNG")
        pictures.append(Picture(file.getvalue, Path(), f"picture {i} of prompt {number}"))
    if not pictures:
        return Prompt(text, number, {})
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
    return Prompt(text, number, {}, messages=[{"role": "user", "content": parts}], images=tuple(pictures))


# images of different sizes, two images, no image
PROMPTS = [
    shown(0, "read", (48, 24)),
    shown(1, "and these two", (64, 32), (40, 24)),
    shown(2, "there is none"),
    shown(3, "x", (48, 48)),
]


def policy_of(folder: Path, world: World, **model: Any) -> LMPolicy:
    truncation = model.pop("truncation", None)
    options: dict[str, Any] = {"chunk": 64, "temperature": 1.0, "seed": 0, "images": True, "truncation": truncation}
    data = LMDataConfig(max_response_length=6, **({"max_prompt_length": 120} | (model.pop("data", {}))))
    config = LMModelConfig(path=str(folder), dtype="float32", **model)
    return build_policy(config, ParallelConfig(), data, world, **options)


def rollout_of(policy: LMPolicy, **rollout: Any) -> LMRollout:
    return LMRollout(policy, LMRolloutConfig(n=N, **rollout), policy.world, 8, Passes(4))


def sampled(policy: LMPolicy, **rollout: Any) -> Samples:
    engine = rollout_of(policy, **rollout)
    with engine.awake():
        return engine.sample(PROMPTS, seed=0, step=0, each=lambda outputs, prompts: None)


def inputs_of(policy: LMPolicy, prompt: Prompt, response: Tensor) -> dict[str, Tensor]:
    """The processor's own inputs for a prompt, followed by a response [R]."""
    reader = policy.reader
    text = policy.tokenizer.apply_chat_template(
        reader.in_parts([prompt])[0].messages, tokenize=False, add_generation_prompt=True
    )
    images = [picture.pil() for picture in prompt.images] or None
    made = dict(reader.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))
    fill = {"input_ids": response, "attention_mask": torch.ones_like(response)}
    for name in ("mm_token_type_ids", "token_type_ids"):
        fill[name] = torch.zeros_like(response)
    return {name: torch.cat([t, fill[name][None]], 1) if name in fill else t for name, t in made.items()}


def in_passes(policy: LMPolicy, samples: Samples, order: Tensor, size: int = 4) -> Tensor:
    """Log-probs from replays of `size` samples each, in the order of the samples."""
    result = torch.empty_like(samples.log_prob)
    for part in order.split(size):
        result[part] = policy.replay(samples.trace.select(part)).log_prob.detach()
    return result


@QUICK
def test_a_replay_is_the_forward_of_transformers_and_does_not_depend_on_its_neighbors(
    folder: Path, world: World
) -> None:
    policy = policy_of(folder, world)
    samples = sampled(policy)
    looks = samples.trace.looks
    assert len(set(looks[:N])) == 1 and looks[2 * N] is None and len(set(looks)) == len(PROMPTS)
    lm, never = policy.trained.module.lm, list(policy.trained.module.never)
    for i in range(0, len(PROMPTS) * N, 3):
        start, count, _ = samples.lengths[i].tolist()
        response = samples.trace.ids[i, start : start + count]
        with torch.no_grad():
            logits = lm(**inputs_of(policy, PROMPTS[i // N], response)).logits[0, start - 1 : -1].float()
        logits[:, never] = FAR
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(samples.log_prob[i, :count], expected, atol=1e-5, rtol=0)
    rows = torch.arange(len(samples.index))
    assert torch.equal(in_passes(policy, samples, rows), samples.log_prob)
    other = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    assert torch.equal(in_passes(policy, samples, other), samples.log_prob)
    # a missing image would be noticed
    blind = samples.trace.select(rows[N : 2 * N])
    blind.looks[0].seen[policy.vision.owner].pooled.mul_(2)
    assert (policy.replay(blind).log_prob - samples.log_prob[N : 2 * N]).abs().max() > 1e-3


@QUICK
def test_greedy_decoding_is_that_of_transformers(folder: Path, world: World) -> None:
    policy = policy_of(folder, world)
    engine = rollout_of(policy)
    with engine.awake():
        drawn = engine.draw_validation(PROMPTS, each=lambda outputs, prompts: None)
    assert len({tuple(each.response) for each in drawn}) > 1
    for prompt, each in zip(PROMPTS, drawn, strict=True):
        inputs = inputs_of(policy, prompt, torch.empty(0, dtype=torch.long))
        lm, never = policy.trained.module.lm, list(policy.trained.module.never)
        made = lm.generate(**inputs, max_new_tokens=6, do_sample=False, suppress_tokens=never)
        assert each.prompt == inputs["input_ids"][0].tolist()
        assert each.response == made[0, len(each.prompt) :].tolist()
    lm.model.rope_deltas = None


@pytest.mark.seldom("qwen3_vl-whole", "smolvlm-top_k")
@pytest.mark.quick("qwen3_vl-top_k", "smolvlm-whole")
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=5)], ids=["whole", "top_k"])
def test_truncated_distributions_and_packed_rows_are_the_same(
    folder: Path, world: World, truncation: Truncation
) -> None:
    policy = policy_of(folder, world, truncation=truncation if truncation.on else None)
    samples = sampled(policy, top_k=truncation.top_k)
    rows = torch.arange(len(samples.index))
    assert torch.equal(in_passes(policy, samples, rows), samples.log_prob)
    if folder.name == "gemma3":
        with pytest.raises(
            ValueError, match=r"use_remove_padding.*Gemma3ForConditionalGeneration attend to each other"
        ):
            policy_of(folder, world, use_remove_padding=True)
        return
    for once in (False, True):  # whether prompts with their images are computed once
        keys = {"use_remove_padding": True, "use_prefix_grouper": once}
        packed = policy_of(folder, world, truncation=policy.truncation, **keys)
        torch.testing.assert_close(in_passes(packed, samples, rows, 8), samples.log_prob, atol=1e-5, rtol=0)


@QUICK
def test_a_trained_tower_has_gradients_with_and_without_images(folder: Path, world: World) -> None:
    policy = policy_of(folder, world, freeze_vision_tower=False)
    samples = sampled(policy)
    trained = policy.trained.parameters
    assert len(trained) == len(list(policy.trained.module.parameters()))
    policy.replay(samples.trace.select(torch.arange(2 * N))).log_prob.sum().backward()
    for name, p in trained.items():
        assert p.grad is not None and p.grad.abs().sum() > 0, name
        p.grad = None
    policy.replay(samples.trace.select(torch.arange(2 * N, 3 * N))).log_prob.sum().backward()
    tower = [p for part in policy.vision.parts() for p in part.parameters()]
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in tower)
    frozen = policy_of(folder, world)
    assert len(frozen.trained.parameters) == len(trained) - len(tower)
    torch.testing.assert_close(
        in_passes(frozen, samples, torch.arange(len(samples.index))), samples.log_prob, atol=1e-5, rtol=0
    )


def test_a_model_that_cannot_read_images_is_told_as_it_is_loaded(qwen: Path, world: World, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen, tmp_path / "model"))
    with pytest.raises(
        ValueError, match=r"^data\.min_pixels, data\.max_pixels: '.*' has images of at least 64 and at most 9 "
    ):
        policy_of(folder, world, data={"max_pixels": 9})
    policy_of(folder, world, data={"max_prompt_length": 9, "overlong_prompts": "truncate"})  # its image alone is longer
    policy = policy_of(folder, world)
    # texts that contain placeholders of images
    for i, token in ((0, "<|image_pad|>"), (0, "<|video_pad|>"), (2, "<|image_pad|>"), (2, "<|video_pad|>")):
        parts = [{"type": "image"} for _ in PROMPTS[i].images]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": token}]}
        with pytest.raises(
            ValueError, match=rf"^a:{i}: its text contains '{re.escape(token)}', which stands for an image"
        ):
            policy.length(replace(PROMPTS[i], messages=[message], place=f"a:{i}"))
    file = folder / "preprocessor_config.json"
    given = file.read_text()
    file.write_text(json.dumps(json.loads(given) | {"size": {"height": 16, "width": 16}}))
    with pytest.raises(ValueError, match=r"^data\.min_pixels, data\.max_pixels: '.*' has no bounds of pixels, "):
        policy_of(folder, world, data={"max_pixels": 900})
    file.write_text(given)
    weights = load_file(folder / "model.safetensors")
    weights["model.visual.blocks.0.attn.qkv.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for frozen in (True, False):
        with pytest.raises(ValueError, match=r"log-probs of a Qwen3VLForConditionalGeneration are NaN or infinite$"):
            policy_of(folder, world, freeze_vision_tower=frozen)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"does not load: Can't load image processor.* containing a preprocessor_config"
    ):
        policy_of(folder, world)


def test_images_of_a_prompt_are_read_once(qwen: Path, world: World) -> None:
    for frozen, expected in ((True, 3), (False, 4)):
        policy = policy_of(qwen, world, freeze_vision_tower=frozen)
        samples = sampled(policy)
        calls: list[int] = []
        policy.vision.model.visual.register_forward_hook(lambda *args, calls=calls: calls.append(1))
        for look in set(samples.trace.looks) - {None}:
            look.seen.clear()
        in_passes(policy, samples, torch.arange(len(samples.index)))  # passes of one prompt's samples
        assert len(calls) == expected  # a trained tower runs also in the pass without images


def test_a_trained_tower_is_recomputed_in_policy_and_critic(qwen: Path, world: World) -> None:
    """transformers' layers are recomputed if they are in training mode."""
    policy = policy_of(qwen, world, freeze_vision_tower=False, gradient_checkpointing=True)
    critic = build_critic(CriticModelConfig(), ParallelConfig(), policy, seed=0)
    trace = sampled(policy).trace
    scores = {policy.trained: lambda: policy.replay(trace).log_prob, critic.trained: lambda: critic.values(trace)}
    for trained, score in scores.items():
        modes: list[bool] = []
        block = trained.module.vision.blocks()[0]
        block.register_forward_pre_hook(lambda module, args, modes=modes: modes.append(module.training))
        assert score().requires_grad and modes == [True]


def test_tokens_that_stand_for_images_are_never_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(40, 8, generator=generator), torch.randn(12, 8, generator=generator)
    head[3] *= 20  # makes this token the most likely one
    logits, uniform = states @ head.T, torch.rand(40, generator=generator)
    for temperature in (0.0, 1.0):
        plain = Decoding(4, temperature, ends=[0], pad=0)
        assert (draw(logits, uniform, plain) == 3).any()
        assert not (draw(logits, uniform, Decoding(4, temperature, [0], 0, never=(3, 5))) == 3).any()
    tokens = torch.arange(40) % 3
    rest = logits[:, [i for i in range(12) if i not in (3, 5)]]
    expected = rest.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    def scores(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return token_scores(states, lambda h: h @ head.T, tokens, temperature=1.0, chunk=16, never=(3, 5), **options)

    log_prob, entropy, certainty = scores()
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=rest).entropy())
    torch.testing.assert_close(certainty, rest.logsumexp(-1) - rest.mean(-1))
    options: dict[str, Any] = {"temperature": 1.0, "chunk": 16, "never": (3, 5)}
    pool = sampled_from(states, lambda h: h @ head.T, tokens, Truncation(top_k=4), **options)
    assert not torch.isin(pool[0], torch.tensor([3, 5])).any() and (pool[1] >= 4).all()
    torch.testing.assert_close(scores(pool=pool)[2], certainty)
