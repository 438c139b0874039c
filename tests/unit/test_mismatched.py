"""Engines that are off by a known amount, and the page and the figure made of what they trained."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.jobs import rows, tiny_config
from tests.helpers.lm import fit, tiny_lm_config
from tests.helpers.policies import disturb
from tests.helpers.ranks import ROOT, run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
import learn_mismatch
import mismatched

Job = Callable[..., Any]


@pytest.fixture(params=["Images", "Texts"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """A configuration of a tiny job with an engine, and further keys; two updates per step."""
    of_images = request.param == "Images"
    model = request.getfixturevalue("sd3_folder" if of_images else "lm_folder")

    def make(off: str, *keys: str) -> Any:
        engine = f"rollout.engine={ROOT}/benchmarks/mismatched.py:{request.param}_{off}" if off else "rollout.n=4"
        options = (engine, *keys, f"trainer.output_dir={tmp_path / off / 'out'}")
        if of_images:
            return tiny_config(model, tmp_path, *options)
        return tiny_lm_config(model, tmp_path, "model.use_remove_padding=false", *options)

    return make


@pytest.mark.seldom("Images")
@pytest.mark.quick("Texts")
def test_only_what_is_off_differs(job: Job, tmp_path: Path) -> None:
    """An exact engine trains bit for bit as the policy's rollout does, and rescoring removes all of the noise."""
    weights = {off: run_ranks(fit, 1, job(off, f"rollout.correction={correction}"))[0] for off, correction in RUNS}
    plain = rows(tmp_path / "out")
    assert len(plain) == 2 and plain[0]["actor/ratio_std"] > 0
    for off, _ in RUNS[1:3]:
        assert all(torch.equal(weights[off][name], value) for name, value in weights[""].items())
        for row, other in zip(plain, rows(tmp_path / off / "out"), strict=True):
            assert {key: other[key] for key in row} == row
    assert not all(torch.equal(weights["noise_1e_1"][name], value) for name, value in weights[""].items())


RUNS = [("", "rescore"), ("exact", "none"), ("noise_1e_2", "rescore"), ("noise_1e_1", "none")]


def drawn(cfg: Any) -> list[Any]:
    """Two samplings of step 4, with other weights in the second: (log-probs, mask, metrics, the final states)."""
    from phalanx.run.rl import build

    t = build(cfg)
    rollout, parts = t.collector.rollout, []
    for _ in range(2):
        with rollout.awake():
            samples = rollout.sample(t.collector.prompts.batch(0), seed=1, step=4, each=t.collector.rewards.submit)
            t.collector.rewards.score()
        states = samples.trace.clean if samples.lengths is None else samples.trace.ids
        row = rollout.metrics(samples, torch.zeros(len(samples.index)))
        parts.append((samples.log_prob, samples.mask, {k: v for k, v in row.items() if "mismatch/" in k}, states))
        disturb(t.policy, std=0.01)
    return parts


@pytest.mark.seldom("Images")
@pytest.mark.full
def test_engines_are_off_by_their_name(job: Job) -> None:
    found = {off: run_ranks(drawn, 1, job(off, "rollout.correction=none"))[0] for off in OFFS}
    log_prob, mask, row, states = found["exact"][0]
    assert row == dict.fromkeys(row, 0.0) and len(row) == 2 + len(mismatched.RANGES)
    noise = (found["noise_1e_2"][0][0] - log_prob)[mask]
    assert noise.std() == pytest.approx(0.01, rel=4 / (2 * len(noise)) ** 0.5)
    assert abs(noise.mean()) < 4 * 0.01 / len(noise) ** 0.5
    assert torch.allclose((found["low_1e_1"][0][0] - log_prob)[mask], torch.tensor(-0.1), atol=1e-5)
    assert found["low_1e_1"][0][2]["mismatch/beyond_0.01"] == 1
    for off in ("noise_1e_2", "low_1e_1"):  # only what is reported is off
        assert torch.equal(found[off][0][3], states)
    assert 0 < found["bf16"][0][2]["mismatch/largest"] < found["fp8"][0][2]["mismatch/largest"]
    # the weights have changed, and the engine still has those before: its samples are the first ones
    stale, now = found["stale"], found["exact"][1]
    assert torch.equal(stale[0][0], stale[1][0]) and torch.equal(stale[0][3], stale[1][3])
    assert stale[0][2]["mismatch/largest"] == 0 < stale[1][2]["mismatch/largest"]
    assert not torch.equal(now[0][now[1]], stale[1][0][stale[1][1]])


OFFS = ("exact", "noise_1e_2", "low_1e_1", "bf16", "fp8", "stale")


def test_rounding() -> None:
    """Of e4m3 with a scale per row: 3 bits after the leading one, and rows do not depend on the others of a rank."""
    weight = torch.randn(8, 32) * torch.logspace(-4, 4, 8)[:, None]
    coarse, fine = (mismatched.rounded(weight, form) for form in ("fp8", "bf16"))
    largest = weight.abs().amax(1, keepdim=True)
    assert ((coarse - weight).abs() <= weight.abs() / 16 + largest / mismatched.LARGEST * 2**-10).all()
    assert not torch.equal(coarse, weight) and torch.equal(mismatched.rounded(weight[2:5], "fp8"), coarse[2:5])
    assert torch.equal(mismatched.rounded(weight[0], "fp8"), fine[0])
    assert ((fine - weight).abs() <= weight.abs() / 256).all()


def test_the_page_and_the_figure_are_made_of_the_runs() -> None:
    """Conditions that lack a seed are left out."""
    known = learn_mismatch.read(learn_mismatch.RESULTS)
    assert "\n".join(learn_mismatch.tables(known)) in learn_mismatch.PAGE.read_text()
    assert learn_mismatch.FIGURE.read_text() == learn_mismatch.figure(known)
    runs = learn_mismatch.finished(known, "images_1e-3")["none", "exact"]
    known["runs"].remove(runs[0])
    assert ("none", "exact") not in learn_mismatch.finished(known, "images_1e-3")
