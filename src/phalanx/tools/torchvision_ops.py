"""Make torchvision importable where its compiled part cannot load.

    python -m phalanx.tools.torchvision_ops

A CUDA build of torchvision beside a CPU build of torch is such a case. vLLM's image processors need
torchvision, whose import fails there with `operator torchvision::nms does not exist`: it registers
kernels of two operators that nobody has declared. The command copies this file into the
environment, with a `.pth` file that imports it whenever Python starts, also in processes that vLLM
starts by itself. From then on the two operators are declared where they are missing. They do not
compute; image processing does without them.
"""

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "phalanx_torchvision_ops"  # of the copy
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators:
    """An import hook that finds nothing.

    It acts after torchvision has tried to load its compiled part, and before it registers the
    kernels.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision._meta_registrations":
            return
        import torch

        for operator in ("nms", "qnms"):
            try:
                getattr(torch.ops.torchvision, operator)
            except AttributeError:
                torch.library.define(f"torchvision::{operator}", SCHEMA)


def install(site: Path) -> Path:
    """Copy this file into an environment's `site`; returns the `.pth` file that imports it."""
    shutil.copyfile(__file__, site / f"{NAME}.py")
    hook = site / f"{NAME}.pth"
    hook.write_text(f"import {NAME}\n")
    return hook


if __name__ == "__main__":
    print(f"installed {install(Path(sysconfig.get_path('purelib')))}")
elif __name__ == NAME:
    sys.meta_path.insert(0, DeclareOperators())
