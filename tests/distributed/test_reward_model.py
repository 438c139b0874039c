"""The reward model in plain transformers over several ranks: answers are right for any placement."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.config.reward import RewardModelConfig
from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.rewards import RewardError
from phalanx.zoo.rewards.judge.unified_reward import UnifiedReward
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.jobs import one_step
from tests.helpers.judged import (
    QUESTIONS,
    RAGGED,
    ask,
    broken_copy,
    config,
    converted,
    cut,
    expected,
    images_of,
    mistake,
    plain_talk,
    read,
    refused,
    settings,
    step_and_terms,
    talk,
)
from tests.helpers.judged_text import BASE, COMPLETION, SHOWN, asked_about_texts, plainly
from tests.helpers.ranks import run_ranks
from tests.helpers.rewards import told
from tests.helpers.tiny_vlm import COLOURS, grades

ENGINE = "reward.model.engine=transformers"


def section(model: Path, **settings: Any) -> RewardModelConfig:
    wanted = {"max_model_len": 512, "max_tokens": 40, "dtype": "float32", **settings}
    return RewardModelConfig(path=str(model), engine="transformers", **wanted)


@pytest.mark.quick("2-settings1")
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {"micro_batch_size": 1}),
        (2, {"tensor_parallel_size": 2, "micro_batch_size": 64}),
        (4, {"tensor_parallel_size": 2, "micro_batch_size": 3}),
        (4, {"tensor_parallel_size": 4}),  # more ranks than key-value heads
        (4, {"tensor_parallel_size": 2, "placement": "ranks 1-2"}),
        (4, {"placement": "ranks 2-3"}),
    ],
)
def test_answers_are_right_wherever_the_model_stands(judge_model: Path, world: int, settings: dict[str, Any]) -> None:
    shares = {1: [list(range(15))], 2: [list(range(15)), []], 4: RAGGED}[world]
    got = run_ranks(ask, world, section(judge_model, **settings), shares)
    for answers, share in zip(got, shares, strict=True):
        assert answers == [expected(share)] * 2


def test_a_question_stands_behind_a_description(judge_model: Path) -> None:
    """A judge with an opening; one rank has no pictures."""
    cfg = section(judge_model, micro_batch_size=2, placement="ranks 1-1")
    numbers = [7, 10]
    first, second = run_ranks(talk, 2, cfg, [numbers, []])
    assert first["described"] == [plain_talk(cfg, number) for number in numbers]
    assert second == {"described": [], "plain": []}
    # each differs from the answer without the opening
    assert all(talked[0] != plain[0] for talked, plain in zip(first["described"], first["plain"], strict=True))


def test_sampled_answers_depend_on_the_question_and_the_seed_alone(judge_model: Path) -> None:
    """At a temperature at which answers differ, they depend neither on the ranks nor on the rest of a batch."""
    twice = [[3, 0, 3], [7, 3]]
    hot = {"temperature": 3.0, "max_tokens": 12}
    alone = run_ranks(ask, 1, section(judge_model, micro_batch_size=1, **hot), [[*twice[0], *twice[1]]])[0]
    both = run_ranks(ask, 2, section(judge_model, tensor_parallel_size=2, **hot), twice)
    assert alone[0] == alone[1] == both[0][0] + both[1][0] == both[0][1] + both[1][1]
    pairs = [tuple(alone[0][2 * i : 2 * i + 2]) for i in range(5)]
    assert pairs[0] == pairs[2] == pairs[4] and len(set(pairs)) == 3
    assert alone[0] != expected([*twice[0], *twice[1]])
    other = run_ranks(ask, 1, section(judge_model, seed=1, **hot), [[*twice[0], *twice[1]]])[0]
    assert other[0] == other[1] and other[0] != alone[0]


def test_answers_end_at_their_limits(judge_model: Path) -> None:
    """Grades have 6 tokens and 5 of white space and numbers between them; a question has 9, or 16 with a caption."""
    whole = grades(1)
    cut = run_ranks(ask, 1, section(judge_model, max_tokens=3), [[0]])[0][0]
    assert cut[0] == "black" and len(cut[1]) < len(whole) and whole.startswith(cut[1])
    long = " ".join("x" * 5)
    questions = (*QUESTIONS, UnifiedReward.template.format(prompt=long))
    assert run_ranks(ask, 1, section(judge_model), [[0]], questions)[0][0] == ["black", whole, whole]
    short, cut, shorter = run_ranks(ask, 1, section(judge_model, max_model_len=23), [[0]], questions)[0][0]
    assert short == "black"
    assert len(shorter) < len(cut) < len(whole) and cut.startswith(shorter) and whole.startswith(cut)


def test_a_question_that_is_too_long_is_told_on_all_ranks(judge_model: Path) -> None:
    cfg = section(judge_model, max_model_len=20, placement="ranks 1-1")
    got = run_ranks(refused, 2, cfg, [[1], []], (UnifiedReward.template.format(prompt=" ".join("x" * 30)),))
    assert got[0] == got[1]
    assert got[0].startswith("reward.model.max_model_len: a question with its image has ")
    assert got[0].endswith(" tokens, and 20 are allowed with the answer; raise it, or make questions or images smaller")


def test_heads_that_do_not_divide_are_refused(judge_model: Path) -> None:
    assert (
        run_ranks(mistake, 3, section(judge_model, tensor_parallel_size=3))
        == [
            "reward.model.tensor_parallel_size: 3 does not divide the model's 4 attention heads and 2 key-value heads; "
            "expected one of 1, 2, 4"
        ]
        * 3
    )


def test_pictures_are_made_of_the_images_that_a_batch_asks_about(judge_model: Path) -> None:
    cfg = section(judge_model, micro_batch_size=4)
    assert run_ranks(converted, 1, cfg, 7, [5, 2]) == [(expected([5, 2]), 2)]  # one batch
    cfg = section(judge_model, micro_batch_size=1)
    assert run_ranks(converted, 1, cfg, 7, [5, 2]) == [(expected([5, 2]), 4)]


def slept(cfg: RewardModelConfig) -> tuple[list[str], int]:
    """The answers of a model that has slept, and the number of divided weights in its blocks."""
    from torch.distributed.tensor import DTensor

    from phalanx.engines.transformers import Sleeping, TransformersEngine
    from phalanx.rewards.judge_model import RewardModel

    model = RewardModel(cfg, timeout_s=60.0)
    assert isinstance(model._engine, TransformersEngine)
    inner = model._engine._model
    model._engine._sleeping = Sleeping(inner, torch.device("cpu"))
    before = dict(inner.named_parameters())
    answers = []
    for _ in range(2):
        with model.awake():
            assert all(after is not before[name] for name, after in inner.named_parameters())
            answers.append(model.ask(images_of([5]), [((0,), text) for text in QUESTIONS]))
    assert answers[0] == answers[1]
    after = dict(inner.named_parameters())
    assert list(after) == list(before) and all(after[n] is before[n] and not after[n].requires_grad for n in after)
    return answers[0], sum(isinstance(weight, DTensor) for weight in after.values())


def test_a_model_sleeps_whole_or_divided(judge_model: Path) -> None:
    assert run_ranks(slept, 1, section(judge_model)) == [(expected([5]), 0)]
    both = run_ranks(slept, 2, section(judge_model, tensor_parallel_size=2))
    assert both[0] == both[1] and both[0][0] == expected([5]) and both[0][1] > 0


@pytest.mark.quick("2-settings1", "3-settings2")
@pytest.mark.parametrize(
    ("world", "settings"),
    [(1, {"micro_batch_size": 5}), (2, {"tensor_parallel_size": 2}), (3, {"placement": "ranks 1-1"})],
)
def test_a_judge_of_texts_sees_the_images_of_a_prompt(judge_model: Path, world: int, settings: dict[str, Any]) -> None:
    """Images of any sizes, formats and numbers; a text itself cannot include one."""
    ranks = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 1, 2, 3, 4, 5], []], 3: [[0, 1], [], [2, 3, 4, 5]]}[world]
    wanted = [text for shown in SHOWN for text in [plainly(judge_model, shown, VlmOcr.template)] * 2]
    assert wanted[0] == COLOURS[0] and len(set(wanted)) >= 3
    got = run_ranks(asked_about_texts, world, section(judge_model, **settings), "", ranks)
    assert [answer for answers, _ in got for answer in answers] == wanted
    assert not any(warnings for _, warnings in got)
    if world == 1:
        broken = VlmOcr.template + " < |image_pad|>< |im_end|>"
        wanted = [text for shown in SHOWN for text in [plainly(judge_model, shown, broken)] * 2]
        assert run_ranks(asked_about_texts, 1, section(judge_model), COMPLETION, ranks) == [(wanted, [])]


def test_a_judge_that_reads_no_images_says_so_once() -> None:
    cfg = section(BASE, max_tokens=8)
    (blind,) = run_ranks(asked_about_texts, 1, cfg, "", [[3, 0, 1]])
    without = run_ranks(asked_about_texts, 1, cfg, "", [[3]])[0]
    assert blind[0] == without[0] * 3 and not without[1]
    assert blind[1] == ["reward.model.path: the model reads no images, so judges do not see those of the prompt row 0"]


def divided(kind: str, tp: int) -> tuple[float, float]:
    """The largest difference between the logits of a whole and a divided model with random weights, and the fraction of
    its weights outside the embeddings that this rank has."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from phalanx.distributed.tensor_parallel import parallelize, replica_mesh
    from phalanx.engines.transformers import tensor_parallel_plan

    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in kind else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**sizes, **heads, **experts, tie_word_embeddings=False)
    )
    model.requires_grad_(False).eval()
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight), alpha=0.2)
    words = torch.randint(3, 101, (3, 9))
    seen = torch.ones_like(words).index_fill_(1, torch.arange(4), 0)  # padded on the left
    with torch.no_grad():
        whole = model(input_ids=words, attention_mask=seen).logits[:, 4:]
        before = held(model)
        parallelize(model, tensor_parallel_plan(model, tp), replica_mesh(range(tp), 60.0))
        parts = model(input_ids=words, attention_mask=seen).logits[:, 4:]
    return (parts - whole).abs().max().item() / whole.std().item(), held(model) / before


def held(model: torch.nn.Module) -> int:
    """The number of parameters that this rank holds, without the embeddings."""
    from torch.distributed.tensor import DTensor

    named = [(n, p.to_local() if isinstance(p, DTensor) else p) for n, p in model.named_parameters()]
    return sum(p.numel() for n, p in named if "embed" not in n)


@pytest.mark.seldom("gemma3_text-4", "glm4-4", "qwen3_moe-4")
@pytest.mark.quick("qwen2-2", "gemma3_text-2", "glm4-2", "qwen3_moe-2")
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3_text", "glm4", "qwen3_moe"])
def test_a_divided_model_computes_the_same(kind: str, tp: int) -> None:
    """Plain layers with biases; norms of heads; layers that are gathered and split; experts."""
    for difference, share in run_ranks(divided, tp, kind, tp):
        assert difference < 1e-4
        assert 1 / tp <= share < 1 / tp + 0.15  # norms are whole, and key-value heads at tp=4 half


def unplanned(judge: Path) -> str:
    from phalanx.engines.transformers import _load_model, tensor_parallel_plan

    model = _load_model(str(judge), "float32")
    assert tensor_parallel_plan(model, 2)["model.language_model.layers.*.mlp.down_proj"] == "rowwise"
    model.model.language_model.layers[1].mlp.gate = torch.nn.Linear(4, 4)
    return told(ValueError, tensor_parallel_plan, model, 2)


def test_a_model_without_a_plan_is_refused(judge_model: Path) -> None:
    """A model with other layers than Llama's, whose plan is used for models without their own."""
    assert unplanned(judge_model) == (
        "reward.model.tensor_parallel_size: 2: transformers has no tensor parallel plan for "
        "Qwen3VLForConditionalGeneration; expected 1, or reward.model.engine=vllm"
    )


def test_what_cannot_be_loaded_is_told_in_one_line(judge_model: Path, tmp_path: Path) -> None:
    from phalanx.engines.transformers import _load_model, load_processor

    for load in (load_processor, lambda path: _load_model(path, "float32")):
        message = told(ValueError, load, str(tmp_path))
        assert message.startswith(f"reward.model.path: {str(tmp_path)!r} does not load: ") and "\n" not in message
    silent = tmp_path / "silent"
    shutil.copytree(judge_model, silent)
    (silent / "chat_template.jinja").unlink()
    assert told(ValueError, load_processor, str(silent)) == (
        f"reward.model.path: {str(silent)!r} has no chat template for images; expected a model that has one"
    )


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("model.safetensors", cut, "does not load: SafetensorError: Error while deserializing header: "),
        (
            "config.json",
            lambda text: text.replace('"intermediate_size": 128', '"intermediate_size": 96'),
            "is not a whole model: its model.language_model.layers.0.mlp.down_proj.weight is [64, 128] rather than [64, 96]",
        ),
        ("tokenizer.json", cut, "does not load: JSONDecodeError: "),
        ("tokenizer.json", lambda text: "{}", "does not load: KeyError: 'added_tokens'"),
        ("tokenizer.json", lambda text: text.replace('"WordLevel"', '"Words"'), "does not load: "),
    ],
    ids=["cut weights", "other sizes", "cut tokenizer", "empty tokenizer", "unknown tokenizer"],
)
def test_what_is_broken_is_told_in_one_line(
    judge_model: Path, tmp_path: Path, file: str, change: Callable[[str], str], reason: str
) -> None:
    from phalanx.engines.transformers import _load_model, load_processor

    folder = broken_copy(judge_model, tmp_path / "model", file, change)
    load = load_processor if file == "tokenizer.json" else partial(_load_model, dtype="float32")
    message = told(ValueError, load, str(folder))
    assert message.startswith(f"reward.model.path: {str(folder)!r} {reason}") and "\n" not in message


@pytest.mark.full
def test_a_judge_in_a_job(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """A step with a model on two ranks: scores follow from its answers, and with weight 0 nothing else changes."""
    rule = "{name: jpeg_incompressibility}"
    plain = run_ranks(step_and_terms, 2, config(sd3_folder, tmp_path / "a", f"reward.functions=[{rule}]"))
    judges = (*settings(judge_model, rule, "{name: vlm_ocr, weight: 0}"), ENGINE, "reward.model.temperature=0.01")
    cfg = config(sd3_folder, tmp_path / "b", *judges, "reward.model.tensor_parallel_size=2")
    judged = run_ranks(step_and_terms, 2, cfg)
    images = torch.cat([rank["images"] for rank in judged])
    batch = PromptStream(load_prompts(cfg.data.train_files, "data.train_files"), 4, cfg.data.seed).batch(0)
    wanted = [prompt.meta for prompt in batch for _ in range(4)]
    scores = torch.cat([rank["terms"]["vlm_ocr"] for rank in judged])
    assert scores.tolist() == pytest.approx(
        [VlmOcr().parse(text, "", meta) for text, meta in zip(read(images), wanted, strict=True)]
    )
    assert len(set(scores.tolist())) >= 3
    for without, with_judge in zip(plain, judged, strict=True):
        assert torch.equal(with_judge["reward"], without["reward"])
        torch.testing.assert_close(with_judge["weights"], without["weights"], rtol=0, atol=0)


def waiting(cfg: Any, answered: Path) -> dict[str, Any]:
    """A step in which rank 0 begins its last micro-batch only after the model has answered about an earlier one."""
    from phalanx.engines.transformers import TransformersEngine
    from phalanx.rollout.flow.in_policy import PolicyRollout

    generate, answer, calls = PolicyRollout.generate, TransformersEngine.answer, []

    def generate_late(self: PolicyRollout, job: Any) -> Any:
        calls.append(job)
        for _ in range(2000 if dist.get_rank() == 0 and len(calls) == 2 else 0):
            if answered.exists():
                break
            time.sleep(0.1)
        else:
            assert len(calls) == 1 or dist.get_rank() == 1, "nothing was answered while this rank was sampling"
        return generate(self, job)

    def answer_and_tell(self: TransformersEngine, *about: Any) -> list[str]:
        said = answer(self, *about)
        answered.touch()
        return said

    PolicyRollout.generate, TransformersEngine.answer = generate_late, answer_and_tell  # type: ignore[method-assign]
    return step_and_terms(cfg)


@pytest.mark.full
def test_a_model_on_some_ranks_answers_while_others_sample(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """The step is the same as with asking afterwards."""
    judges = (*settings(judge_model, "{name: vlm_ocr}"), ENGINE, "reward.model.placement=ranks 1-1")
    beside = run_ranks(waiting, 2, config(sd3_folder, tmp_path / "a", *judges), tmp_path / "answered")
    after = run_ranks(step_and_terms, 2, config(sd3_folder, tmp_path / "b", *judges, "reward.overlap=false"))
    for one, other in zip(beside, after, strict=True):
        torch.testing.assert_close(one["terms"], other["terms"], rtol=0, atol=0)
        assert len(set(one["reward"].tolist())) >= 3
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def failing(cfg: Any) -> str:
    return told(RewardError, one_step, cfg)


def test_a_question_that_fails_beside_the_sampling_ends_the_job(
    sd3_folder: Path, judge_model: Path, tmp_path: Path
) -> None:
    judges = (*settings(judge_model, "{name: vlm_ocr}"), ENGINE, "reward.model.placement=ranks 1-1")
    got = run_ranks(failing, 2, config(sd3_folder, tmp_path, *judges, "reward.model.max_model_len=5"))
    assert got[0] == got[1]
    assert ": reward.model.max_model_len: a question with its image has " in got[0]  # of the rank that heard it first
