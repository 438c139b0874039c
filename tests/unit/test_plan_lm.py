"""--plan of language models: their shapes, what a rank holds in each phase, and what is printed."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config.joint import JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.distributed.mesh import alone
from phalanx.run.rules import load_config
from phalanx.tools.plan import plan_job
from phalanx.tools.plan.batch import batch
from phalanx.tools.plan.blueprint import fetch
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import Ledger
from phalanx.tools.plan.lm_blueprint import PlannedLMPolicy, planned_lm_policy
from phalanx.tools.plan.memory import Memory, count
from phalanx.tools.plan.rehearsal import Rehearsal
from tests.helpers.checks import refused
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_vision import shown_prompts, tiny_vision

GB = 10**9
SHIPPED_LM = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "inclusionAI/LLaDA2.0-mini": 16_255_638_528,  # and biases of the routers, which are not trained
    "inclusionAI/LLaDA2.0-flash": 102_889_697_280,
}
QUICKSTART = ROOT / "configs" / "grpo" / "quickstart.yaml"
SEVEN = (
    "model.path=Qwen/Qwen2.5-7B-Instruct",
    "model.dtype=bfloat16",
    "model.gradient_checkpointing=true",
    "model.use_remove_padding=true",
    "actor.use_dynamic_bsz=true",
    "data.train_batch_size=128",
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "actor.ppo_mini_batch_size=128",
    "rollout.n=8",
    "rollout.micro_batch_size_per_gpu=64",
    "parallel.fsdp_size=8",
    "trainer.total_training_steps=100",
)


@pytest.mark.parametrize("path", SHIPPED_LM)
def test_shipped_shapes(path: str) -> None:
    """As many parameters as the published weights."""
    cfg = load_config(LMRLConfig, str(QUICKSTART), [])
    cfg.model.path = fetch(path)
    with alone():
        policy = planned_lm_policy(cfg, Cluster(1, 1), Ledger())
    assert sum(p.numel() for p in policy.trained.module.parameters()) == SHIPPED_LM[path]


def test_a_vision_tower_is_counted(tmp_path: Path) -> None:
    """All of the published weights; the tower's are frozen, in bfloat16, and whole on each of 8 ranks."""
    folder = fetch("Qwen/Qwen2.5-VL-7B-Instruct")
    keys = ("data.image_key=images", "model.dtype=bfloat16", "parallel.fsdp_size=8")
    cfg = tiny_lm_config(Path(folder), tmp_path, *keys)
    with alone():
        policy = planned_lm_policy(cfg, Cluster(1, 8), Ledger())
    published = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    weights = policy.layout.weights
    assert 2 * sum(w.numel for w in weights) == published
    tower = [w for w in weights if not w.trained]
    assert [w for w in weights if ".visual." in w.name] == tower and not any(w.sharded for w in tower)
    assert policy.layout.kept(tower) == 2 * sum(w.numel for w in tower) == 2 * 676_550_144
    assert all(w.sharded for w in weights if w.trained)


def memory_of(folder: Path, tmp_path: Path, *keys: str, gpu: int | None = None) -> Memory:
    return count(planned(tiny_lm_config(folder, tmp_path, *keys), Cluster(1, 2)), gpu)


def test_the_cache_of_a_rollout(lm_folder: Path, tmp_path: Path) -> None:
    """Eight responses have twice the keys and values of four: of 2 layers, 64 + 12 tokens, a head of 32, in float32."""
    found = []
    for together in (4, 8):
        memory = memory_of(lm_folder, tmp_path, f"rollout.micro_batch_size_per_gpu={together}")
        found.append(next(phase for phase in memory.phases if phase.name == "rollout: sample").activations)
    cache = 2 * 2 * (64 + 11) * 32 * 4
    # and a layer's, while it grows, and the probabilities of a token
    assert 4 * cache < found[0] and 4 * cache < found[1] - found[0] < 4 * (1.5 * cache + 512 * 30)


def test_all_updates_are_planned(lm_folder: Path, tmp_path: Path) -> None:
    """Also those that a job leaves out if an update has gone too far, which shapes cannot tell."""
    keys = ("actor.ppo_mini_batch_size=2", "algorithm.early_stop_imp_ratio=5")
    job = planned(tiny_lm_config(lm_folder, tmp_path, *keys), Cluster(1, 2))
    assert job.plan is not None and job.state.updates_made == job.plan.updates == 2


def test_partial_rollouts_hold_more_than_they_train(lm_folder: Path, tmp_path: Path) -> None:
    """A rank decodes 16 responses where it trains 8, and reads again what they have so far."""
    found = []
    for keys in (
        (),
        (
            "rollout.partial_rollout=true",
            "rollout.partial_rollout_tokens=4",
            "rollout.max_staleness=1",
            "rollout.correction=token_tis",
        ),
    ):
        every = ("rollout.micro_batch_size_per_gpu=null", *keys)
        job = planned(tiny_lm_config(lm_folder, tmp_path, *every), Cluster(1, 2))
        found.append(next(phase for phase in count(job, None).phases if phase.name == "rollout: sample").activations)
    rows = dict(batch(job))
    assert rows["rollout"] == "16 responses together"
    assert rows["in flight"] == "32 responses, in rounds of 4 tokens; those that wait have no keys and values"
    cache = 2 * 2 * (64 + 11) * 32 * 4
    assert 8 * cache < found[1] - found[0]


def test_an_engine_that_sleeps_on_the_host(lm_folder: Path, tmp_path: Path) -> None:
    """vLLM's first level keeps a rank's part of its bfloat16 weights there, its second nothing."""
    keys = ("rollout.engine=vllm", "rollout.tensor_parallel_size=2", "model.dtype=bfloat16")
    shallow = planned(tiny_lm_config(lm_folder, tmp_path, *keys, "rollout.sleep_level=1"), Cluster(1, 2))
    held, deep = count(shallow).host, memory_of(lm_folder, tmp_path, *keys).host
    weights = sum(w.numel for w in shallow.policy.layout.weights)
    assert {name: held[name] for name in held.keys() - deep.keys()} == {"sleeping engine": weights}
    awake = memory_of(lm_folder, tmp_path, *keys, "rollout.sleep_level=1", "rollout.sleep=false")
    assert "sleeping engine" not in awake.host


def test_an_engine_that_keeps_the_base_of_a_lora(lm_folder: Path, tmp_path: Path) -> None:
    """It sleeps on the host with buffers of the next rank of vLLM's; if it gets merged weights, it keeps nothing."""
    keys = ("rollout.engine=vllm", "model.dtype=bfloat16", "model.lora_rank=4")
    beside = planned(tiny_lm_config(lm_folder, tmp_path, *keys, "rollout.lora_sync=adapter"), Cluster(1, 1))
    lora, base = 0, 0
    for weight in beside.policy.layout.weights:
        lora, base = lora + weight.numel * weight.lora, base + weight.numel * (not weight.lora)
    assert count(beside).host["sleeping engine"] == 2 * (base + 2 * lora)
    assert "sleeping engine" not in memory_of(lm_folder, tmp_path, *keys).host


def test_the_cache_of_conversations(lm_folder: Path, tmp_path: Path) -> None:
    """Rows that wait for an answer, or begin while others are drawn, need no more columns than those of single turns."""
    found = []
    for keys in ((), ("environment.tools=[calculator]", "environment.max_turns=3")):
        job = planned(tiny_lm_config(lm_folder, tmp_path, *keys), Cluster(1, 2))
        found.append(next(phase for phase in count(job, None).phases if phase.name == "rollout: sample").activations)
        assert ("tokens", "64 + 12 at most") in batch(job)
    assert found[0] == found[1]


def test_experts_that_stay_apart(tmp_path: Path) -> None:
    """An update gathers none of the 2 x 16 experts of 3 x 16 x 32 weights, and has a half of their gradients; a rollout
    gathers all.
    """
    folder = tiny_llada2(tmp_path / "base")
    keys = ("actor.ppo_micro_batch_size_per_gpu=1", "parallel.fsdp_size=2")  # micro-batches whose gradients add up
    found = []
    for spread in (False, True):
        memory = memory_of(folder, tmp_path / str(spread), *keys, f"parallel.expert_parallel={spread}")
        found.append({phase.name: phase for phase in memory.phases})
    gathered, apart = found
    experts = 16 * 3 * 16 * 32 * 4
    assert gathered["update"].gathered - apart["update"].gathered > experts
    assert gathered["update"].gradients - apart["update"].gradients == 2 * experts / 2
    assert gathered["rollout: sample"].gathered == apart["rollout: sample"].gathered


@pytest.mark.parametrize("sleep", [True, False])
def test_the_share_of_vllm(sleep: bool, lm_folder: Path, tmp_path: Path) -> None:
    """Of the GPU while it samples, or throughout; where the GPU is not known, its weights."""
    keys = ("rollout.engine=vllm", f"rollout.sleep={sleep}", "rollout.gpu_memory_utilization=0.4")
    known = memory_of(lm_folder, tmp_path, *keys, gpu=10 * GB)
    phases = {phase.name: phase for phase in known.phases}
    assert not sleep or phases["rollout: sample"].other == 4 * GB
    assert known.held.get("sampling engine", 0) == (0 if sleep else 4 * GB)
    assert "rescore" in phases and "rollout: log-probs" not in phases
    weights = 2 * known.held["trained weights"]  # of which a rank keeps a half, and vLLM all
    assert count_of(memory_of(lm_folder, tmp_path, *keys), sleep) == pytest.approx(weights, rel=0.01)


def count_of(memory: Memory, sleep: bool) -> int:
    """Of the engine alone."""
    if not sleep:
        return memory.held["sampling engine"]
    return next(phase for phase in memory.phases if phase.name == "rollout: sample").other


def test_operations_are_those_of_the_job(lm_folder: Path, tmp_path: Path) -> None:
    """Of all samples at their greatest lengths; a LoRA has half of a backward pass."""
    cfg = tiny_lm_config(lm_folder, tmp_path)
    job = planned(cfg, Cluster(1, 2))
    assert isinstance(job.policy, PlannedLMPolicy)
    scored, read = job.policy.forward_flops(76, 12), job.policy.forward_flops(64, 0)
    decoded = 16 * scored - (16 - 4) * read
    assert job.model_flops == pytest.approx(decoded + 16 * scored * (1 + 3), rel=1e-6)
    assert job.flops - job.model_flops == pytest.approx(16 * job.policy.forward_flops(0, 12), rel=1e-6)  # of logits
    cfg.model = replace(cfg.model, gradient_checkpointing=True)
    job = planned(cfg, Cluster(1, 2))
    assert job.flops - job.model_flops == pytest.approx(16 * scored, rel=1e-6)
    cfg.model = replace(cfg.model, lora_rank=4)
    assert planned(cfg, Cluster(1, 2)).flops < job.flops


@pytest.mark.long
def test_seven_billion_weights() -> None:
    """On 8 GPUs of 80 GB, in words."""
    words = {"nproc": "8", "gpu_memory_gb": "80"}
    text = plan_job(load_config(LMRLConfig, str(QUICKSTART), [*SEVEN, "rollout.engine=vllm"]), words)
    for line in (
        "  a step          128 prompts x 8 responses = 1024 responses",
        "  rollout         64 responses together, in vllm",
        "  updates         1 per step, of 32 micro-batches in all",
        "  micro-batch     at most 16384 tokens, 4 of the longest responses, in one row",
        "  forward passes  32 to score samples again, 32 to train, per rank and step",
        "Memory of a rank (7.62 B weights, 7.62 B of them trained)",
    ):
        assert line in text.split("\n")
    assert "  assumed   all prompts and responses have their maximum lengths" in text and "images" not in text
    own = plan_job(load_config(LMRLConfig, str(QUICKSTART), [*SEVEN, "actor.ppo_mini_batch_size=64"]), words)
    assert "  rollout: log-probs" in own and "32 of old log-probs, 32 to train" in own
    once = plan_job(load_config(LMRLConfig, str(QUICKSTART), [*SEVEN]), words)
    assert "log-probs" not in once and "  forward passes  32 to train" in once


@pytest.mark.parametrize(("name", "critic"), [("ppo", True), ("reinforce_plus_plus", False)])
def test_advantages_of_tokens_are_planned_without_a_critic(
    name: str, critic: bool, lm_folder: Path, tmp_path: Path
) -> None:
    cfg = tiny_lm_config(lm_folder, tmp_path, f"algorithm.name={name}", "algorithm.kl_reward_coef=0.1")
    text = plan_job(cfg, {"nproc_per_node": "2"})
    assert "reference" in text
    assert ("warning: algorithm.name=ppo trains a critic, which no figure includes" in text) == critic


def joint_plan(*keys: str) -> str:
    return plan_job(
        load_config(JointConfig, str(ROOT / "configs" / "joint" / "quickstart.yaml"), list(keys)), {"nproc": "2"}
    )


def test_joint_runs_hold_both_policies() -> None:
    """Each policy beside the weights and the optimizer of the other; a frozen one has neither optimizer nor update."""
    both, writer = joint_plan(), joint_plan("train=[writer]")
    for text in (both, writer):
        assert "Batch of the writer" in text and "64 prompts x 4 images = 256 images" in text
    # 0.509 M weights of the writer in float32, and 2.298 M of the painter, 3 times, with 0.07 MB of buffers, and the VAE
    assert re.search(r"the writer +6\.11\n", both) and re.search(r"the painter +28\.36\n", both)
    assert re.search(r"the writer +6\.11\n", writer) and re.search(r"the painter +9\.98\n", writer)
    assert both.count("  update ") == 2 and writer.count("  update ") == 1 and "painter: gradients" not in writer


def test_joint_runs_are_refused_by_their_own_keys(tmp_path: Path) -> None:
    with refused("writer.model.path: './none': no such folder"):
        joint_plan("writer.model.path=./none")
    with refused("painter.model.path: './none': no such folder"):
        joint_plan("painter.model.path=./none")


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "gemma3"])
def test_the_passes_of_a_vision_tower(family: str, tmp_path: Path) -> None:
    """A tower that is trained is in the updates; of a frozen one the features stay beside the samples."""
    folder = tiny_vision(tmp_path / "model", family)
    shown_prompts(tmp_path, "prompts.jsonl")
    keys = ("data.max_prompt_length=110",)
    jobs = []
    for frozen in ("true", "false"):
        cfg = tiny_lm_config(folder, tmp_path, *keys, f"model.freeze_vision_tower={frozen}")
        shown_prompts(tmp_path, "prompts.jsonl")
        jobs.append(planned(cfg, Cluster(1, 1)))
    still, trained = jobs
    assert isinstance(still.policy, PlannedLMPolicy)
    look, width = still.samples.trace.looks[0], still.policy.settings.hidden_size
    assert look.count <= 110 and (look.count > 100 or not still.policy.vision.family.sizes)
    deep = len(look.seen["model.path"].deep)
    # the features of 4 prompts, and 16 samples in int64
    assert still.samples_size - trained.samples_size == 4 * look.count * width * 4 * (1 + deep)
    took = [job.ledger.phases["update"] for job in jobs]
    assert took[1].peak - took[1].before > took[0].peak - took[0].before
    assert "1 image per prompt" in plan_text(still)


def test_prompts_without_room_for_an_image(tmp_path: Path) -> None:
    folder = tiny_vision(tmp_path / "model", "gemma3")
    cfg = tiny_lm_config(folder, tmp_path, "data.image_key=images", "data.max_prompt_length=3")
    with refused(f"data.max_prompt_length: 3 tokens have no room for an image, of which {str(folder)!r} makes 4"):
        planned(cfg, Cluster(1, 1))


def plan_text(job: Rehearsal) -> str:
    return " ".join(" ".join(row) for row in batch(job))
