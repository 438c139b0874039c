"""Beside the trained model in a plan: reward models, averages, teachers, files, a sampling engine's copy."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.config.flow import FlowRewardFunctionConfig, FlowRLConfig
from phalanx.models.flow.registry import family_of
from phalanx.tools.plan.batch import messages
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import nbytes
from phalanx.tools.plan.memory import MAPPED, Memory, count
from tests.helpers.jobs import algorithm_config, tiny_config
from tests.helpers.plans import (
    GB,
    describe,
    described,
    flow_matching_config,
    judged,
    memory_of,
    phases_of,
    plan_of,
    section,
    warnings,
)
from tests.helpers.tiny import halved, load_pipeline

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


def judge_phase(memory: Memory) -> int:
    """Bytes of the phase beyond the samples, which the update has as well."""
    phases = phases_of(memory)
    assert [*phases].index("judge") == [*phases].index("rollout: decode") + 1
    judge = phases["judge"]
    assert judge.total == judge.other
    return judge.other - phases["update"].other


@pytest.mark.full
def test_a_sleeping_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    """It is on the device while it scores, and on the host throughout; one that does not sleep is held instead."""
    cfg = judged(sd3_folder, tmp_path, reward_folder, "reward.model.gpu_memory_utilization=0.25")
    alone = memory_of(tiny_config(sd3_folder, tmp_path / "job"))
    unknown, known = memory_of(cfg), memory_of(cfg, GPU)
    assert alone.held == unknown.held == known.held
    assert unknown.host == known.host == alone.host | {"sleeping reward model": PART}
    assert (judge_phase(unknown), judge_phase(known)) == (PART, GPU // 4)
    assert known.largest.name == "judge"
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


@pytest.mark.full
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


def test_a_node_has_the_reward_model_on_some_ranks(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    cfg = judged(sd3_folder, tmp_path, reward_folder, "reward.model.placement=ranks 2-3")
    for file in reward_folder.glob("*.safetensors"):
        file.unlink()
    save_file({"a": torch.zeros(25_000_000, dtype=torch.bfloat16)}, reward_folder / "big.safetensors")
    (reward_folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "big.safetensors"}}')
    cfg.reward.model.sleep = False
    host = memory_of(cfg).host
    cfg.reward.model.sleep = True
    kept = (sum(host.values()) * 4 - host[MAPPED] * 3 + 2 * 25_000_000) / 1e6
    assert section(described(cfg), "In the host's memory")[1] == f"a node  {kept:.2f} MB"


def test_a_share_that_is_too_small_for_the_reward_model(sd3_folder: Path, tmp_path: Path, reward_folder: Path) -> None:
    cfg = judged(sd3_folder, tmp_path, reward_folder, "reward.model.gpu_memory_utilization=0.5")
    told = warnings(described(cfg, PART))
    assert told[-1] == (
        f"warning: reward.model.gpu_memory_utilization: 0.5 of the GPU is {PART // 2 / 1e6:.2f} MB, and a rank's part of "
        f"the weights {PART / 1e6:.2f}: vLLM would not start; raise it, or reward.model.tensor_parallel_size"
    )
    cfg.reward.model.gpu_memory_utilization = 0.95
    (told,) = warnings(described(cfg, 60 * GB))
    assert told.startswith("warning: judge takes 63.85 of 60.00 GB with CUDA, NCCL and vLLM and does not fit")
    assert told.endswith("what helps: a smaller reward.model.gpu_memory_utilization, a LoRA (model.lora_rank)")


def test_the_weights_that_an_algorithm_keeps(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ["model.lora_rank=4", "parallel.fsdp_size=1", "actor.ema.decay=0.9"]

    def memory_with(name: str, *overrides: str) -> Memory:
        return memory_of(algorithm_config(sd3_folder, tmp_path, name, *keys, *overrides))

    plain, nft = memory_with("sft"), memory_with("diffusion_nft")
    average = plain.held["moving average"]
    before = plain.held["state before a step"] + average
    assert average > 0 and nft.held == plain.held | {"algorithm's weights": average, "state before a step": before}
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
    assert section(describe(plan), "Batch")[6] == (
        "forward passes  8 to sample, 4 of the teacher, 4 to train, per rank and step"
    )


def test_several_teachers(sd3_folder: Path, tmp_path: Path) -> None:
    """Each is held, and passes over all samples, as on a rank that has only its rows."""
    cluster, cfg = Cluster(1, 2), taught(sd3_folder, sd3_folder, tmp_path)
    one = plan_of(cfg, cluster)
    algorithm = replace(cfg.algorithm, teacher_path=None, teachers={n: str(sd3_folder) for n in "ab"}, teacher_key="t")
    two = plan_of(replace(cfg, algorithm=algorithm), cluster)
    single, held = count(one).held, count(two).held
    assert held["teacher a"] == held["teacher b"] == single["teacher"]
    view = two.policy.model.flops(32, 32, 77 + 32)
    assert two.flops - one.flops == 16 * 2 * view  # of 16 images, 2 steps
    assert section(describe(two), "Batch")[6] == (
        "forward passes  8 to sample, 4 of the teacher a, 4 of the teacher b, 4 to train, per rank and step"
    )


@pytest.mark.long
def test_each_count_of_operations_is_a_new_one(sd3_folder: Path, tmp_path: Path) -> None:
    """Each is of a model that is gone afterwards: the next one may have its place in memory, and is another one."""
    model = plan_of(tiny_config(sd3_folder, tmp_path), Cluster(1, 2)).policy.model
    counts = set()
    for _ in range(20):
        counts.add(model.flops(32, 32, 77 + 32))
        gc.collect()
    assert len(counts) == 1


@pytest.mark.full
def test_what_a_teacher_brings_to_the_host(sd3_folder: Path, sd3_t5_folder: Path, tmp_path: Path) -> None:
    """Its own text encoders, and weights that are offloaded."""
    own, theirs = (load_pipeline(folder) for folder in (sd3_folder, sd3_t5_folder))
    encoders, more = (nbytes(*text_encoders(p)) for p in (own, theirs))
    equal = memory_of(taught(sd3_folder, sd3_folder, tmp_path))
    assert equal.host[MAPPED] == encoders and "text encoders" not in equal.host  # float32, as in the files
    other = memory_of(taught(sd3_folder, sd3_t5_folder, tmp_path))
    assert other.host[MAPPED] == encoders + more
    cast = memory_of(taught(sd3_folder, sd3_folder, tmp_path, "model.dtype=bfloat16"))
    assert 0 < cast.host["text encoders"] < 0.6 * encoders and MAPPED not in cast.host
    away = memory_of(taught(sd3_folder, sd3_folder, tmp_path, "parallel.param_offload=true"))
    assert away.host["teacher"] + away.held["teacher"] == equal.held["teacher"]


def test_files_are_shared_unless_they_are_cast(sd3_folder: Path, tmp_path: Path) -> None:
    """Tensors in the dtype of their file are views of it, as the kernel's list of mappings shows."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    for keys, shared in ((["model.dtype=bfloat16", "model.lora_rank=4"], False), ([], True)):
        cfg = tiny_config(sd3_folder, tmp_path, *keys)
        model = family_of(cfg.model)(cfg.model, dtypes[cfg.model.dtype], dtypes[cfg.model.dtype])
        assert all(is_mapped(next(m.parameters())) is shared for m in (model.transformer, *model.text_encoders))


def test_files_are_shared_where_ranks_cast_their_parts(sd3_folder: Path, tmp_path: Path) -> None:
    """Of a full fine-tuning of a model in bfloat16; one tensor that a cast to bfloat16 would change, and all is own."""
    folder = halved(sd3_folder, tmp_path / "half")
    cfg = tiny_config(folder, tmp_path, "model.dtype=bfloat16")
    model = family_of(cfg.model)(cfg.model, torch.bfloat16, torch.float32)
    assert is_mapped(next(model.transformer.parameters()))
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"proj_out.bias": tensors["proj_out.bias"].float()}, file, {"format": "pt"})
    model = family_of(cfg.model)(cfg.model, torch.bfloat16, torch.float32)
    assert not is_mapped(next(model.transformer.parameters()))


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


@pytest.mark.quick("full")
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
        of_micro_batch = 2 * 2 * 4 if phase.name == "update" else 0  # the weights of 2 samples x 2 steps
        found = replace(found, other=phase.other, activations=found.activations - of_micro_batch)
        assert found == (replace(phase, gathered=size) if engines else phase)
    (rescore,) = by_name.values()
    sample, update = (phases_of(plain)[name] for name in ("rollout: sample", "update"))
    assert (rescore.name, rescore.gathered, rescore.other) == ("rescore", sample.gathered, update.other)
    assert rescore.activations > 0
    plan = plan_of(cfg, Cluster(1, 4))
    forward = section(describe(plan), "Batch")[6]
    assert forward == "forward passes  4 to sample, 2 to score samples again, 2 to train, per rank and step"
    # it gets the weights once, in the dtype that it computes in; the policy's are gathered to score its samples
    sent, stored = {t.what: t.size for t in messages(plan)}, plan.policy.layout.for_engine()
    assert sent["weights, gathered for the engine"] == stored // 2
    assert sent["weights, gathered to score samples"] == sum(plan.policy.layout.units()) // 2
    assert "weights, gathered to sample" not in sent
    cfg.rollout.correction = "none"
    assert "rescore" not in phases_of(memory_of(cfg))
