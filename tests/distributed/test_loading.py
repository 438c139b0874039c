"""Loading and encoding: the weights are those of the files, whoever casts them, and a rank reads and casts no more than its part."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from benchmarks.loading import evict, lay_out, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, T5Config, T5EncoderModel

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMDataConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.models.flow.embeds import moved
from phalanx.models.flow.folder import load_text_encoder
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.lm.lm_export import export_model
from phalanx.models.lm.lm_policy import build_policy
from phalanx.models.lm.load_folder import load_model
from phalanx.models.stored import dtype_to_read
from phalanx.run.world import start_world
from tests.helpers.jobs import fit, full_weights, tiny_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import halved

HALF = torch.bfloat16


def language_model(folder: Path, parallel: ParallelConfig) -> dict[str, Tensor]:
    config, data = LMModelConfig(path=str(folder)), LMDataConfig(max_prompt_length=16, max_response_length=16)
    policy = build_policy(config, parallel, data, start_world(parallel), chunk=8, temperature=1.0, seed=0)
    module, trained = policy.trained.module, policy.trained.parameters
    assert module.lm.config.dtype is torch.float32
    assert module.lm.lm_head.weight is module.lm.model.embed_tokens.weight
    return full_weights(trained) | dict(module.named_buffers())


def flow_model(folder: Path, parallel: ParallelConfig) -> dict[str, Tensor]:
    from phalanx.models.flow.policy import build_policy

    cfg = tiny_config(folder, folder.parent / "job", "model.dtype=bfloat16")
    policy = build_policy(cfg.model, parallel, cfg.data, start_world(parallel), seed=0, detach_uncond=False)
    return full_weights(policy.trained.parameters) | dict(policy.trained.module.named_buffers())


@pytest.mark.quick("lm-2", "sd3-1", "sd3-2")
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("kind", ["lm", "sd3"])
def test_parts_are_those_of_the_whole(
    kind: str, shards: int, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what loading in float32 gives, tied weights, uneven parts, buffers and offloading included."""
    folder = halved(request.getfixturevalue(f"{kind}_folder"), tmp_path / "model")
    parallel = ParallelConfig(fsdp_size=shards, param_offload=shards == 4)
    build: Any = language_model if kind == "lm" else flow_model
    found = run_ranks(build, max(shards, 2), folder, parallel)[0]
    for module in ("models.lm.load_folder", "models.flow.folder"):
        monkeypatch.setattr(f"phalanx.{module}.dtype_to_read", lambda _, dtype: dtype)
    whole = run_ranks(build, 1, folder, ParallelConfig(fsdp_size=1))[0]
    assert list(found) == list(whole)
    for name, value in whole.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.full
def test_a_rank_reads_and_casts_its_part(tmp_path: Path) -> None:
    """MB of four ranks, of a file in bfloat16 and weights in float32."""
    size = run_ranks(write, 1, tmp_path, 2048, 1, init=False)[0]
    read, own, _ = (max(column) for column in zip(*run_ranks(lay_out, 4, str(tmp_path), 4, True), strict=True))
    assert own < 0.75 * size  # 2 of float32 over 4, and what a step of it takes
    assert read < 0.6 * size  # pages come 2 MB at a time
    read, own, _ = (max(column) for column in zip(*run_ranks(lay_out, 4, str(tmp_path), 4, False), strict=True))
    assert own > 1.75 * size and read > 0.9 * size


def encoder_there_and_back(folder: Path, copied: bool) -> tuple[float, float]:
    """MB of this rank's private memory for a text encoder that was on a device, and its share of all of it. copied: as if it
    had been copied back.
    """
    before = memory()
    encoder = load_text_encoder(str(folder), "text_encoder", "T5EncoderModel", HALF)
    kept = {name: p.data_ptr() for name, p in encoder.named_parameters()}
    buffer = torch.ones(2)
    encoder.register_buffer("scale", buffer)
    with moved([encoder], torch.device("meta")):
        assert {p.device.type for p in encoder.parameters()} == {"meta"} and encoder.scale.device.type == "meta"
    assert encoder.scale is buffer
    if copied:
        for p in encoder.parameters():
            p.data = p.data.clone()
    assert copied or kept == {name: p.data_ptr() for name, p in encoder.named_parameters()}
    assert all(bool(p.view(torch.int16).max() > 0) for p in encoder.parameters())  # reads every page
    dist.barrier()
    after = memory()
    dist.barrier()  # the other rank has the same pages until it has counted its own
    return after["Private_Dirty"] - before["Private_Dirty"], after["Pss"] - before["Pss"]


def memory() -> dict[str, float]:
    """MB of this process's memory by kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines}


def test_ranks_share_a_text_encoder(tmp_path: Path) -> None:
    """Its pages are those of the file also after it was on the device: each rank counts half of them, and no copy."""
    encoder = T5EncoderModel(T5Config(d_model=512, d_ff=512, num_layers=2, vocab_size=20000)).to(HALF)
    encoder.save_pretrained(tmp_path / "text_encoder")
    size = sum(p.nbytes for p in encoder.parameters()) / 1e6
    for private, proportional in run_ranks(encoder_there_and_back, 2, tmp_path, False):
        assert private < 0.35 * size and proportional < 0.8 * size
    for private, _ in run_ranks(encoder_there_and_back, 2, tmp_path, True):
        assert private > 0.9 * size


def test_what_is_cast_late(lm_folder: Path, tmp_path: Path) -> None:
    """Only what is of one dtype, none of whose values float32 lacks, and no number that was made in that dtype."""
    folder = halved(lm_folder, tmp_path / "half")
    assert dtype_to_read(folder, torch.float32) is HALF
    assert dtype_to_read(folder, torch.bfloat16) is torch.bfloat16
    assert dtype_to_read(lm_folder, torch.float32) is torch.float32
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-6
    save_file(tensors, file, {"format": "pt"})
    assert dtype_to_read(folder, torch.float32) is torch.float32
    lm = load_model(LMModelConfig(path=str(folder)), torch.float32, chunk=8, stored=True).lm
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    assert torch.equal(lm.model.norm.weight, tensors["model.norm.weight"])


def test_all_weights_have_one_dtype(tmp_path: Path) -> None:
    """A router's too, which transformers keeps in float32; the bias that it chooses by stays as transformers keeps it."""
    settings = Ernie4_5_MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, moe_intermediate_size=16, moe_num_experts=4, moe_k=2, tie_word_embeddings=True,
    )  # fmt: skip
    base, folder = tmp_path / "base", tmp_path / "out"
    Ernie4_5_MoeForCausalLM(settings).to(HALF).save_pretrained(base)
    kept = AutoModelForCausalLM.from_pretrained(base, dtype=HALF)
    assert kept.model.layers[1].mlp.gate.weight.dtype is torch.float32
    model = load_model(LMModelConfig(path=str(base)), HALF, chunk=8)
    assert model.lm.lm_head.weight is model.lm.model.embed_tokens.weight
    folder.mkdir()
    export_model(folder, LMModelConfig(path=str(base)), model)
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype is (torch.float32 if name.endswith("e_score_correction_bias") else HALF), name
        assert torch.equal(after[name].to(HALF), tensor), name


def encoded(cfg: FlowRLConfig) -> list[str]:
    """The texts that a rank encodes in a job."""
    texts: list[str] = []
    encode = FlowPolicy._encode_missing
    with patch.object(FlowPolicy, "_encode_missing", lambda self, wanted: texts.extend(wanted) or encode(self, wanted)):
        fit(cfg)
    return texts


@pytest.mark.long
def test_a_job_encodes_a_prompt_once_a_node(sd3_folder: Path, tmp_path: Path) -> None:
    """In three epochs, in which a prompt comes to other ranks; they would encode 41 texts, each for itself."""
    keys = ["trainer.total_training_steps=12", "rollout.num_inference_steps=2", "rollout.sde_window_size=1"]
    cfg = tiny_config(sd3_folder, tmp_path, *keys, "actor.ppo_mini_batch_size=4")
    Path(cfg.data.train_files[0]).write_text("".join(f"prompt {i}\n" for i in range(16)))
    found = run_ranks(encoded, 4, cfg)
    assert sorted(text for texts in found for text in texts) == sorted(["", *(f"prompt {i}" for i in range(16))])
    assert [len(texts) for texts in found] == [5, 4, 4, 4]


def loaded_late(cfg: FlowRLConfig) -> int:
    """Train while rank 1 loads its model 8 s later than rank 0, with a limit of 5 s; returns the steps done."""
    from phalanx.run.flow_kind import Flow
    from phalanx.run.rl import build

    plain = Flow.load_policy

    def late(self: Flow, *args: Any, **kwargs: Any) -> FlowPolicy:
        time.sleep(8 * dist.get_rank())
        return plain(self, *args, **kwargs)

    with patch.object(Flow, "load_policy", late):
        trainer = build(cfg)
    trainer.fit()
    return trainer.job.progress.step


@pytest.mark.full
def test_a_model_that_one_node_reads_slowly_is_no_hang(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ["parallel.timeout_s=5", "parallel.fsdp_size=1", "trainer.total_training_steps=1"]
    assert run_ranks(loaded_late, 2, tiny_config(sd3_folder, tmp_path, *keys)) == [1, 1]


def test_the_ranks_of_a_node_read_a_file_once(tmp_path: Path) -> None:
    """All ranks together fetch each page of the model from the disk once, whether they load it whole or in parts."""
    size = run_ranks(write, 1, tmp_path, 512, 1, init=False)[0]
    for parts in (False, True):
        evict(tmp_path / "model.safetensors")
        fetched = [disk for _, _, disk in run_ranks(lay_out, 2, str(tmp_path), 2, parts)]
        if sum(fetched) == 0:
            pytest.skip("the folder is on no disk")
        assert sum(fetched) == pytest.approx(size, rel=0.1)
