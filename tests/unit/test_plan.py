"""What --plan prints: groups, batches, messages and warnings by hand-made numbers. Memory: test_plan_memory.py."""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.config import ConfigError, load
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRewardFunctionConfig, FlowRLConfig, FlowRunConfig
from phalanx.models.flow.policy import family_of
from phalanx.plan import clusters, gpu_of, plan_job
from phalanx.plan.blueprint import family_name, fetch, planned_policy, shipped
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster, Layout, Weight
from phalanx.plan.ledger import META, Ledger, fused_attention, nbytes
from phalanx.plan.loading import Loading
from phalanx.plan.memory import Memory, Phase, count
from phalanx.plan.pace import Gpu
from phalanx.plan.rehearsal import Planned
from phalanx.plan.text import describe, messages, sizes
from phalanx.plan.warnings import ALLOWED
from phalanx.training import flow_rl
from tests.jobs import base_overrides, tiny_config
from tests.ranks import ROOT, launch_environment
from tests.tiny import halved, load_pipeline
from tests.unit.test_plan_lm import SHIPPED_LM

QUICKSTART = str(ROOT / "configs" / "flowgrpo" / "quickstart.yaml")
GB = 10**9
ONE = Cluster(1, 1)


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[[Path], Path]:
    """Makes copies of model folders that hold nothing but configurations."""

    def copy(source: Path) -> Path:
        names = {"model_index.json", "config.json", "scheduler_config.json"}

        def others(_: str, found: list[str]) -> list[str]:
            return [name for name in found if "." in name and name not in names]

        return Path(shutil.copytree(source, tmp_path / source.name, ignore=others, dirs_exist_ok=True))

    return copy


def plan_of(cfg: FlowRunConfig, cluster: Cluster = ONE) -> Planned:
    cfg.model.family = family_name(cfg.model)
    return planned(cfg, cluster)


def memory_of(cfg: FlowRunConfig, gpu: int | None = None) -> Memory:
    return count(plan_of(cfg, Cluster(1, 4)), gpu)


def algorithm_config(model: Path, folder: Path, name: str, *overrides: str) -> FlowRLConfig:
    base = [o for o in base_overrides(model, folder) if not o.startswith("algorithm.")]
    return load(FlowRLConfig, None, [*base, f"algorithm.name={name}", *overrides])


def phases_of(memory: Memory) -> dict[str, Phase]:
    return {phase.name: phase for phase in memory.phases}


def section(text: str, title: str) -> list[str]:
    """The lines of a section, below its title."""
    (found,) = [part.split("\n") for part in text.split("\n\n") if part.startswith(title)]
    return [line.strip() for line in found[1:]]


def quickstart(*overrides: str) -> FlowRLConfig:
    return load(FlowRLConfig, QUICKSTART, [f"model.path={ROOT / 'assets' / 'digits' / 'base'}", *overrides])


# -- the cluster --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "env", "expected"),
    [
        ({}, {}, [(1, 1)]),
        ({}, {"NNODES": "2", "NPROC_PER_NODE": "8"}, [(2, 8)]),
        ({"nnodes": "4", "nproc_per_node": "8"}, {"NNODES": "2", "NPROC_PER_NODE": "1"}, [(4, 8)]),
        ({"nproc": "8"}, {"NNODES": "2:4"}, [(2, 8), (3, 8), (4, 8)]),
    ],
)
def test_clusters(words: Mapping[str, str], env: Mapping[str, str], expected: list[tuple[int, int]]) -> None:
    assert clusters(words, env) == [Cluster(*size) for size in expected]


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ({"nnodes": "0"}, {}, "nnodes=0: expected a whole number such as 4, or a range such as 2:4"),
        ({"nnodes": "4:2"}, {}, "nnodes=4:2: expected a whole number such as 4, or a range such as 2:4"),
        ({}, {"NNODES": "x"}, "NNODES=x: expected a whole number such as 4, or a range such as 2:4"),
        ({"nproc": "8.0"}, {}, "nproc=8.0: expected a whole number, such as 8"),
        ({}, {"NPROC_PER_NODE": "gpu"}, "NPROC_PER_NODE=gpu: expected a whole number, such as 8"),
    ],
)
def test_clusters_that_are_none(words: Mapping[str, str], env: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        clusters(words, env)
    assert str(error.value) == message


def test_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the words; else the one that is here, with the memory and the price of the words."""
    assert gpu_of({}) == Gpu()
    assert gpu_of({"gpu_memory_gb": "79.6", "gpu_hour_price": "2.5"}) == Gpu(None, 79_600_000_000, 2.5)
    assert gpu_of({"gpu": "a100"}) == Gpu("a100")
    for text in ("80GB", "0", "-1", "1.2.3", ""):
        with pytest.raises(ConfigError) as error:
            gpu_of({"gpu_memory_gb": text})
        assert str(error.value) == f"gpu_memory_gb={text}: expected GB (10^9 bytes) of a GPU, such as 80"
    with pytest.raises(ConfigError, match=r"^gpu=GTX: expected a name with one of A100, A800, .*, MI300X in it$"):
        gpu_of({"gpu": "GTX"})
    here = SimpleNamespace(name="NVIDIA L40S", total_memory=48 * GB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: here)
    assert gpu_of({}) == Gpu("NVIDIA L40S", 48 * GB)
    assert gpu_of({"gpu_memory_gb": "80"}) == Gpu("NVIDIA L40S", 80 * GB)
    assert gpu_of({"gpu": "H100"}) == Gpu("H100")


def test_groups() -> None:
    """phalanx.distributed.mesh cuts its mesh row by row: (replicate, shard)."""
    cluster, mesh = Cluster(nodes=2, per_node=6), torch.arange(12).view(3, 4)
    assert [list(g) for g in cluster.shard_groups(4)] == mesh.tolist()
    assert [list(g) for g in cluster.replicate_groups(4)] == mesh.T.tolist()
    assert [cluster.crosses(g) for g in cluster.shard_groups(4)] == [False, True, False]
    assert [cluster.crosses(g) for g in cluster.replicate_groups(4)] == [True] * 4


# -- layout -------------------------------------------------------------------------------------------------------


def test_parts_are_filled_up() -> None:
    """Of two blocks of a frozen [6, 10] and a trained [3, 10], and a trained [5] beside them."""
    weights = [Weight("bias", (5,), torch.float32, True, 4, -1)]
    for unit in range(2):
        weights.append(Weight(f"{unit}.base", (6, 10), torch.bfloat16, False, 4, unit))
        weights.append(Weight(f"{unit}.lora", (3, 10), torch.float32, True, 4, unit))
    sharded = Layout(weights, Cluster(1, 8), 4, torch.bfloat16)
    # over 4 ranks: 6 rows are 2 on a rank, 3 rows are 1, and 5 numbers are 2
    assert sharded.kept(weights) == 2 * 4 + 2 * (2 * 10 * 2 + 1 * 10 * 4)
    assert sharded.units() == [4 * (20 + 10) * 2, 4 * (20 + 10) * 2, 4 * 2 * 2]
    assert sharded.stored() == 4 * sharded.kept(weights)
    assert sum(sharded.gradient(w) for w in sharded.trained) == 2 * 4 + 2 * 10 * 4
    assert sum(sharded.gradient(w, summed=True) for w in sharded.trained) == (5 + 2 * 30) * 4
    assert sharded.reduced() == 4 * (2 + 2 * 10) * 4
    assert sharded.reducing(999, summed=True) == 4 * 10 * (2 + 4)
    assert sharded.reducing(999, summed=False) == 4 * 10 * (2 + 4) + 8 * 2  # the bias waits for its turn
    assert (sharded.copies(), sharded.message()) == (0, 0)


def test_attention_keeps_no_weights() -> None:
    """Inputs, output and a number a row; torch's plain attention would keep two [4, 1024, 1024]."""
    q, k, v = (torch.zeros(1, 4, 1024, 16, device=META, requires_grad=True) for _ in range(3))
    plain = nn.functional.scaled_dot_product_attention
    with fused_attention(), Ledger() as ledger:
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        assert ledger.live == 4 * 1024 * (16 + 1) * 4
        out.sum().backward()
    assert nn.functional.scaled_dot_product_attention is plain
    assert ledger.phase.peak < 10 * 4 * 1024 * 16 * 4
    assert q.grad is not None and q.grad.shape == q.shape


def test_an_operator_again_is_as_it_was() -> None:
    """Shapes, dtypes, strides and bytes are those of the first time, and of the inputs of the second one."""
    x, w, counts = (torch.zeros(*shape, device=META) for shape in ((2, 8, 4), (4, 16), (2, 3)))
    counts = counts.long()
    with Ledger() as ledger:
        for turn in range(2):
            sums = [counts + 1, counts + 1.0, counts.T + 1]
            assert [total.dtype for total in sums] == [torch.int64, torch.float32, torch.int64]
            assert [total.stride() for total in sums] == [(3, 1), (3, 1), (1, 3)]
            before = ledger.live
            with ledger.during(str(turn)):
                product = x @ w  # one operator that makes it, and a view that does not say that it is one
                assert (product.shape, ledger.phase.peak - before) == ((2, 8, 16), 2 * 8 * 16 * 4)
            del product
            assert ledger.live == before == 6 * (8 + 4 + 8)


# -- what stands beside the model ----------------------------------------------------------------------------------

PART = (3000 * 2 + 100) // 2  # bytes of a rank's half of reward_folder's weights, in bfloat16
GPU = 10**9


@pytest.fixture
def reward_folder(tmp_path: Path) -> Path:
    """Two files with 3000 numbers of several dtypes and 100 of 8 bits, their index, and all of it once more."""
    folder = tmp_path / "judge"
    folder.mkdir()
    first = {"a": torch.zeros(10, 100), "codes": torch.zeros(100, dtype=torch.int8)}
    second = {"b": torch.zeros(2000, dtype=torch.float16)}
    files = {"model-1.safetensors": first, "model-2.safetensors": second, "consolidated.safetensors": first | second}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {"a": "model-1.safetensors", "codes": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"metadata": {"total_size": 4000 + 4000 + 100}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def judged(sd3_folder: Path, folder: Path, judge: Path | str, *keys: str) -> FlowRLConfig:
    model = [f"reward.model.path={judge}", "reward.model.tensor_parallel_size=2"]
    return tiny_config(sd3_folder, folder / "job", *model, *keys)


def described(cfg: FlowRLConfig, gpu: int | None = None) -> str:
    return describe(plan_of(cfg, Cluster(1, 4)), Gpu(memory=gpu))


def judge_phase(memory: Memory) -> int:
    """Bytes of the phase beyond the samples, which the update has as well."""
    phases = phases_of(memory)
    assert [*phases].index("judge") == [*phases].index("rollout: decode") + 1
    judge = phases["judge"]
    assert judge.total == judge.other
    return judge.other - phases["update"].other


def test_a_sleeping_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    """It is on the device while it scores, and on the host throughout; one that does not sleep is held instead."""
    cfg = judged(sd3_folder, tmp_path, reward_folder, "reward.model.gpu_memory_utilization=0.25")
    alone = memory_of(tiny_config(sd3_folder, tmp_path / "job"))
    unknown, known = memory_of(cfg), memory_of(cfg, GPU)
    assert alone.held == unknown.held == known.held
    assert unknown.host == known.host == alone.host | {"sleeping reward model": PART}
    assert (judge_phase(unknown), judge_phase(known)) == (PART, GPU // 4)
    assert known.largest.name == "judge"
    loading = [memory.loading_of_a_node(4, judges, cast=False) for memory, judges in ((alone, 0), (known, 4))]
    assert loading[1] == loading[0] + 4 * PART  # vLLM loads to the device
    cfg.reward.model.engine = "transformers"
    other = memory_of(cfg, GPU)
    assert (judge_phase(other), other.host, other.largest.name) == (PART, known.host, alone.largest.name)
    cfg.reward.model.dtype = "float32"
    assert judge_phase(memory_of(cfg, GPU)) == (3000 * 4 + 100) // 2
    cfg.reward.model = replace(cfg.reward.model, sleep=False, engine="vllm", dtype="bfloat16")
    for gpu, size in ((None, PART), (GPU, GPU // 4)):
        awake = memory_of(cfg, gpu)
        assert (awake.held, awake.host) == (alone.held | {"reward model": size}, alone.host)
        assert (judge_phase(awake), awake.peak) == (0, alone.peak + size)


def test_a_reward_model_that_answers_while_images_are_sampled(
    sd3_folder: Path, tmp_path: Path, reward_folder: Path
) -> None:
    """It is on the device while they are sampled and decoded, and nowhere else than without."""
    keys = ("reward.model.placement=ranks 2-3", "parallel.rollout_unsharded=true", "trainer.test_freq=1")
    share = 950_000_000
    cfg = judged(sd3_folder, tmp_path, reward_folder, *keys, "data.val_files=[held_out.txt]")
    cfg.reward.model.gpu_memory_utilization = 0.95

    def sizes() -> dict[str, int]:
        return {phase.name: phase.total for phase in memory_of(cfg, GPU).phases}

    beside = sizes()
    (told,) = warnings(described(cfg, GPU))
    assert ": sample takes " in told and ", reward.overlap=false," in told
    cfg.reward.overlap = False
    after = sizes()
    woken = {name for name in after if beside[name] != after[name]}
    assert woken == {"rollout: sample", "rollout: decode", "validation: sample", "validation: decode"}
    assert all(beside[name] == after[name] + share for name in woken)
    cfg.reward.overlap, cfg.reward.model.sleep = True, False  # then it is there throughout
    assert sizes() == {name: size - share * (name == "judge") for name, size in after.items()}


def test_a_job_without_rewards_has_no_reward_model(sd3_folder: Path, reward_folder: Path) -> None:
    cfg = flow_matching_config(sd3_folder, f"reward.model.path={reward_folder}")
    memory = memory_of(cfg, GPU)
    assert memory.reward is None and "judge" not in phases_of(memory)
    cfg.reward.functions = [FlowRewardFunctionConfig(name="vlm_ocr")]
    assert "judge" in phases_of(memory_of(cfg, GPU))


def flow_matching_config(model: Path, *overrides: str) -> FlowMatchingTaskConfig:
    keys = ["data.train_files=[pictures.jsonl]", "data.train_batch_size=64", "rollout.height=32", "rollout.width=32"]
    return load(FlowMatchingTaskConfig, None, [f"model.path={model}", *keys, "trainer.total_epochs=2", *overrides])


@pytest.mark.full
def test_the_size_of_a_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    """From the files' headers; from the index where a file is not there; else it is not known, which is told."""
    cfg = judged(sd3_folder, tmp_path, reward_folder)
    (reward_folder / "model-2.safetensors").unlink()
    assert judge_phase(memory_of(cfg)) == (4000 + 4000 + 100) // 2
    (reward_folder / "model.safetensors.index.json").unlink()
    (reward_folder / "model-1.safetensors").rename(reward_folder / "model.safetensors")
    assert judge_phase(memory_of(cfg)) == (1000 * 2 + 100) // 2
    (reward_folder / "model.safetensors").unlink()
    assert judge_phase(memory_of(cfg)) == PART  # of consolidated.safetensors
    (reward_folder / "consolidated.safetensors").write_bytes(b"0" * 100)
    with pytest.raises(ValueError, match=rf"^reward.model.path: {reward_folder}/consolidated.safetensors is damaged"):
        memory_of(cfg)
    (reward_folder / "consolidated.safetensors").unlink()
    for path in (str(reward_folder), "someone/something", "some where"):
        cfg.reward.model.path = path
        assert warnings(described(cfg)) == [
            f"warning: reward.model.path: {path!r}: no whole set of *.safetensors, nor their index, is within reach: "
            "its weights are not counted"
        ]


@pytest.mark.full
def test_words_about_a_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    cfg = judged(sd3_folder, tmp_path, reward_folder)

    def said(gpu: int | None = None) -> str:
        return section(described(cfg, gpu), "  phase")[-1]

    asleep = "between scorings it sleeps in the host's memory"
    assert said() == (
        "judge: the weights of reward.model alone; vLLM takes 0.3 of a GPU in all, which gpu_memory_gb=80 would count; "
        f"{asleep}"
    )
    assert said(GPU) == f"judge: what reward.model.gpu_memory_utilization=0.3 gives to vLLM; {asleep}"
    cfg.reward.model.placement, cfg.reward.model.engine = "ranks 2-3", "transformers"
    assert said(GPU) == (
        "judge (on ranks 2-3 of each node): the weights of reward.model alone; what it computes comes on top; awake while "
        "images are sampled and scored; else it sleeps in the host's memory"
    )
    cfg.reward.overlap = False
    assert said(GPU).endswith(f"what it computes comes on top; {asleep}")
    cfg.reward.model.sleep = False
    assert said().startswith("reward model (on ") and said().endswith("; it stays on the GPU between scorings")
    # the two ranks share the file, or cast it
    for file in reward_folder.glob("*.safetensors"):
        file.unlink()
    save_file({"a": torch.zeros(25_000_000, dtype=torch.bfloat16)}, reward_folder / "big.safetensors")
    (reward_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "big.safetensors"}}')
    assert section(described(cfg), "In the host's memory")[2] == "loading  up to 50.00 MB a node"
    cfg.reward.model.dtype = "float32"
    assert section(described(cfg), "In the host's memory")[2] == "loading  up to 200.00 MB a node"
    cfg.reward.model.dtype = "bfloat16"
    memory = memory_of(cfg)
    cfg.reward.model.sleep = True
    kept = (sum(memory.host.values()) * 4 + 2 * 25_000_000) / 1e6
    assert section(described(cfg), "In the host's memory")[1] == f"a node   {kept:.2f} MB"


def test_a_share_that_is_too_small_for_the_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    cfg = judged(sd3_folder, tmp_path, reward_folder, "reward.model.gpu_memory_utilization=0.5")
    told = warnings(described(cfg, PART))
    assert told[-1] == (
        f"warning: reward.model.gpu_memory_utilization: 0.5 of the GPU is {PART // 2 / 1e6:.2f} MB, and a rank's part of "
        f"the weights {PART / 1e6:.2f}: vLLM would not start; raise it, or reward.model.tensor_parallel_size"
    )
    cfg.reward.model.gpu_memory_utilization = 0.95
    (told,) = warnings(described(cfg, 60 * GB))
    assert told.startswith("warning: judge takes 59.00 of 60.00 GB with CUDA and NCCL and leaves little ")
    assert told.endswith("what helps: a smaller reward.model.gpu_memory_utilization, a LoRA (model.lora_rank)")


def test_the_weights_that_an_algorithm_keeps(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ["model.lora_rank=4", "parallel.fsdp_size=1", "actor.ema.decay=0.9"]

    def memory_with(name: str, *overrides: str) -> Memory:
        return memory_of(algorithm_config(sd3_folder, tmp_path, name, *keys, *overrides))

    plain, nft = memory_with("sft"), memory_with("diffusion_nft")
    average = plain.held["moving average"]
    assert average > 0 and nft.held == plain.held | {"algorithm's weights": average}
    sampling, before = (phases_of(memory)["rollout: sample"] for memory in (nft, plain))
    assert sampling.other > before.other  # the policy's own weights step aside
    followed = memory_with("diffusion_dpo", "actor.ref_model_sync_steps=5", "actor.ppo_mini_batch_size=4")
    assert followed.held["algorithm's weights"] == average


def taught(student: Path, teacher: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    """A job of opd on ranks that share the weights two by two."""
    keys = [
        f"algorithm.teacher_path={teacher}",
        "rollout.guidance_scale=1",
        "parallel.fsdp_size=2",
        "model.lora_rank=4",
    ]
    return algorithm_config(student, folder, "opd", *keys, *overrides)


def test_a_teacher(sd3_folder: Path, tmp_path: Path) -> None:
    """Frozen weights in model.dtype over the ranks of the mesh, and neither gradients nor an optimizer's state."""
    from diffusers import SD3Transformer2DModel

    parameters = SD3Transformer2DModel.from_pretrained(sd3_folder / "transformer").num_parameters()
    cluster, cfg = Cluster(1, 2), taught(sd3_folder, sd3_folder, tmp_path)
    alone = replace(cfg, algorithm=tiny_config(sd3_folder, tmp_path / "other").algorithm)
    plan = plan_of(cfg, cluster)
    memory, before = count(plan), count(plan_of(alone, cluster))
    teacher = memory.held["teacher"]
    assert memory.held == before.held | {"teacher": teacher}
    # rows that two ranks cannot share are filled up; the table of positions is a buffer, and whole
    assert parameters * 2 < teacher < 1.02 * parameters * 2 + 16 * 16 * 64 * 4
    assert memory.host == before.host  # VAE and text encoders are the student's
    half = memory_of(taught(sd3_folder, sd3_folder, tmp_path, "model.dtype=bfloat16")).held["teacher"]
    assert parameters < half < 0.55 * teacher + 16 * 16 * 64 * 2

    phases = phases_of(memory)
    view, sample = phases["teacher"], phases["rollout: sample"]
    assert list(phases)[-3:] == ["teacher", "update", "optimizer"] and "reference" not in phases
    assert parameters * 4 <= view.gathered < sample.gathered  # the student has its LoRA too
    assert view.activations > 0 and view.gradients == 0
    text = ((77 + 32) * 64 + 64) * 4  # bytes of a prompt, of which a rank has two
    assert plan.samples_size <= view.other < plan.samples_size + 1000
    guided = plan_of(taught(sd3_folder, sd3_folder, tmp_path, "algorithm.teacher_guidance=2"), cluster)
    assert phases_of(count(guided))["teacher"].activations > view.activations + 2 * text
    assert guided.flops - plan.flops == 16 * 2 * plan.policy.model.flops(32, 32, 77 + 32)  # of 16 images, 2 steps

    (sent_of_it,) = [t for t in messages(plan) if "teacher" in t.what]
    assert (sent_of_it.what, sent_of_it.size) == ("weights of the teacher, gathered", view.gathered // 2)
    assert section(describe(plan, Gpu()), "Batch")[6] == (
        "forward passes  8 to sample, 4 of the teacher, 4 to train, a rank and step"
    )


def test_each_count_of_operations_is_a_new_one(sd3_folder: Path, tmp_path: Path) -> None:
    """Each is of a model that is gone afterwards: the next one may have its place in memory, and is another one."""
    model = plan_of(tiny_config(sd3_folder, tmp_path), Cluster(1, 2)).policy.model
    counts = set()
    for _ in range(20):
        counts.add(model.flops(32, 32, 77 + 32))
        gc.collect()
    assert len(counts) == 1


def test_what_a_teacher_brings_to_the_host(sd3_folder: Path, sd3_t5_folder: Path, tmp_path: Path) -> None:
    """Text encoders of its own stay; all that its folder holds is there while it is loaded."""
    own, theirs = (load_pipeline(folder) for folder in (sd3_folder, sd3_t5_folder))
    encoders, more = (nbytes(*text_encoders(p)) for p in (own, theirs))
    weights = own.transformer.num_parameters() * 4

    def loading(memory: Memory) -> int:
        return memory.loading_of_a_node(1, 0, cast=False)

    equal = memory_of(taught(sd3_folder, sd3_folder, tmp_path))
    assert equal.host["text encoders"] == encoders
    assert loading(equal) == encoders + weights + nbytes(own.vae) + encoders
    other = memory_of(taught(sd3_folder, sd3_t5_folder, tmp_path))
    assert other.host["text encoders"] == encoders + more
    assert loading(other) == encoders + weights + nbytes(theirs.vae) + more
    away = memory_of(taught(sd3_folder, sd3_folder, tmp_path, "parallel.param_offload=true"))
    assert away.host["teacher"] + away.held["teacher"] == equal.held["teacher"]
    assert loading(away) == loading(equal) + away.host["weights"]


def test_files_are_shared_unless_they_are_cast(
    sd3_folder: Path, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    """What is loaded in the dtype of its file is a view of it, as the kernel's list of mappings shows."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for keys, shared in ((["model.dtype=bfloat16", "model.lora_rank=4"], False), ([], True)):
        cfg = tiny_config(sd3_folder, tmp_path, *keys)
        model = family_of(cfg.model)(cfg.model, dtypes[cfg.model.dtype], dtypes[cfg.model.dtype])
        assert all(is_mapped(next(m.parameters())) is shared for m in (model.transformer, *model.text_encoders))
        first, *_ = memory_of(cfg).loading
        size = sum(p.nbytes for p in model.transformer.parameters()) + nbytes(model.vae, *model.text_encoders)
        assert first == Loading(shared=size) if shared else size < first.own < 1.1 * size and not first.shared
    cfg.model.path = str(config_only(sd3_folder))
    assert memory_of(cfg).loading[0] == Loading(either=size)
    assert section(described(cfg), "In the host's memory")[2] == (
        f"loading  up to {size / 1e6:.2f} MB a node; {4 * size / 1e6:.2f} if files that are not here hold other dtypes, "
        "for each rank casts its own"
    )


def test_files_are_shared_where_ranks_cast_their_parts(sd3_folder: Path, tmp_path: Path) -> None:
    """Of a full fine-tuning of a model in bfloat16; one tensor that a cast to bfloat16 would change, and all is own."""
    folder = halved(sd3_folder, tmp_path / "half")
    cfg = tiny_config(folder, tmp_path, "model.dtype=bfloat16")
    model = family_of(cfg.model)(cfg.model, torch.bfloat16, torch.float32)
    assert is_mapped(next(model.transformer.parameters()))
    size = sum(p.nbytes for p in model.transformer.parameters()) + nbytes(model.vae, *model.text_encoders)
    assert memory_of(cfg).loading[0] == Loading(shared=size)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"proj_out.bias": tensors["proj_out.bias"].float()}, file, {"format": "pt"})
    model = family_of(cfg.model)(cfg.model, torch.bfloat16, torch.float32)
    assert not is_mapped(next(model.transformer.parameters()))
    assert memory_of(cfg).loading[0].own == sum(p.nbytes for p in model.transformer.parameters())


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith(".safetensors")
    raise AssertionError("no such address")


def text_encoders(pipeline: Any) -> list[nn.Module]:
    parts = [pipeline.components[name] for name in ("text_encoder", "text_encoder_2", "text_encoder_3")]
    return [part for part in parts if part is not None]


def test_a_teacher_that_cannot_be(sd3_folder: Path, qwen_folder: Path, tmp_path: Path) -> None:
    family = f"'{qwen_folder}' is a QwenImagePipeline; it should be a StableDiffusion3Pipeline, as model.path is"
    for path, reason in ((Path("/nowhere/at/all"), "'/nowhere/at/all': no such folder"), (qwen_folder, family)):
        with pytest.raises(ValueError) as error:
            plan_of(taught(sd3_folder, path, tmp_path), Cluster(1, 2))
        assert str(error.value) == f"algorithm.teacher_path: {reason}"


@pytest.mark.parametrize("keys", [["model.lora_rank=4", "model.dtype=bfloat16"], []], ids=["lora", "full"])
def test_the_copy_of_a_sampling_engine(keys: list[str], sd3_folder: Path, tmp_path: Path) -> None:
    """The transformer without its LoRA, whole and in model.dtype on each rank, while it samples."""
    from diffusers import SD3Transformer2DModel

    cfg = tiny_config(sd3_folder, tmp_path, "parallel.fsdp_size=2", *keys)
    plain = memory_of(cfg)
    cfg.rollout.engine = "vllm_omni"
    memory = memory_of(cfg)
    size = SD3Transformer2DModel.from_pretrained(sd3_folder / "transformer").num_parameters() * (2 if keys else 4)
    assert memory.held == plain.held
    by_name = phases_of(memory)
    for phase in plain.phases:
        engines = phase.name.startswith(("rollout", "validation"))
        found = by_name.pop(phase.name)
        weights = found.other - phase.other  # of the correction, 8 samples x 2 steps, whose log-probs are there anyway
        assert weights == (0 if engines or phase.name == "encode prompts" else 4 * 2 * 4)
        assert replace(found, other=phase.other) == (replace(phase, gathered=size) if engines else phase)
    (rescore,) = by_name.values()
    sample, update = (phases_of(plain)[name] for name in ("rollout: sample", "update"))
    assert (rescore.name, rescore.gathered, rescore.other) == ("rescore", sample.gathered, update.other)
    assert rescore.activations > 0
    plan = plan_of(cfg, Cluster(1, 4))
    forward = section(describe(plan, Gpu()), "Batch")[6]
    assert forward == "forward passes  4 to sample, 2 to score samples again, 2 to train, a rank and step"
    # it gets the weights once, as they are kept; the policy's are gathered to score its samples
    sent, stored = {t.what: t.size for t in messages(plan)}, plan.policy.layout.stored()
    assert sent["weights, gathered for the engine"] == stored // 2
    assert sent["weights, gathered to score samples"] == sum(plan.policy.layout.units()) // 2
    assert "weights, gathered to sample" not in sent
    cfg.rollout.correction = "none"
    assert "rescore" not in phases_of(memory_of(cfg))


# -- the model without its weights --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "branches"), [("qwen", 2), ("flux", 1), ("z_image", 2), ("wan", 2)])
def test_a_plan_of_each_family(
    family: str, branches: int, request: pytest.FixtureRequest, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    """FLUX takes guidance as an input."""
    cfg = tiny_config(config_only(request.getfixturevalue(f"{family}_folder")), tmp_path / "job", "model.lora_rank=4")
    text = plan_job(cfg, {"nproc": "2", "gpu_memory_gb": "1"})
    rows = f" x {branches} branches of guidance = 8 rows" if branches > 1 else " = 4 rows"
    assert f"micro-batch     2 images x 2 trained steps{rows}" in text
    assert "  update " in text and "TFLOP" in text


@pytest.mark.parametrize(
    "family", ["sd3_folder", "sd3_t5_folder", "qwen_folder", "flux_folder", "z_image_folder", "wan_folder"]
)
@pytest.mark.parametrize("keys", [["model.lora_rank=4", "model.dtype=bfloat16"], []], ids=["lora", "full"])
def test_the_blueprint_is_the_model(
    family: str, keys: list[str], request: pytest.FixtureRequest, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Names, shapes and dtypes of all tensors are those of the loaded model, and no tensor has memory."""
    real_folder = request.getfixturevalue(family)
    cfg = tiny_config(config_only(real_folder), tmp_path / "job", *keys)
    drawn = plan_of(cfg).policy.model
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[cfg.model.dtype]
    cfg.model.path = str(real_folder)
    real = family_of(cfg.model)(cfg.model, dtype, dtype)
    for module, other in zip([real.vae, *real.text_encoders], [drawn.vae, *drawn.text_encoders], strict=True):
        assert tensors(module) == tensors(other)
    lora = {name: t for name, t in tensors(drawn.transformer).items() if "lora_" in name}
    base = {name.replace(".base_layer", ""): t for name, t in tensors(drawn.transformer).items() if name not in lora}
    assert base == tensors(real.transformer)
    assert bool(lora) == bool(cfg.model.lora_rank)
    (encoded,) = real.encode(["a text"], torch.device("cpu"), 32)
    length = len(encoded["prompt_embeds"])
    assert shapes(encoded) == shapes(drawn.embeds_like(length, 32, 32))
    assert length <= drawn.most_tokens(32, 32, 32)
    assert all(t.is_meta for m in [drawn.transformer, drawn.vae, *drawn.text_encoders] for t in m.state_dict().values())


@pytest.mark.parametrize(
    ("family", "keys", "numbers"),  # of a prompt's embeddings: tokens of 64, and what FLUX's CLIP pools to 32
    [
        ("flux", ["data.max_prompt_length=1"], 64 + 32),
        ("flux", ["rollout.height=8", "rollout.width=8"], 32 * 64 + 32),  # one image token
        ("qwen", ["data.max_prompt_length=1", "rollout.height=8", "rollout.width=8"], 64),
    ],
)
def test_texts_and_images_of_one_token(
    family: str,
    keys: list[str],
    numbers: int,
    request: pytest.FixtureRequest,
    config_only: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    cfg = tiny_config(config_only(request.getfixturevalue(f"{family}_folder")), tmp_path / "job", *keys)
    assert "  update " in plan_job(cfg, {})
    embeds = plan_of(cfg).policy.model.embeds_like(cfg.data.max_prompt_length, 8, 8)
    assert sum(tensor.numel() for tensor in embeds.values()) == numbers


def test_frames_are_counted(wan_folder: Path, config_only: Callable[[Path], Path], tmp_path: Path) -> None:
    """Latents, videos, activations and arithmetic; texts are what they are for an image."""
    image, video = (
        plan_of(tiny_config(config_only(wan_folder), tmp_path / str(n), f"rollout.num_frames={n}"))
        for n in (1, 9)  # 1 and 3 frames of the latent
    )
    pictures = [count(plan).host["images"] for plan in (image, video)]
    assert pictures == [16 * frames * 3 * 32 * 32 * 4 for frames in (1, 9)]
    texts = 32 * image.policy.model.transformer.config.text_dim * 4 * 4 * 2  # of 4 prompts and their negatives
    assert video.samples_size - texts == pytest.approx(3 * (image.samples_size - texts), rel=0.01)
    assert 2 < video.flops / image.flops < 4  # attention grows faster, what the text takes not at all
    for one, other in zip(count(image).phases, count(video).phases, strict=True):
        if one.activations:
            assert other.activations > 1.5 * one.activations, one.name


def test_a_prompt_length_that_the_model_refuses(
    z_image_folder: Path, config_only: Callable[[Path], Path], tmp_path: Path
) -> None:
    cfg = tiny_config(config_only(z_image_folder), tmp_path / "job", "data.max_prompt_length=97")
    with pytest.raises(ValueError) as error:
        plan_job(cfg, {})
    assert str(error.value) == "data.max_prompt_length: 97 is more than the model's 96 tokens"


def shapes(embeds: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (t.shape, t.dtype) for name, t in embeds.items()}


def tensors(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: (t.shape, t.dtype) for name, t in found}


def broken_index(**changes: Any) -> Callable[[Path], object]:
    """Breaks a folder's model_index.json: other entries, None for those that it is to lack."""

    def change(folder: Path) -> None:
        index = json.loads((folder / "model_index.json").read_text()) | changes
        left = {name: value for name, value in index.items() if value is not None}
        (folder / "model_index.json").write_text(json.dumps(left))

    return change


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            lambda folder: (folder / "model_index.json").unlink(),
            "model.path: '{folder}' is not a diffusers model folder: it has no model_index.json",
        ),
        (lambda folder: (folder / "vae" / "config.json").unlink(), "model.path: {folder}/vae has no config.json"),
        (
            lambda folder: (folder / "transformer" / "config.json").write_text('{"num_layers": 2,,}'),
            "model.path: {folder}/transformer/config.json:1:18 is not valid JSON: ",
        ),
        (
            broken_index(text_encoder=["transformers", "CLIPTextModle"]),
            "model.path: '{folder}' has a CLIPTextModle, which the installed transformers lacks",
        ),
        (
            broken_index(vae=["my_vae", "Vae"]),
            "model.path: '{folder}' has its vae from my_vae; known: diffusers, transformers",
        ),
        (
            broken_index(_class_name="SanaPipeline"),
            "model.path: '{folder}' is a SanaPipeline; supported: FluxPipeline, QwenImageEditPipeline, "
            "QwenImageEditPlusPipeline, QwenImagePipeline, StableDiffusion3Pipeline, WanPipeline, ZImagePipeline",
        ),
        (
            lambda folder: shutil.rmtree(folder / "scheduler"),
            "model.path: {folder}/scheduler has no scheduler_config.json",
        ),
        (
            broken_index(vae=None),
            "model.path: '{folder}': StableDiffusion3Pipeline.__init__() missing 1 required positional argument: 'vae'",
        ),
    ],
    ids=["index", "config", "json", "class", "library", "family", "scheduler", "lacks"],
)
def test_folders_that_cannot_be_read(
    breaks: Callable[[Path], object],
    message: str,
    sd3_folder: Path,
    config_only: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    folder = config_only(sd3_folder)
    breaks(folder)
    with pytest.raises(ValueError) as error:
        plan_job(tiny_config(folder, tmp_path / "job"), {})
    said, expected = str(error.value), message.format(folder=folder)
    # what Python says of a JSON file changes with its version
    assert said == expected or (expected.endswith("JSON: ") and said.startswith(expected))


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/nowhere/at/all", "no such folder"), ("someone/something", "no such folder, and no hub has it within reach")],
)
def test_folders_that_are_not_there(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        plan_job(tiny_config(Path(path), tmp_path), {})
    assert str(error.value) == f"model.path: {path!r}: {reason}"


# -- models whose folder is not within reach -----------------------------------------------------------------------

T5, UMT5, CLIP_L, CLIP_G, QWEN_VL = 4_762_310_656, 5_680_910_336, 123_650_304, 694_659_840, 8_292_166_656
KL_VAE, VIDEO_VAE = 83_819_683, 126_892_531
SHIPPED = {
    "stabilityai/stable-diffusion-3.5-medium": [2_243_171_520, KL_VAE, CLIP_L, CLIP_G, T5],
    "stabilityai/stable-diffusion-3.5-large": [8_056_627_520, KL_VAE, CLIP_L, CLIP_G, T5],
    "black-forest-labs/FLUX.1-dev": [11_901_408_320, KL_VAE, CLIP_L - 768 * 768, T5],  # without a projection
    "Qwen/Qwen-Image": [20_430_401_088, VIDEO_VAE, QWEN_VL],
    "Qwen/Qwen-Image-Edit-2509": [20_430_401_088, VIDEO_VAE, QWEN_VL],
    "Tongyi-MAI/Z-Image-Turbo": [6_154_908_736, KL_VAE, 4_022_468_096],
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": [1_418_996_800, VIDEO_VAE, UMT5],
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": [14_288_491_584, VIDEO_VAE, UMT5],
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": [4_999_787_712, 704_688_668, UMT5],
}
JUDGES = {"Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976, "Qwen/Qwen2.5-VL-7B-Instruct": QWEN_VL}


@pytest.mark.parametrize("path", SHIPPED)
def test_shipped_shapes(path: str, sd3_folder: Path, tmp_path: Path) -> None:
    """Transformer, VAE and text encoders have as many parameters as the published weights."""
    cfg = tiny_config(sd3_folder, tmp_path)
    cfg.model.path = fetch(path)
    cfg.model.family = family_name(cfg.model)
    model = planned_policy(cfg, ONE, Ledger()).model
    modules: list[nn.Module] = [model.transformer, model.vae, *model.text_encoders]
    assert [sum(p.numel() for p in module.parameters()) for module in modules] == SHIPPED[path]
    assert (shipped(cfg.model.path), shipped(str(sd3_folder))) == (path, None)


def test_shipped_judges(sd3_folder: Path, tmp_path: Path) -> None:
    for path, parameters in JUDGES.items():
        cfg = judged(sd3_folder, tmp_path, path)
        assert memory_of(cfg).host["sleeping reward model"] == parameters  # a half of them, in bfloat16
        assert (
            described(cfg).split("\n")[1] == f"Shapes of {path} as shipped with Phalanx: no hub has them within reach"
        )


def test_all_that_is_shipped_is_known() -> None:
    files = {file.stem for file in (ROOT / "src" / "phalanx" / "plan" / "models").iterdir()}
    assert files == {path.replace("/", "--") for path in [*SHIPPED, *JUDGES, *SHIPPED_LM]}


def test_nothing_stays_of_a_plan_that_is_refused(tmp_path: Path) -> None:
    """Wan's folder is unpacked before its number of frames is refused."""
    words = [
        "tasks/train_flowgrpo.py",
        "configs/flowgrpo/wan21_t2v_1_3b_ocr_lora.yaml",
        "--plan",
        "rollout.num_frames=2",
    ]
    done = run(sys.executable, *words, env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "") and "rollout.num_frames" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("phalanx-plan-")]


def test_the_hub_goes_before_what_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert fetch("Qwen/Qwen-Image") == str(tmp_path)


# -- the text -----------------------------------------------------------------------------------------------------


def test_the_quickstart_on_two_nodes() -> None:
    text = plan_job(quickstart(), {"nnodes": "2", "nproc": "1"})
    assert text.startswith("Plan of 2 nodes x 1 = 2 ranks; no GPU, process group or weights were used\n\n")
    assert section(text, "Topology") == [
        "nodes    0 | 1",
        "weights  a copy of the weights on each rank",
        "rewards  ocr: on every rank, for its own images",
    ]
    assert section(text, "Batch") == [
        "a step          6 prompts x 16 images = 96 images",
        "a rank          48 images of 3 prompts",
        "rollout         2 micro-batches of 24 images",
        "updates         2 a step, each of 2 micro-batches",
        "micro-batch     12 images x 2 trained steps = 24 rows",
        "texts           78 tokens, the most that there can be",
        "forward passes  10 to sample, 4 to train, a rank and step",
        "run             120 steps, 240 optimizer steps",
    ]
    # 2 297 616 weights in float32, their two moments, and the average
    held = dict(line.rsplit(maxsplit=1) for line in section(text, "Memory of a rank (0.0023 B weights"))
    assert {k: held[k] for k in ("trained weights", "optimizer's state", "moving average")} == {
        "trained weights": "9.19",
        "optimizer's state": "18.38",
        "moving average": "9.19",
    }
    # two updates of 9.19 MB, which goes round once and comes back
    assert section(text, "Messages of a step") == [
        "MB                               within a node  across nodes",
        "gradients of replicated weights              -         18.38",
        "together                                     -         18.38",
    ]
    assert "warning" not in text and len(text.splitlines()) < 60


def test_hundreds_of_ranks_take_a_few_lines(tmp_path: Path, sd3_folder: Path) -> None:
    batch = ["data.train_batch_size=256", "rollout.n=8", "actor.ppo_mini_batch_size=256"]
    cfg = tiny_config(sd3_folder, tmp_path, "parallel.fsdp_size=4", *batch)
    text = plan_job(cfg, {"nnodes": "32", "nproc": "8"})
    assert section(text, "Topology") == [
        "nodes             0-7 | 8-15 | 16-23 | .. | 248-255",
        "weights           64 copies of the weights, each over 4 ranks",
        "shard groups      0-3 | 4-7 | 8-11 | .. | 252-255",
        "replicate groups  0 4 .. 252 | 1 5 .. 253 | 2 6 .. 254 | 3 7 .. 255",
        "rewards           contrast: on every rank, for its own images",
    ]
    assert len(text.splitlines()) < 80


def test_the_reward_models_groups(tmp_path: Path, sd3_folder: Path) -> None:
    batch = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
    model = [f"reward.model.path={sd3_folder}", "reward.model.tensor_parallel_size=2"]
    last = "reward.model.placement=ranks 6-7"
    text = plan_job(tiny_config(sd3_folder, tmp_path, *batch, *model, last), {"nnodes": "2", "nproc": "8"})
    assert "reward groups     6-7 | 14-15: each holds reward.model, for the judges" in section(text, "Topology")
    with pytest.raises(ValueError) as error:
        plan_job(tiny_config(sd3_folder, tmp_path, *batch, *model), {"nnodes": "16", "nproc": "1"})
    assert str(error.value) == (
        "reward.model.tensor_parallel_size: 2 does not divide the 1 ranks of a node; nearest that does: 1"
    )


def test_guidance_reference_and_passes_are_counted(tmp_path: Path, sd3_folder: Path) -> None:
    keys = ["algorithm.kl_loss_coef=0.1", "actor.ppo_epochs=2", "rollout.num_inference_steps=5"]
    text = plan_job(tiny_config(sd3_folder, tmp_path, *keys), {"nproc": "2"})
    assert section(text, "Batch")[1:] == [
        "a rank          8 images of 2 prompts",
        "rollout         2 micro-batches of 4 images x 2 branches of guidance",
        "updates         4 a step, each of 2 micro-batches",
        "micro-batch     2 images x 2 trained steps x 2 branches of guidance = 8 rows",
        "texts           109 tokens, the most that there can be",
        "forward passes  10 to sample, 4 of the reference, 8 to train, a rank and step",
        "run             2 steps, 8 optimizer steps",
    ]
    split = plan_job(tiny_config(sd3_folder, tmp_path, *keys, "actor.detach_uncond=true"), {"nproc": "2"})
    assert section(split, "Batch")[4] == "micro-batch     2 images x 2 trained steps = 4 rows"
    assert section(split, "Batch")[6].startswith("forward passes  20 to sample, 8 of the reference, 16 to train")


def test_flow_matching(sd3_folder: Path) -> None:
    cfg = flow_matching_config(sd3_folder)
    text = plan_job(cfg, {"nproc": "2"})
    assert section(text, "Batch") == [
        "a step          64 images, 32 a rank, one optimizer step",
        "update          4 micro-batches of 8 images",
        "texts           333 tokens, the most that there can be",
        "forward passes  4 to train, a rank and step",
        "run             as many steps as trainer.total_epochs and the images make",
    ]
    assert "encode images" in text and "rollout" not in text and "validation" not in text
    with pytest.raises(ConfigError, match=r"data.train_batch_size: 64 images do not divide over 3 ranks"):
        plan_job(cfg, {"nproc": "3"})


def test_a_range_of_nodes() -> None:
    before = dict(os.environ)
    text = plan_job(quickstart(), {"nnodes": "1:3", "nproc": "2"})
    assert os.environ == before
    first, *lines = text.split("\n\n")[0].split("\n")
    assert (first, lines[:2]) == (
        "Sizes",
        [
            "  1 node x 2 = 2 ranks   48 images a rank, a copy of the weights on each rank",
            "  2 nodes x 2 = 4 ranks  24 images a rank, a copy of the weights on each rank",
        ],
    )
    refusal = (
        "actor.ppo_micro_batch_size_per_gpu: 12 does not divide the 8 samples of an update on a rank (3 prompts x "
        "rollout.n 16 = 48 samples of an update / 6 ranks); nearest that work: actor.ppo_micro_batch_size_per_gpu=8"
    )
    assert lines[2:] == [f"  3 nodes x 2 = 6 ranks  refused: {refusal}"]
    assert "Plan of 2 nodes x 2 = 4 ranks" in text  # the largest that works
    with pytest.raises(ConfigError) as error:
        plan_job(quickstart(), {"nnodes": "3", "nproc": "2"})
    assert str(error.value) == refusal
    with pytest.raises(ConfigError, match=r"^no number of nodes from 5 to 7 works: actor.ppo_mini_batch_size: 3 "):
        plan_job(quickstart(), {"nnodes": "5:7"})
    assert sizes(quickstart(), [Cluster(1, 1)], {}).endswith("96 images a rank, a copy of the weights on each rank")


@pytest.mark.full
@pytest.mark.long
def test_twenty_billion_weights() -> None:
    """Qwen-Image on four nodes, which is what docs/plan.md shows."""
    recipe = ROOT / "configs" / "flowgrpo" / "qwen_image_ocr_lora_multinode.yaml"
    words = {"nnodes": "4", "nproc": "8", "gpu_memory_gb": "80", "gpu_hour_price": "2.5"}
    text = plan_job(load(FlowRLConfig, str(recipe), []), words)
    page = (ROOT / "docs" / "plan.md").read_text()
    shown = page[page.index("```text\n") + len("```text\n") :].split("```")[0].rstrip()
    without = (part.split("\n\n") for part in (text, shown))
    assert [part for part in next(without) if "  phase " not in part] == [
        part for part in next(without) if "  phase " not in part
    ]
    found = phases(text)
    assert found == {name: pytest.approx(row, rel=0.05) for name, row in phases(shown).items()}
    base, lora = 20_430_401_088 / 1e9, 424_673_280 / 1e9
    gathered, activations, gradients = (1, 2, 3)  # columns
    assert found["rollout: decode"][gathered] == pytest.approx((base + lora) * 2, rel=1e-3)
    # 32 rows of 1024 + 256 tokens go into each of 60 blocks, 3072 wide in bfloat16, and one block is computed again
    inputs = 60 * 32 * (1024 + 256) * 3072 * 2 / 1e9
    assert inputs < found["update"][activations] < 1.6 * inputs
    assert found["update"][gradients] == pytest.approx(lora * 4, rel=0.05)  # whole between the passes


def phases(text: str) -> dict[str, list[float]]:
    """The rows of the table of phases but that of the text encoders, and none of the lines below it."""
    rows = (
        line.rsplit(maxsplit=6) for line in section(text, "  phase") if not line.startswith(("encode", "peak", "fits"))
    )
    return {name: [float(cell.replace("-", "0")) for cell in cells] for name, *cells in rows}


def test_time_and_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sd3_folder: Path) -> None:
    """Of 4 ranks that each have 45 s of an H100's peak to do, for 16 images, in each of 2 steps."""
    cfg = tiny_config(sd3_folder, tmp_path, "model.dtype=bfloat16", "model.lora_rank=4")
    plan = plan_of(cfg, Cluster(1, 4))
    assert section(describe(plan, Gpu()), "Arithmetic")[0].endswith(" a rank: too little to tell a time from")
    monkeypatch.setattr("phalanx.plan.rehearsal.RLRehearsal.flops", 4 * 45 * 989.4e12)
    monkeypatch.setattr("phalanx.plan.rehearsal.RLRehearsal.model_flops", 3 * 45 * 989.4e12)
    text = describe(plan, Gpu(price=2.5))
    title = "Arithmetic and time, assumed that H100 does 25 to 45 % of its 989 TFLOP/s in bfloat16"
    assert section(text, title) == [
        "a step    178.1 PFLOP, 44.52 a rank: 100 to 180 s",
        "repeated  25 % of it, in backward passes: perf/mfu would be 18.8 to 33.8 %",
        "images    0.0889 to 0.160 a second, 0.0222 to 0.0400 on a GPU",
        "the job   2 steps: 0.0556 to 0.100 hours, 0.222 to 0.400 GPU-hours",
        "cost      0.556 to 1.00, at 2.5 for a GPU-hour",
        "left out  rewards, validation, checkpoints, text encoders, VAE, waiting for the slowest rank",
    ]
    plan.cfg.trainer.total_training_steps = None
    text = describe(plan, Gpu("NVIDIA A100-SXM4-80GB"))
    title = "Arithmetic and time, assumed that NVIDIA A100-SXM4-80GB does 25 to 45 % of its 312 TFLOP/s in bfloat16"
    slower = section(text, title)
    assert slower[0].endswith(": 317 to 571 s") and slower[3] == "1000 steps  88.1 to 159 hours, 352 to 634 GPU-hours"
    assert "assumed that H100 does" in describe(plan, Gpu("some other card"))


# -- warnings -----------------------------------------------------------------------------------------------------


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_a_shard_group_on_two_nodes(tmp_path: Path, sd3_folder: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, "parallel.fsdp_size=4", "rollout.n=24")
    assert warnings(plan_job(cfg, {"nnodes": "2", "nproc": "6"})) == [
        "warning: ranks 4-7 share one copy of the weights and are on nodes 0 to 1: every gather of weights goes through "
        "the network; parallel.fsdp_size=3 keeps it within a node"
    ]
    assert warnings(plan_job(cfg, {"nnodes": "3", "nproc": "4"})) == []


def test_inexact_micro_batches(tmp_path: Path, sd3_folder: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, "rollout.micro_batch_size_per_gpu=8")
    assert warnings(plan_job(cfg, {})) == [
        "warning: rollout.micro_batch_size_per_gpu 8 is not ppo_micro_batch_size_per_gpu x window = 4: log-probs of "
        "rollout and replay may differ in the last bits"
    ]


def test_memory_that_does_not_fit(tmp_path: Path, sd3_folder: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path)
    memory = count(plan_of(cfg))
    assert memory.largest.name == "update"
    need = memory.peak + ALLOWED

    def told(gpu: float) -> list[str]:
        return warnings(plan_job(cfg, {"gpu_memory_gb": f"{gpu / GB:.6f}"}))

    helps = (
        "what helps: model.gradient_checkpointing=true, a smaller actor.ppo_micro_batch_size_per_gpu, "
        "parallel.optimizer_offload=true, a LoRA (model.lora_rank)"
    )
    takes = f"warning: update takes {need / GB:.2f}"
    assert told(need - 10**6) == [
        f"{takes} of {(need - 10**6) / GB:.2f} GB with CUDA and NCCL and does not fit; {helps}"
    ]
    assert told(need * 1.05) == [
        f"{takes} of {need * 1.05 / GB:.2f} GB with CUDA and NCCL and leaves little for gaps of the allocator; {helps}"
    ]
    assert told(need * 1.2) == []
    last = section(plan_job(cfg, {"gpu_memory_gb": "80"}), "  phase")[-1]
    assert last == f"peak: {memory.peak / GB:.2f} and 2.00 for CUDA and NCCL, of 80.00 GB"


def test_keys_that_help_do_help(tmp_path: Path, sd3_folder: Path) -> None:
    def need(*keys: str) -> int:
        cfg = tiny_config(sd3_folder, tmp_path, "rollout.n=8", "parallel.fsdp_size=2", *keys)
        return memory_of(cfg).peak

    plain = need()
    for key in (
        "model.gradient_checkpointing=true",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "parallel.optimizer_offload=true",
        "parallel.fsdp_size=4",
        "parallel.param_offload=true",
        "model.lora_rank=4",
    ):
        assert need(key) < plain, key


# -- the command line ---------------------------------------------------------------------------------------------


def run(*words: str, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env=launch_environment(env), capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command() -> None:
    task, config = "tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml"
    done = run(
        "sh", "train.sh", task, config, "--plan", "actor.ppo_epochs=2", env={"NNODES": "2", "NPROC_PER_NODE": "2"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan of 2 nodes x 2 = 4 ranks;")
    assert "updates         4 a step, each of 1 micro-batch\n" in done.stdout
    words = ("plan=true", "nnodes=2", "nproc_per_node=2", "actor.ppo_epochs=2")
    assert run(sys.executable, task, config, *words).stdout == done.stdout


@pytest.mark.quick(
    "words2-unknown key trainer.sed; did you mean trainer.seed?",
    "words3-unknown option --plan; expected [config.yaml] [key=value ...], or --help",
    "words4-nnodes=2 goes with --plan; a job's own size is its launcher's, such as NNODES=2",
)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "nproc=5"],
            "actor.ppo_mini_batch_size: 3 prompts x rollout.n 16 = 48 samples of an update do not divide over 5 ranks; "
            "nearest that work: rollout.n=20",
        ),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "gpu_hour_price=2,5"],
            "gpu_hour_price=2,5: expected the price of a GPU for an hour, such as 2.5",
        ),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "trainer.sed=1"],
            "unknown key trainer.sed; did you mean trainer.seed?",
        ),
        (["tasks/sample.py", "--plan"], "unknown option --plan; expected [config.yaml] [key=value ...], or --help"),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "nnodes=2"],
            "nnodes=2 goes with --plan; a job's own size is its launcher's, such as NNODES=2",
        ),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str) -> None:
    done = run(sys.executable, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {message}\n")


def test_fewer_steps_behind_the_window(sd3_folder: Path, tmp_path: Path) -> None:
    """Counted where the window ends last, of 7 steps: 3, and half of the 4 that are left."""
    own = ("rollout.num_inference_steps=7", "rollout.sde_window_range=[0,3]")
    whole, fewer = (
        plan_of(tiny_config(sd3_folder, tmp_path, *own, f"rollout.ode_compression={share}")) for share in (1.0, 0.5)
    )
    passes = [plan.ledger.phases["rollout: sample"].passes for plan in (whole, fewer)]
    assert passes == [4 * 7, 4 * 5]  # micro-batches of 4 among 16 images
    assert fewer.flops < whole.flops


def test_a_share_of_the_stochastic_steps(tmp_path: Path, sd3_folder: Path) -> None:
    """All 3 are kept, 2 are trained."""
    cfg = tiny_config(sd3_folder, tmp_path, "rollout.sde_window_size=null", "rollout.timestep_fraction=0.6")
    share = plan_of(cfg)
    assert share.plan is not None and (flow_rl.stochastic_steps(cfg), share.plan.actions) == (3, 2)
    two = replace(cfg, rollout=replace(cfg.rollout, sde_window_size=2, timestep_fraction=1.0))
    latent = 4 * 8 * 8 * 4
    assert share.samples_size - plan_of(two).samples_size == pytest.approx(16 * latent, abs=100)
