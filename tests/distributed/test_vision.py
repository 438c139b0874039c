"""Jobs on prompts with and without images: layouts agree, runs resume, and stock libraries load the exports."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from phalanx.config.lm import LMDataConfig, LMRLConfig
from phalanx.config.messages import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.config.tasks import ExportConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.context_parallel import KEY
from phalanx.engines.transformers import load_processor
from phalanx.models.lm import vision_families
from phalanx.models.lm.lm_policy import build_policy
from phalanx.models.lm.load_folder import read_lora
from phalanx.run import rl
from phalanx.run.kind import kind_of
from phalanx.run.rules import load_config
from phalanx.run.world import start_world, stop_world
from phalanx.tools.export import Export
from phalanx.types import JobError
from tests.helpers import jobs
from tests.helpers.checks import refused
from tests.helpers.lm import lm_overrides, tiny_lm
from tests.helpers.ranks import run_ranks
from tests.helpers.roles import run_roles
from tests.helpers.tiny_vision import chat, picture, shown_prompts, tiny_vision


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(tmp_path_factory.mktemp("qwen") / "qwen3_vl", "qwen3_vl")


def config_of(model: Path, folder: Path, *overrides: str) -> LMRLConfig:
    """A job of 4 prompts per step, some with images."""
    keys = lm_overrides(model, folder)
    shown_prompts(folder, "prompts.jsonl")
    return load_config(LMRLConfig, None, [*keys, "data.max_prompt_length=100", "trainer.resume=auto", *overrides])


def job(config: LMRLConfig, steps: int = 2) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The metrics of a run's steps, and its weights at the end."""
    trainer: Any = rl.build(config)
    trainer.fit()
    # before the file is read: rank 0 takes part once it has written its last row
    weights = {name: value.detach().clone() for name, value in trainer.policy.trained.whole()}
    rows = [json.loads(line) for line in (Path(config.trainer.output_dir) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/grad_norm" in row], weights


PARTIAL = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=4")
PACKED = ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=250")
SHARED = f"{KEY}=2"
LAYOUTS = {
    True: ((1, ()), (2, ()), (2, PACKED), (2, (SHARED,))),
    False: ((1, ()), (2, ("parallel.fsdp_size=1",)), (4, ("parallel.fsdp_size=2",)), (2, (SHARED,))),
}


@pytest.mark.quick("frozen")
@pytest.mark.seldom("frozen")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_ranks_train_as_one_though_images_are_on_some_of_them(qwen: Path, tmp_path: Path, frozen: bool) -> None:
    """In two updates per step; the first one has the weights that sampled."""
    keys = [f"model.freeze_vision_tower={str(frozen).lower()}", "model.gradient_checkpointing=true", "optim.lr=1e-3"]
    results = []
    for i, (ranks, layout) in enumerate(LAYOUTS[frozen]):
        config = config_of(qwen, tmp_path / str(i), *keys, *layout, f"trainer.output_dir={tmp_path / f'out{i}'}")
        results.append(run_ranks(job, ranks, config)[0])
    one, weights = results[0]
    assert any("visual" in name for name in weights) is not frozen
    for rows, others in results[1:]:
        for row, other in zip(one, rows, strict=True):
            assert row["actor/first_ratio_error"] == other["actor/first_ratio_error"] == 0
            assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-5)
            assert row["prompt/length_mean"] == other["prompt/length_mean"] > 35  # with the tokens of images
        assert weights.keys() == others.keys()
        for name, value in weights.items():
            torch.testing.assert_close(others[name], value, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.full
def test_a_run_that_goes_on_is_the_whole_one(qwen: Path, tmp_path: Path) -> None:
    results = {}
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        keys = [f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "model.freeze_vision_tower=false"]
        config = config_of(qwen, tmp_path / "data", f"trainer.output_dir={tmp_path / name}", *keys)
        results[name] = run_ranks(job, 1, config)[0]
    (rows, weights), (others, other_weights) = results.values()
    assert [row["actor/grad_norm"] for row in rows] == [row["actor/grad_norm"] for row in others]
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


def damaged_later(config: LMRLConfig) -> str:
    """The error of a run with an image that is damaged after the start, on one rank in the middle of the file."""
    trainer: Any = rl.build(config)
    last = next(prompt for prompt in reversed(trainer.collector.prompts.batch(1)) if prompt.images)
    if torch.distributed.get_rank() == 0:
        path = last.images[0].folder / last.images[0].source()
        path.write_bytes(path.read_bytes()[:100])
    torch.distributed.barrier()
    with pytest.raises(JobError) as error:
        trainer.fit()
    return f"{trainer.job.progress.step} {error.value}"


def test_a_picture_that_one_rank_cannot_read_ends_all_of_them(qwen: Path, tmp_path: Path) -> None:
    config = config_of(qwen, tmp_path, f"trainer.output_dir={tmp_path / 'out'}")
    told, other = run_ranks(damaged_later, 2, config)
    assert told == other
    assert re.fullmatch(
        r"1 rank 0: data\.train_files: \S+prompts\.jsonl:\d: images\[0\]: the image cannot be read: .+", told
    )


def logits_of(model: Any, folder: Path) -> Tensor:
    processor = load_processor(str(folder))
    text = processor.apply_chat_template(chat("read"), add_generation_prompt=True)
    inputs = processor(text=[text], images=[[picture()]], return_tensors="pt")
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    return logits


@pytest.mark.quick("weights")
@pytest.mark.parametrize(
    ("rank", "frozen"), [(0, True), (0, False), (4, True)], ids=["weights", "with the tower", "lora"]
)
def test_exports_are_read_by_stock_libraries_with_the_processor_beside(
    qwen: Path, tmp_path: Path, rank: int, frozen: bool
) -> None:
    keys = [f"model.lora_rank={rank}", f"model.freeze_vision_tower={str(frozen).lower()}"]
    keys += [f"trainer.output_dir={tmp_path / 'out'}", "optim.lr=1e-2"]
    config = config_of(qwen, tmp_path / "data", *keys, "trainer.total_training_steps=2", "trainer.save_freq=2")
    [(_, weights)] = run_ranks(job, 1, config)
    assert weights and any("visual" in name for name in weights) is not frozen
    folder = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={folder}"])).run()
    for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
        assert (folder / name).read_bytes() == (qwen / name).read_bytes()
    base = transformers.AutoModelForImageTextToText.from_pretrained(qwen if rank else folder)
    model = PeftModel.from_pretrained(base, folder) if rank else base
    names = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
    assert not any("visual" in name and "lora" in name for name in names)
    for name, value in weights.items():
        assert torch.equal(names[name.removeprefix("lm.")], value), name
    before = logits_of(transformers.AutoModelForImageTextToText.from_pretrained(qwen), qwen)
    assert (logits_of(model, qwen if rank else folder) - before).abs().max() > 1e-3


def trained_from(config: LMRLConfig) -> Tensor:
    """The logits of a run's final policy for a prompt with an image."""
    trainer: Any = rl.build(config)
    trainer.fit()
    with trainer.policy.unsharded():
        return logits_of(trainer.policy.trained.module.lm, Path(config.model.path))


@pytest.mark.seldom("smolvlm")
@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_run_goes_on_from_a_lora_of_peft_and_to_one(family: str, tmp_path: Path) -> None:
    base, adapter = tiny_vision(tmp_path / family, family), tmp_path / "adapter"

    def stock() -> Any:
        return transformers.AutoModelForImageTextToText.from_pretrained(base)

    targets = r".*\.(language_model|text_model)\..*\.(q_proj|down_proj)"
    torch.manual_seed(1)
    lora = get_peft_model(stock(), LoraConfig(r=3, target_modules=targets, init_lora_weights=False))
    lora.save_pretrained(adapter)
    started = logits_of(lora, base)
    assert (started - logits_of(stock(), base)).abs().max() > 0.1
    for rank, rate in ((4, 1e-12), (4, 1e-2), (0, 1e-2)):
        out, folder = tmp_path / f"out{rank}{rate}", tmp_path / f"export{rank}{rate}"
        keys = [f"model.lora_path={adapter}", f"model.lora_rank={rank}", f"trainer.output_dir={out}"]
        keys += [f"optim.lr={rate}", "trainer.save_freq=2"]
        [trained] = run_ranks(trained_from, 1, config_of(base, tmp_path / "data", *keys))
        if rate < 1e-9:  # it stays where it began
            torch.testing.assert_close(trained, started, atol=1e-5, rtol=0)
            continue
        assert (trained - started).abs().max() > 1e-3
        Export(load_config(ExportConfig, None, [f"checkpoint={out}", f"output_dir={folder}"])).run()
        kind = transformers.AutoModelForImageTextToText
        read = PeftModel.from_pretrained(stock(), folder) if rank else kind.from_pretrained(folder)
        torch.testing.assert_close(logits_of(read, base), trained, atol=1e-5, rtol=0)


def test_a_lora_of_the_tower_is_no_start(qwen: Path, tmp_path: Path) -> None:
    whole = transformers.AutoModelForImageTextToText.from_pretrained(qwen)
    get_peft_model(whole, LoraConfig(r=3, target_modules=["qkv"])).save_pretrained(tmp_path / "adapter")
    with refused(
        f"model.lora_path: '{tmp_path}/adapter' has model.visual.blocks.0.attn.qkv; expected only layers of the decoder, "
        "model.language_model"
    ):
        read_lora(str(tmp_path / "adapter"), names=["lm.model.language_model.layers.0.self_attn.q_proj.weight"])


def test_a_critic_reads_images(qwen: Path, tmp_path: Path) -> None:
    keys = ["algorithm.name=ppo", f"trainer.output_dir={tmp_path / 'out'}"]
    rows, _ = run_ranks(job, 1, config_of(qwen, tmp_path / "data", *keys))[0]
    assert len(rows) == 2 and all(torch.tensor(row["critic/values_mean"]).isfinite() for row in rows)


def taught(config: LMRLConfig) -> tuple[Tensor, Tensor, Tensor, list[bool]]:
    """The log-probs of a step's samples under the policy and its teacher, the mask, and which samples have images."""
    trainer: Any = rl.build(config)
    samples, _ = trainer.collector.sample(0)
    [teacher] = trainer.updater.teachers.values()
    with torch.no_grad():
        of_teacher = teacher.policy.scored(samples.trace, 1.0).log_prob
        own = trainer.policy.scored(samples.trace, 1.0).log_prob
    return own, of_teacher, samples.mask, [look is not None for look in samples.trace.looks]


@pytest.mark.full
def test_a_teacher_reads_images(qwen: Path, tmp_path: Path) -> None:
    """With its own tower: the policy's own folder gives the policy's log-probs, another one other log-probs."""
    other = tmp_path / "other"
    shutil.copytree(qwen, other)
    model = transformers.AutoModelForImageTextToText.from_pretrained(qwen)
    with torch.no_grad():
        for weight in model.model.visual.merger.parameters():
            weight += 1
    model.save_pretrained(other)
    for folder in (qwen, other):
        keys = [
            "algorithm.name=distillation",
            f"algorithm.teacher_path={folder}",
            f"trainer.output_dir={tmp_path / 'o'}",
        ]
        config = config_of(qwen, tmp_path / "data", *keys)
        [(own, theirs, mask, seen)] = run_ranks(taught, 1, config)
        off = ((own - theirs).abs() * mask).amax(1)
        assert any(seen) and not all(seen)
        assert [bool(value > 1e-4) for value in off] == [folder == other and shown for shown in seen]
        if folder == other:
            rows, _ = run_ranks(job, 1, config)[0]
            assert len(rows) == 2 and all(row["actor/grad_norm"] > 0 for row in rows)
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    with refused(
        f"algorithm.teacher_path: {str(other)!r} reads images differently from model.path; expected a "
        "Qwen3VLForConditionalGeneration with the same image processor"
    ):
        rl.build(config)


def test_options_that_do_not_work_with_images_are_refused(qwen: Path, tmp_path: Path) -> None:
    message = "which is not supported with block diffusion; leave model.block_size out"
    with refused(f"data.train_files: a:1 has images, {message}", ConfigError):
        kind_of(config_of(qwen, tmp_path / "data", "model.block_size=4")).check_images(
            "data.train_files: a:1 has images"
        )
    config = config_of(qwen, tmp_path / "data", "rollout.limit_images=1")
    with refused(
        f"data.train_files: {tmp_path}/data/prompts.jsonl:3 has 2 images, more than rollout.limit_images=1", ConfigError
    ):
        rl.build(config)
    text = tiny_lm(tmp_path / "text")
    with refused(f"a:1 has images, and model.path: {str(text)!r} is a Qwen3ForCausalLM, which reads none"):
        vision_families.check(config_of(text, tmp_path / "data").model, "a:1")
    other = tiny_vision(tmp_path / "other", "qwen3_vl")
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"architectures": ["GotOcr2ForConditionalGeneration"]}))
    with pytest.raises(ValueError, match="is a GotOcr2ForConditionalGeneration, expected one of Qwen2VL, Qwen2_5_VL"):
        vision_families.check(config_of(other, tmp_path / "data").model, "a:1")


def test_a_model_without_a_class_of_its_text_part_is_trained_on_texts_as_a_whole(qwen: Path, tmp_path: Path) -> None:
    keys = [f"data.train_files=[{tmp_path / 'texts.jsonl'}]", f"trainer.output_dir={tmp_path / 'out'}"]
    keys.append("trainer.save_freq=2")
    config = config_of(qwen, tmp_path / "data", *keys)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    rows, weights = run_ranks(job, 1, config)[0]
    assert [row["actor/first_ratio_error"] for row in rows] == [0, 0]
    folder = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={folder}"])).run()
    assert (folder / "preprocessor_config.json").is_file()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    assert not any("visual" in name for name in weights)
    for name, value in weights.items():
        assert torch.equal(model.get_parameter(name.removeprefix("lm.")), value), name


def loaded(folder: Path) -> str:
    """The error at load of a model whose positions two ranks share; empty if its passes agree with its own forward."""
    parallel = ParallelConfig(ulysses_sequence_parallel_size=2, fsdp_size=1)
    config = LMModelConfig(path=str(folder), dtype="float32", use_remove_padding=True, use_prefix_grouper=True)
    data, world = LMDataConfig(max_prompt_length=100, max_response_length=16), start_world(parallel)
    options = {"chunk": 5, "temperature": 1.0, "seed": 0, "images": True, "tries": True}
    try:
        build_policy(config, parallel, data, world, **options)
    except ValueError as error:
        return str(error)
    finally:
        stop_world()
    return ""


@pytest.mark.quick("smolvlm", "gemma3")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3"])
def test_families_whose_positions_ranks_share(family: str, tmp_path: Path) -> None:
    """As at each start, padded, packed and with prompts once, against the model's own forward."""
    folder = tiny_vision(tmp_path / family, family)
    wanted = f"{KEY}: 2 needs causal attention, and the tokens of an image" if family == "gemma3" else ""
    assert [error[: len(wanted) or None] for error in run_ranks(loaded, 2, folder)] == [wanted, wanted]


@pytest.mark.full
def test_roles_train_on_the_same_pixels(qwen: Path, tmp_path: Path) -> None:
    """Images travel with their samples."""
    keys = ("parallel.fsdp_size=1", "model.freeze_vision_tower=false", "trainer.total_training_steps=2")
    found = {}
    for name, ranks, more in (("together", 1, ()), ("apart", 3, ("placement={rollout: 0-1, actor: 2}",))):
        out = f"trainer.output_dir={tmp_path / name}"
        run_roles(rl.build, ranks, config_of(qwen, tmp_path / "data", *keys, *more, out))
        found[name] = jobs.rows(tmp_path / name)
    for one, other in zip(found["together"], found["apart"], strict=True):
        assert one["prompt/length_mean"] == other["prompt/length_mean"] > 35
        assert one["actor/grad_norm"] > 1e-4
        for key in ("reward/mean", "actor/grad_norm", "actor/first_ratio_error"):
            assert other[key] == pytest.approx(one[key], rel=1e-5), key


@pytest.mark.full
def test_partial_rollouts_of_prompts_with_images(qwen: Path, tmp_path: Path) -> None:
    """A response that goes on in the next step still sees its image: layouts train the same."""
    found = []
    for ranks in (1, 2):
        keys = [*PARTIAL, "rollout.correction=rescore", f"trainer.output_dir={tmp_path / str(ranks)}"]
        found.append(run_ranks(job, ranks, config_of(qwen, tmp_path / "data", *keys))[0][0])
    for one, two in zip(*found, strict=True):
        assert one["reward/mean"] == pytest.approx(two["reward/mean"])
        assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)
        assert one["actor/first_ratio_error"] < 1e-5
