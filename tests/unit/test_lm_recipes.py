"""Every recipe of language models: it loads, its batches divide, and it trains, at tiny size, with its own settings."""

import io
import json
import math
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

from phalanx.config.lm import LMRLConfig
from phalanx.rewards import RewardSet
from phalanx.run.rules import load_config
from phalanx.types import Prompt
from tests.helpers.kinds import plan_of
from tests.helpers.lm import REWARD, one_step
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.tiny_vision import picture, tiny_vision
from tests.unit.test_recipes import leaves, ranks_of

RECIPES = sorted(path for folder in ("grpo", "ppo") for path in (ROOT / "configs" / folder).glob("*.yaml"))
FOR_GPUS = [path for path in RECIPES if not path.stem.startswith("quickstart")]
SEEING = [path for path in RECIPES if "vl" in path.stem.split("_")]  # those whose prompts have images
ANSWERS = {  # of rewards that know right
    "gsm8k": ("so\n#### 4", "4"),
    "math": (r"so \boxed{\frac12}", r"\frac{1}{2}"),
    "geo3k": (r"<think>so</think> \boxed{4}", "4"),
}
recipes = pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
gpu_recipes = pytest.mark.parametrize("path", FOR_GPUS, ids=lambda p: f"{p.parent.name}-{p.stem}")


def verl_rows(split: str, *, images: bool = False) -> Iterator[dict[str, Any]]:
    """Rows in the schema of verl's data_preprocess scripts."""
    for i in range(4):
        file = io.BytesIO()
        picture(seed=i).save(file, "PNG")
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{'<image>' * images}Ann has {i} books."}],
            **({"images": [{"bytes": file.getvalue(), "path": None}]} if images else {}),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"split": split, "index": i},
        }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the data files that the recipes name."""
    for name in ("gsm8k", "math", "geo3k"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split in ("train", "test"):
            rows = pa.Table.from_pylist(list(verl_rows(split, images=name == "geo3k")))
            pq.write_table(rows, tmp_path / "data" / name / f"{split}.parquet")
    rows = [{"prompt": f"What is {i} + 1?", "ground_truth": str(i + 1)} for i in range(4)]
    for name in ("boba", "products"):
        (tmp_path / "data" / name).mkdir()
        for split in ("train", "test"):
            file = tmp_path / "data" / name / f"{split}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    return tmp_path


@recipes
def test_batches_divide(path: Path) -> None:
    cfg = load_config(LMRLConfig, str(path), [])
    plan = plan_of(cfg, ranks_of(path))
    # a pass whose shape depends on its samples is like no other: old log-probs are taken by the training's passes
    assert plan.exact != (cfg.actor.use_dynamic_bsz or plan.packed)
    assert plan.samples == cfg.data.train_batch_size * cfg.rollout.n


@gpu_recipes
def test_holds_differences_only(path: Path) -> None:
    name = load_config(LMRLConfig, str(path), []).algorithm.name
    plain = dict(leaves(asdict(load_config(LMRLConfig, None, ["model.path=x", f"algorithm.name={name}"]))))
    cfg = dict(leaves(asdict(load_config(LMRLConfig, str(path), []))))
    for key, _ in leaves(yaml.safe_load(path.read_text())):
        needed = ("model.path", "algorithm.name")
        assert key in needed or cfg[key] != plain.get(key), f"{path.name}: {key} is the default"
    assert cfg["trainer.experiment_name"] == path.stem


@pytest.mark.seldom("grpo-quickstart", "grpo-quickstart_vl", "ppo-quickstart", "grpo-math_deepseek_r1_distill_1_5b")
@pytest.mark.quick("grpo-gsm8k_qwen25_7b")
@recipes
def test_one_tiny_step(path: Path, home: Path, lm_folder: Path) -> None:
    """One step on one rank, with all of the recipe's settings but the model, its lengths, the batch, the engine and the
    reward.
    """
    (home / "reward.py").write_text(REWARD)
    model = tiny_vision(home / "model", "qwen2_5_vl") if path in SEEING else lm_folder
    tiny = [f"model.path={model}", "rollout.engine=policy", "rollout.tensor_parallel_size=1"]
    tiny += ["data.max_prompt_length=64", "data.max_response_length=12", "rollout.n=4", "parallel.fsdp_size=1"]
    tiny += ["trainer.critic_warmup=0", "model.gradient_checkpointing_blocks=null"]  # there are fewer blocks
    tiny += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "actor.ppo_micro_batch_size_per_gpu=1"]
    tiny += [f"reward.functions=[{{path: '{home}/reward.py:evenness'}}]", "trainer.logger=[]"]
    cfg = load_config(LMRLConfig, str(path), [*tiny, f"trainer.output_dir={home / 'out'}"])
    cfg.data.chat_template_kwargs = {}  # of the recipe's own template
    (result,) = run_ranks(one_step, 1, cfg)
    row = result["row"]
    assert row["actor/first_ratio_error"] == 0
    assert row["actor/grad_norm"] > 0 and row["actor/updates_skipped"] == 0
    assert ("actor/kl_ref" in row) == (cfg.algorithm.kl_loss_coef > 0)
    assert all(torch.isfinite(value).all() for value in result["weights"].values())


@recipes
def test_rewards_know_what_is_right(path: Path) -> None:
    reward = load_config(LMRLConfig, str(path), []).reward
    reward.functions = [entry for entry in reward.functions if entry.name in ANSWERS]
    assert reward.functions, "no term says what is right"
    (entry,) = reward.functions
    if entry.name == "math":  # without the package that compares further
        entry.kwargs = {**entry.kwargs, "equivalence": "string"}
    text, truth = ANSWERS[str(entry.name)]
    found = RewardSet(reward, "cpu", outputs="completions")
    found.submit([text, "no"], [Prompt("p", 0, {"ground_truth": truth})] * 2)
    assert found.collect()[str(entry.name)].tolist() == [1.0, 0.0]


@gpu_recipes
def test_data_paths(path: Path, home: Path) -> None:
    from phalanx.data.prompts import load_prompts

    cfg = load_config(LMRLConfig, str(path), [])
    for key, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        assert files and all("ground_truth" in row.meta for row in load_prompts(files, key, quoted=False))


def test_products_that_are_held_out(tmp_path: Path) -> None:
    """No product is asked for in both files, nor is the one that all chats show."""
    from assets.make.make_products import ProductsConfig, build

    build(ProductsConfig(output_dir=str(tmp_path), train=3000, test=3000))()
    asked = {}
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        questions = [re.fullmatch(r"What is (\d{3}) \* (\d{3})\?", row["prompt"][-1]["content"]) for row in rows]
        asked[split] = {frozenset(map(int, question.groups())) for question in questions if question}
        assert len(asked[split]) == len(rows) == 3000
        assert all(
            math.prod(map(int, q.groups())) == int(r["ground_truth"]) for q, r in zip(questions, rows, strict=True) if q
        )
        assert rows[0]["prompt"][1]["content"] == "What is 205 * 318?"
    assert asked["train"].isdisjoint(asked["test"]) and frozenset((205, 318)) not in asked["train"] | asked["test"]


@pytest.mark.parametrize(
    ("keys", "packed", "shared"),
    [
        ((), True, True),
        (("actor.ppo_mini_batch_size=2",), False, False),  # old log-probs come from passes of another shape
        (("actor.ppo_mini_batch_size=2", "actor.use_dynamic_bsz=true"), True, True),
        (("rollout.engine=vllm",), False, False),
        (("model.attn_implementation=flash_attention_2",), True, False),
        (("model.attn_implementation=eager",), False, False),
        (("parallel.ulysses_sequence_parallel_size=2",), False, False),
        (("model.use_remove_padding=false",), False, False),
        (("model.use_remove_padding=true",), True, False),
        (("model.use_prefix_grouper=false",), True, False),
        (("model.use_prefix_grouper=true", "actor.ppo_mini_batch_size=2"), True, True),
    ],
)
def test_what_is_packed(keys: tuple[str, ...], packed: bool, shared: bool) -> None:
    """Keys that are not set exclude nothing, and old log-probs that were exact stay so."""
    base = ["model.path=m", "algorithm.name=grpo", "data.train_files=[a.jsonl]", "reward.functions=[{name: gsm8k}]"]
    cfg = load_config(LMRLConfig, None, [*base, "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", *keys])
    plan = plan_of(cfg, 2)
    assert (plan.packed, plan.adjacent) == (packed, shared)
