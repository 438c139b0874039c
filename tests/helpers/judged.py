"""A judge with checkable answers, asked directly about pictures, and in training jobs that show it pictures instead of
the sampled images.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from phalanx.config.reward import RewardModelConfig
from phalanx.media.pictures import decoded, pil_image, raw_file
from phalanx.rewards import Judge, RewardError
from phalanx.types import Prompt
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.jobs import one_step, tiny_config
from tests.helpers.rewards import told
from tests.helpers.tiny_vlm import COLOURS, PICTURES, grades, name, picture

PROMPTS = [f'the word "{colour}" on a wall' for colour in COLOURS] + ['"black"']
QUESTIONS = (VlmOcr.template, UnifiedReward.template.format(prompt="a red thing"))
RAGGED = [[0, 1, 2, 3, 4, 5, 6], [7], [], [8, 9, 10, 11, 12, 13, 14]]  # each rank's share of PICTURES
JUDGE = ("reward.model.dtype=float32", "reward.model.max_model_len=512", "reward.model.max_tokens=40")


def process_state() -> list[Any]:
    """Global state that engines could change."""
    return [
        (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        (dict(os.environ), torch.get_num_threads(), torch.get_float32_matmul_precision()),
    ]


def images_of(share: list[int]) -> list[bytes]:
    """A share of PICTURES as files."""
    return [raw_file((picture(*PICTURES[i]) * 255).byte()) for i in share]


def ask(cfg: RewardModelConfig, shares: list[list[int]], questions: tuple[str, ...] = QUESTIONS) -> list[list[str]]:
    """On each rank: ask twice about its share of PICTURES; returns both lists of answers."""
    from phalanx.rewards.judge_model import RewardModel

    own = shares[dist.get_rank()]
    before = process_state()
    model = RewardModel(cfg, timeout_s=60.0)
    asked = [((i,), text) for i in range(len(own)) for text in questions]
    answers = []
    for _ in range(2):
        with model.awake():
            answers.append(model.ask(images_of(own), asked))
    assert process_state() == before
    total = torch.ones(1)
    dist.all_reduce(total)  # our world is still usable
    assert total.item() == dist.get_world_size()
    return answers


def expected(share: list[int]) -> list[str]:
    """The correct answers to QUESTIONS about a share of PICTURES."""
    return [text for colour, lit in (PICTURES[i] for i in share) for text in (name(colour, lit), grades(1 + lit))]


def converted(cfg: RewardModelConfig, count: int, numbers: list[int]) -> tuple[list[str], int]:
    """Ask QUESTIONS about some of `count` PICTURES; returns the answers, and the number of decoded images."""
    from phalanx.engines import transformers, vllm
    from phalanx.rewards.judge_model import RewardModel

    made: list[Any] = []

    def counted(*file: Any) -> Any:
        made.append(decoded(*file))
        return made[-1]

    transformers.decoded = vllm.decoded = counted  # only in this forked rank
    model = RewardModel(cfg, timeout_s=60.0)
    with model.awake():
        answers = model.ask(images_of(list(range(count))), [((i,), text) for i in numbers for text in QUESTIONS])
    return answers, len(made)


class Plain(Judge):
    """Asks a question that the model was not taught, so its answers depend on the whole context."""

    template = "And?"

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """Not called."""


class Described(Plain):
    """Asks an opening question and then two others: the context of each is only the opening and its answer."""

    opens = True

    def opening(self, prompt: str, metadata: dict[str, Any]) -> str:
        return QUESTIONS[0]

    def questions(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
        return ["And?", "user user"]


def talk(cfg: RewardModelConfig, shares: list[list[int]]) -> dict[str, list[list[str]]]:
    """On each rank: the answers about its share of PICTURES to a judge with an opening, and to one without."""
    from phalanx.rewards.judge_pool import JudgePool

    cpu, judges = torch.device("cpu"), {"described": Described(), "plain": Plain()}
    pool = JudgePool(judges, cfg, 60.0, outputs="images", device=cpu, beside=False)
    for i in shares[dist.get_rank()]:
        pool.submit(picture(*PICTURES[i])[None], [Prompt(PROMPTS[0], i, {})])
    _, answers, _ = pool.ask()
    return answers


def plain_answer(model: Path, messages: list[dict[str, Any]], images: list[Any], max_tokens: int = 40) -> str:
    """The model's answer in a conversation about images, from plain transformers."""
    from transformers import AutoModelForImageTextToText

    from phalanx.engines.transformers import load_processor

    processor = load_processor(str(model))
    judge = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    tokens = judge.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(processor.decode(tokens, skip_special_tokens=True))


def about(count: int, question: str) -> dict[str, Any]:
    """A message with a question about so many images."""
    return {"role": "user", "content": [*({"type": "image"} for _ in range(count)), {"type": "text", "text": question}]}


def plain_talk(cfg: RewardModelConfig, number: int) -> list[str]:
    """The model's answers to Described about one of PICTURES, from plain transformers."""
    image = pil_image((picture(*PICTURES[number]) * 255).byte())
    model, opening, answers = Path(str(cfg.path)), about(1, QUESTIONS[0]), []
    reading = {"role": "assistant", "content": plain_answer(model, [opening], [image], cfg.max_tokens)}
    for question in ("And?", "user user"):
        messages = [opening, reading, {"role": "user", "content": question}]
        answers.append(plain_answer(model, messages, [image], cfg.max_tokens))
    return answers


def refused(cfg: RewardModelConfig, shares: list[list[int]], questions: tuple[str, ...]) -> str:
    """On each rank: the error message for questions that the model cannot be asked."""
    return told(RewardError, ask, cfg, shares, questions)


def mistake(cfg: RewardModelConfig) -> str:
    """On each rank: the error message for a model that cannot be loaded."""
    from phalanx.rewards.judge_model import RewardModel

    return told(ValueError, RewardModel, cfg, timeout_s=60.0)


def cut(text: str) -> str:
    """The content of a file whose download stopped halfway."""
    return text[: len(text) // 2]


def broken_copy(model: Path, folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """A copy of a model folder with one changed file."""
    shutil.copytree(model, folder)
    whole = (folder / file).read_bytes().decode("latin-1")
    (folder / file).write_bytes(change(whole).encode("latin-1"))
    assert (folder / file).read_bytes() != whole.encode("latin-1")
    return folder


def settings(judge: Path, *functions: str) -> list[str]:
    return [f"reward.functions=[{', '.join(functions)}]", f"reward.model.path={judge}", *JUDGE]


def config(model: Path, folder: Path, *overrides: str) -> Any:
    cfg = tiny_config(model, folder, *overrides)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return cfg


def shown(image: torch.Tensor) -> tuple[int, int]:
    """The picture that a test shows to the judge instead of a sampled image; a function of that image."""
    return PICTURES[int(image.double().sum() * 1000) % len(PICTURES)]


def read(images: torch.Tensor) -> list[str]:
    """The texts in the pictures that are shown for these images."""
    return [name(*shown(image)) for image in images]


def step_and_terms(cfg: Any) -> dict[str, Any]:
    """Run one training step whose rewards see pictures; returns its results, and the terms of the reward."""
    from phalanx.rewards.client import RewardClient

    kept: dict[str, torch.Tensor] = {}
    submit, collect = RewardClient.submit, RewardClient.collect

    def show(self: RewardClient, images: torch.Tensor, prompts: list[Prompt]) -> None:
        submit(self, torch.stack([picture(*shown(image)) for image in images]), prompts)

    def keep(self: RewardClient) -> Any:
        terms = collect(self)
        kept.update(terms)
        return terms

    RewardClient.submit, RewardClient.collect = show, keep  # type: ignore[method-assign]
    return one_step(cfg) | {"terms": kept}
