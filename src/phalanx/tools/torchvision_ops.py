"""Make torchvision importable if its compiled extension cannot be loaded.

    python -m phalanx.tools.torchvision_ops

This happens with a CUDA build of torchvision beside a CPU build of torch. vLLM's image processors need torchvision,
whose import then fails with `operator torchvision::nms does not exist`, because it registers kernels of two operators
that the extension should have declared. The command copies this file into the environment, with a `.pth` file that
imports it whenever Python starts, also in processes that vLLM starts. Missing operators are then declared, without
kernels that compute; image processing does not need them.
"""

import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "phalanx_torchvision_ops"  # the module name of the copy
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators:
    """An import hook that never finds a module.

    It is called after torchvision has tried to load its compiled extension, and before it registers the kernels.
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
    """Copy this file into an environment's `site` folder; returns the `.pth` file that imports it."""
    shutil.copyfile(__file__, site / f"{NAME}.py")
    hook = site / f"{NAME}.pth"
    hook.write_text(f"import {NAME}\n")
    return hook


if __name__ == "__main__":
    print(f"installed {install(Path(sysconfig.get_path('purelib')))}")
elif __name__ == NAME:
    sys.meta_path.insert(0, DeclareOperators())
