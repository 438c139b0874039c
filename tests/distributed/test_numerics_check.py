"""The check of numerics on tiny jobs: what a sampler and a trainer make of the same samples, and what is said of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from html import escape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.load import load
from phalanx.config.tasks import CheckNumericsConfig
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.tools.first_update import update_verdict
from phalanx.tools.numerics import BASE, NumericsCheck, verdict
from tests.helpers.checks import refused
from tests.helpers.jobs import base_overrides, tiny_config
from tests.helpers.lm import lm_overrides, sft_overrides, tiny_blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import tiny_sd3

JOINT = "configs/joint/quickstart.yaml"
TIMES = ("sample_s", "replay_s", "memory_gb")


class Rounded(PolicyRollout):
    """Samples with weights that are rounded to bfloat16, as an engine with a copy of them does."""

    facts = EngineFacts(exact=False)

    @contextmanager
    def awake(self) -> Iterator[None]:
        parameters = list(self.policy.trained.module.parameters())
        with super().awake():
            kept = [p.detach().clone() for p in parameters]
            for p in parameters:
                p.data = p.data.bfloat16().float()
            yield
            for p, value in zip(parameters, kept, strict=True):
                p.data = value


def config(folder: Path, keys: list[str], variants: dict[str, list[str]]) -> CheckNumericsConfig:
    return CheckNumericsConfig(keys=keys, variants=variants, output_dir=str(folder / "numerics"))


def check(cfg: CheckNumericsConfig) -> None:
    NumericsCheck(cfg).run()


def checked(ranks: int, cfg: CheckNumericsConfig) -> dict[str, Any]:
    """What the first rank of several writes."""
    run_ranks(check, ranks, cfg)
    found: dict[str, Any] = json.loads((Path(cfg.output_dir) / "numerics.json").read_text())
    return found


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    result = deepcopy(result)
    result.pop("ranks")
    for row in result["jobs"].values():
        for name in TIMES:
            assert row.pop(name) > 0
    return result


def test_a_flow_model_is_exact_on_one_and_two_ranks(sd3_folder: Path, tmp_path: Path) -> None:
    """In float32 and in bfloat16, whose log-probabilities and samples are others."""
    tiny_config(sd3_folder, tmp_path)  # writes the prompts
    keys = base_overrides(sd3_folder, tmp_path)
    one, two = (
        checked(ranks, config(tmp_path / str(ranks), keys, {"bf16": ["model.dtype=bfloat16"]})) for ranks in (1, 2)
    )
    one, two = without_times(one), without_times(two)
    for name in (BASE, "bf16"):
        row = one["jobs"][name]
        assert row["sampler"]["largest"] == row["old"]["largest"] == 0 and row["unit"] == "denoising step"
        assert len(row["positions"]) == row["sampler"]["actions"] / 16
    beside = one["jobs"]["bf16"]["beside"]
    assert beside["samples"] == 16 and beside["equal_samples"] == 0 and 0 < beside["replay_off"] < 0.1
    assert one["jobs"] == two["jobs"]
    assert one["verdict"].startswith("Exact: ")
    page = (tmp_path / "2" / "numerics" / "numerics.html").read_text()
    assert escape(one["verdict"]) in page and "0 of 16" in page


def test_rounded_weights_of_a_sampler_are_found_and_mended(sd3_folder: Path, tmp_path: Path) -> None:
    """The clip range of 1e-4 would drop ratios before any update; the trainer's own log-probabilities mend it."""
    tiny_config(sd3_folder, tmp_path)  # writes the prompts
    engine = f"rollout.engine='{__file__}:Rounded'"
    keys = [*base_overrides(sd3_folder, tmp_path), engine, "rollout.correction=none"]
    result = checked(1, config(tmp_path, keys, {"rescored": ["rollout.correction=rescore"]}))
    off, mended = result["jobs"][BASE], result["jobs"]["rescored"]
    assert off["sampler"] == off["old"] == mended["sampler"]
    assert 1e-4 < off["sampler"]["largest"] < 0.1 and off["sampler"]["actions_clipped"] > 0
    assert off["sampler"]["k3"] > 0 == mended["old"]["largest"]
    assert result["verdict"].endswith(" before any update; set rollout.correction=rescore (rescored), where none is.")


@pytest.mark.full
def test_decoding_with_a_cache_differs_from_scoring_by_rounding(lm_folder: Path, tmp_path: Path) -> None:
    """The loss takes log-probabilities that are scored, with packed samples too."""
    keys = lm_overrides(lm_folder, tmp_path)
    variants = {"bf16": ["model.dtype=bfloat16"], "packed": ["model.use_remove_padding=true"]}
    result = checked(1, config(tmp_path, keys, variants))
    jobs = result["jobs"]
    for row in jobs.values():
        assert row["old"]["largest"] == 0 and row["unit"] == "token"
    assert 0 < jobs[BASE]["sampler"]["largest"] < 1e-4 < jobs["bf16"]["sampler"]["largest"]
    assert jobs["packed"]["beside"]["equal_samples"] == 16 and jobs["packed"]["beside"]["replay_off"] < 1e-4
    assert result["verdict"].startswith("Sound: |ratio - 1| is at most ")


@pytest.mark.parametrize("part", [pytest.param("writer", marks=pytest.mark.full), "painter"])
def test_a_joint_run_is_checked_part_by_part(part: str, tmp_path: Path) -> None:
    """The writer's kernels decode, and its modules score; the painter's are exact. Neither job has the other's sections."""
    keys = ["data.train_batch_size=1", "writer.rollout.n=4", "writer.actor.ppo_mini_batch_size=1"]
    keys += ["writer.actor.ppo_micro_batch_size_per_gpu=4", "painter.actor.ppo_mini_batch_size=4"]
    keys += ["painter.actor.ppo_micro_batch_size_per_gpu=8"]
    cfg = CheckNumericsConfig(config=JOINT, part=part, keys=keys, output_dir=str(tmp_path / "numerics"))
    result = checked(1, cfg)
    row = result["jobs"][BASE]
    assert row["unit"] == {"writer": "token", "painter": "denoising step"}[part]
    assert result["verdict"].startswith({"writer": "Sound: ", "painter": "Exact: "}[part])


def test_a_joint_run_needs_a_part() -> None:
    with refused(f"part: {JOINT} is of a joint run; expected writer or painter"):
        NumericsCheck(CheckNumericsConfig(config=JOINT))
    with refused(
        "keys: writer.rollout.n: 1 leaves writer.algorithm.name=grpo nothing to compare a sample with; set it to at "
        "least 2, or writer.algorithm.name=ppo, which needs no groups"
    ):
        NumericsCheck(CheckNumericsConfig(config=JOINT, part="writer", keys=["writer.rollout.n=1"]))


def supervised_keys(task: str, folder: Path) -> list[str]:
    """Overrides for a tiny supervised job; its data is written to `folder`."""
    folder.mkdir(parents=True)
    if task == "block_diffusion":
        return sft_overrides(tiny_blocks(folder / "model"), folder)
    model, size = Path("assets/words/base"), "actor.ppo_micro_batch_size_per_gpu=4"
    texts = [{"prompt": f"Ann has {i} books.", "chosen": f"#### {i}", "rejected": "6" * i} for i in range(1, 9)]
    file, columns = (
        folder / "texts.jsonl",
        {"sft": ("data.prompt_key=prompt", "data.response_key=chosen", "actor.ppo_mini_batch_size=8")},
    )
    if task == "flow_matching":
        model, size = tiny_sd3(folder / "model"), "flow_matching.micro_batch_size_per_gpu=4"
        texts = [{"image": "grey.png", "prompt": f"picture {i}"} for i in range(8)]
        Image.new("RGB", (40, 40), (90, 90, 90)).save(folder / "grey.png")
        columns = {task: ("rollout.height=32", "rollout.width=32", "data.max_prompt_length=8")}
    elif task == "dpo":
        columns = {task: ("rollout.engine=dataset", "reward.functions=[{name: chosen}]", "actor.ppo_mini_batch_size=8")}
    if task != "flow_matching":
        columns[task] += ("data.max_prompt_length=64", "data.max_response_length=24")
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
    common = [f"model.path={model}", "model.dtype=float32", f"data.train_files=[{file}]", "data.train_batch_size=8"]
    common.append("trainer.total_training_steps=2")
    return [*common, size, *columns[task]]


@pytest.mark.quick("flow_matching")
@pytest.mark.parametrize("task", ["sft", "block_diffusion", "dpo", "flow_matching"])
def test_the_first_update_of_a_supervised_job(task: str, tmp_path: Path) -> None:
    """Nothing is drawn: loss and gradient are compared. Those of another dtype are off by rounding, and of shards by less."""
    keys = supervised_keys(task, tmp_path / "data")
    cfg = CheckNumericsConfig(task=task, keys=keys, standard=True, output_dir=str(tmp_path / "numerics"))
    result = checked(2, cfg)
    jobs = result["jobs"]
    base, other = jobs[BASE], jobs["bfloat16"]["beside"]
    assert base["loss"] > 0 < base["grad_norm"] and "beside" not in base
    assert 1e-5 < other["grad_norm"] < 0.2 and (other["loss"] == 0 if task == "dpo" else 1e-6 < other["loss"] < 0.1)
    exact = [name for name in jobs if name not in (BASE, "bfloat16")]
    assert {"replicated", "half as many in a pass"} <= {*exact}
    for name in exact:
        assert jobs[name]["beside"]["loss"] < 1e-5 > jobs[name]["beside"]["grad_norm"], name
    assert result["verdict"].startswith("Nothing is sampled, so that no ratio can be off before an update; ")
    assert "bfloat16 changes the first update most" in result["verdict"]
    if task == "dpo":
        assert base["margin"] == 0 and "the reference gives pairs the policy's log-probabilities" in result["verdict"]
    page = (tmp_path / "numerics" / "numerics.html").read_text()
    assert escape(result["verdict"]) in page and f"{base['loss']:.6g}" in page


def test_verdicts_of_first_updates() -> None:
    first = {"unit": "update", "loss": 1.0, "grad_norm": 2.0}
    assert update_verdict({BASE: first}).endswith("; with variants, or standard=true, the first update is compared.")
    equal = first | {"beside": {"loss": 0.0, "grad_norm": 0.0}}
    assert update_verdict({BASE: first, "b": equal}).endswith("; no variant changes a bit of the first update's loss and "
                                                              "gradient norm.")  # fmt: skip
    apart = update_verdict({BASE: first | {"margin": 0.5}})
    assert "reference and policy are apart before any update: the mean margin of pairs is 5.0e-01" in apart


@pytest.mark.full
def test_standard_variants_that_a_job_refuses_are_named(lm_folder: Path, tmp_path: Path) -> None:
    """The others are compared. Two ranks of one copy also run with the weights sharded."""
    keys = [*lm_overrides(lm_folder, tmp_path), "parallel.fsdp_size=1", "model.use_prefix_grouper=true"]
    cfg = CheckNumericsConfig(keys=keys, standard=True, output_dir=str(tmp_path / "numerics"))
    result = checked(2, cfg)
    assert {BASE, "bfloat16", "packed", "sharded"} <= result["jobs"].keys()
    assert result["jobs"]["sharded"]["beside"]["replay_off"] < 1e-4
    assert result["refused"].keys() == {"padded", "attention by eager"}
    reason = result["refused"]["padded"]
    assert "use_remove_padding=true" in reason
    assert escape(reason) in (tmp_path / "numerics" / "numerics.html").read_text()


def row(largest: float, old: float, seconds: float = 1.0, correction: str | None = None) -> dict[str, Any]:
    values = {"largest": largest, "actions_clipped": 0.42}
    times = {"sample_s": seconds, "replay_s": 0.0}
    sides = {"sampler": values, "old": values | {"largest": old}}
    return {"unit": "denoising step", "clip_range": 1e-4, "correction": correction, **sides, **times}


@pytest.mark.parametrize(
    ("folder", "keys", "unit"),
    [
        ("words", [], "token"),
        ("digits", ["rollout.height=24", "rollout.width=48", "data.max_prompt_length=1"], "denoising step"),
    ],
)
def test_a_model_folder_needs_no_configuration(folder: str, keys: list[str], unit: str, tmp_path: Path) -> None:
    result = checked(1, config(tmp_path, [f"model.path=assets/{folder}/base", "model.dtype=float32", *keys], {}))
    assert result["jobs"][BASE]["unit"] == unit
    assert result["verdict"].startswith(("Exact: ", "Sound: "))


def test_verdicts() -> None:
    """Each names the setting that mends it: of the exact variants that of the fastest."""
    assert verdict({BASE: row(0, 0)}, {}).startswith("Exact: ")
    assert verdict({BASE: row(1e-5, 1e-5)}, {}).startswith("Sound: ")
    assert verdict({BASE: row(0.1, 0, correction="rescore")}, {}).startswith("Mended by the job: the sampler's ")
    off = {BASE: row(0.1, 0.1), "slow": row(0, 0, 9), "fast": row(0, 0, 2), "off": row(0.1, 0.1, 1)}
    assert verdict(off, {"slow": ["a=1"], "fast": ["b=2", "c=3"], "off": ["d=4"]}) == (
        "Off: |ratio - 1| is at most 1.0e-01, the clip range 0.0001, which clips 42 % of denoising steps before any "
        "update; set b=2 c=3 (fast), where none is."
    )
    assert verdict({BASE: row(0.1, 0.1)}, {"refused as it was built": ["a=1"]}).startswith("Off: ")
    few = row(5e-5, 5e-5)
    few["sampler"] = few["sampler"] | {"actions_clipped": 0.0}
    assert verdict({BASE: few}, {}).startswith(
        "Off: |ratio - 1| is at most 5.0e-05, more than a tenth of the clip range 0.0001, which clips 0 % of "
    )
    assert verdict({BASE: row(0.1, 0.1, correction="none")}, {}).endswith("; set rollout.correction=rescore.")
    assert verdict({BASE: row(0.1, 0.1)}, {}).endswith("; from its second step on the job recomputes old ones.")


def test_mistakes(sd3_folder: Path, tmp_path: Path) -> None:
    keys = base_overrides(sd3_folder, tmp_path)
    with refused("variants: slow: unknown key model.dtipe; did you mean model.dtype?"):
        NumericsCheck(config(tmp_path, keys, {"slow": ["model.dtipe=float32"]}))
    with refused("variants: 'a/b' is no name for a folder; expected one such as bf16"):
        NumericsCheck(config(tmp_path, keys, {"a/b": []}))
    with refused("variants: b: rollout.n: expected at least 2, got 1"):
        NumericsCheck(config(tmp_path, keys, {"b": ["rollout.n=1"]}))
    others = [key for key in keys if not key.startswith("algorithm.")]
    with refused("keys: algorithm.name=diffusion_nft trains on fresh noise, without log-probabilities of samples"):
        NumericsCheck(config(tmp_path, [*others, "algorithm.name=diffusion_nft", "rollout.noise_level=0"], {}))
    for config_file, task in (("sft/quickstart", "sft or dpo"), ("flow_matching/digits", "flow_matching")):
        with refused(f"task: configs/{config_file}.yaml is of a supervised job; expected task={task}"):
            NumericsCheck(CheckNumericsConfig(config=f"configs/{config_file}.yaml"))
    with refused("config: nothing.yaml: no such configuration file"):
        NumericsCheck(CheckNumericsConfig(config="nothing.yaml"))
    for kind, engines in (("grpo", "policy, vllm, dataset"), ("flowgrpo", "policy, vllm_omni, dataset")):
        mistaken = CheckNumericsConfig(config=f"configs/{kind}/quickstart.yaml", keys=["rollout.engine=foo"])
        with refused(
            f"keys: rollout.engine: expected one of {engines}, module:Class, path/to/file.py:Class, got 'foo'"
        ):
            NumericsCheck(mistaken)
    with refused("part: configs/grpo/quickstart.yaml is not of a joint run; leave it out"):
        NumericsCheck(CheckNumericsConfig(config="configs/grpo/quickstart.yaml", part="writer"))
    typo = tmp_path / "typo.yaml"
    typo.write_text(Path("configs/flowgrpo/quickstart.yaml").read_text().replace("  dtype:", "  dtipe:"))
    with refused(f"config: {typo}: unknown key model.dtipe; did you mean model.dtype?"):
        NumericsCheck(CheckNumericsConfig(config=str(typo)))
    assert load(CheckNumericsConfig, None, ["variants={b: [rollout.n=4]}"]).variants == {"b": ["rollout.n=4"]}
