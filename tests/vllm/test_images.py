"""Prompts with images in vLLM: engines on one rank and on two, against transformers, after a change of all weights."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from phalanx.config.lm import LMRLConfig
from phalanx.distributed.vllm_groups import VllmGroups
from phalanx.engines.transformers import load_processor
from phalanx.engines.vllm_text import Shown, TextEngine, TextEngineConfig
from phalanx.functional.tokens import Decoding
from phalanx.media.pictures import Picture
from phalanx.types import JobError
from tests.helpers.jobs import rows
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import chat, picture, tiny_vision

SHOWN = [[0], [1], [0, 1, 2], [], [2]]  # the images of each prompt, all of which have one text
SIZES = [(48, 24), (24, 48), (30, 90)]
DRAWN = Decoding(8, 0.7, [], 0)
GREEDY = replace(DRAWN, temperature=0.0)


class Reference:
    """The model by transformers, and the prompts as it reads them."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.processor = load_processor(str(folder))
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.inputs, self.shown = [], []
        images = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
        for numbers in SHOWN:
            text = self.processor.apply_chat_template(chat("read", len(numbers)), add_generation_prompt=True)
            given = {"images": [[images[i] for i in numbers]]} if numbers else {}
            self.inputs.append(dict(self.processor(text=[text], **given, return_tensors="pt")))
            pictures = tuple(Picture(partial(bytes, _png(images[i])), Path(), f"image {i}") for i in numbers)
            short = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            self.shown.append(Shown(short, pictures, f"of images {numbers}") if numbers else None)
        self.prompts = [inputs["input_ids"][0].tolist() for inputs in self.inputs]
        self.placeholders = [self.model.config.image_token_id, self.model.config.video_token_id]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As LMPolicy.engine_weights: all but the tied head."""
        return ((name, p) for name, p in self.model.state_dict().items() if name != "lm_head.weight")

    def move(self, std: float) -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(std * torch.randn_like(p))

    @torch.no_grad()
    def log_probs(self, responses: list[list[int]]) -> list[torch.Tensor]:
        """Those of the responses' tokens, at DRAWN's temperature."""
        result = []
        for given, tokens in zip(self.inputs, responses, strict=True):
            response, length = torch.tensor([tokens]), given["input_ids"].shape[1]
            ids = torch.cat([given["input_ids"], response], 1)
            kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(tokens)))
            inputs = given | {"input_ids": ids, "mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
            logits = self.model(**inputs).logits[0, length - 1 : -1] / DRAWN.temperature
            logits[:, self.placeholders] = -torch.inf
            result.append(logits.log_softmax(-1).gather(1, response[0, :, None])[:, 0])
        return result


def _png(image: Any) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def engines(folder: Path) -> dict[int, dict[str, Any]]:
    """What an engine on one rank, and one on two, answer before and after all weights have moved."""
    results = {}
    for size in (1, 2):
        reference, rank = Reference(folder), dist.get_rank()
        config = TextEngineConfig(str(folder), None, "float32", size, 0.5, 200, 8, False, images={})
        group = VllmGroups(range(2) if size == 2 else [rank], rank, 60)
        engine = TextEngine(config, group)
        asked = (reference.prompts, list(range(len(SHOWN))))
        drawn = replace(DRAWN, never=reference.placeholders)
        engine.refresh(reference.weights())
        before, _ = engine.generate(*asked, drawn, reference.shown)
        reference.move(0.05)
        engine.refresh(reference.weights())
        result: dict[str, Any] = {"before": before, "placeholders": reference.placeholders}
        result["free"], _ = engine.generate(*asked, replace(DRAWN, limit=64), reference.shown)
        result["after"], log_probs = engine.generate(*asked, drawn, reference.shown)
        exact = reference.log_probs(result["after"])
        result["errors"] = [float((torch.tensor(p) - q).abs().max()) for p, q in zip(log_probs, exact, strict=True)]
        shown = [None if s is None else replace(s, short=p) for s, p in zip(reference.shown, asked[0], strict=True)]
        with pytest.raises(JobError) as error:
            engine.generate(*asked, GREEDY, shown)
        results[size] = result | {"error": str(error.value)}
    return results


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("qwen2_vl", marks=pytest.mark.long)])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tiny_vision(tmp_path_factory.mktemp("vision"), request.param)
    first, second = run_ranks(engines, 2, folder, timeout=200)
    assert first[2]["after"] == second[2]["after"]
    return first


def test_all_weights_reach_the_tower_too(answers: Any) -> None:
    """Log-probs are transformers', whatever the images, and the responses others than with the old weights."""
    for size in (1, 2):
        assert max(answers[size]["errors"]) < 1e-5 and answers[size]["after"] != answers[size]["before"]
        assert len({tuple(response) for response in answers[size]["after"]}) == len(SHOWN)
    assert answers[1]["after"] == answers[2]["after"]


def test_placeholders_are_not_drawn(answers: Any) -> None:
    for size in (1, 2):
        placeholders = set(answers[size]["placeholders"])
        assert any(placeholders & set(response) for response in answers[size]["free"])
        assert not any(placeholders & set(response) for response in answers[size]["after"])


def test_a_prompt_that_vllm_reads_otherwise_ends_the_job(answers: Any) -> None:
    """Of expanded placeholders vLLM expands one again."""
    for size in (1, 2):
        assert answers[size]["error"] == (
            "rollout.engine: vLLM reads 60 tokens in the prompt of images [0], and the policy 43: their processors make "
            "different tokens of its images"
        )


def fit_and_break(cfg: LMRLConfig) -> str:
    """Train to the end. Then only a trained tower moves, and the engine does not get the new weights: what the job
    says.
    """
    from phalanx.run.rl import build

    trainer = build(cfg)
    trainer.fit()
    rollout = trainer.collector.rollout
    with rollout.awake():
        pass
    if trainer.policy.vision.frozen:
        return ""
    with torch.no_grad():
        for name, p in trainer.policy.trained.module.named_parameters():
            if "visual" in name:
                p.add_(torch.randn_like(p))
    with patch.object(rollout.engine, "refresh", list), pytest.raises(JobError) as error, rollout.awake():
        pass
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "tp", "kind"), [("qwen2_5_vl", 1, "lora_rank=4"), ("qwen3_vl", 2, "freeze_vision_tower=false")]
)
def test_jobs_on_images(tmp_path: Path, family: str, tp: int, kind: str) -> None:
    """The engine follows the policy, a trained tower included, and has what vLLM makes of the processor's settings."""
    keys = (
        f"rollout.tensor_parallel_size={tp}",
        f"model.{kind}",
        "rollout.lora_sync=adapter",
        "parallel.fsdp_size=2",
        "optim.lr=1e-2",
        "rollout.limit_images=2",
    )
    cfg = shown_config(family, tmp_path, *keys, "data.max_pixels=1024")
    for message in run_ranks(fit_and_break, 2, cfg, timeout=280):
        assert ("after the weights were copied, vLLM does not hold model.visual." in message) is (tp == 2)
    for row in rows(tmp_path / "out"):
        assert row["rollout/sync_error"] < 1e-4 and row["rollout/logprob_abs_diff_max"] < 1e-3
        # a trained tower's features depend on the other images of a pass
        assert row["actor/first_ratio_error"] <= (1e-5 if tp == 2 else 0)


def shown_config(family: str, folder: Path, *overrides: str) -> LMRLConfig:
    """A tiny job on prompts with one image, two or none."""
    images = [["0.png"], ["0.png", "1.png"], ["2.png"], []]
    lines = [{"prompt": "<image>" * len(images[i % 4]) + f"read {i}", "images": images[i % 4]} for i in range(8)]
    (folder / "shown.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for seed, size in enumerate(SIZES):
        picture(*size, seed=seed).save(folder / f"{seed}.png")
    keys = (f"data.train_files=[{folder / 'shown.jsonl'}]", "data.max_prompt_length=120", "rollout.engine=vllm")
    return tiny_lm_config(tiny_vision(folder / "model", family), folder, *keys, *overrides)


def refused(cfg: LMRLConfig) -> str:
    from phalanx.run.rl import build

    with pytest.raises(ValueError) as error:
        build(cfg)
    return str(error.value)


def test_a_family_whose_images_vllm_reads_otherwise_is_refused(tmp_path: Path) -> None:
    assert run_ranks(refused, 1, shown_config("gemma3", tmp_path), timeout=100) == [
        "rollout.engine: vllm does not support bidirectional attention between the tokens of an image, as in "
        "Gemma3ForConditionalGeneration; set rollout.engine=policy"
    ]
