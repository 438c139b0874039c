"""Joint runs: a writer's texts are a painter's prompts, one reward trains both, and all layouts agree."""

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config.joint import POLICIES, JointConfig
from phalanx.config.messages import ConfigError
from phalanx.config.trust import Use
from phalanx.run.joint_rl import build
from phalanx.run.rl import warn_of_k1
from phalanx.run.rules import load_config
from phalanx.tools.opening import open_checkpoint
from tests.helpers.checks import heard, refused
from tests.helpers.jobs import CONTRAST, PROMPTS, SIZE, assert_same_weights, full_weights, rows
from tests.helpers.kinds import check
from tests.helpers.ranks import RankError, run_ranks


def joint_config(writer: Path, painter: Path, folder: Path, *overrides: str) -> JointConfig:
    """A job of 2 prompts x 4 responses x 2 images per step, rewarded for the images' contrast."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS[:2] + PROMPTS[3:]) + "\n")
    base = [
        f"writer.model.path={writer}",
        "writer.model.dtype=float32",
        "writer.rollout.n=4",
        "writer.rollout.micro_batch_size_per_gpu=2",
        "writer.actor.ppo_mini_batch_size=2",
        "writer.actor.ppo_micro_batch_size_per_gpu=2",
        "writer.optim.lr=1e-3",
        f"painter.model.path={painter}",
        "painter.model.dtype=float32",
        "painter.rollout.n=2",
        "painter.rollout.num_inference_steps=3",
        f"painter.rollout.height={SIZE}",
        f"painter.rollout.width={SIZE}",
        "painter.rollout.sde_window_size=1",
        "painter.rollout.micro_batch_size_per_gpu=2",
        "painter.actor.ppo_mini_batch_size=4",
        "painter.actor.ppo_micro_batch_size_per_gpu=2",
        "painter.optim.lr=1e-3",
        "painter.algorithm.clip_ratio=1e-3",
        f"data.train_files=[{folder / 'prompts.txt'}]",
        f"data.val_files=[{folder / 'prompts.txt'}]",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "data.max_rewrite_length=32",
        f"reward.functions=[{{name: contrast, path: '{CONTRAST}'}}]",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        f"trainer.output_dir={folder / 'out'}",
    ]
    return load_config(JointConfig, None, [*base, *overrides])


def weights(t: Any) -> dict[str, dict[str, Tensor]]:
    """The weights of both policies."""
    return {name: full_weights(dict(part.policy.trained.module.named_parameters())) for name, part in t.parts.items()}


def one_step(cfg: JointConfig) -> dict[str, Any]:
    """Both policies' samples and rewards in the first training step, the weights after it, and its metrics."""
    t = build(cfg)
    drawn: dict[str, Any] = {}
    draw = t.draw

    def kept(step: int) -> Any:
        drawn.update(draw(step))
        return dict(drawn)

    t.draw = kept  # type: ignore[method-assign]
    row = {key: value for key, value in t.step(0).items() if "perf/" not in key}
    return {
        "prompts": [prompt.text for prompt in t.rewriter.prompts(t.rewriter.numbers(0))],
        "responses": drawn["writer"].samples.outputs,
        "pictures": drawn["painter"].samples.outputs,
        "rewards": {name: collected.reward for name, collected in drawn.items()},
        "row": row,
        "weights": weights(t),
    }


def steps(folder: Path) -> list[dict[str, Any]]:
    """Like `rows`, for two policies."""
    return [{key: value for key, value in row.items() if "/perf/" not in key} for row in rows(folder)]


def fit_until_killed(cfg: JointConfig, step: int) -> None:
    """Train; one rank is killed just before that step trains the painter."""
    t = build(cfg)
    optimizer_steps = t.updaters["painter"].optimizer_steps

    def killed(batch: Any, at: int) -> Any:
        if at == step and t.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return optimizer_steps(batch, at)

    t.updaters["painter"].optimizer_steps = killed  # type: ignore[method-assign]
    t.fit()


def fit(cfg: JointConfig) -> dict[str, dict[str, Tensor]]:
    """Train to the end; returns the weights."""
    t = build(cfg)
    t.fit()
    return weights(t)


KEPT = ("rewrite.keep_originals=4", "painter.actor.ppo_mini_batch_size=8")


@pytest.mark.full
def test_layouts_agree(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """One rank, two ranks, and two replicas of two shards have equal texts, images and rewards, and take equal steps."""
    (alone,) = run_ranks(one_step, 1, joint_config(lm_folder, sd3_folder, tmp_path / "1", *KEPT))
    row = alone["row"]
    assert row["writer/actor/first_ratio_error"] == row["painter/actor/first_ratio_error"] == 0
    assert row["writer/actor/grad_norm"] > 1e-4 and row["painter/actor/grad_norm"] > 1e-4
    # a response's reward is the mean over its pictures, and the last prompts of each group are the original one
    of_prompts = alone["rewards"]["painter"].view(2, 8, 2).mean(-1)
    assert torch.equal(alone["rewards"]["writer"], of_prompts[:, :4].flatten())
    for group in (alone["prompts"][:8], alone["prompts"][8:]):
        assert len(set(group[4:])) == 1 and group[4] in PROMPTS and not set(group[:4]) & set(PROMPTS)
    original = float(of_prompts[:, 4:].mean())
    assert row["writer/rewrite/original_reward_mean"] == pytest.approx(original)
    for ranks, shards in ((2, 1), (4, 2)):
        cfg = joint_config(lm_folder, sd3_folder, tmp_path / f"{ranks}", *KEPT, f"parallel.fsdp_size={shards}")
        parts = run_ranks(one_step, ranks, cfg)
        assert [text for part in parts for text in part["responses"]] == alone["responses"]
        assert torch.equal(torch.cat([part["pictures"] for part in parts]), alone["pictures"])
        for part in parts:
            assert part["prompts"] == alone["prompts"]
            for name, reward in alone["rewards"].items():
                assert torch.equal(part["rewards"][name], reward)
                if shards == 1:
                    assert_same_weights(alone["weights"][name], part["weights"][name], 1e-3)
            for key, value in row.items():
                assert part["row"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_it_had_not_been(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """Bit for bit, after SIGKILL of one of two ranks in a step after the last checkpoint; with alternating policies, a
    moving average and a learning rate schedule.
    """
    keys = (
        "alternate=1",
        "painter.actor.ema.decay=0.5",
        "writer.optim.lr_scheduler=linear",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=4",
    )
    whole = run_ranks(fit, 2, joint_config(lm_folder, sd3_folder, tmp_path / "whole", *keys))[0]
    begun = tmp_path / "begun" / "out"
    cfg = joint_config(lm_folder, sd3_folder, tmp_path / "begun", *keys)
    with pytest.raises(RankError):
        run_ranks(fit_until_killed, 2, cfg, 3)
    assert [row["step"] for row in steps(begun)] == [1, 2, 3]
    again = run_ranks(fit, 2, cfg)[0]
    for name, values in whole.items():
        for key, value in values.items():
            assert torch.equal(again[name][key], value), key
    for name in POLICIES:
        held = open_checkpoint(str(tmp_path / "whole" / "out"), "model", Use(), name)
        exported = {key: torch.empty(entry.size) for key, entry in held.entries.items()}
        held.read_into(exported)
        assert exported.keys() <= whole[name].keys() and len(exported) > 10
        assert all(torch.equal(whole[name][key], value) for key, value in exported.items())
    first, second = steps(tmp_path / "whole" / "out"), steps(begun)
    assert first == second and [row["step"] for row in first] == [1, 2, 3, 4]
    assert "val/prompts_original/reward/mean" in first[-1] and "val/prompts_rewritten/reward/mean" in first[-1]
    # they take turns
    assert ["writer/actor/lr" in row for row in first] == [True, False, True, False]
    assert ["painter/actor/lr" in row for row in first] == [False, True, False, True]


@pytest.mark.quick("writer")
@pytest.mark.parametrize("trained", ["writer", "painter"])
def test_the_other_policy_stays_as_it_is(trained: str, lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    cfg = joint_config(lm_folder, sd3_folder, tmp_path, f"train=[{trained}]", "painter.model.lora_rank=2")
    before, after = run_ranks(before_and_after, 1, cfg)[0]
    for name, values in before.items():
        same = all(torch.equal(after[name][key], value) for key, value in values.items())
        assert same == (name != trained)
    row = rows(tmp_path / "out")[-1]
    assert row[f"{trained}/actor/first_ratio_error"] == 0 and row["reward/std"] > 0
    assert ("writer/actor/lr" in row, "painter/actor/lr" in row) == (trained == "writer", trained == "painter")


def before_and_after(cfg: JointConfig) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    t = build(cfg)
    before = weights(t)
    t.fit()
    return before, weights(t)


@pytest.mark.full
def test_pictures_are_compared_within_a_text_or_a_prompt(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """The scope changes only what the painter learns, neither the samples nor what the writer learns."""
    drawn = []
    for scope in ("rewrite", "prompt"):
        cfg = joint_config(lm_folder, sd3_folder, tmp_path / scope, f"diffusion_group_scope={scope}")
        drawn.append(run_ranks(one_step, 1, cfg)[0])
    one, other = drawn
    assert torch.equal(one["pictures"], other["pictures"])
    assert all(torch.equal(value, other["weights"]["writer"][key]) for key, value in one["weights"]["writer"].items())
    assert one["row"]["painter/actor/grad_norm"] != other["row"]["painter/actor/grad_norm"]
    assert one["row"]["reward/std_mean"] < other["row"]["reward/std_mean"]


FAILING = """
import logging

calls = 0


def picky(images, prompts, metadata):
    global calls
    calls += 1
    logging.getLogger("mine").warning("optim.lr: %s", "model.path: a")
    assert calls % 3, "no score"
    return [float(image.mean()) for image in images]
"""
TEXTS = ("", "x " * 5000, "<|endoftext|></s><|im_end|><pad> a fox")


def odd_steps(cfg: JointConfig) -> tuple[list[dict[str, float]], set[str]]:
    """The metrics of a step for each of TEXTS, with all responses equal to it, and the lines that the reward logs."""
    t, lines = build(cfg), heard("mine", logging.NOTSET)
    texts, draw, result = t.rewriter.texts, t.draw, []

    def kept(step: int) -> Any:
        drawn = draw(step)
        pictures = drawn["painter"].reward.view(-1, 2)  # two of each text
        assert torch.equal(drawn["writer"].reward.isnan(), pictures.isnan().all(1))
        result.append({"lost": int(drawn["writer"].reward.isnan().sum())})
        return drawn

    t.draw = kept  # type: ignore[method-assign]
    for step, text in enumerate(TEXTS):
        t.rewriter.texts = lambda responses, text=text: texts([text] * len(responses))  # type: ignore[method-assign]
        row = t.step(step)
        result[-1] |= row
    return result, set(lines)


@pytest.mark.full
def test_texts_and_rewards_that_are_missing(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    """Texts that are empty, all equal, far too long or with special tokens; some have no reward for both images."""
    (tmp_path / "picky.py").write_text(FAILING)
    reward = (f"reward.functions=[{{path: '{tmp_path}/picky.py:picky'}}]", "reward.on_error=skip")
    reward += ("reward.max_error_fraction=0.9", "trainer.total_training_steps=9")
    cfg = joint_config(lm_folder, sd3_folder, tmp_path, *reward)
    for part, lines in run_ranks(odd_steps, 2, cfg):
        assert lines == {"optim.lr: model.path: a"}  # a user's lines have no keys of policies
        ratios = []
        for row in part:
            ratios.append([row[f"writer/rewrite/{name}_ratio"] for name in ("fallback", "cut", "distinct")])
            assert row["writer/actor/first_ratio_error"] == row["painter/actor/first_ratio_error"] == 0
            assert 0 < row["lost"] < 8 and row["reward/errors"] == 2 * row["lost"]
        assert ratios == [[1, 0, 0.25], [0, 1, 0.25], [0, 0, 0.25]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a <image>"}, "has a place for an image, <image>; the writer of a joint run reads texts"),
        ({"prompt": "a", "images": ["a.png"]}, "has a column images; the writer of a joint run reads texts"),
    ],
)
def test_images_of_prompts_are_refused(
    row: dict[str, Any], message: str, lm_folder: Path, sd3_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps(row) + "\n")
    cfg = joint_config(lm_folder, sd3_folder, tmp_path, f"data.train_files=[{file}]")
    with pytest.raises(ConfigError) as error:
        build(cfg)
    assert str(error.value) == f"data.train_files: {file}:1 {message}"


def test_other_numbers_of_references_are_refused(lm_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    cfg = joint_config(lm_folder, sd3_folder, tmp_path, "painter.model.reference_count=2")
    said = "painter.model.reference_count: 2, but StableDiffusion3Pipeline takes no image per row; set it to 1"
    with refused(said, ConfigError):
        build(cfg)


def test_messages_have_the_keys_of_the_joint_run(
    lm_folder: Path, sd3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In errors and log lines; the painter's batch size follows from the writer's."""
    with refused(
        "painter.actor.ppo_mini_batch_size: 3 prompts do not divide data.train_batch_size x (writer.rollout.n + "
        "rewrite.keep_originals) 8; nearest that work: painter.actor.ppo_mini_batch_size=2 or 4"
    ):
        check(joint_config(lm_folder, sd3_folder, tmp_path, "painter.actor.ppo_mini_batch_size=3"))
    cfg = joint_config(
        lm_folder, sd3_folder, tmp_path, "writer.algorithm.kl_loss_type=k1", "writer.algorithm.kl_loss_coef=1"
    )
    warn_of_k1(cfg.of_writer(), lead=True)
    assert caplog.messages[0].startswith("writer.algorithm.kl_loss_type: the expected gradient of k1 is 0")
