"""tasks/export_checkpoint.py: exports load in stock diffusers, and generate the images of the trained policy."""

import json
import shutil
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import diffusers
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HTTPError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from phalanx.config.tasks import ExportConfig
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.types import JobError, Prompt
from tests.helpers.comfy import add_as_comfy, diffusers_name
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import free_port, run_ranks
from tests.helpers.tasks import run_task
from tests.helpers.tiny import load_pipeline

WEIGHTS = "diffusion_pytorch_model.safetensors"
TEXTS = ['a "7" on a wall', "a longer prompt, about two cats"]
FULL = ("optim.lr=1e-2",)
# alpha differs from the rank, and the modulation layers are adapted as well
LORA = ("optim.lr=3e-2", "model.lora_rank=4", "model.lora_alpha=6")
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sd3-lora": ("sd3", (*LORA, "model.target_modules=[attn.to_q, attn.to_out.0, norm1.linear, ff.net.2]")),
    "sd3-pissa": ("sd3", (*LORA, "model.target_modules=[attn.to_v, norm1.linear]", "model.lora_init=pissa")),
    "sd3-full": ("sd3", FULL),
    "qwen-lora": ("qwen", (*LORA, "model.target_modules=[attn.to_k, attn.add_v_proj, img_mod.1, txt_mlp.net.2]")),
    "qwen-full": ("qwen", FULL),
    "flux-lora": ("flux", (*LORA, "model.target_modules=[attn.to_k, attn.to_add_out, norm.linear, ff_context.net.2]")),
    "flux-full": ("flux", FULL),
    "klein-lora": (
        "flux2_klein",
        (*LORA, "model.target_modules=[attn.to_k, attn.to_out, to_qkv_mlp_proj, ff.linear_in]"),
    ),
    "z-lora": ("z_image", (*LORA, "model.target_modules=[attention.to_q, cap_embedder.1, feed_forward.w2]")),
    "z-full": ("z_image", FULL),
}
# trained on two ranks, each of which writes its shard of the checkpoint
SHARDED = {"sd3-lora", "qwen-full", "flux-full"}


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and the policy's images [P, 3, H, W] with each kind of weights."""

    folder: Path
    base: Path
    images: dict[str, Tensor]


def train(overrides: tuple[str, ...], base: Path, folder: Path) -> dict[str, Tensor]:
    """Two steps of real training, then images with the weights, the moving average, and the initial weights."""

    from phalanx.run.rl import build

    trainer = build(
        tiny_config(
            base,
            folder,
            "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=1",
            "actor.ppo_micro_batch_size_per_gpu=2",
            "actor.ema={decay: 0.7, warmup: false}",
            "reward.functions=[{name: jpeg_compressibility}]",
            "trainer.save_freq=2",
            *overrides,
        )
    )
    images = {"start": sample(trainer)}
    trainer.fit()
    images["model"] = sample(trainer)
    return images | ({"ema": sample(trainer, "ema")} if trainer.job.state.ema is not None else {})


def sample(trainer: Any, weights: str | None = None) -> Tensor:
    parts: list[Tensor] = []
    with nullcontext() if weights is None else trainer.policy.using(weights), trainer.collector.rollout.awake():
        prompts = [Prompt(text, i, {}) for i, text in enumerate(TEXTS)]
        trainer.collector.rollout.sample_validation(prompts, each=lambda images, _: parts.append(images))
    return torch.cat(parts)


Runs = Callable[[str], Run]


def runs(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    named: dict[str, tuple[str, tuple[str, ...]]],
    sharded: Collection[str] = (),
) -> Runs:
    """Runs by name, each trained once: `named` has families and overrides, `sharded` the runs on two ranks."""

    @cache
    def get(name: str) -> Run:
        family, overrides = named[name]
        base, folder, ranks = request.getfixturevalue(f"{family}_folder"), folders.mktemp(name), 1 + (name in sharded)
        images = run_ranks(train, ranks, (*overrides, f"parallel.fsdp_size={ranks}"), base, folder, timeout=150)[0]
        assert len(list(folder.glob("out/checkpoints/step_000002/*.distcp"))) == ranks
        return Run(folder / "out", base, images)

    return get


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(request, tmp_path_factory, RUNS, SHARDED)


def export(folder: Path, checkpoint: Path, *overrides: str) -> Path:
    Export(load_config(ExportConfig, None, [f"checkpoint={checkpoint}", f"output_dir={folder}", *overrides])).run()
    return folder


def stock_images(pipeline: Any) -> Tensor:
    """The stock pipeline's images [P, 3, H, W] from validation's initial noise."""
    name = type(pipeline).__name__
    qwen, shape = name == "QwenImagePipeline", (16, 16) if name in ("QwenImagePipeline", "FluxPipeline") else (4, 8, 8)
    shape = (16, 4, 4) if name == "Flux2KleinPipeline" else shape
    noise = [normal(shape, fold_in(1234, 0, i, 0, "init"), torch.device("cpu")) for i in range(len(TEXTS))]
    extra = {"true_cfg_scale": 3.0, "negative_prompt": [" "] * 2} if qwen else {"guidance_scale": 3.0}
    return pipeline(
        prompt=list(TEXTS),  # Z-Image's pipeline writes its template into the list
        height=32,
        width=32,
        num_inference_steps=4,
        max_sequence_length=32,
        latents=torch.stack(noise),
        output_type="pt",
        **extra,
    ).images


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.seldom("sd3-pissa-model", "flux-lora-model", "z-lora-model", "klein-lora-model")
@pytest.mark.quick("qwen-lora-model")
@pytest.mark.parametrize("weights", ["ema", "model"])
@pytest.mark.parametrize("name", ["sd3-lora", "qwen-lora", "sd3-pissa", "flux-lora", "z-lora", "klein-lora"])
def test_lora(name: str, weights: str, trained: Runs, tmp_path: Path) -> None:
    run = trained(name)
    assert distance(run.images["model"], run.images["start"]) > 0.05
    assert distance(run.images["model"], run.images["ema"]) > 0.01
    # `auto` is the moving average in this run
    folder = export(tmp_path / "export", run.folder, *([] if weights == "ema" else ["weights=model"]))
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md",
        "curves.png",
        "pytorch_lora_weights.safetensors",
    ]
    pipeline = load_pipeline(run.base)
    assert distance(stock_images(pipeline), run.images["start"]) < 1e-4
    pipeline.load_lora_weights(folder)
    assert distance(stock_images(pipeline), run.images[weights]) < 1e-4
    pipeline.unload_lora_weights()
    assert distance(stock_images(pipeline), run.images["start"]) < 1e-4
    add_as_comfy(pipeline.transformer, folder, diffusers_name)
    assert distance(stock_images(pipeline), run.images[weights]) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", ["sd3-lora", "sd3-pissa", "qwen-lora"])
def test_a_merged_lora(name: str, trained: Runs, tmp_path: Path) -> None:
    run = trained(name)
    folder = export(tmp_path / "export", run.folder, "merge_lora=true")
    assert distance(stock_images(load_pipeline(folder)), run.images["ema"]) < 1e-4
    half = export(tmp_path / "half", run.folder, "merge_lora=true", "dtype=bfloat16")
    exact = load_file(folder / "transformer" / WEIGHTS)
    for key, tensor in load_file(half / "transformer" / WEIGHTS).items():
        assert torch.equal(tensor, exact[key].bfloat16())


@pytest.mark.full
def test_lora_file(trained: Runs, tmp_path: Path) -> None:
    run = trained("sd3-lora")
    file = export(tmp_path / "a", run.folder) / "pytorch_lora_weights.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == metadata["transformer.lora_alpha"] == 4
    blocks = [f"transformer_blocks.{i}" for i in range(2)]
    leaves = ["attn.to_out.0", "attn.to_q", "ff.net.2", "norm1.linear"]
    assert metadata["transformer.target_modules"] == [f"{block}.{leaf}" for block in blocks for leaf in leaves]
    tensors = load_file(file)
    assert sorted(tensors) == sorted(
        f"transformer.{block}.{leaf}.lora_{x}.weight" for block in blocks for leaf in leaves for x in "AB"
    )
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    half = load_file(export(tmp_path / "b", run.folder, "dtype=float16") / file.name)
    assert all(torch.equal(t, tensors[name].half()) for name, t in half.items()) and half.keys() == tensors.keys()


@pytest.mark.seldom("flux-full")
@pytest.mark.quick("sd3-full")
@pytest.mark.parametrize("name", ["sd3-full", "qwen-full", "flux-full", "z-full"])
def test_whole_folder(name: str, trained: Runs, tmp_path: Path) -> None:
    run = trained(name)
    assert distance(run.images["model"], run.images["start"]) > 0.05
    assert distance(run.images["model"], run.images["ema"]) > 0.01
    folder = export(tmp_path / "export", run.folder / "checkpoints" / "step_000002")
    assert distance(stock_images(load_pipeline(folder)), run.images["ema"]) < 1e-4
    changed = {
        file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and not same(file, folder, run.base)
    }
    assert {path.parts[0] for path in changed} == {"README.md", "curves.png", "transformer"}
    config = json.loads((folder / "transformer/config.json").read_text())
    assert config["_name_or_path"] == run.base.name  # not where it was on this machine


def same(file: Path, folder: Path, other: Path) -> bool:
    twin = other / file.relative_to(folder)
    return twin.is_file() and twin.read_bytes() == file.read_bytes()


@pytest.mark.full
def test_command_line_and_dtype(trained: Runs, tmp_path: Path) -> None:
    run = trained("sd3-full")
    job = run_task(["tasks/export_checkpoint.py", f"checkpoint={run.folder}", "weights=model", "dtype=bfloat16"])
    assert job.returncode == 0, job.stderr
    written = run.folder / "export" / "step_000002"
    lines = job.stdout.splitlines()
    assert lines[0] == f"the weights of {run.folder / 'checkpoints' / 'step_000002'} -> {written}"
    said, call = lines[1].split("; load it with ")
    assert said == "the folder lacks components, as its base does" and len(lines) == 2
    assert eval(call, vars(diffusers)).text_encoder_3 is None
    exact = load_file(export(tmp_path / "model", run.folder, "weights=model") / "transformer" / WEIGHTS)
    rounded = load_file(written / "transformer" / WEIGHTS)
    assert rounded.keys() == exact.keys()
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in exact.items())


def test_one_rank_of_many_works(
    trained: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not export(tmp_path / "export", trained("sd3-full").folder).exists()
    assert capsys.readouterr().out == ""


def test_the_dtype_of_the_base_is_kept(trained: Runs, tmp_path: Path) -> None:
    run = trained("sd3-full")
    base = shutil.copytree(run.base, tmp_path / "base")
    pipeline = load_pipeline(base)
    pipeline.transformer.half().save_pretrained(base / "transformer")
    folder = export(tmp_path / "export", run.folder, f"model_path={base}")
    assert {t.dtype for t in load_file(folder / "transformer" / WEIGHTS).values()} == {torch.float16}


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(trained: Runs, tmp_path: Path) -> Path:
    """The output_dir of a copy of a run, which a test may damage."""
    return Path(shutil.copytree(trained("sd3-full").folder, tmp_path / "run"))


def refused(*overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        Export(load_config(ExportConfig, None, list(overrides)))
    return str(error.value)


def test_checkpoints_that_cannot_be_used(copy: Path, tmp_path: Path) -> None:
    step = copy / "checkpoints" / "step_000002"
    nowhere = tmp_path / "nowhere"
    assert refused(f"checkpoint={nowhere}") == f"checkpoint: '{nowhere}': no such folder"
    assert refused(f"checkpoint={copy / 'checkpoints'}") == (
        f"checkpoint: '{copy / 'checkpoints'}' is neither a run's output_dir, with a folder checkpoints in it, nor a "
        "checkpoint, a folder step_NNNNNN"
    )
    data = step / "__0_0.distcp"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(1000)
    problem = f"__0_0.distcp has 1000 bytes of {size}"
    assert refused(f"checkpoint={step}") == f"checkpoint: '{step}' cannot be used: {problem}"
    assert refused(f"checkpoint={copy}") == f"checkpoint: '{copy}' has no complete checkpoint in its folder checkpoints"
    step.rename(step.with_suffix(".tmp"))
    assert refused(f"checkpoint={step}.tmp") == f"checkpoint: '{step}.tmp' cannot be used: it was never finished"


def test_a_complete_checkpoint_is_found_behind_a_damaged_one(copy: Path, tmp_path: Path) -> None:
    newer = shutil.copytree(copy / "checkpoints" / "step_000002", copy / "checkpoints" / "step_000004")
    (Path(newer) / "meta.json").unlink()
    export(tmp_path / "export", copy)
    assert (tmp_path / "export" / "model_index.json").is_file()


def test_damage_within_a_file_is_told(copy: Path, tmp_path: Path) -> None:
    data = copy / "checkpoints" / "step_000002" / "__0_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(JobError) as error:
        export(tmp_path / "export", copy)
    assert str(error.value) == (
        f"checkpoint: {copy}/checkpoints/step_000002 is damaged (the checksum of __0_0.distcp differs); use another "
        "one of the run"
    )
    assert not (tmp_path / "export").exists()


@pytest.mark.full
def test_the_configuration_of_the_run_is_needed(copy: Path) -> None:
    file = copy / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("  lora_rank: 0", "  lora_rank: 8"))
    assert refused(f"checkpoint={copy}") == (
        f"checkpoint: {copy}/checkpoints/step_000002 was trained with lora_rank 0, but the config.yaml of its run says "
        "8; put the checkpoint back into its own run"
    )
    file.write_text(text.replace("  lora_rank: 0", "  lora_rank: many"))
    assert refused(f"checkpoint={copy}") == (f"{file}: model.lora_rank: expected an integer, got 'many'")
    file.write_text("model: {}\n")
    assert refused(f"checkpoint={copy}") == f"{file} is not the configuration of a training run"
    file.unlink()
    assert refused(f"checkpoint={copy}") == f"{file} is missing; it says which model the checkpoints belong to"


@pytest.mark.full
def test_another_model_is_refused(trained: Runs, qwen_folder: Path, tmp_path: Path) -> None:
    run, wrong = trained("sd3-full"), qwen_folder
    with pytest.raises(ValueError) as error:
        export(tmp_path / "export", run.folder, f"model_path={wrong}")
    assert str(error.value) == (
        f"checkpoint: {run.folder}/checkpoints/step_000002 does not fit the model '{wrong}': for context_embedder.bias "
        "it contains [64], the model has nothing; give the base model that the run was trained from"
    )
    gone = tmp_path / "gone"
    assert refused(f"checkpoint={run.folder}", f"model_path={gone}") == f"model.path: '{gone}': no such folder"


def test_other_mistakes(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    assert refused(f"checkpoint={copy}", f"output_dir={tmp_path / 'full'}") == (
        f"output_dir: '{tmp_path / 'full'}' exists; give a new folder"
    )
    assert refused() == (
        "checkpoint is not set; give checkpoint=...: a run's output_dir, for its newest complete checkpoint, "
        "output_dir/best, for its best by trainer.keep_best, or a folder step_NNNNNN"
    )
    assert refused(f"checkpoint={copy}", "dtype=int8") == (
        "dtype: expected one of float32, bfloat16, float16, got 'int8'"
    )


@pytest.mark.long
def test_a_run_without_an_average(sd3_folder: Path, tmp_path: Path) -> None:
    (images,) = run_ranks(train, 1, (*LORA, "actor.ema.decay=null"), sd3_folder, tmp_path, timeout=150)
    run = tmp_path / "out"
    assert refused(f"checkpoint={run}", "weights=ema") == (
        f"weights: ema: {run}/checkpoints/step_000002 contains no moving average; use weights=model"
    )
    pipeline = load_pipeline(sd3_folder)
    pipeline.load_lora_weights(export(tmp_path / "export", run))
    assert distance(stock_images(pipeline), images["model"]) < 1e-4


# -- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the hub that accepts and records all calls matching huggingface_hub's signatures."""
    api = create_autospec(huggingface_hub.HfApi, instance=True)
    api.upload_folder.return_value = "http://hub/me/lora/tree/main"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    return api


def test_push_to_hub(trained: Runs, hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = export(tmp_path / "export", trained("sd3-lora").folder, "push_to_hub=me/lora")
    hub.create_repo.assert_called_once_with("me/lora", exist_ok=True)
    hub.upload_folder.assert_called_once_with(
        repo_id="me/lora", folder_path=folder, commit_message="step_000002 of a Phalanx run"
    )
    assert capsys.readouterr().out.endswith("\nuploaded: http://hub/me/lora/tree/main\n")


def test_an_upload_that_fails_leaves_the_export(trained: Runs, hub: Any, tmp_path: Path) -> None:
    hub.upload_folder.side_effect = HTTPError("403 Forbidden.\nmore")
    with pytest.raises(JobError) as error:
        export(tmp_path / "export", trained("sd3-lora").folder, "push_to_hub=me/lora")
    assert str(error.value) == (
        f"push_to_hub: the upload to 'me/lora' failed: 403 Forbidden; the export itself is in {tmp_path / 'export'}"
    )
    assert (tmp_path / "export" / "pytorch_lora_weights.safetensors").is_file()


def test_a_hub_out_of_reach_is_told_before_any_work(
    trained: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    arguments = (f"checkpoint={trained('sd3-lora').folder}", f"output_dir={tmp_path / 'a'}", "push_to_hub=me/lora")
    assert refused(*arguments) == (
        "push_to_hub: the repository 'me/lora' cannot be created: [Errno 111] Connection refused; expected access to "
        "the hub and a token in HF_TOKEN, or leave push_to_hub out"
    )
