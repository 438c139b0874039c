"""Conversations about images: those of the prompt are seen in all turns, and the tokens behind stand where they should."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from phalanx.config.lm import LMRLConfig
from phalanx.config.messages import ConfigError
from phalanx.config.tasks import EvaluateConfig, GenerateConfig
from phalanx.rollout.lm.decode import draw
from phalanx.run import rl
from phalanx.run.kind import kind_of
from phalanx.run.rules import load_config
from phalanx.telemetry.records import read_index
from phalanx.tools.evaluate import Evaluation
from phalanx.tools.generate import Generation
from tests.helpers.checks import refused
from tests.helpers.jobs import assert_same_weights, first_step
from tests.helpers.lm import lm_overrides
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import shown_prompts, tiny_vision

TALK = '''
import random


class Talk:
    """Says something of another length each time, and what stands for an image."""

    def reset(self, seed, sample_seed, images):
        self.number, self.random, self.images = seed % 1000, random.Random(sample_seed), len(images)
        mark = "" if images else "<|image_pad|>"
        return f" Number {mark}{self.number}." if self.number % 2 else None

    def step(self, message: str):
        return "and " * self.random.randrange(4) + "<|image_pad|>more", (len(message) % 5 + self.images) / 8, False
'''


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns are short: many of its tokens are end tokens."""
    folder = tiny_vision(tmp_path_factory.mktemp("talker") / "qwen3_vl", "qwen3_vl")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = [settings["eos_token_id"], *range(40, 110)]
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def config_of(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    own = lm_overrides(model, folder)
    shown_prompts(folder, "prompts.jsonl")
    (folder / "talk.py").write_text(TALK)
    own += [f"environment.path={folder}/talk.py:Talk", "environment.max_turns=3", "environment.join=4"]
    own += ["data.max_prompt_length=100", "data.max_response_length=64", "reward.functions=[{name: environment}]"]
    return load_config(LMRLConfig, None, [*own, *keys])


def one_step(config: LMRLConfig) -> dict[str, Any]:
    """Sample and update once. The conversations, and how far transformers' own model is from what was drawn and from
    the log-probs of it.
    """
    trainers: list[Any] = []

    def build(cfg: LMRLConfig) -> Any:
        trainers.append(rl.build(cfg))
        return trainers[0]

    samples, result = first_step(build, config)
    rollout, trace = trainers[0].collector.rollout, samples.trace
    stock = transformers.AutoModelForImageTextToText.from_pretrained(config.model.path)
    talks, off, same = [], 0.0, True
    for i, number in enumerate(samples.index.tolist()):
        ids, end = trace.ids[i, : trace.ends[i]][None], int(trace.ends[i])
        logits = logits_of(rollout.policy, stock, ids, trace.looks[i])
        at = trace.sampled[i, :end].nonzero().flatten()
        name = (*rollout._seed, samples.prompts[i].group_id, number % config.rollout.n)
        drawn = logits[at - 1]
        uniform = rollout.request([], name, rollout.how).numbers[: len(at)]
        same = same and torch.equal(draw(drawn, uniform, rollout.how), ids[0, at])
        drawn[:, list(rollout.policy.vision.never)] = -torch.inf
        log_prob = drawn.log_softmax(-1).gather(1, ids[0, at, None]).squeeze(1)
        off = max(off, float((log_prob - samples.log_prob[i, : len(at)]).abs().max()))
        talks.append((ids[0].tolist(), trace.sampled[i, :end].tolist(), samples.prompts[i].images != ()))
    told = [drawn.beside["messages"] for drawn in rollout.drawn]
    return result | {"talks": talks, "off": off, "same": same, "told": told}


def logits_of(policy: Any, stock: Any, ids: Tensor, look: Any) -> Tensor:
    """Those of transformers' own forward, which makes positions and features by itself."""
    with torch.no_grad():
        given = {"input_ids": ids} if look is None else policy.vision.stock(ids, look)
        logits: Tensor = stock(**given).logits[0].float()
    return logits


TOGETHER = ("rollout.micro_batch_size_per_gpu=16",)  # conversations with images and without
PACKED = ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=400")


@pytest.mark.full
def test_turns_behind_images_are_those_of_transformers_on_any_layout(talker: Path, tmp_path: Path) -> None:
    """In two updates per step, padded and packed."""
    (alone,) = run_ranks(one_step, 1, config_of(talker, tmp_path / "alone", *TOGETHER))
    assert alone["off"] < 2e-5 and alone["same"] and alone["row"]["actor/first_ratio_error"] == 0
    turns = {str(sampled).count("False, True") for _, sampled, shown in alone["talks"] if shown}
    assert turns >= {2, 3} and {shown for *_, shown in alone["talks"]} == {True, False}
    contents = [[message["content"] for message in messages] for messages in alone["told"]]
    assert any(" Number " in texts[0] and "<image>" in texts[0] for texts in contents)
    assert any("<image>" in texts[0] and " Number " not in texts[0] for texts in contents)
    for ranks, keys in ((2, ()), (2, PACKED)):
        parts = run_ranks(one_step, ranks, config_of(talker, tmp_path / f"{ranks}{len(keys)}", *keys))
        assert [talk for part in parts for talk in part["talks"]] == alone["talks"]
        for part in parts:
            assert part["off"] < 2e-5 and part["row"]["actor/first_ratio_error"] == 0
            assert part["row"]["actor/grad_norm"] == pytest.approx(alone["row"]["actor/grad_norm"], rel=1e-5)
        assert_same_weights(alone["weights"], parts[0]["weights"], 1e-3)


def test_another_engine_draws_none(talker: Path, tmp_path: Path) -> None:
    config = config_of(talker, tmp_path, "rollout.engine=vllm")
    with refused(
        "a:1 has images, which is not supported with environments and rollout.engine=vllm; set rollout.engine=policy",
        ConfigError,
    ):
        kind_of(config).check_images("a:1 has images")


def fit(config: LMRLConfig) -> None:
    trainer: Any = rl.build(config)
    trainer.fit()


def write(words: list[str]) -> None:
    Generation(load_config(GenerateConfig, None, words)).run()


def measure(words: list[str]) -> None:
    Evaluation(load_config(EvaluateConfig, None, words)).run()


@pytest.mark.full
def test_a_checkpoint_talks_as_validation_did(talker: Path, tmp_path: Path) -> None:
    """In tasks/generate.py and tasks/evaluate.py."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    keys = [
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        f"data.val_files=[{prompts}]",
    ]
    run_ranks(fit, 1, config_of(talker, tmp_path, *keys, "rollout.val.temperature=0.8"))
    kept = read_index(out / "samples/prompts/step_000001", "text")
    assert max(row["turns"] for row in kept) > 1 and any("images" in row for row in kept)
    trusted = [f"checkpoint={out}", "trust_run=true"]
    run_ranks(write, 1, [*trusted, f"prompt_file={prompts}", f"output_file={tmp_path / 'texts.jsonl'}"])
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [row["messages"] for row in rows] == [row["messages"] for row in kept]
    run_ranks(measure, 1, [*trusted, f"output_dir={tmp_path / 'measured'}"])
    told = [json.loads(line) for line in (tmp_path / "measured" / "records.jsonl").read_text().splitlines()]
    assert [row["messages"] for row in told] == [row["messages"] for row in kept]
