"""Every metric of every algorithm is one number, whatever the layout: sums over what counts, divided once."""

import importlib
import json
import math
import pkgutil
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.algorithms
from phalanx.algorithms import TokenAlgorithm
from phalanx.types import Samples
from tests.helpers.checks import normal
from tests.helpers.jobs import PROMPTS, algorithm_config, full_weights, update
from tests.helpers.lm import tiny_lm_config
from tests.helpers.policies import disturb
from tests.helpers.ranks import ROOT, run_ranks

NAMES = [info.name for info in pkgutil.iter_modules(phalanx.algorithms.__path__) if not info.name.startswith("_")]
MODULES = {name: importlib.import_module(f"phalanx.algorithms.{name}") for name in NAMES}
TOKENS = [name for name in NAMES if issubclass(MODULES[name].Algorithm, TokenAlgorithm)]
FLOW = [name for name in NAMES if name not in TOKENS]
SAMPLES = 12  # 4 prompts x 3
# micro-batches on one rank, whose update has 6 samples, and on each of two; three samples would cut a pair in two
MICROS = {pairs: ((1, 2, 6), 1) if pairs else ((1, 3, 6), 3) for pairs in (True, False)}
PACKED = "model.use_remove_padding=true"
GRADED = ROOT / "tests" / "helpers" / "graded.py"
# small steps, since AdamW's first ones are as large for a gradient of rounding errors as for any other
TINY = ("rollout.n=3", "rollout.micro_batch_size_per_gpu=6", "parallel.fsdp_size=1", "optim.lr=1e-5")


def given(samples: Samples, spread: float) -> tuple[Samples, torch.Tensor]:
    """The samples with the old log-probs of other weights and with holes in their masks, and rewards [N]: a sample is
    lost, and those of a prompt are equal.
    """
    shape, at = (SAMPLES, samples.mask.shape[1]), samples.index
    reward = normal(SAMPLES, seed=3)
    reward[4], reward[6:9] = torch.nan, 0.5
    old = samples.log_prob + spread * normal(*shape, seed=1)[at]
    return replace(samples, log_prob=old, mask=samples.mask & (normal(*shape, seed=2)[at] < 0.7)), reward


def made(cfg: Any) -> tuple[Any, Samples, torch.Tensor]:
    """A job whose weights have moved from its reference, and `given` samples of a step."""
    from phalanx.run.rl import build

    is_text = cfg.algorithm.name in TOKENS
    t = build(cfg)
    disturb(t.policy)
    with t.collector.rollout.awake():
        drawn = t.collector.rollout.sample(t.collector.prompts.batch(0), seed=0, step=0, each=lambda *_: None)
        if drawn.on_policy:  # a step of one update leaves the old log-probs to it
            drawn = replace(drawn, log_prob=t.policy.replay(drawn.trace).log_prob, on_policy=False)
    return t, *given(drawn, 0.3 if is_text else 1e-3)


def steps(cfgs: list[Any]) -> list[dict[str, Any]]:
    """For each job, the metrics of a step, the weights after it, and the mean ratio of its last update."""
    found = []
    for cfg in cfgs:
        t, samples, reward = made(cfg)
        decide, ratios = t.updater.too_far, [math.nan]

        def noted(sums: Any, ratios: list[float] = ratios, decide: Any = decide) -> bool:
            ratios.append(sums.values().get("ratio_mean", math.nan))
            return bool(decide(sums))

        t.updater.too_far = noted
        row = update(t, samples, reward, 0)
        found.append({"row": row, "ratio": ratios[-1], "weights": full_weights(t.policy.trained.parameters)})
    return found


def job(name: str, model: Path, folder: Path, micro: int, *keys: str) -> Any:
    """A tiny job of an algorithm, with the penalties and the teacher that it can have."""
    own = {field.name for field in fields(MODULES[name].Config)} - {*MODULES[name].Config.unused}
    wanted = [f"algorithm.{key}=0.1" for key in ("kl_loss_coef", "kl_reward_coef") if key in own]
    if "teacher_path" in own:  # the weights before they moved
        wanted.append(f"algorithm.teacher_path={model}")
    if "last_steps" in own:  # the reward is differentiated
        wanted.append(f"reward.functions=[{{path: '{GRADED}:brightness'}}]")
    keys = (*TINY, *wanted, f"actor.ppo_micro_batch_size_per_gpu={micro}", *keys)
    if name in TOKENS:
        cfg = tiny_lm_config(model, folder, f"algorithm.name={name}", *keys)
        prompts = folder / "prompts.jsonl"
        told = [{**json.loads(line), "privileged_context": "Ann"} for line in prompts.read_text().splitlines()]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in told))
        return cfg
    cfg = algorithm_config(model, folder, name, "rollout.guidance_scale=1", *keys)
    if "context_key" in own:
        cfg.data.train_files = [str(folder / "told.jsonl")]
        told = [{"prompt": text, "enhanced_prompt": f"{text} at dawn"} for text in PROMPTS]
        (folder / "told.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    return cfg


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    row = {key: value for key, value in one["row"].items() if key.startswith(("actor/", "critic/"))}
    assert len(row) > 4 and one["row"].keys() == other["row"].keys()
    assert {key: other["row"][key] for key in row} == pytest.approx(row, rel=1e-5, abs=1e-6)


def documented() -> set[str]:
    """The metrics in the lists of docs/concepts.md; a name without a section has that of the name before it."""
    page, found = (ROOT / "docs" / "concepts.md").read_text(), set()
    for cell in re.findall(r"^- (`[^:]+):", page, re.MULTILINE):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = name.rpartition("/")[0] if "/" in name else section
            found.add(name if "/" in name else f"{section}/{name}")
    return found


def check(name: str, model: Path, tmp_path: Path, *packed: str) -> dict[str, float]:
    """Compare a step's metrics on all layouts, and return them."""
    alone, each = MICROS[MODULES[name].Algorithm.samples_per_unit == 2]
    layouts = [job(name, model, tmp_path / str(micro), micro) for micro in alone]
    layouts += [job(name, model, tmp_path / "packed", 3, key) for key in packed]
    (found,) = run_ranks(steps, 1, layouts)
    two = run_ranks(steps, 2, [job(name, model, tmp_path / "two", each)])
    for other in [*found[1:], *(part[0] for part in two)]:
        assert_same(found[0], other)
    row: dict[str, float] = found[0]["row"]
    assert row["actor/updates_skipped"] == 0 and row["actor/grad_norm"] > 0
    unknown = {key for key in row if key.startswith(("actor/", "critic/"))} - documented()
    assert not unknown, f"docs/concepts.md does not define {unknown}"
    return row


@pytest.mark.seldom("rloo")
@pytest.mark.quick("grpo")
@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str, lm_folder: Path, tmp_path: Path) -> None:
    row = check(name, lm_folder, tmp_path, PACKED)
    assert row["actor/entropy"] > 1
    assert row["actor/margin" if name == "dpo" else "actor/kl_ref"] > 0.01


@pytest.mark.seldom("cps", "dance_grpo", "mix_grpo", "tempflow_grpo")  # flow_grpo's loss
@pytest.mark.quick("diffusion_dpo")
@pytest.mark.parametrize("name", FLOW)
def test_flow(name: str, sd3_folder: Path, tmp_path: Path) -> None:
    row = check(name, sd3_folder, tmp_path)
    assert row["actor/kl_ref"] > 0


# --- by hand


def by_hand(cfg: Any) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a step of one update, and the same from loops over its tokens."""
    t, samples, reward = made(cfg)
    with torch.no_grad():
        replay = t.policy.replay(samples.trace)
        with t.policy.using("reference"):
            other = t.policy.replay(samples.trace).log_prob
    clip, kind = cfg.algorithm.clip_ratio, cfg.algorithm.kl_loss_type
    sums = dict.fromkeys(("entropy", "self_certainty", "ratio_mean", "approx_kl", "clipfrac", "kl_ref"), 0.0)
    count = 0
    for i in range(SAMPLES):
        known = [r for r in reward[i // 3 * 3 :][:3].tolist() if not math.isnan(r)]
        if math.isnan(reward[i]) or max(known) == min(known):
            continue
        better = reward[i] > sum(known) / len(known)
        for k in samples.mask[i].nonzero().flatten().tolist():
            new = float(replay.log_prob[i, k])
            moved, d = new - float(samples.log_prob[i, k]), float(other[i, k]) - new
            ratio = math.exp(moved)
            count += 1
            sums["entropy"] += float(replay.entropy[i, k])
            sums["self_certainty"] += float(replay.self_certainty[i, k])
            sums["ratio_mean"] += ratio
            sums["approx_kl"] += ratio - 1 - moved
            sums["clipfrac"] += ratio > 1 + clip if better else ratio < 1 - clip
            sums["kl_ref"] += -d if kind == "k1" else math.exp(d) - 1 - d
    assert 20 < count < int(samples.mask.sum())
    return update(t, samples, reward, 0), {f"actor/{name}": total / count for name, total in sums.items()}


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_plain_loop_over_tokens(kind: str, lm_folder: Path, tmp_path: Path) -> None:
    keys = ("actor.ppo_mini_batch_size=4", f"algorithm.kl_loss_type={kind}")
    ((row, expected),) = run_ranks(by_hand, 1, job("grpo", lm_folder, tmp_path, 3, *keys))
    assert 0.05 < expected["actor/clipfrac"] < 0.9
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)


# --- the decision to stop early


@pytest.mark.full
def test_the_updates_of_a_step_end_early_on_all_layouts_or_on_none(lm_folder: Path, tmp_path: Path) -> None:
    """With a limit just below the second update's mean ratio, and just above it."""
    ((free,),) = run_ranks(steps, 1, [job("grpo", lm_folder, tmp_path / "free", 3)])
    assert free["ratio"] > 1.001
    limits = [free["ratio"] * factor for factor in (0.9999, 1.0001)]

    def jobs(*micros: int) -> list[Any]:
        key = "algorithm.early_stop_imp_ratio"
        return [
            job("grpo", lm_folder, tmp_path / f"{micro}_{limit}", micro, f"{key}={limit}")
            for micro in micros
            for limit in limits
        ]

    (alone,), (two, _) = run_ranks(steps, 1, jobs(1, 3, 6)), run_ranks(steps, 2, jobs(1))
    found = [*alone, *two]
    assert [part["row"]["actor/updates_skipped"] for part in found] == [1, 0] * 4
    for part in found:
        assert_same(found[1 - int(part["row"]["actor/updates_skipped"])], part)
        expected = found[1 - int(part["row"]["actor/updates_skipped"])]["weights"]
        for name, value in part["weights"].items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)
