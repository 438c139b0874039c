"""Self-distillation: the teacher is the policy with more in its prompt, on any layout and in resumed runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.config.lm import LMRLConfig
from phalanx.run.rl import build
from tests.helpers.checks import refused
from tests.helpers.jobs import assert_same_weights, first_step, rows, update
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.ranks import RankError, run_ranks

TEMPLATE = "{context} or {prompt}"


def config(model: Path, folder: Path, *overrides: str, hints: Any = "Ann has {0}.") -> LMRLConfig:
    keys = (
        "algorithm.name=sdft",
        f"algorithm.teacher_prompt_template='{TEMPLATE}'",
        "algorithm.context_key=hint",
        "actor.ppo_mini_batch_size=4",
        "algorithm.use_task_rewards=false",
    )
    cfg = tiny_lm_config(model, folder, *keys, *overrides)
    lines = [json.dumps({"prompt": f"Bo has {i} books.", "hint": hints and hints.format(i)}) for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return cfg


def divergence(cfg: LMRLConfig) -> tuple[float, float]:
    """The metric of the first step, and the same by transformers' model alone."""
    samples, found = first_step(build, cfg)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32)

    def scored(text: str, response: list[int]) -> torch.Tensor:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        first = tokenizer(chat, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*first, *response]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, len(first) - 1 : -1].log_softmax(-1)
        return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0]

    parts, trace = [], samples.trace
    for i, prompt in enumerate(samples.prompts):
        response = trace.ids[i, trace.starts[i] : trace.stops[i]].tolist()
        told = TEMPLATE.format(prompt=prompt.text, context=prompt.meta["hint"])
        parts.append(scored(prompt.text, response) - scored(told, response))
    return found["row"]["actor/teacher_kl"], float(torch.cat(parts).mean())


@pytest.mark.parametrize("packed", ["true", "false"])
def test_the_teacher_reads_more(packed: str, lm_folder: Path, tmp_path: Path) -> None:
    ((metric, expected),) = run_ranks(
        divergence,
        1,
        config(lm_folder, tmp_path, f"model.use_remove_padding={packed}", "data.overlong_prompts=truncate"),
    )
    assert metric == pytest.approx(expected, rel=1e-5) and abs(metric) > 1e-3


def test_layouts_and_a_resumed_run(lm_folder: Path, tmp_path: Path) -> None:
    """The teacher follows the policy, and its weights are in the checkpoint."""
    keys = ("algorithm.teacher_update_rate=0.5", "trainer.total_training_steps=3", "trainer.save_freq=1")
    (one,) = run_ranks(fit, 1, config(lm_folder, tmp_path / "one", *keys))
    two = run_ranks(fit, 2, config(lm_folder, tmp_path / "two", *keys, "trainer.total_training_steps=2"))
    two = run_ranks(fit, 2, config(lm_folder, tmp_path / "two", *keys))
    first, second = rows(tmp_path / "one" / "out"), rows(tmp_path / "two" / "out")
    assert [row["actor/teacher_kl"] for row in second] == pytest.approx(
        [row["actor/teacher_kl"] for row in first], rel=1e-4
    )
    assert_same_weights(one, two[0], 1e-3)


def budgeted(cfg: LMRLConfig) -> list[int]:
    """The tokens of each pass of the teacher."""
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    seen, output = [], t.updater.algorithm.reference_output

    def counted(policy: Any, batch: Any) -> torch.Tensor:
        seen.append(int(batch.trace.stops.sum()))
        return output(policy, batch)

    t.updater.algorithm.reference_output = counted
    update(t, samples, torch.zeros(len(samples.index) * 2), 0)
    return seen


@pytest.mark.full
def test_the_teachers_passes_keep_to_the_budget(lm_folder: Path, tmp_path: Path) -> None:
    keys = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=200", "model.use_remove_padding=true")
    short, long = (
        run_ranks(budgeted, 2, config(lm_folder, tmp_path / name, *keys, hints=hint))
        for name, hint in (("short", "{0}"), ("long", "Ann has {0}" + " and more" * 12))
    )
    for passes in (short, long):
        assert max(map(max, passes)) <= 200 and len(passes[0]) == len(passes[1])
    assert len(long[0]) > len(short[0])


def test_rows_and_templates_that_cannot_be_told(lm_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"prompts.jsonl:1: no text in the column hint; see algorithm.context_key"):
        run_ranks(fit, 1, config(lm_folder, tmp_path, hints=None))
    with pytest.raises(RankError, match=r"tokens, and the model has 512 positions; lower data.max_response_length"):
        run_ranks(fit, 1, config(lm_folder, tmp_path, hints="{0} and more" * 200))
    with refused(
        "algorithm.teacher_prompt_template: expected a text with {prompt} and {context}, each once, got '{prompt}'"
    ):
        config(lm_folder, tmp_path, "algorithm.teacher_prompt_template='{prompt}'")
