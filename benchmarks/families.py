"""Forward passes of each flow family's transformer, as Phalanx samples and as diffusers' own pipeline does, as a ratio.

    python benchmarks/families.py                       # all families
    python benchmarks/families.py sd3 qwen_image --runs 3 --no-docs

Each family is a tiny folder of its own classes in float32. It samples an image of 256 x 256 pixels (SD3: 128 x 128), or
a video of 9 frames of 64 x 96, in four steps with guidance, alternately here and by diffusers' pipeline, in this
process, on one thread, with torch's own linear layers, and with texts padded to the same length. Figures are CPU
seconds of the transformer's forward passes, the fastest of several runs: text encoders, the VAE and the steps between
the passes are left out. The table goes to docs/measurements.md.
"""

import argparse
import inspect
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from learning import insert  # noqa: E402

from phalanx.types import Prompt  # noqa: E402
from tests.helpers.policies import MAX_LENGTH, make_policy, make_rollout, ode, one_rank  # noqa: E402
from tests.helpers.tiny import load_pipeline, tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan, tiny_z_image  # noqa: E402
from tests.helpers.tiny_edit import edits, load_edit_pipeline, tiny_qwen_image_edit  # noqa: E402
from tests.helpers.tiny_flux2 import tiny_flux2, tiny_flux2_klein  # noqa: E402
from tests.helpers.tiny_hunyuan import tiny_hunyuan_video_15  # noqa: E402
from tests.helpers.tiny_i2v import load_i2v_pipeline, tiny_wan_a14b, tiny_wan_i2v  # noqa: E402
from tests.helpers.tiny_ltx2 import tiny_ltx2  # noqa: E402
from tests.helpers.tiny_qwen_image_21 import load_21_pipeline, tiny_qwen_image_21  # noqa: E402

GUIDANCE, STEPS, SIDE = 3.0, 4, 64  # SIDE: that of a reference image, in pixels
IMAGE, VIDEO = {"height": 256, "width": 256}, {"height": 64, "width": 96, "num_frames": 9}
TEXT, EDIT = Prompt("two small dogs on a red sofa", 0, {}, negative="blur"), edits(1)[0]


@dataclass(frozen=True)
class Case:
    """A family: the function that makes its folder, the one that loads diffusers' pipeline of it, and the sizes of a
    sample. keys: arguments of the pipeline's call. parts: attributes that its call reads.
    """

    make: Callable[..., Path]
    load: Callable[[Path], Any] = load_pipeline
    size: dict[str, int] = field(default_factory=lambda: IMAGE)
    guidance: float = GUIDANCE
    prompt: Prompt = TEXT
    keys: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


# fewer tokens of the absent image and of padding, which no token attends to
HUNYUAN = {"tokenizer_max_length": MAX_LENGTH, "vision_num_semantic_tokens": 9, "tokenizer_2_max_length": 64}
SOUND = dict.fromkeys(("audio_guidance_scale", "audio_stg_scale", "audio_modality_scale", "audio_guidance_rescale"))
LTX2 = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, **SOUND}
EDITS: dict[str, Any] = {"prompt": EDIT, "model": {"reference_size": SIDE}}
CASES = {
    "sd3": Case(partial(tiny_sd3, t5=True), size={"height": 128, "width": 128}),  # its largest
    "flux": Case(tiny_flux, keys={"guidance_scale": 3.5, "true_cfg_scale": GUIDANCE}),
    "flux_kontext": Case(
        partial(tiny_flux, kontext=True),
        keys={"guidance_scale": 3.5, "true_cfg_scale": GUIDANCE, "max_area": 256 * 256, "_auto_resize": False},
        **EDITS,
    ),
    "flux2": Case(tiny_flux2, keys={"guidance_scale": 3.5}, guidance=1.0),
    "flux2_klein": Case(tiny_flux2_klein),
    "qwen_image": Case(tiny_qwen_image, keys={"true_cfg_scale": GUIDANCE}),
    "qwen_image_21": Case(tiny_qwen_image_21, load_21_pipeline, keys={"true_cfg_scale": GUIDANCE}),
    "qwen_image_edit": Case(tiny_qwen_image_edit, load_edit_pipeline, keys={"true_cfg_scale": GUIDANCE}, **EDITS),
    "z_image": Case(tiny_z_image),
    "wan": Case(tiny_wan, size=VIDEO),
    "wan_a14b": Case(tiny_wan_a14b, size=VIDEO),
    "wan_i2v": Case(
        partial(tiny_wan_i2v, sees=False, two=True),
        load_i2v_pipeline,
        VIDEO,
        prompt=EDIT,
        model={"family": "wan_i2v", "max_prompt_length": 512},
        keys={"max_sequence_length": 512},
    ),
    "hunyuan_video_15": Case(tiny_hunyuan_video_15, size=VIDEO, parts=HUNYUAN),
    "ltx2": Case(tiny_ltx2, size=VIDEO, keys=LTX2),
}


class Passes:
    """CPU seconds of the forward passes of transformers, until `take`."""

    def __init__(self, *transformers: Any) -> None:
        self._seconds, self._began = 0.0, 0.0
        for transformer in transformers:
            transformer.register_forward_pre_hook(self._begin)
            transformer.register_forward_hook(self._end)

    def _begin(self, module: Any, args: Any) -> None:
        self._began = time.process_time()

    def _end(self, module: Any, args: Any, out: Any) -> None:
        self._seconds += time.process_time() - self._began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@contextmanager
def adapted_pipelines() -> Iterator[None]:
    """Diffusers' pipelines for edits with reference images of SIDE squared pixels, as `model.reference_size` sets, and
    Wan's for images without ftfy, which its pipeline for texts does not need either.
    """
    plus, edit = pipeline_qwenimage_edit_plus, pipeline_qwenimage_edit
    area, dimensions, clean = plus.VAE_IMAGE_SIZE, edit.calculate_dimensions, pipeline_wan_i2v.prompt_clean
    pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
    plus.VAE_IMAGE_SIZE = SIDE**2
    edit.calculate_dimensions = lambda _, ratio: dimensions(SIDE**2, ratio)
    yield
    plus.VAE_IMAGE_SIZE, edit.calculate_dimensions, pipeline_wan_i2v.prompt_clean = area, dimensions, clean


def transformers_of(pipeline: Any) -> list[Any]:
    """The transformers of a pipeline: two for Wan 2.2 A14B."""
    return [part for name, part in pipeline.components.items() if name.startswith("transformer") and part is not None]


def measure(case: Case, folder: Path, runs: int) -> tuple[list[float], list[float]]:
    """CPU seconds of a sample's passes, here and in diffusers' pipeline, of each run."""
    ours, theirs = [], []
    with one_rank() as world, adapted_pipelines():
        policy = make_policy(world, folder, cpu_linear="torch", **case.model)
        rollout = make_rollout(policy, 1, guidance=case.guidance, num_inference_steps=STEPS, **case.size)
        pipeline = case.load(folder)
        for name, value in case.parts.items():
            setattr(pipeline, name, value)
        if hasattr(pipeline, "guider"):
            pipeline.guider.guidance_scale = GUIDANCE
        image = case.prompt.meta.get("image")
        given = {
            "prompt": case.prompt.text,
            "negative_prompt": case.prompt.negative or "",
            "image": image and image.pil(),
            "guidance_scale": GUIDANCE,
            "max_sequence_length": MAX_LENGTH,
            "num_inference_steps": STEPS,
            "output_type": "latent",
            **case.size,
            **case.keys,
        }
        accepted = inspect.signature(type(pipeline).__call__).parameters
        given = {name: value for name, value in given.items() if name in accepted}
        here, there = Passes(*transformers_of(policy.model.pipeline)), Passes(*transformers_of(pipeline))
        sides = [partial(ode, rollout, [case.prompt]), partial(pipeline, **given)]
        for _ in range(runs + 1):
            for sample in sides:
                sample()
            sides.reverse()  # neither side is always the first
            ours.append(here.take())
            theirs.append(there.take())
    return ours[1:], theirs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"some of: {', '.join(CASES)} (all)")
    parser.add_argument("--runs", type=int, default=15, help="runs of each side, after one warm-up (15)")
    parser.add_argument("--no-docs", action="store_true", help="print the table, write nothing below docs/")
    args = parser.parse_args()
    unknown = set(args.families) - set(CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(CASES)}")
    torch.set_num_threads(1)
    table = ["| family | here, ms | diffusers, ms | ratio |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as name:
        for family in args.families or CASES:
            case = CASES[family]
            ours, theirs = measure(case, case.make(Path(name) / family), args.runs)
            here, there = 1e3 * min(ours), 1e3 * min(theirs)
            table.append(f"| `{family}` | {here:.0f} | {there:.0f} | {there / here:.2f} |")
            print(table[-1], flush=True)
    if not args.families and not args.no_docs:
        insert(ROOT / "docs" / "measurements.md", "families", table)


if __name__ == "__main__":
    main()
