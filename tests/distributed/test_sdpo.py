"""Self-distillation from what is known of the samples: other responses, an environment's answers, texts of rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from phalanx.config.lm import LMRLConfig
from phalanx.config.messages import ConfigError
from phalanx.engines.transformers import load_processor
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from tests.distributed.test_conversations import job, talker  # noqa: F401
from tests.helpers.checks import refused
from tests.helpers.jobs import assert_same_weights, rows, update
from tests.helpers.lm import fit, lm_overrides, tiny_lm_config
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.roles import run_roles
from tests.helpers.tiny_vision import shown_prompts, tiny_vision

REWARD = """
from phalanx.rewards import RewardOutput

def judged(completions, prompts, metadata):
    lengths = [len(text) for text in completions]
    said = [f"{length} letters" if length % 3 else None for length in lengths]
    return RewardOutput([float(length % 2 == 0) for length in lengths], feedback=said)
"""
FORMS = ("algorithm.context_forms={peer: 'Like {text}', reward: 'It has {text}', environment: 'Heard {text}'}",
         "algorithm.teacher_prompt_template='{context} or {prompt}'", "actor.ppo_mini_batch_size=4")  # fmt: skip


def config(model: Path, folder: Path, *overrides: str) -> LMRLConfig:
    keys = ("algorithm.name=sdpo", "algorithm.context=[column,peer,reward]", "algorithm.context_key=hint", *FORMS)
    cfg = tiny_lm_config(model, folder, *keys, f"reward.functions=[{{path: '{folder}/judged.py:judged'}}]", *overrides)
    (folder / "judged.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"Bo has {i} books.", "hint": f"Ann has {i}."}) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return cfg


def step(cfg: LMRLConfig) -> dict[str, Any]:
    """The first step: this rank's samples, with what was read before them, and the metrics."""
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    drawn = [
        (each.prompt, each.text, list(each.response), each.beside.get("messages")) for each in t.collector.rollout.drawn
    ]
    samples, reward, _ = t.collector.reward(samples, 0)
    sampled = [[True] * len(each[2]) for each in drawn]
    if samples.trace.sampled is not None:
        spans = zip(samples.trace.sampled, samples.trace.starts, samples.trace.stops, strict=True)
        sampled = [marks[start:stop].tolist() for marks, start, stop in spans]
    row = update(t, samples, reward, 0)
    prompts = [(prompt.text, prompt.meta.get("hint")) for prompt in samples.prompts]
    return {"drawn": drawn, "sampled": sampled, "prompts": prompts, "reward": reward.tolist(), "row": row}


class Plain:
    """The divergence by transformers' model alone."""

    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def first(self, text: str) -> list[int]:
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        found: list[int] = self.tokenizer(chat, add_special_tokens=False)["input_ids"]
        return found

    def scored(self, first: list[int], response: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*first, *response]])).logits[0, len(first) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    def kl(self, found: dict[str, Any], told: list[str | None]) -> float:
        parts = []
        for text, (prompt, _, response, _), sampled in zip(told, found["drawn"], found["sampled"], strict=True):
            if text is not None:
                apart = self.scored(prompt, response) - self.scored(self.first(text), response)
                parts.append(apart[torch.tensor(sampled)])
        return float(torch.cat(parts).mean())


def test_peers_and_feedback_of_rewards(lm_folder: Path, tmp_path: Path) -> None:
    """The teacher reads the next successful response of the group, and what the reward says, if they are there."""
    cfg = config(lm_folder, tmp_path, "algorithm.context=[peer,reward]", "data.seed=3")
    (found,) = run_ranks(step, 1, cfg)
    texts, reward, told = [text for _, text, _, _ in found["drawn"]], found["reward"], []
    for i, (prompt, _) in enumerate(found["prompts"]):
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        after = [j for j in group if j > i] + [j for j in group if j < i]
        parts = [f"Like {texts[j].strip()}" for j in after if reward[j] >= 1][:1]
        parts += [f"It has {len(texts[i])} letters"] * (len(texts[i]) % 3 > 0)
        told.append("\n\n".join(parts) + f" or {prompt}" if parts else None)
    assert 0 < sum(reward) < len(reward)
    assert found["row"]["actor/teacher_kl"] == pytest.approx(Plain(str(lm_folder)).kl(found, told), rel=1e-5)
    assert abs(found["row"]["actor/teacher_kl"]) > 1e-3
    assert found["row"]["actor/context_share"] == sum(map(bool, told)) / len(told) < 1


def test_answers_of_an_environment(talker: Path, tmp_path: Path) -> None:  # noqa: F811
    """They are read before the conversation, together with what reset adds, and only the model's own tokens count."""
    cfg = job(talker, tmp_path, "algorithm.name=sdpo", "algorithm.context=[environment]", *FORMS)
    (found,) = run_ranks(step, 1, cfg)
    told = []
    for _, _, _, messages in found["drawn"]:
        heard = "\n".join(message["content"] for message in messages[1:] if message["role"] != "assistant").strip()
        told.append(f"Heard {heard} or {messages[0]['content']}" if heard else None)
    assert None not in told and " Number " in told[0]
    assert not all(map(all, found["sampled"]))
    assert found["row"]["actor/teacher_kl"] == pytest.approx(Plain(str(talker)).kl(found, told), rel=1e-5)


@pytest.mark.full
def test_layouts_and_a_resumed_run(lm_folder: Path, tmp_path: Path) -> None:
    """Groups span ranks, and samples move to balance their costs."""
    keys = ("trainer.total_training_steps=3", "trainer.save_freq=1", "rollout.n=8", "data.train_batch_size=1",
            "actor.ppo_mini_batch_size=1", "actor.use_dynamic_bsz=true", "trainer.balance_batch=true")  # fmt: skip
    (one,) = run_ranks(fit, 1, config(lm_folder, tmp_path / "one", *keys))
    run_ranks(fit, 2, config(lm_folder, tmp_path / "two", *keys, "trainer.total_training_steps=2"))
    two = run_ranks(fit, 2, config(lm_folder, tmp_path / "two", *keys))
    first, second = rows(tmp_path / "one" / "out"), rows(tmp_path / "two" / "out")
    for key in ("actor/teacher_kl", "actor/context_share"):
        assert [row[key] for row in second] == pytest.approx([row[key] for row in first], rel=1e-4)
    assert_same_weights(one, two[0], 1e-3)


def test_a_step_without_any_context(lm_folder: Path, tmp_path: Path) -> None:
    keys = ("algorithm.context=[peer]", "algorithm.success_reward_threshold=2", "optim.weight_decay=0")
    (found,) = run_ranks(step, 1, config(lm_folder, tmp_path, *keys))
    assert found["row"]["actor/grad_norm"] == 0.0


def test_long_contexts_are_cut(lm_folder: Path, tmp_path: Path) -> None:
    """To fit the model's positions, 512, without the middle."""
    cfg = config(lm_folder, tmp_path)
    rows = [json.dumps({"prompt": "Bo has books.", "hint": "Ann has " + "1 and " * 600 + "2."}) for _ in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (found,) = run_ranks(step, 1, cfg)
    assert found["row"]["actor/context_share"] == 1.0


def test_what_is_refused(lm_folder: Path, tmp_path: Path) -> None:
    with refused("algorithm.context: expected some of column, peer, environment, reward, got ['word']"):
        config(lm_folder, tmp_path, "algorithm.context=[word]")
    expected = (
        r"algorithm.context_forms: expected texts with \{text\}, each once, by names of column, peer, environment, "
    )
    with pytest.raises(ConfigError, match=expected):
        config(lm_folder, tmp_path, "algorithm.context_forms={peers: '{text}'}")
    cfg = config(lm_folder, tmp_path)
    text = (tmp_path / "judged.py").read_text().replace("feedback=said", "feedback=said[1:]")
    (tmp_path / "judged.py").write_text(text)
    with pytest.raises(RankError, match="expected a text or None for each of"):
        run_ranks(fit, 1, cfg)


def shown_step(cfg: LMRLConfig) -> tuple[dict[str, Any], list[Any]]:
    """The first step's metrics, and by sample: the prompt's text, its images, its context and the response."""
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    samples, reward, _ = t.collector.reward(samples, 0)
    drawn = []
    for prompt, start, stop, ids in zip(
        samples.prompts, samples.trace.starts, samples.trace.stops, samples.trace.ids, strict=True
    ):
        pictures = [picture.pil() for picture in prompt.images]
        drawn.append((prompt.meta["hint"], prompt.text, pictures, ids[start:stop].tolist()))
    return update(t, samples, reward, 0), drawn


@pytest.mark.quick("gemma3")
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_the_teacher_sees_the_images(family: str, tmp_path: Path) -> None:
    """Behind the context, and where they stand in the prompt, as transformers' processor places them."""
    model = tiny_vision(tmp_path / family, family)
    rows = [json.loads(line) for line in shown_prompts(tmp_path, "prompts.jsonl").read_text().splitlines()]
    hint = "a <image> b " + load_processor(str(model), None, "model.path").tokenizer.convert_ids_to_tokens(
        AutoConfig.from_pretrained(model).image_token_id
    )
    lines = [json.dumps(row | {"hint": hint if row["images"] else "a"}) for row in rows]
    keys = lm_overrides(model, tmp_path / "data")
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    more = ("algorithm.name=sdft", "algorithm.context_key=hint", "algorithm.teacher_prompt_template='{context} or {prompt}'",
            f"data.train_files=[{tmp_path}/prompts.jsonl]", "data.max_prompt_length=200", "actor.ppo_mini_batch_size=4")  # fmt: skip
    ((row, drawn),) = run_ranks(shown_step, 1, load_config(LMRLConfig, None, [*keys, *more]))
    processor, stock = (
        load_processor(str(model), None, "model.path"),
        AutoModelForImageTextToText.from_pretrained(model),
    )

    def scored(before: str, text: str, images: list[Any], response: list[int]) -> torch.Tensor:
        content = [{"type": "text", "text": before}] if before else []
        content += [{"type": "image"}] * len(images) + [{"type": "text", "text": text.replace("<image>", "")}]
        chat = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        given = processor(
            text=[chat], images=[images] if images else None, add_special_tokens=False, return_tensors="pt"
        )
        length = given["input_ids"].shape[1]
        given["input_ids"] = torch.cat([given["input_ids"], torch.tensor([response])], 1)
        for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
            if name in given:
                fill = torch.full((1, len(response)), int(name == "attention_mask"))
                given[name] = torch.cat([given[name], fill], 1)
        with torch.no_grad():
            logits = stock(**given).logits[0, length - 1 : -1]
        for name in ("image_token_id", "video_token_id"):  # never sampled
            logits[:, getattr(stock.config, name, stock.config.image_token_id)] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    parts = []
    for said, text, images, response in drawn:
        context = "a  b " if images else said
        parts.append(scored("", text, images, response) - scored(f"{context} or ", text, images, response))
    assert any(images for _, _, images, _ in drawn)
    assert row["actor/teacher_kl"] == pytest.approx(float(torch.cat(parts).mean()), rel=1e-4)
    assert abs(row["actor/teacher_kl"]) > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
def test_roles(images: bool, lm_folder: Path, tmp_path: Path) -> None:
    """Contexts are read where samples are drawn, and the teacher's passes are made where the policy is trained."""
    model = tiny_vision(tmp_path / "vision", "qwen3_vl") if images else lm_folder
    found = []
    for name, ranks, more in (("together", 1, ()), ("apart", 3, ("placement={rollout: 0-1, actor: 2}",))):
        keys = ("trainer.total_training_steps=2", "parallel.fsdp_size=1", "data.max_prompt_length=100")
        cfg = config(model, tmp_path / name, *keys, *more)
        if images:
            file = shown_prompts(tmp_path / name, "prompts.jsonl")
            lines = [json.dumps(json.loads(line) | {"hint": "It is red."}) for line in file.read_text().splitlines()]
            file.write_text("\n".join(lines) + "\n")
        run_roles(build, ranks, cfg)
        found.append(rows(tmp_path / name / "out"))
    for one, other in zip(*found, strict=True):
        assert one["actor/grad_norm"] > 1e-4 and abs(one["actor/teacher_kl"]) > 1e-3
        for key in ("reward/mean", "actor/grad_norm", "actor/teacher_kl", "actor/context_share"):
            assert other[key] == pytest.approx(one[key], rel=1e-5), key
