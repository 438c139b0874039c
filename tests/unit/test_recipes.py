"""Every recipe of configs/flowgrpo: it loads, its batches divide, and it trains, at tiny size, with its own settings."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardConfig, FlowRLConfig
from phalanx.rewards import RewardSet
from phalanx.run.rules import load_config
from phalanx.types import Prompt
from tests.helpers.jobs import PROMPTS, one_step
from tests.helpers.judged import JUDGE, step_and_terms
from tests.helpers.kinds import check_config, plan_of
from tests.helpers.ranks import ROOT, run_ranks

RECIPES = sorted((ROOT / "configs" / "flowgrpo").glob("*.yaml"))
FOR_GPUS = [path for path in RECIPES if not path.stem.startswith("quickstart")]
# fixtures, by how a recipe's name begins
TINY = {
    "qwen_image_edit": "qwen_edit_folder",
    "sd35": "sd3_t5_folder",
    "qwen": "qwen_folder",
    "flux1_kontext": "flux_kontext_folder",
    "flux1": "flux_folder",
    "flux2_klein": "flux2_klein_folder",
    "z": "z_image_folder",
    "wan21": "wan_folder",
    "hunyuan": "hunyuan_folder",
    "wan22_t2v": "a14b_folder",
    "wan22_i2v": "i2v_folder",
}
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
gpu_recipes = pytest.mark.parametrize("path", FOR_GPUS, ids=lambda p: p.stem)

# What a recipe says of itself: the ranks that its batches are made for.
RANKS = re.compile(r"^# ranks: (\d+)$", re.MULTILINE)


def ranks_of(path: Path) -> int:
    found = RANKS.search(path.read_text())
    assert found, f"{path} does not say its ranks; add a line such as `# ranks: 8`"
    return int(found[1])


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the data files that the recipes name, in the schema of VeRL-Omni's scripts."""
    for folder in ("ocr/qwen_image", "ocr/sd3", "pickscore_sfw/sd3"):
        target = tmp_path / "data" / folder
        target.mkdir(parents=True)
        for split in ("train", "test"):
            pq.write_table(pa.Table.from_pylist(list(verl_rows(folder, split))), target / f"{split}.parquet")
    edits = tmp_path / "data" / "edits"
    edits.mkdir()
    Image.new("RGB", (40, 30), (200, 40, 90)).save(edits / "a.png")
    for split in ("train", "test"):
        lines = [json.dumps(row | {"image": "a.png"}) for row in verl_rows("qwen_image_edit", split)]
        (edits / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    return tmp_path


def verl_rows(folder: str, split: str) -> Iterator[dict[str, Any]]:
    system = [{"role": "system", "content": "Describe the image:"}] if "qwen" in folder else []
    for index, text in enumerate(PROMPTS):
        yield {
            "data_source": f"flow_grpo/{folder}",
            "prompt": [*system, {"role": "user", "content": text}],
            "negative_prompt": [*system, {"role": "user", "content": " "}],
            "ability": "ocr",
            "reward_model": {"style": "model", "ground_truth": text.split('"')[1]},
            "extra_info": {"split": split, "index": index},
        }


@recipes
def test_batches_divide(path: Path) -> None:
    cfg = load_config(FlowRLConfig, str(path), [])
    check_config(cfg)
    plan = plan_of(cfg, ranks_of(path))
    assert plan.exact  # log-probs of rollout and replay are equal to the last bit
    assert cfg.trainer.experiment_name == path.stem


@gpu_recipes
def test_holds_differences_only(path: Path) -> None:
    """The quickstart also spells out defaults, for a newcomer to read."""
    plain = dict(leaves(asdict(load_config(FlowRLConfig, None, ["model.path=x"]))))
    cfg = dict(leaves(asdict(load_config(FlowRLConfig, str(path), []))))
    for key, _ in leaves(yaml.safe_load(path.read_text())):
        assert key == "model.path" or cfg[key] != plain[key], f"{path.name}: {key} is the default"


@pytest.mark.quick("qwen_image_ocr_lora", "wan22_t2v_a14b_pickscore_lora")
@recipes
def test_one_tiny_step(path: Path, home: Path, request: pytest.FixtureRequest) -> None:
    """One step on one rank, with all of the recipe's settings but the model, its size, compiling, the batch and the reward; a judge
    stays, and is a tiny one.
    """
    cfg = load_config(FlowRLConfig, str(path), [])
    window = plan_of(cfg, ranks_of(path)).actions
    tiny = []
    if path in FOR_GPUS:
        folder = request.getfixturevalue(next(TINY[name] for name in TINY if path.stem.startswith(name)))
        tiny = [f"model.path={folder}", "model.reference_size=32", "data.max_prompt_length=16"]
        tiny += ["model.compile=false"]  # compiling takes a CPU minutes; test_compiling.py and test_trained.py do it
        tiny += ["model.gradient_checkpointing_blocks=null"]  # there are fewer blocks
        tiny += ["rollout.height=32", "rollout.width=32"]
    tiny += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1"]
    tiny += ["data.train_batch_size_per_gpu=null", "actor.ppo_mini_batch_size_per_gpu=null"]
    tiny += [f"rollout.n={max(window, 2)}", "trainer.logger=[]", f"trainer.output_dir={home / 'out'}"]
    if cfg.reward.model.path is None:
        step = one_step
        tiny += ["reward.functions=[{name: jpeg_incompressibility}]"]  # no two random images have one size
    else:  # it is shown pictures, which depend on the images
        step = step_and_terms
        tiny += [
            f"reward.model.path={request.getfixturevalue('judge_model')}",
            "reward.model.engine=transformers",
            *JUDGE,
        ]
        tiny += ["reward.model.tensor_parallel_size=1"]
    cfg = load_config(FlowRLConfig, str(path), tiny)
    (result,) = run_ranks(step, 1, cfg, timeout=240)
    row, weights = result["row"], result["weights"]
    assert row["actor/first_ratio_error"] == 0
    assert row["actor/grad_norm"] > 0 and row["actor/updates_skipped"] == 0
    assert ("actor/kl_ref" in row) == (cfg.algorithm.kl_loss_coef > 0)
    ranks = {value.shape[0] for name, value in weights.items() if "lora_A" in name}
    assert ranks == ({cfg.model.lora_rank} if cfg.model.lora_rank else set())
    assert all(torch.isfinite(value).all() for value in weights.values())


@recipes
def test_rewards_are_there(path: Path) -> None:
    cfg = load_config(FlowRLConfig, str(path), [])
    (entry,) = cfg.reward.functions
    if entry.name == "pickscore":  # known, and it looks for its model where it is told to
        with pytest.raises(
            ConfigError, match=r"reward.functions\[0\] \(pickscore\): model='./nowhere' is not a folder"
        ):
            entry.kwargs = {**entry.kwargs, "model": "./nowhere"}
            RewardSet(FlowRewardConfig(functions=[entry]), "cpu")
        return
    if entry.name == "vlm_ocr":  # known; `test_one_tiny_step` asks it
        with pytest.raises(ConfigError, match=r"vlm_ocr is a judge and needs reward\.model"):
            RewardSet(cfg.reward, "cpu")
        assert cfg.reward.model.path is not None
        return
    reward = RewardSet(cfg.reward, "cpu")
    reward.submit(torch.ones(1, 3, 32, 64), [Prompt('a sign that says "alpha"', 0, {"ground_truth": "alpha"})])
    assert reward.collect()["ocr"].tolist() == [0.0]


@gpu_recipes
def test_data_paths(path: Path, home: Path) -> None:
    from phalanx.data.prompts import load_prompts

    cfg = load_config(FlowRLConfig, str(path), [])
    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        rows = load_prompts(files, key)
        assert [row.text for row in rows] == PROMPTS
        assert rows[0].negative == " " and rows[0].meta["ground_truth"] == "alpha"
