"""The three largest costs of each shipped GPU recipe, modelled from the counts of its plan.

    python benchmarks/largest_costs.py [configs/grpo/gsm8k_qwen25_7b.yaml ...] [--write]

Nothing is measured. The arithmetic is that of `--plan`, at 35 % of the GPU's dense peak, the middle of the range that
the plan assumes. Decoding a language model takes at least the time of reading weights and cache for each token.
Communication and moments on the host take the time of their bytes, without overlap with arithmetic. Prompts and
responses have their maximum lengths. Rewards, the VAE, text encoders, validation and checkpoints are left out.
`--write` puts the table into docs/performance.md. The script takes a few minutes on a CPU, and needs no GPU.
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from count_kernels import RATES

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.rollout.lm.together import token_bytes
from phalanx.run.rules import load_config
from phalanx.tools.plan.batch import messages
from phalanx.tools.plan.blueprint import family_name, fetch
from phalanx.tools.plan.jobs import planned
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.lm import PlannedBlockRollout, PlannedLMPolicy
from phalanx.tools.plan.pace import CARD, USED, Gpu, seconds
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal, SupervisedRehearsal

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- largest costs: begin -->\n", "<!-- largest costs: end -->\n"
FOLDERS = ("flowgrpo", "grpo", "ppo", "block_diffusion")
PER_NODE = 8
MEMORY = 80e9  # bytes per GPU
LINK, NETWORK, HOST = 0.7 * 450e9, 0.7 * 50e9, 0.7 * 64e9  # bytes per second and direction: NVLink, 400 Gbit/s, PCIe 5
MOMENTS = 8  # bytes of AdamW's two moments per weight

SAMPLING, DECODING, OLD = "sampling", "decoding", "old log-probs"
REFERENCE, CRITIC, MOVED = "reference", "critic", "moments to the host and back"
FORWARD, BACKWARD, AGAIN = "update: forward", "update: backward", "update: recomputed"
LOWERED = {
    SAMPLING: "`model.compile`; fewer `rollout.num_inference_steps`; no guidance where the model can do without",
    DECODING: "shorter responses (`data.max_response_length`, which the model assumes); more responses at a time "
    "(`rollout.gpu_memory_utilization`, `rollout.micro_batch_size_per_gpu`); ranks that only decode, while others "
    "train (`rollout.schedule: one_step_off`)",
    OLD: "`rollout.correction: none`, which takes vLLM's log-probs and is not exact; `model.compile`",
    REFERENCE: "no KL (`algorithm.kl_loss_coef: 0`)",
    CRITIC: "an algorithm with groups in place of a critic; fewer `critic.ppo_epochs`",
    MOVED: "`parallel.optimizer_offload: false` where `--plan` says that the moments fit; fewer updates per step",
    FORWARD: "`model.compile`; a smaller `rollout.sde_window_size` of flow models",
    BACKWARD: "`model.compile`; a smaller `rollout.sde_window_size`; of flow models with guidance "
    "`actor.detach_uncond`, which changes the gradient",
    AGAIN: "`model.gradient_checkpointing_blocks`, for which `--plan` names a number that fits",
    "weights, gathered": "larger micro-batches; a smaller `parallel.fsdp_size`; in training "
    "`parallel.reshard_after_forward: false`; for experts `parallel.expert_parallel`",
    "gradients": "larger micro-batches, or no `parallel.sync_each_batch` where memory allows; a LoRA",
}


def plan(file: Path) -> Rehearsal:
    """The recipe on the ranks that its first lines name."""
    text = file.read_text()
    found = re.search(r"^# ranks: (\d+)$", text, re.MULTILINE)
    ranks = 1 if found is None else int(found[1])
    cluster = Cluster(-(-ranks // PER_NODE), min(ranks, PER_NODE), int(MEMORY))
    if file.parent.name == "flowgrpo":
        flow = load_config(FlowRLConfig, str(file), [])
        flow.model.path = fetch(flow.model.path, flow.model.revision)
        flow.model.family = family_name(flow.model)
        return planned(flow, cluster)
    schema = BlockDiffusionTaskConfig if file.stem.endswith("_sft") else LMRLConfig
    cfg = load_config(schema, str(file), [])
    cfg.model.path = fetch(cfg.model.path, cfg.model.revision)
    return planned(cfg, cluster)


def costs(p: Rehearsal) -> dict[str, float]:
    """Seconds of a step by what they go to."""
    layout, parallel = p.policy.layout, p.cfg.parallel
    operations = of_supervised(p) if isinstance(p, SupervisedRehearsal) else of_reinforcement(p)
    taken = {}
    for name, flops in operations.items():
        slowest = seconds(flops / layout.cluster.ranks, Gpu(CARD), layout.dtype)
        taken[name] = slowest * USED[0] * 2 / sum(USED)
    if DECODING in taken and isinstance(p, RLRehearsal):
        taken[DECODING] = max(taken[DECODING], decoded_bytes(p) / RATES.memory / RATES.of_memory)
    for message in messages(p):
        taken[message.what] = message.size / (NETWORK if message.nodes else LINK)
    if parallel.optimizer_offload:
        moments = MOMENTS * sum(w.part for w in layout.trained)
        taken[MOVED] = 2 * moments * p.state.updates_made / HOST
    return taken


def of_supervised(p: SupervisedRehearsal) -> dict[str, float]:
    """Operations of a step on all ranks."""
    forward = p.task_flops * p.task.shares.batch_size
    return {FORWARD: forward, BACKWARD: p.model_flops - forward, AGAIN: p.flops - p.model_flops}


def of_reinforcement(p: RLRehearsal) -> dict[str, float]:
    """Operations of a step on all ranks, as differences of `step_flops` with and without a kind of pass."""
    updates = p.updater.trained / p.plan.per_rank
    known = replace(p.samples, on_policy=True)

    def flops(samples: object = known, *, updates: float = 0, references: float = 0, again: bool = False) -> int:
        actions = p.algorithm.levels or p.samples.mask.shape[1]
        counts = {"actions": actions, "count": p.plan.samples, "updates": updates, "references": references}
        return p.policy.step_flops(samples, **counts, recomputed=again)  # type: ignore[arg-type]

    drawn, whole = flops(), flops(p.samples, updates=updates, again=True)
    scored = flops(references=1) - drawn
    trained, forward = flops(updates=updates) - drawn, flops(references=updates) - drawn
    operations: dict[str, float] = {
        DECODING if p.policy.tokens else SAMPLING: drawn,
        OLD: flops(p.samples) - drawn,
        REFERENCE: p.flops - whole,
        FORWARD: forward,
        BACKWARD: trained - forward,
        AGAIN: whole - flops(p.samples) - trained,
    }
    if isinstance(p.cfg, LMRLConfig) and p.cfg.algorithm.needs_critic:  # the critic has the policy's architecture
        again = p.cfg.model.gradient_checkpointing
        operations[CRITIC] = scored * (1 + (3 + again) * p.plan.epochs)
    return operations


def decoded_bytes(p: RLRehearsal) -> float:
    """Bytes that a rank reads to decode its samples: all weights in each pass, and the cache of each sample."""
    assert isinstance(p.cfg, LMRLConfig), "only language models decode"
    rollout, before, limit = p.cfg.rollout, p.cfg.data.max_prompt_length, p.cfg.data.max_response_length
    assert isinstance(p.policy, PlannedLMPolicy), "of a language model"
    token = token_bytes(p.policy)
    copy = rollout.tensor_parallel_size if rollout.facts.tensor_parallel else 1
    weights = p.policy.layout.dtype.itemsize * sum(w.numel for w in p.policy.layout.weights) / copy
    together = float(p.plan.rollout_micro)
    if rollout.facts.reserves:
        together = min(together, (MEMORY * rollout.gpu_memory_utilization - weights) / token / (before + limit))
    looks = limit / (p.rollout.per_look if isinstance(p.rollout, PlannedBlockRollout) else 1)
    cache = p.plan.per_rank * token * (before + limit / 2)
    return looks * (weights * max(p.plan.per_rank / together, 1) + cache)


def table(files: list[Path]) -> list[str]:
    """The lines of both tables."""
    lines, lowered = ["| recipe | seconds per step | largest | second | third |", "|---|---|---|---|---|"], []
    for file in files:
        try:
            planned_job = plan(file)
        except ValueError as error:  # the shapes of the model are not shipped, and the hub cannot be reached
            print(f"{file.stem} is left out: {error}", file=sys.stderr)
            continue
        taken = costs(planned_job)
        total = sum(taken.values())
        cells = []
        for name in sorted(taken, key=lambda name: -taken[name])[:3]:
            cells.append(f"{name}, {100 * taken[name] / total:.0f} %" if taken[name] > 0.005 * total else "")
            lowered.append(next((key for key in LOWERED if name.startswith(key)), name))
        rounded = f"{total:,.0f}" if total > 100 else f"{total:.3g}"
        lines.append(f"| `{file.parent.name}/{file.stem}` | {rounded} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines += ["", "| cost | lowered by |", "|---|---|"]
    for name, remedy in LOWERED.items():
        if name in lowered:
            lines.append(f"| {name} | {remedy} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="recipes; by default all that are for GPUs")
    parser.add_argument("--write", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args()
    files = args.files
    if not files:
        for folder in FOLDERS:
            shipped = sorted((ROOT / "configs" / folder).glob("*.yaml"))
            shipped = [file for file in shipped if "quickstart" not in file.stem]
            files += [file for file in shipped if not re.search("CPU (ranks|cores)", file.read_text())]
    lines = table(files)
    print("\n".join(lines))
    if args.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
