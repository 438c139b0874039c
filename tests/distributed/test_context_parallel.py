"""Context parallelism (Ulysses) gives the same job as without it, for each family with a plan."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.tasks import SampleConfig
from phalanx.run import rl
from phalanx.run.rules import load_config
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.rehearsal import Rehearsal
from tests.distributed import test_editing, test_flow_matching, test_opd, test_preferences
from tests.distributed.test_resume import stop_after
from tests.helpers.checks import refused
from tests.helpers.jobs import fit, one_step, rows, tiny_config
from tests.helpers.kinds import check
from tests.helpers.plans import describe
from tests.helpers.ranks import RankError, run_ranks

KEY = "parallel.ulysses_sequence_parallel_size"
SHARED = f"{KEY}=2"
LORA = "model.lora_rank=4"
FRAMES = "rollout.num_frames=5"
# with the usual epsilon, Adam would make full steps for gradients that are only rounding errors
GENTLE = "optim.eps=1e-3"

COUNTED = """
import os
from pathlib import Path

def counted(images, prompts, metadata):
    with open(Path(__file__).with_name("calls"), "a") as file:
        print(os.environ["RANK"], len(images), file=file)
    return images.mean(dim=(1, 2, 3))
"""


def of_family(family: str, request: pytest.FixtureRequest, folder: Path, *keys: str) -> FlowRLConfig:
    frames = [FRAMES] if family in ("wan", "hunyuan", "ltx2") else []  # LTX-2 with 5 audio tokens
    return tiny_config(request.getfixturevalue(f"{family}_folder"), folder, *frames, GENTLE, *keys)


def assert_same(alone: list[dict[str, Any]], shared: list[dict[str, Any]]) -> None:
    """Samples agree up to a few last bits, since attention sums in another order; ranks of a group agree exactly."""
    for rank, part in enumerate(shared):
        other = alone[rank // 2]
        for key in ("images", "latents", "log_prob"):
            torch.testing.assert_close(part[key], other[key], rtol=0, atol=1e-5)
            assert torch.equal(part[key], shared[rank // 2 * 2][key])
        torch.testing.assert_close(part["reward"], other["reward"], rtol=1e-4, atol=0)
        # both passes run on the same tokens
        assert part["row"]["actor/first_ratio_error"] == 0.0
        assert part["row"]["actor/grad_norm"] == pytest.approx(other["row"]["actor/grad_norm"], rel=1e-4)
        assert part["row"].keys() == other["row"].keys()
        for name, value in other["weights"].items():
            torch.testing.assert_close(part["weights"][name], value, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.seldom(
    *("qwen-lora-4-2", "qwen-full-2-1", "qwen-full-4-2", "wan-lora-4-2", "wan-full-2-1"),
    *("flux2_klein-lora-4-2", "flux2_klein-full-2-1", "flux2_klein-full-4-2"),
    *("ltx2-lora-4-2", "ltx2-full-2-1", "ltx2-full-4-2"),
    *("qwen_21-lora-4-2", "qwen_21-full-2-1", "qwen_21-full-4-2"),
    *("hunyuan-lora-2-1", "hunyuan-lora-4-2", "hunyuan-full-2-1", "hunyuan-full-4-2"),
)
@pytest.mark.parametrize(("world", "shards"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(
    "family", ["qwen", "qwen_21", "wan", "hunyuan", "ltx2", pytest.param("flux", marks=pytest.mark.long), "flux2_klein"]
)
def test_the_same_step(
    family: str, kind: str, world: int, shards: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    lora = [LORA, "algorithm.kl_loss_coef=0.04"] if kind == "lora" else ["model.gradient_checkpointing=true"]
    cfg = of_family(family, request, tmp_path, *lora)
    alone = run_ranks(one_step, world // 2, cfg)
    shared = of_family(family, request, tmp_path, *lora, SHARED, f"parallel.fsdp_size={shards}")
    assert_same(alone, run_ranks(one_step, world, shared))


@pytest.mark.full
@pytest.mark.seldom("flux2_klein_edit", "flux_kontext")
@pytest.mark.parametrize("family", ["qwen_image_edit", "flux_kontext", "flux2_klein_edit"])
def test_the_tokens_of_a_second_image(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    names = {"qwen_image_edit": "qwen_edit_folder", "flux2_klein_edit": "flux2_klein_folder"}
    folder = request.getfixturevalue(names.get(family, f"{family}_folder"))
    keys = GENTLE, LORA, f"model.family={family}"
    alone = run_ranks(one_step, 1, test_editing.configure(folder, tmp_path, *keys))
    shared = test_editing.configure(folder, tmp_path, *keys, SHARED)
    assert_same(alone, run_ranks(one_step, 2, shared))


def trained(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run that do not depend on the last bits of its images."""
    return [{k: v for k, v in row.items() if k in ("step", "reward/mean", "actor/grad_norm")} for row in rows(folder)]


def assert_same_rows(some: Path, others: Path) -> None:
    for one, other in zip(trained(some), trained(others), strict=True):
        assert one.keys() == other.keys()
        assert list(one.values()) == pytest.approx(list(other.values()), rel=1e-3)


def long_job(wan_folder: Path, folder: Path, *keys: str) -> FlowRLConfig:
    """Two rewards, a validation set, passes of three images that two ranks cannot share evenly, and redrawn samples."""
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(COUNTED)
    reward = f"{{path: '{folder / 'reward.py'}:counted', weight: 100}}"
    fixed = [
        LORA, GENTLE, "rollout.n=6", "rollout.micro_batch_size_per_gpu=3", "actor.ppo_micro_batch_size_per_gpu=3",
        "data.train_batch_size=2", "trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2",
        "rollout.num_inference_steps=3", "rollout.sde_window_size=1", "rollout.max_draws_per_prompt=2",
        f"data.val_files=[{folder / 'prompts.txt'}]", f"reward.functions=[{{name: jpeg_incompressibility}}, {reward}]",
    ]  # fmt: skip
    return tiny_config(wan_folder, folder, *fixed, *keys)


@pytest.mark.long
def test_a_run_resumes_with_and_without(wan_folder: Path, tmp_path: Path) -> None:
    plain = long_job(wan_folder, tmp_path / "plain")
    alone = run_ranks(fit, 1, plain)[0]
    shared = long_job(wan_folder, tmp_path / "shared", SHARED, "parallel.fsdp_size=2")
    weights = run_ranks(fit, 2, shared)
    for name, value in alone.items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=2e-5)
        assert torch.equal(weights[0][name], weights[1][name])
    assert_same_rows(tmp_path / "shared" / "out", tmp_path / "plain" / "out")
    plainly, together = (rows(tmp_path / name / "out") for name in ("plain", "shared"))
    key = "val/prompts/reward/mean"
    before, now = ([row[key] for row in some if key in row] for some in (plainly, together))
    assert len(now) == 3 and before == pytest.approx(now, rel=1e-3)

    # each sample is scored once, half of them on each rank
    counts = {}
    for name in ("plain", "shared"):
        calls = [tuple(map(int, line.split())) for line in (tmp_path / name / "calls").read_text().splitlines()]
        counts[name] = [sum(count for rank, count in calls if rank == r) for r in range(2)]
    assert sum(counts["shared"]) == sum(counts["plain"])
    assert abs(counts["shared"][0] - counts["shared"][1]) <= 8

    # from the second step on: bitwise the same again, also on separate ranks
    wanted = rows(tmp_path / "shared" / "out")
    stop_after(tmp_path / "shared", 2)
    again = run_ranks(fit, 2, shared)[0]
    assert rows(tmp_path / "shared" / "out") == wanted
    assert all(torch.equal(again[name], value) for name, value in weights[0].items())
    stop_after(tmp_path / "shared", 2)
    apart = long_job(wan_folder, tmp_path / "apart", f"trainer.output_dir={tmp_path / 'shared' / 'out'}")
    run_ranks(fit, 2, apart)
    assert_same_rows(tmp_path / "shared" / "out", tmp_path / "plain" / "out")


def collected(cfg: FlowRLConfig) -> tuple[torch.Tensor, dict[str, float]]:
    found = rl.build(cfg).collector.collect(0)
    return found.samples.outputs, found.row


@pytest.mark.full
def test_prompts_that_are_drawn_again(wan_folder: Path, tmp_path: Path) -> None:
    """All prompts are drawn again, because their rewards are equal."""
    (tmp_path / "reward.py").write_text("def dark(images, prompts, metadata):\n    return [0.0] * len(images)\n")
    keys = ["rollout.max_draws_per_prompt=2", f"reward.functions=[{{path: '{tmp_path / 'reward.py'}:dark'}}]"]
    [(images, row)] = run_ranks(collected, 1, tiny_config(wan_folder, tmp_path, *keys))
    for again, found in run_ranks(collected, 2, tiny_config(wan_folder, tmp_path, *keys, SHARED)):
        assert row["rollout/resampled_ratio"] == found["rollout/resampled_ratio"] == 1.0
        torch.testing.assert_close(again, images, rtol=0, atol=1e-5)


def test_pairs_of_the_data(qwen_folder: Path, tmp_path: Path) -> None:
    keys = [GENTLE, LORA, "algorithm.train_timesteps=1", "rollout.true_cfg_scale=1"]
    alone = run_ranks(one_step, 1, test_preferences.offline(qwen_folder, tmp_path, *keys))[0]
    shared = run_ranks(one_step, 2, test_preferences.offline(qwen_folder, tmp_path, *keys, SHARED))
    for part in shared:
        for key in ("actor/grad_norm", "actor/margin", "actor/accuracy"):
            assert part["row"][key] == pytest.approx(alone["row"][key], rel=1e-4, abs=1e-5), key
        for name, value in alone["weights"].items():
            torch.testing.assert_close(part["weights"][name], value, rtol=0, atol=1e-5)


pictures = test_flow_matching.pictures


@pytest.mark.full
def test_supervised_flow_matching(wan_folder: Path, pictures: Path, tmp_path: Path) -> None:
    def configure(name: str, *keys: str) -> FlowMatchingTaskConfig:
        return test_flow_matching.configure(wan_folder, pictures, tmp_path / name, GENTLE, *keys)

    alone = run_ranks(test_flow_matching.train, 1, configure("alone"))[0]
    shared = run_ranks(test_flow_matching.train, 4, configure("shared", SHARED, "parallel.fsdp_size=4"))[0]
    for a, b in zip(alone["rows"], shared["rows"], strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
        assert b["actor/grad_norm"] == pytest.approx(a["actor/grad_norm"], rel=1e-4)


@pytest.mark.full
def test_a_teacher(qwen_folder: Path, tmp_path: Path) -> None:
    teacher = test_opd.moved(qwen_folder, tmp_path / "teacher")
    alone, shared = (
        run_ranks(
            test_opd.one_step, ranks, test_opd.configure(qwen_folder, tmp_path / "job", LORA, *keys, teacher=teacher)
        )
        for ranks, keys in ((1, ()), (2, (SHARED,)))
    )
    assert alone[0]["row"]["actor/teacher_kl"] > 1e-5
    for part in shared:
        for key in ("actor/grad_norm", "actor/teacher_kl"):
            assert part["row"][key] == pytest.approx(alone[0]["row"][key], rel=1e-4), key


UNPLANNED = (
    f"{KEY}: 2 needs a plan of how to split tokens, which neither diffusers nor Phalanx has for model.path FOLDER; "
    "set it to 1, or use one of the families flux, flux2, flux2_edit, flux2_klein, flux2_klein_edit, flux_kontext, "
    "hunyuan_video_15, hunyuan_video_15_i2v, ltx2, qwen_image, qwen_image_21, qwen_image_edit, qwen_image_edit_2508, wan, "
    "wan_i2v"
)


@pytest.mark.parametrize(
    ("family", "keys", "ranks", "message"),
    [
        ("sd3", (SHARED,), 2, UNPLANNED),
        ("z_image", (SHARED,), 2, UNPLANNED),
        ("wan", (f"{KEY}=3",), 4, f"{KEY}: 3 does not divide the 4 ranks of a node; nearest that does: 2 or 4"),
        ("wan", (SHARED, "model.compile=true"), 2,
         f"{KEY}: 2 exchanges tokens within blocks, which cannot be compiled then; set model.compile=false"),
        ("qwen", (SHARED, "rollout.engine=vllm_omni"), 2,
         f"{KEY}: 2 needs an engine that samples in the policy's modules; set rollout.engine=policy"),
        ("wan", (SHARED, "data.train_batch_size=3", "actor.ppo_mini_batch_size=1", "rollout.n=3"), 4,
         "actor.ppo_mini_batch_size: 1 prompts x rollout.n 3 = 3 samples of an update do not divide over 2 ranks; "
         "nearest that work: rollout.n=8"),
    ],
)  # fmt: skip
def test_what_is_refused(
    family: str,
    keys: tuple[str, ...],
    ranks: int,
    message: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with refused(message.replace("FOLDER", repr(str(folder))), ConfigError):
        check(tiny_config(folder, tmp_path, *keys))


def test_other_jobs_refuse_it(wan_folder: Path) -> None:
    message = f"{KEY}: 2 is only for training; here ranks sample different prompts, so set it to 1"
    with refused(message, ConfigError):
        load_config(SampleConfig, None, [f"model.path={wan_folder}", "prompts=[a cat]", SHARED])


def test_the_plan_divides_activations(wan_folder: Path, tmp_path: Path) -> None:
    def plan(*keys: str) -> Rehearsal:
        cfg = tiny_config(wan_folder, tmp_path, LORA, "rollout.num_frames=29", "model.family=wan", *keys)
        return planned(cfg, Cluster(1, 4))

    alone, shared = plan(), plan(SHARED, "data.train_batch_size=2", "actor.ppo_mini_batch_size=1")
    whole, half = (p.ledger.phases["update"] for p in (alone, shared))
    # texts are whole on both ranks
    assert 0.5 < (half.peak - half.before) / (whole.peak - whole.before) < 0.62
    assert shared.plan is not None and shared.plan.per_rank == 4
    assert shared.flops == alone.flops // 2
    assert "context groups  0-1 | 2-3: each has its own samples" in describe(shared)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("wan", (f"{KEY}=3",), f"{KEY}: 3 does not divide the model's 4 attention heads; nearest that does: 2 or 4"),
        ("wan", (SHARED, "rollout.height=8", "rollout.width=24"),
         f"{KEY}: 2 does not divide the 3 tokens of a video of 1 x 8 x 24; nearest that does: 1 or 3"),
        ("flux", (SHARED, "data.max_prompt_length=31"),
         f"{KEY}: 2 does not divide the 31 tokens of data.max_prompt_length; nearest that does: 1 or 31"),
        ("qwen", (SHARED, "model.attn_backend=_native_math"), f"model.attn_backend: _native_math does not support {KEY}; expected "),
    ],
)  # fmt: skip
def test_what_the_model_cannot_share(
    family: str, keys: tuple[str, ...], message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cfg = tiny_config(request.getfixturevalue(f"{family}_folder"), tmp_path, *keys)
    size = cfg.parallel.ulysses_sequence_parallel_size
    with pytest.raises(RankError, match=re.escape(f"Error: {message}")):
        run_ranks(one_step, size, cfg)
