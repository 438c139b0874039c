"""Whole jobs on pretended GPUs: no operator meets tensors of two devices, no streams race, no group gets a tensor that
its back end does not serve, and the host waits for the device no more often than is known.
"""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.joint import POLICIES, JointConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run import block_diffusion_sft, flow_matching, joint_rl, rl
from phalanx.run.rules import load_config
from tests.distributed.test_conversations import job as conversations
from tests.distributed.test_editing import configure as edits
from tests.distributed.test_flow_matching import configure as pictures
from tests.distributed.test_flow_matching import write_pictures
from tests.distributed.test_joint import joint_config
from tests.distributed.test_opd import configure as distilled
from tests.distributed.test_preferences import offline as pairs
from tests.distributed.test_wan_a14b import BOTH
from tests.helpers import tiny_vlm
from tests.helpers.jobs import algorithm_config, rows, tiny_config
from tests.helpers.lm import tiny_lm_config, tiny_sft_config
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_edit import write_edits
from tests.helpers.tiny_vision import shown_prompts
from tests.pretended.jobs import rehearse
from tests.pretended.record import Record
from tests.pretended.vllm import JUDGE as JUDGE_EVENTS
from tests.pretended.vllm import ROLLOUT as ROLLOUT_EVENTS
from tests.pretended.vllm import pretend_vllm
from tests.unit.test_rewards_clip import save_clip

BF16 = "model.dtype=bfloat16"
LORA = "model.lora_rank=4"
AGAIN = "model.gradient_checkpointing=true"
KL = "algorithm.kl_loss_coef=0.04"
STATES = (KL, "actor.ema.decay=0.9", "parallel.optimizer_offload=true")
PACKED = ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=80")
WOKEN = "engines/transformers.py:Sleeping.awake"
FILMS = "reward.functions=[{name: jpeg_incompressibility}]"
JUDGE = ("reward.model.engine=transformers", "reward.model.max_tokens=4")
OF_TEXTS = ("reward.functions=[{name: length}, {name: llm_judge, weight: 0}]", *JUDGE, "reward.model.temperature=1")
OF_IMAGES = ("reward.functions=[{name: jpeg_incompressibility}, {name: vlm_ocr, weight: 0}]", *JUDGE)
IN_VLLM = (*OF_TEXTS, "rollout.engine=vllm", "rollout.max_sync_error=100", "reward.model.engine=vllm")
FOUR = "rollout.micro_batch_size_per_gpu=4"
OF_LIGHT = (
    FOUR,
    f"reward.functions=[{{path: '{ROOT / 'tests' / 'helpers' / 'graded.py'}:brightness'}}]",
    "algorithm.last_steps=2",
)
PARTIAL = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=4", "rollout.max_staleness=2")
APART = ("placement={rollout: 0, inference: 1, actor: 2}",)
TOOLS = (
    *("data.train_batch_size=4", "rollout.n=4", "actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size_per_gpu=8"),
    *("data.val_files=[]", "trainer.test_freq=-1"),
)
# by name: the folder of a model, the keys, and the ranks
JOBS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "sd3_lora": ("sd3", (AGAIN, LORA), 1),
    "sd3_full": ("sd3", (AGAIN, *STATES), 1),
    "lm": ("lm", (AGAIN,), 1),
    "lm_packed": ("lm", (*PACKED, "model.use_prefix_grouper=true", "actor.ppo_mini_batch_size=4"), 1),
    "blocks": ("blocks", ("model.block_size=4", "rollout.threshold=0.02"), 1),
    "ppo": ("lm", ("algorithm.name=ppo",), 1),
    "qwen_2_ranks": ("qwen", (AGAIN, LORA, "parallel.fsdp_size=2"), 2),
    "nf4_2_ranks": ("sd3", (AGAIN, LORA, "model.quantization=nf4", "parallel.fsdp_size=2"), 2),
    "flux": ("flux", (LORA,), 1),
    "z_image": ("z_image", (LORA,), 1),
    "flux2_klein": ("flux2_klein", (LORA,), 1),
    "wan_2_ranks_a_sample": ("wan", (LORA, FILMS, "parallel.ulysses_sequence_parallel_size=2"), 2),
    "lm_2_ranks": ("lm", (AGAIN, "parallel.fsdp_size=2"), 2),
    "lm_2_ranks_a_sample": ("lm", (AGAIN, *PACKED, "parallel.ulysses_sequence_parallel_size=2"), 2),
    "judge": ("lm", OF_TEXTS, 1),  # which sleeps
    "judge_beside": ("sd3", (LORA, *OF_IMAGES, "reward.model.placement=ranks 1-1"), 2),
    "roles": ("lm", (*OF_TEXTS, "placement={rollout: 0, actor: 1}"), 2),
    "flow_roles": ("sd3", (LORA, *OF_IMAGES, "placement={rollout: 0, actor: 1}"), 2),
    "inference": ("lm", ("rollout.engine=tests.pretended.engines:Texts", *APART), 3),
    "flow_inference": ("sd3", (LORA, "rollout.engine=tests.pretended.engines:Images", *APART), 3),
    "judge_on_a_rank": ("lm", (*OF_TEXTS, "reward.model.placement=ranks 1-1", "placement={rollout: 0-1, actor: 2}"), 3),
    "vllm": ("lm", (*IN_VLLM, "reward.model.sleep=false"), 1),
    "vllm_judge": ("lm", (*IN_VLLM, "rollout.sleep=false"), 1),
    "experts": ("llada2", ("parallel.fsdp_size=2", "parallel.expert_parallel=true"), 2),
    "partial": ("lm", (*PARTIAL, "rollout.correction=token_tis", "data.max_response_length=24"), 1),
    "lm_nf4": ("lm", (AGAIN, LORA, "model.quantization=nf4"), 1),
    "draft": ("sd3", ("algorithm.name=draft", LORA, *OF_LIGHT), 1),
    "refl": ("sd3", ("algorithm.name=refl", *OF_LIGHT), 1),
    "dgpo": ("sd3", ("algorithm.name=dgpo", FOUR), 1),
    "hunyuan": ("hunyuan", (LORA, FILMS, "rollout.num_frames=5"), 1),
    "vision": ("vision", (AGAIN, "parallel.fsdp_size=2", "data.max_prompt_length=100"), 2),
    "ltx2": ("ltx2", (LORA, FILMS, "rollout.num_frames=5"), 1),
    "edits": ("qwen_edit", (AGAIN, LORA), 1),
    "talks": ("lm", (), 1),
    "joint": ("lm", (), 1),
    "tools": ("calculator", TOOLS, 1),
    "opd": ("sd3", (AGAIN, LORA), 1),
    "nft": ("sd3", ("algorithm.name=diffusion_nft", LORA, FOUR), 1),
    "pairs": ("sd3", (LORA,), 1),
    "pictures": ("sd3", (), 1),
    "block_texts": ("blocks", (AGAIN,), 1),
    "wan_i2v": ("i2v", (*BOTH, LORA), 1),
    "hunyuan_i2v": ("hunyuan_i2v", (LORA, FILMS, "rollout.num_frames=5", FOUR), 1),
    "kontext": ("flux_kontext", (LORA,), 1),
}
# jobs that also validate
VALIDATED = ("sd3_full", "lm_packed")
# jobs whose paths others of these take as well
ALIKE = {
    *("flux", "flux2_klein", "z_image", "lm", "lm_2_ranks", "lm_2_ranks_a_sample", "flow_roles", "flow_inference"),
    *("partial", "lm_nf4", "refl", "dgpo", "hunyuan", "ltx2", "edits", "talks"),
    *("opd", "nft", "pairs", "wan_i2v", "hunyuan_i2v", "kontext"),
    *("nf4_2_ranks", "judge", "judge_beside", "judge_on_a_rank", "vllm_judge", "wan_2_ranks_a_sample"),
}


OTHERS: dict[type, Any] = {
    JointConfig: joint_rl.build,
    FlowMatchingTaskConfig: flow_matching.build,
    BlockDiffusionTaskConfig: block_diffusion_sft.build,
}


def build(cfg: Any) -> Any:
    """The job, or this rank's part in it; an engine that is not here is pretended."""
    for kind, of_kind in OTHERS.items():
        if isinstance(cfg, kind):
            return of_kind(cfg)
    if cfg.rollout.engine == "vllm":
        pretend_vllm()
    return rl.build(cfg)


def tools(model: Path, folder: Path, *keys: str) -> LMRLConfig:
    """The quickstart whose model calls a calculator, with fewer samples."""
    keys = (*keys, f"model.path={model}", "trainer.logger=[]", f"trainer.output_dir={folder / 'out'}")
    return load_config(LMRLConfig, str(ROOT / "configs" / "grpo" / "quickstart_tools.yaml"), list(keys))


def of_pictures(model: Path, folder: Path, *keys: str) -> FlowMatchingTaskConfig:
    return pictures(model, write_pictures(folder), folder / "out", *keys)


def of_photos(model: Path, folder: Path, *keys: str) -> FlowRLConfig:
    """Videos that begin with images."""
    family = "hunyuan_video_15_i2v" if model.name.startswith("hunyuan") else "wan_i2v"
    files = (f"data.train_files=[{write_edits(folder)}]", "data.max_prompt_length=512", f"model.family={family}")
    return tiny_config(model, folder, *files, *keys)


OF_FILES: dict[str, Any] = {
    "talks": conversations,
    "tools": tools,
    "edits": edits,
    "kontext": edits,
    "opd": distilled,
    "pairs": pairs,
    "pictures": of_pictures,
    "block_texts": tiny_sft_config,
    "wan_i2v": of_photos,
    "hunyuan_i2v": of_photos,
}


def validate(cfg: Any, folder: Path) -> None:
    """Have a job validate on two prompts after each step."""
    file = Path(cfg.data.train_files[0])
    held_out = folder / f"held_out{file.suffix}"
    held_out.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    cfg.data.val_files, cfg.trainer.test_freq = [str(held_out)], 1


def configure(name: str, model: Path, folder: Path) -> Any:
    kind, keys, _ = JOBS[name]
    if OF_TEXTS[0] in keys:
        keys = (*keys, f"reward.model.path={model}")
    elif OF_IMAGES[0] in keys:
        words = tiny_vlm.tokenizer()
        tiny_vlm.save(folder / "judge", tiny_vlm.untrained(words), words)
        keys = (*keys, f"reward.model.path={folder / 'judge'}")
    elif name == "draft":
        clip = save_clip(folder / "clip")
        keys = (*keys, f"reward.functions=[{{name: pickscore, kwargs: {{model: {clip}, processor: {clip}}}}}]")
    if name == "joint":
        return joint_config(model, folder / "painter", folder, *(f"{one}.{BF16}" for one in POLICIES))
    if name in OF_FILES:
        return OF_FILES[name](model, folder, BF16, *keys)
    if kind in ("lm", "blocks", "llada2", "vision"):
        cfg: Any = tiny_lm_config(model, folder, BF16, *keys)
    elif keys[0].startswith("algorithm.name="):
        cfg = algorithm_config(model, folder, keys[0].partition("=")[2], BF16, *keys[1:])
    else:
        cfg = tiny_config(model, folder, BF16, *keys)
    if name in VALIDATED:
        validate(cfg, folder)
    if kind == "vision":
        shown_prompts(folder, "prompts.jsonl")
    return cfg


@pytest.fixture
def calculator_folder() -> Path:
    return ROOT / "assets" / "calculator" / "base"


def waits(record: Record, phase: str) -> dict[str, int]:
    """Host syncs of two steps in a phase, by the function that waits."""
    counts: dict[str, int] = {}
    for (during, _, place), count in record.syncs.items():
        if during == phase:
            counts[place] = counts.get(place, 0) + count
    return counts


@pytest.mark.full
@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.seldom("experts", "joint", "sd3_full", "inference", "ppo", "roles")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in JOBS]
)
def test_a_job_on_pretended_gpus(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Two steps with checkpoints, and a third after a resume."""
    model: Path = request.getfixturevalue(f"{JOBS[name][0]}_folder")
    if name == "joint":
        (tmp_path / "painter").symlink_to(request.getfixturevalue("sd3_folder"))
    cfg = configure(name, model, tmp_path)
    for record in rehearse(build, cfg, JOBS[name][2]):
        for phase, most in CEILINGS[name].items():
            assert record.waits()[phase] <= most, waits(record, phase)
        if name == "tools":
            row = rows(tmp_path / "out")[0]
            assert row["tools/call_frequency"] > 0 and row["tools/mistake_frequency"] < 1
            assert row["conversation/turns_max"] > 1 and row["actor/first_ratio_error"] == 0
        if name in ORDERS:
            first, *events = [event for event, _ in groupby(record.events)]  # several answers in a row are one
            assert (first, events) == (("start", ORDERS[name][0]), 2 * ORDERS[name][1])
        if name == "judge":  # all of it was on the device for each of two steps: transformers also computes elsewhere
            weights = sum(value.numel() for value in load_file(model / "model.safetensors").values())
            assert record.copied["judge", "host to device, pinned", WOKEN] == 2 * weights * 2


# What an engine and a judge in vLLM do at the start, and in the phases of a step: whoever sleeps does so before the phase
# ends.
ORDERS = {
    "vllm": ("rollout sleeps at 2", [*(("rollout", event) for event in ROLLOUT_EVENTS), ("judge", "judge answers")]),
    "vllm_judge": (
        "judge sleeps at 1",
        [("rollout", "rollout loads"), ("rollout", "rollout answers"), *(("judge", event) for event in JUDGE_EVENTS)],
    ),
}

# Host syncs of two steps. An update's are: the rows and weights of each micro-batch, which come from the host, and the
# gradients' norm; with averages or moments on the host, those of each weight.
CEILINGS = {
    "sd3_lora": {"rollout": 29, "update": 58},
    "sd3_full": {"validation": 358, "rollout": 29, "update": 616},
    "lm": {"rollout": 520, "update": 154},
    "lm_packed": {"validation": 243, "rollout": 647, "update": 154},
    "blocks": {"rollout": 838, "update": 362},
    "ppo": {"rollout": 715, "update": 350},
    "qwen_2_ranks": {"rollout": 43, "update": 50},
    "nf4_2_ranks": {"rollout": 29, "update": 58},
    "flux": {"rollout": 29, "update": 58},
    "z_image": {"rollout": 32, "update": 58},
    "flux2_klein": {"rollout": 29, "update": 58},
    "wan_2_ranks_a_sample": {"rollout": 35, "update": 66},
    "lm_2_ranks": {"rollout": 363, "update": 94},
    "lm_2_ranks_a_sample": {"rollout": 419, "update": 158},
    "judge": {"rollout": 716, "judge": 64, "update": 154},
    "judge_beside": {"update": 42},  # the judge is awake in all phases of the rollout
    "roles": {"sync": 35, "rollout": 716, "judge": 64, "wait": 12, "update": 154},
    "flow_roles": {"sync": 5, "rollout": 29, "judge": 370, "wait": 24, "update": 58},
    "inference": {"sync": 35, "rollout": 648, "idle": 10, "rescore": 86, "wait": 14, "update": 154},
    "flow_inference": {"sync": 5, "rollout": 28, "idle": 22, "rescore": 38, "wait": 25, "update": 58},
    "judge_on_a_rank": {"sync": 35, "wait": 24, "update": 154},  # as above, on one of the ranks that sample
    "vllm": {"rollout": 27, "rescore": 86, "update": 154},
    "vllm_judge": {"rollout": 27, "rescore": 86, "update": 154},
    "experts": {"rollout": 484, "update": 130},
    "partial": {"rollout": 2127, "rescore": 71, "update": 122},
    "lm_nf4": {"rollout": 715, "update": 122},
    "draft": {"rollout": 29, "reward": 48, "update": 118},
    "refl": {"rollout": 29, "update": 60},
    "dgpo": {"rollout": 29, "update": 280},
    "hunyuan": {"rollout": 31, "update": 58},
    "vision": {"rollout": 517, "update": 122},
    "ltx2": {"rollout": 93, "update": 86},
    "edits": {"rollout": 73, "update": 70},
    "talks": {"rollout": 3733},
    "joint": {"rollout": 692, "update": 130},
    "tools": {"rollout": 661, "update": 25},
    "opd": {"rollout": 29, "update": 110},
    "nft": {"rollout": 28, "update": 106},
    "pairs": {"rollout": 15, "update": 58},
    "pictures": {"update": 467},
    "block_texts": {"update": 279},
    "wan_i2v": {"rollout": 69, "update": 70},
    "hunyuan_i2v": {"rollout": 33, "update": 54},
    "kontext": {"rollout": 31, "update": 54},
}


def test_every_job_has_a_ceiling() -> None:
    assert CEILINGS.keys() == JOBS.keys() and all(CEILINGS.values())
