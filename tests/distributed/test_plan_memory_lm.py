"""What --plan says of the memory of a language model's job, against what a step takes on a CPU: see test_plan_memory.py."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.joint import PAINTER, WRITER
from phalanx.config.lm import LMRLConfig
from phalanx.data.prompts import load_prompts
from phalanx.distributed.mesh import alone
from phalanx.run import joint_rl
from phalanx.run.disaggregated.schedules import Delivered
from phalanx.run.kind import kind_of
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from phalanx.run.world import lone_world
from phalanx.tools.plan.jobs import planned, planned_joint
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from phalanx.tools.plan.text import describe
from tests.distributed.test_joint import joint_config
from tests.distributed.test_plan_memory import (
    BF16,
    CHECKPOINTING,
    FULL,
    HEAP_NOISE,
    LORA,
    SHARDED,
    WITHIN,
    Heap,
    WideProducts,
    alive,
    as_on_gpus,
    compare,
    medium_folder,  # noqa: F401 - a fixture
    needs_glibc,
    storages,
    total,
    train,
)
from tests.helpers.jobs import update
from tests.helpers.lm import lm_overrides, tiny_lm_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_vision import picture, tiny_vision

TRAINED = "model.freeze_vision_tower=false"
SHARED = "parallel.ulysses_sequence_parallel_size=2"
PACKED = ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=500")


@pytest.fixture(scope="session")
def medium_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 4.2 M weights: four blocks, 256 wide, and a vocabulary of 4,096."""
    from assets.make.tiny_lm import make_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "medium_lm", make_tokenizer()
    settings = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure_supervised(cfg: Any) -> dict[str, int]:
    """The same of supervised block diffusion."""
    from phalanx.run.block_diffusion_sft import build

    strangers = alive()
    t = build(cfg)
    as_on_gpus(t)
    t.update(0)
    found = {"held": sum(size for address, size in alive().items() if address not in strangers)}
    with Heap(found["held"]) as heap:
        t.update = heap.during("update", t.update)
        t.job.state.optimizer.step = heap.during("optimizer", t.job.state.optimizer.step)
        t.update(1)
    return found | heap.most


def measure(cfg: Any) -> dict[str, int]:
    """Bytes of the parts, and the most that there are in each phase of a step."""
    strangers = alive()
    t = build(cfg)
    t.collector.rollout.how = replace(t.collector.rollout.how, ends=[])  # all responses are the longest
    as_on_gpus(t)
    with WideProducts():
        train(t)  # imports that come late, and kernels' caches
    t.collector.rollout.drawn = []  # as metrics let the images go
    on_host = dict(strangers)
    if "reference" in t.policy.trained._weights:
        on_host |= storages(t.policy.trained._weights["reference"].values())
    if t.policy.vision is not None:  # pixels
        looks = [t.policy.reader.tried[1], *t.policy._looks.values()]
        on_host |= storages(value for look in looks for value in look.inputs.values())
    found = {
        "held": sum(size for address, size in alive().items() if address not in on_host),
        "weights": total([*t.policy.trained.module.parameters(), *t.policy.trained.parameters.values()]),
        "optimizer's state": total(
            value for state in t.job.state.optimizer.state().values() for value in state.values()
        ),
    }
    with Heap(found["held"]) as heap:
        t.job.state.optimizer.step = heap.during("optimizer", t.job.state.optimizer.step)
        t.collector.rollout._decode = heap.during("rollout: sample", t.collector.rollout._decode)
        t.collector.rollout._scored = heap.during("rollout: log-probs", t.collector.rollout._scored)
        if t.updater.algorithm.references:
            t.updater.reference_outputs = heap.during("reference", t.updater.reference_outputs)
        train(t, heap.during("update", update))
    return found | heap.most


@pytest.mark.quick("lora, checkpointing, bfloat16, packed")
@needs_glibc
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [FULL], id="full", marks=pytest.mark.long),
        pytest.param(
            1, [LORA, CHECKPOINTING, BF16, *PACKED], id="lora, checkpointing, bfloat16, packed", marks=pytest.mark.long
        ),
        pytest.param(
            2,
            [FULL, SHARDED, CHECKPOINTING, "algorithm.kl_loss_coef=0.1", *PACKED],
            id="sharded, KL, packed",
            marks=pytest.mark.long,
        ),
        pytest.param(2, [FULL, SHARDED, SHARED, *PACKED], id="shared samples, packed", marks=pytest.mark.long),
    ],
)
def test_memory(ranks: int, overrides: list[str], medium_lm: Path, tmp_path: Path) -> None:
    prompt = "Ann has 3 books." * 8
    chat = [{"role": "user", "content": prompt}]
    tokenizer = AutoTokenizer.from_pretrained(medium_lm)
    length = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    sizes = [f"data.max_prompt_length={length}", "data.max_response_length=64", "data.train_batch_size=4"]
    batch = [f"rollout.n={4 * ranks}", "rollout.micro_batch_size_per_gpu=8", "actor.log_prob_chunk_size=64"]
    batch += ["actor.ppo_mini_batch_size=2"]  # two updates, which need old log-probs
    cfg = tiny_lm_config(medium_lm, tmp_path, *sizes, *batch, "actor.ppo_micro_batch_size_per_gpu=4", *overrides)
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * 4)
    took = run_ranks(measure, ranks, cfg, timeout=240)[0]
    job = planned(cfg, Cluster(1, ranks))
    compare(job, count(job), took)


PROMPT = "Ann has 3 books." * 8
BLOCKS = ("model.block_size=8", "model.mask_token=<|endoftext|>")


@pytest.mark.full
def test_memory_of_supervised_blocks(medium_lm: Path, tmp_path: Path) -> None:
    """Two passes, in which four of five tokens of the responses are masked."""
    prompt, length = in_blocks(medium_lm)
    answer = AutoTokenizer.from_pretrained(medium_lm).decode([40] * 63)
    (tmp_path / "rows.jsonl").write_text((json.dumps({"prompt": prompt, "answer": answer}) + "\n") * 8)
    keys = [
        f"model.path={medium_lm}",
        "model.dtype=float32",
        *BLOCKS,
        f"data.train_files=[{tmp_path / 'rows.jsonl'}]",
        "data.prompt_key=prompt",
        "data.response_key=answer",
        "data.train_batch_size=8",
        f"data.max_prompt_length={length}",
        "data.max_response_length=64",
        "block_diffusion.micro_batch_size_per_gpu=4",
        "block_diffusion.log_prob_chunk_size=64",
        "block_diffusion.noise_range_low=0.8",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        f"trainer.output_dir={tmp_path / 'out'}",
    ]
    cfg = load_config(BlockDiffusionTaskConfig, None, keys)
    (took,) = run_ranks(measure_supervised, 1, cfg, timeout=240)
    job = planned(cfg, Cluster(1, 1))
    compare(job, count(job), took)


def in_blocks(folder: Path) -> tuple[str, int]:
    """A prompt of whole blocks, and its length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for more in range(64):
        prompt = PROMPT + "~" * more
        chat = [{"role": "user", "content": prompt}]
        length = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        if length % 8 == 0:
            return prompt, length
    raise AssertionError("some length divides")


@pytest.mark.full
@needs_glibc
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [FULL, "rollout.threshold=1"], id="full", marks=pytest.mark.long),
        pytest.param(1, [FULL, "actor.log_prob_estimate=coupled", "rollout.denoising_steps_per_block=2"], id="coupled"),
        pytest.param(
            2,
            [LORA, SHARDED, CHECKPOINTING, BF16, "rollout.threshold=1"],
            id="lora, sharded, bfloat16",
            marks=pytest.mark.long,
        ),
    ],
)
def test_memory_of_blocks(ranks: int, overrides: list[str], medium_lm: Path, tmp_path: Path) -> None:
    """Of as many states as there can be: one for each token."""
    prompt, length = in_blocks(medium_lm)
    sizes = [f"data.max_prompt_length={length}", "data.max_response_length=32", "data.train_batch_size=4"]
    batch = [f"rollout.n={4 * ranks}", "rollout.micro_batch_size_per_gpu=8", "actor.log_prob_chunk_size=64"]
    batch += ["actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=4", *BLOCKS]
    cfg = tiny_lm_config(medium_lm, tmp_path, *sizes, *batch, *overrides)
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": prompt}) + "\n") * 4)
    took = run_ranks(measure, ranks, cfg, timeout=240)[0]
    job = planned(cfg, Cluster(1, ranks))
    compare(job, count(job), took)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 11.1 M weights, in three layers with 16 experts each."""
    from assets.make.tiny_lm import make_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "medium_experts", make_tokenizer()
    settings = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.long
@needs_glibc
def test_memory_of_experts_on_ranks(experts_folder: Path, tmp_path: Path) -> None:
    """The peak is within 2 %, with the rows that travel to the experts of another rank and back."""
    chat = [{"role": "user", "content": PROMPT}]
    tokenizer = AutoTokenizer.from_pretrained(experts_folder)
    length = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    sizes = [f"data.max_prompt_length={length}", "data.max_response_length=16", "data.train_batch_size=4"]
    batch = ["rollout.n=8", "rollout.micro_batch_size_per_gpu=8", "actor.log_prob_chunk_size=64"]
    batch += ["actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size_per_gpu=4"]
    keys = [FULL, SHARDED, "parallel.expert_parallel=true", "model.use_remove_padding=false"]
    cfg = tiny_lm_config(experts_folder, tmp_path, *sizes, *batch, *keys)
    (tmp_path / "prompts.jsonl").write_text((json.dumps({"prompt": PROMPT}) + "\n") * 4)
    one, other = run_ranks(measure, 2, cfg, timeout=240)
    took = {name: (one[name] + other[name]) // 2 for name in one}  # a row that does not come to one comes to the other
    job = planned(cfg, Cluster(1, 2))
    memory = count(job)
    compare(job, memory, took)
    assert memory.peak == pytest.approx(took["peak"], rel=0.02), (one, other, memory)


def measure_joint(cfg: Any) -> dict[str, int]:
    """Bytes that are held, and the most that there are in phases of both policies."""
    strangers = alive()
    t = joint_rl.build(cfg)
    writer, painter = t.parts[WRITER], t.parts[PAINTER]
    writer.rollout.how = replace(writer.rollout.how, ends=[])  # all responses are the longest
    encoders = [*painter.policy.model.text_encoders]
    step(t, lambda phase, function: function)  # imports that come late, and kernels' caches
    on_host = strangers | storages([p for e in encoders for p in [*e.parameters(), *e.buffers()]])
    found = {"held": sum(size for address, size in alive().items() if address not in on_host)}
    with Heap(found["held"]) as heap:
        writer.rollout._decode = heap.during("writer: rollout: sample", writer.rollout._decode)
        painter.policy.model.decode = heap.during("painter: rollout: decode", painter.policy.model.decode)
        painter.rollout.sample = heap.during("painter: rollout: sample", painter.rollout.sample)
        step(t, heap.during)
    return found | heap.most


def step(t: Any, during: Any) -> None:
    """A training step of a joint run, of which each policy's part is `during` a phase."""
    drawn = t.draw(0)
    for name, updater in t.updaters.items():
        learn = during(f"{name}: update", joint_rl.train_step)
        learn(t.job, Delivered(lambda *_, of=name: drawn.pop(of)), updater, 0)


@pytest.mark.long
@needs_glibc
@pytest.mark.parametrize("train", ["[writer,painter]", "[writer]"], ids=["both", "writer"])
def test_memory_of_joint_runs(train: str, medium_lm: Path, medium_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Each policy beside all that the other one holds."""
    sizes = ["painter.rollout.height=64", "painter.rollout.width=64", "painter.rollout.micro_batch_size_per_gpu=4"]
    sizes += ["painter.actor.ppo_micro_batch_size_per_gpu=4", "data.max_response_length=64", f"train={train}"]
    sizes += ["writer.model.use_remove_padding=false"]
    prompt = "Ann has 3 books." * 3
    tokenizer = AutoTokenizer.from_pretrained(medium_lm)
    chat = [{"role": "user", "content": prompt}]
    length = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    cfg = joint_config(medium_lm, medium_folder, tmp_path, *sizes, f"data.max_prompt_length={length}")
    (tmp_path / "prompts.txt").write_text((prompt + "\n") * 2)
    (took,) = run_ranks(measure_joint, 1, cfg, timeout=240)
    parts = planned_joint(cfg, Cluster(1, 1))
    text = describe(Cluster(1, 1), parts)
    planned_bytes = {}
    for p in parts:
        memory = count(p)
        planned_bytes["held"] = sum(memory.held.values())
        for phase in memory.phases:
            planned_bytes[f"{p.part}: {phase.name}"] = planned_bytes["held"] + phase.total
        planned_bytes["peak"] = max(memory.peak, planned_bytes.get("peak", 0))
    assert {name: planned_bytes[name] for name in took} == pytest.approx(took, rel=WITHIN, abs=HEAP_NOISE), text
    assert planned_bytes["held"] == pytest.approx(took["held"], rel=0.01), text


@pytest.fixture(scope="session")
def medium_vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL: a decoder of four blocks, 256 wide, and a tower of four, 128 wide."""
    folder = tiny_vision(tmp_path_factory.mktemp("models") / "medium_vision", "qwen3_vl")
    settings = AutoConfig.from_pretrained(folder)
    text = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    tower = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "num_heads": 4, "out_hidden_size": 256}
    settings.text_config.update(text | {"num_key_value_heads": 4})
    settings.vision_config.update(tower)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3VLForConditionalGeneration(settings).save_pretrained(folder)
    return folder


@pytest.mark.long
@needs_glibc
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(1, [FULL, PACKED[0], *PACKED[1:2], "actor.ppo_max_token_len_per_gpu=1500"], id="frozen, packed"),
        pytest.param(1, [FULL, TRAINED], id="trained"),
        pytest.param(2, [FULL, TRAINED, SHARDED, CHECKPOINTING], id="trained, sharded, checkpointing"),
    ],
)
def test_memory_of_images(ranks: int, overrides: list[str], medium_vision: Path, tmp_path: Path) -> None:
    """Prompts with an image of 256 tokens, whose tower is in the passes or has read it before them."""
    sizes = ["data.max_response_length=32", "data.train_batch_size=4", f"data.max_pixels={128 * 128}"]
    batch = [f"rollout.n={4 * ranks}", "rollout.micro_batch_size_per_gpu=8", "actor.log_prob_chunk_size=64"]
    batch += ["actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=4"]
    keys = lm_overrides(medium_vision, tmp_path)
    rows = []
    for i in range(4):
        picture(128, 128, seed=i).save(tmp_path / f"{i}.png")
        rows.append(json.dumps({"prompt": "<image>read it", "images": [f"{i}.png"]}) + "\n")
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    cfg = load_config(LMRLConfig, None, [*keys, "data.max_prompt_length=400", *sizes, *batch, *overrides])
    cfg.data.max_prompt_length = length_of(cfg)
    took = run_ranks(measure, ranks, cfg, timeout=600)[0]
    job = planned(cfg, Cluster(1, ranks))
    assert job.policy.vision.look.count == 256
    compare(job, count(job), took)


def length_of(cfg: LMRLConfig) -> int:
    """The length of the first prompt."""
    with alone():
        kind = kind_of(cfg)
        kind.images = True
        policy = kind.load_policy(lone_world(cfg.parallel, 1, 0, torch.device("cpu")))
        row = load_prompts(cfg.data.train_files, "data.train_files", quoted=False)[0]
        return policy.length(row)
