"""The text of --plan: groups, batches, messages and warnings by hand-made numbers. Memory: test_plan_memory.py."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.run.flow_kind import stochastic_steps
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.memory import count
from phalanx.tools.plan.text import sizes
from phalanx.tools.plan.warnings import ALLOWED
from tests.helpers.jobs import tiny_config
from tests.helpers.plans import (
    GB,
    describe,
    flow_matching_config,
    memory_of,
    plan_of,
    quickstart,
    run,
    section,
    warnings,
)
from tests.helpers.ranks import ROOT

# -- the text -----------------------------------------------------------------------------------------------------


def test_the_quickstart_on_two_nodes() -> None:
    text = plan_job(quickstart(), {"nnodes": "2", "nproc": "1"})
    assert text.startswith("Plan of 2 nodes x 1 = 2 ranks; no GPU, process group or weights were used\n\n")
    assert section(text, "Topology") == [
        "weights  a copy of the weights on each rank",
        "rewards  ocr: on every rank, for its own images",
    ]
    assert section(text, "Batch") == [
        "a step          6 prompts x 16 images = 96 images",
        "a rank          48 images of 3 prompts",
        "rollout         2 micro-batches of 24 images",
        "updates         2 per step, each of 2 micro-batches",
        "micro-batch     12 images x 2 trained steps = 24 rows",
        "texts           78 tokens at most",
        "forward passes  10 to sample, 4 to train, per rank and step",
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
        "weights       64 copies of the weights, each over 4 ranks",
        "shard groups  0-3 | 4-7 | 8-11 | .. | 252-255",
        "rewards       contrast: on every rank, for its own images",
    ]
    assert len(text.splitlines()) < 80


def test_the_reward_models_groups(tmp_path: Path, sd3_folder: Path) -> None:
    batch = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
    model = [f"reward.model.path={sd3_folder}", "reward.model.tensor_parallel_size=2"]
    last = "reward.model.placement=ranks 6-7"
    text = plan_job(tiny_config(sd3_folder, tmp_path, *batch, *model, last), {"nnodes": "2", "nproc": "8"})
    assert "reward groups  6-7 | 14-15: each holds reward.model, for the judges" in section(text, "Topology")
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
        "updates         4 per step, each of 2 micro-batches",
        "micro-batch     2 images x 2 trained steps x 2 branches of guidance = 8 rows",
        "texts           109 tokens at most",
        "forward passes  10 to sample, 4 of the reference, 8 to train, per rank and step",
        "run             2 steps, 8 optimizer steps",
    ]
    split = plan_job(tiny_config(sd3_folder, tmp_path, *keys, "actor.detach_uncond=true"), {"nproc": "2"})
    assert section(split, "Batch")[4] == "micro-batch     2 images x 2 trained steps = 4 rows"
    assert section(split, "Batch")[6].startswith("forward passes  20 to sample, 8 of the reference, 16 to train")


def test_flow_matching(sd3_folder: Path) -> None:
    cfg = flow_matching_config(sd3_folder)
    text = plan_job(cfg, {"nproc": "2"})
    assert section(text, "Batch") == [
        "a step          64 images, 32 per rank, one optimizer step",
        "update          4 micro-batches of 8 images",
        "texts           333 tokens at most",
        "forward passes  4 to train, per rank and step",
        "run             as many steps as trainer.total_epochs=2.0 gives",
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
            "  1 node x 2 = 2 ranks   48 images per rank, a copy of the weights on each rank",
            "  2 nodes x 2 = 4 ranks  24 images per rank, a copy of the weights on each rank",
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
    assert sizes(quickstart(), [Cluster(1, 1)], {}).endswith("96 images per rank, a copy of the weights on each rank")


@pytest.mark.full
@pytest.mark.long
def test_twenty_billion_weights() -> None:
    """Qwen-Image on four nodes, which is what docs/plan.md shows."""
    recipe = ROOT / "configs" / "flowgrpo" / "qwen_image_ocr_lora_multinode.yaml"
    words = {"nnodes": "4", "nproc": "8", "gpu_memory_gb": "80"}
    text = plan_job(load_config(FlowRLConfig, str(recipe), []), words)
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


def test_the_operations_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sd3_folder: Path) -> None:
    """Of 4 ranks; what they are: test_plan_passes.py."""
    cfg = tiny_config(sd3_folder, tmp_path, "model.dtype=bfloat16", "model.lora_rank=4")
    plan = plan_of(cfg, Cluster(1, 4))
    left_out = "left out  rewards, text encoders, VAE and vision tower"
    each = f"{plan.flops / 1e12:.4g} TFLOP, {plan.flops / 4e12:.4g} per rank"
    assert section(describe(plan), "Arithmetic") == [f"a step    {each}", left_out]
    monkeypatch.setattr("phalanx.tools.plan.rehearsal.RLRehearsal.flops", 178 * 10**15)
    monkeypatch.setattr("phalanx.tools.plan.rehearsal.RLRehearsal.model_flops", 3 * 178 * 10**15 // 4)
    assert section(describe(plan), "Arithmetic") == [
        "a step    178 PFLOP, 44.5 per rank",
        "repeated  25 % of it, recomputed in backward passes",
        left_out,
    ]


def test_copies_for_another_node(tmp_path: Path, sd3_folder: Path) -> None:
    """They count only where no node has the whole state, and with the state before a step."""
    keys = ("parallel.fsdp_size=4", "actor.ema.decay=0.9", "actor.ppo_mini_batch_size=4", "trainer.peer_copy=true")
    held = [count(plan_of(tiny_config(sd3_folder, tmp_path, *keys), Cluster(nodes, 4 // nodes))) for nodes in (2, 1)]
    state = sum(held[0].held[name] for name in ("trained weights", "optimizer's state", "moving average"))
    assert held[0].held["state before a step"] == state
    assert held[0].host["two copies of another rank's state"] == 2 * state
    del held[0].held["state before a step"], held[0].host["two copies of another rank's state"]
    assert (held[0].held, held[0].host) == (held[1].held, held[1].host)


# -- warnings -----------------------------------------------------------------------------------------------------


def test_a_shard_group_on_two_nodes(tmp_path: Path, sd3_folder: Path) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, "parallel.fsdp_size=4", "rollout.n=24")
    assert warnings(plan_job(cfg, {"nnodes": "2", "nproc": "6"})) == [
        "warning: ranks 4-7 share one copy of the weights and are on nodes 0 to 1: every gather of weights goes through "
        "the network; parallel.fsdp_size=3 keeps it within a node"
    ]
    assert warnings(plan_job(cfg, {"nnodes": "3", "nproc": "4"})) == []


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
        f"{takes} of {need * 1.05 / GB:.2f} GB with CUDA and NCCL and leaves little for fragmentation; {helps}"
    ]
    assert told(need * 1.2) == []
    last = section(plan_job(cfg, {"gpu_memory_gb": "80"}), "  phase")[-1]
    assert last == f"peak: {memory.peak / GB:.2f} and 2.00 for CUDA and NCCL, of 80.00 GB"


@pytest.mark.full
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


def test_compiled_blocks_are_counted_as_plain_ones(tmp_path: Path, sd3_folder: Path) -> None:
    plain = plan_job(tiny_config(sd3_folder, tmp_path), {"nproc": "1"})
    assert plan_job(tiny_config(sd3_folder, tmp_path, "model.compile=true"), {"nproc": "1"}) == plain


@pytest.mark.full
def test_the_command() -> None:
    task, config = "tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml"
    done = run(
        "sh", "train.sh", task, config, "--plan", "actor.ppo_epochs=2", env={"NNODES": "2", "NPROC_PER_NODE": "2"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Plan of 2 nodes x 2 = 4 ranks;")
    assert "updates         4 per step, each of 1 micro-batch\n" in done.stdout
    words = ("plan=true", "nnodes=2", "nproc_per_node=2", "actor.ppo_epochs=2")
    assert run(sys.executable, task, config, *words).stdout == done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "nproc=5"],
            "actor.ppo_mini_batch_size: 3 prompts x rollout.n 16 = 48 samples of an update do not divide over 5 ranks; "
            "nearest that work: rollout.n=20",
            marks=pytest.mark.full,
        ),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "gpu=H200"],
            "gpu=H200: --plan counts memory, messages and operations, not times; leave gpu out",
        ),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "--plan", "trainer.sed=1"],
            "unknown key trainer.sed; did you mean trainer.seed?",
        ),
        (["tasks/sample.py", "--plan"], "unknown option --plan; expected [config.yaml] [key=value ...], or --help"),
        (
            ["tasks/train_flowgrpo.py", "configs/flowgrpo/quickstart.yaml", "nnodes=2"],
            "nnodes=2 is only for --plan; the size of a job is set by environment variables, such as NNODES=2",
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
    assert share.plan is not None and (stochastic_steps(cfg), share.plan.actions) == (3, 2)
    two = replace(cfg, rollout=replace(cfg.rollout, sde_window_size=2, timestep_fraction=1.0))
    latent = 4 * 8 * 8 * 4
    assert share.samples_size - plan_of(two).samples_size == pytest.approx(16 * latent, abs=100)
