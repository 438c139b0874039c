"""Every kind of job, tiny and in float32: a training step on the GPU beside the CPU's and beside recorded numbers."""

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_lines import Line, Lines, Part, device

RECORDED = Path(__file__).with_suffix("").with_name("gpu_day.json")
# accepted differences, relative to the expected number or, if that is larger, to FLOORS
WITHIN = 0.02  # of a GPU from the CPU: its convolutions may use TF32
RECORDED_WITHIN = 0.002  # of a CPU from the recorded one; those of other instruction sets are below 1e-5
# the numbers that are compared, and the least that a difference is relative to
FLOORS = {
    "reward/mean": 0.1,
    "response/length_mean": 1.0,
    "actor/grad_norm": 1e-3,
    "actor/ratio_mean": 1.0,
    "actor/approx_kl": 0.1,
    "actor/kl_loss": 1e-3,
    "critic/vf_loss": 1e-2,
    "critic/grad_norm": 1e-3,
}
RATIO = "actor/first_ratio_error"
ROUNDED_RATIO = 1e-5
LIMIT_S = 100.0


Rows = dict[str, dict[str, Any] | None]  # the numbers of each device, None if the job failed there


@dataclass(frozen=True)
class Kind:
    """A job: `make` of tests/<module>.py with `options` makes its model, and `keys` are what differs in its config."""

    module: str
    make: str
    keys: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> bool:
        """Whether it is a language model."""
        return self.module in ("lm", "llada2", "tiny_vision")


LORA, AGAIN = "model.lora_rank=4", "model.gradient_checkpointing=true"
PACKED = ("model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=80")
BLOCKS = ("model.block_size=4", "rollout.threshold=0.02")
FILMS = "reward.functions=[{name: jpeg_incompressibility}]"
KINDS = {  # those that matter most come first
    "sd3 lora": Kind("tiny", "tiny_sd3", (AGAIN, LORA)),
    "lm packed": Kind("lm", "tiny_lm", (*PACKED, AGAIN)),
    "qwen_image lora kl": Kind("tiny", "tiny_qwen_image", (AGAIN, LORA, "algorithm.kl_loss_coef=0.04")),
    "blocks": Kind("lm", "tiny_blocks", BLOCKS),
    "vision": Kind("tiny_vision", "tiny_vision", (AGAIN, "data.max_prompt_length=100"), {"family": "qwen2_5_vl"}),
    "ppo": Kind("lm", "tiny_lm", ("algorithm.name=ppo",)),
    "lm grouped": Kind("lm", "tiny_lm", (*PACKED, "model.use_prefix_grouper=true")),
    "sd3 full ema offload": Kind("tiny", "tiny_sd3", (AGAIN, "actor.ema.decay=0.9", "parallel.optimizer_offload=true")),
    "sd3 nf4": Kind("tiny", "tiny_sd3", (LORA, "model.quantization=nf4")),
    "flux": Kind("tiny", "tiny_flux", (LORA,)),
    "z_image": Kind("tiny", "tiny_z_image", (LORA,)),
    "wan": Kind("tiny", "tiny_wan", (LORA, FILMS)),
    "llada2": Kind("llada2", "tiny_llada2", (*BLOCKS, "model.mask_token='<|endoftext|>'")),
    "lm lora nf4": Kind("lm", "tiny_lm", (LORA, "model.quantization=nf4")),
    "lm muon": Kind("lm", "tiny_lm", ("optim.name=muon",)),
}


def tiny() -> Lines:
    """A line for each kind: the largest difference from the CPU and from the recorded numbers."""
    expected = json.loads(RECORDED.read_text())["tiny"]
    with tempfile.TemporaryDirectory(prefix="phalanx-tiny-") as name:
        for kind, rows in steps(list(KINDS), Path(name)):
            yield compared(kind, rows, expected.get(kind, {}), device().type)


def compared(kind: str, rows: Rows, expected: dict[str, float], where: str = "cpu") -> Line:
    """The line of a kind, for the device `where`."""
    lost = [name for name, row in rows.items() if row is None]
    if lost:
        return Line(kind, False, note=f"no step on {' and '.join(lost)}: see {kind.replace(' ', '_')}-{lost[0]}.log")
    cpu, here = rows["cpu"], rows[where]
    assert cpu is not None and here is not None
    if "refused" in here:
        return Line(kind, None, note=here["refused"])
    (key, off), (old_key, old) = difference(here, cpu), difference(cpu, expected)
    # Packed samples are not rescored in the shapes of training. Experts have few rows, in the rollout fewer, and MKL
    # rounds by the number of rows where it has no strict mode, as on AMD's processors.
    rounds = KINDS[kind].make == "tiny_llada2" or any("remove_padding" in key for key in KINDS[kind].keys)
    exact = here.get(RATIO, 0.0) <= (ROUNDED_RATIO if rounds else 0)
    cuda = f"{off:.0e} from the CPU in {key}, " if here is not cpu else ""
    note = f"{cuda}{old:.0e} from recorded in {old_key}, ratio off by {here.get(RATIO, 0.0):.0e}"
    good = off <= WITHIN and old <= RECORDED_WITHIN and exact
    return Line(kind, good, here["actor/grad_norm"], "", note, {"rows": rows})


def difference(row: dict[str, float], expected: dict[str, float]) -> tuple[str, float]:
    """The name of the number that differs most, and by how much; a number that one of them lacks differs by inf."""
    worst = ("nothing", 0.0)
    for key, floor in FLOORS.items():
        if key in row or key in expected:
            one, other = row.get(key, float("inf")), expected.get(key, 0.0)
            worst = max(worst, (key, abs(one - other) / max(abs(other), floor)), key=lambda item: item[1])
    return worst


def steps(kinds: list[str], folder: Path) -> Iterator[tuple[str, Rows]]:
    """Run a step of each kind on each device, as many at a time as there are processors for."""
    imports()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    waiting, running = [(kind, where) for kind in kinds for where in devices], dict[tuple[str, str], Part]()
    rows: dict[str, Rows] = {kind: {} for kind in kinds}
    while waiting or running:
        while waiting and len(running) < max((os.cpu_count() or 1) // 2, 1):
            kind, where = waiting.pop(0)
            log = Path(f"{kind.replace(' ', '_')}-{where}.log")  # in the folder of the stage
            running[kind, where] = Part(partial(step_of, kind, where, folder / f"{kind}-{where}"), log)
        for (kind, where), part in list(running.items()):
            if not part.process.is_alive() or time.monotonic() - part.began > LIMIT_S:
                found = list(part.results(0))
                rows[kind][where] = found[0] if found and isinstance(found[0], dict) else None
                del running[kind, where]
                if len(rows[kind]) == len(devices):
                    yield kind, rows[kind]
        time.sleep(0.05)


def imports() -> None:
    """Import once what each of the forks needs."""
    for name in ("jobs", "phalanx.run.rl", "phalanx.run.flow_kind", "phalanx.run.lm_kind"):
        importlib.import_module(name if "." in name else f"tests.helpers.{name}")
    for kind in KINDS.values():
        importlib.import_module(f"tests.helpers.{kind.module}")


def step_of(name: str, where: str, folder: Path) -> Iterator[dict[str, Any]]:
    """One training step of a kind on the CPU or the GPU; yields its numbers, or the version that it needs."""
    kind = KINDS[name]
    if where == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    else:
        draw_on_cpu()
    from phalanx.run import rl
    from tests.helpers import jobs, lm, tiny_vision

    make: Any = getattr(sys.modules[f"tests.helpers.{kind.module}"], kind.make)
    model = make(folder / kind.make.removeprefix("tiny_"), **kind.options)
    keys = (*kind.keys, "trainer.total_training_steps=1")
    cfg: Any = (lm.tiny_lm_config if kind.text else jobs.tiny_config)(model, folder / "job", *keys)
    if kind.module == "tiny_vision":
        tiny_vision.shown_prompts(folder / "job", "prompts.jsonl")
    try:
        trainer: Any = rl.build(cfg)
    except ValueError as error:
        if "install a newer one" not in str(error):
            raise
        yield {"refused": str(error).rpartition("': ")[2]}
        return
    rows: list[dict[str, float]] = []
    trainer.job.end_step = lambda step, row: (rows.append(row), setattr(trainer.job.progress, "step", step))
    trainer.fit()
    yield {key: float(rows[0][key]) for key in (*FLOORS, RATIO) if key in rows[0]}


def draw_on_cpu() -> None:
    """Draw the noise on the CPU and move it, since generators of devices differ."""
    from phalanx.distributed import seed

    drawn = seed.normal
    for module in list(sys.modules.values()):
        if vars(module).get("normal") is drawn:
            module.normal = lambda shape, number, to: drawn(shape, number, torch.device("cpu")).to(to)  # type: ignore


def record() -> None:
    """Write the numbers of this CPU, with which later runs are compared."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-tiny-") as name:
        for kind, found in steps(list(KINDS), Path(name)):
            rows[kind] = found["cpu"]
    recorded = {"tiny": {kind: rows[kind] for kind in KINDS}}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
