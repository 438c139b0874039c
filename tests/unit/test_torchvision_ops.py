"""The workaround for a torchvision whose compiled extension cannot be loaded."""

import subprocess
import sys
from pathlib import Path

from phalanx.tools.torchvision_ops import install

# The import of torchvision without its compiled extension.
META = """
import torch

for name in ("nms", "qnms"):
    @torch.library.register_fake(f"torchvision::{name}")
    def fake(dets, scores, iou_threshold):
        return dets.new_empty(0)
"""


def imports(site: Path) -> subprocess.CompletedProcess[str]:
    code = f"import site; site.addsitedir({str(site)!r}); import torchvision; print('imported')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_operators_are_declared_where_they_are_missing(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("import torchvision._meta_registrations\n")
    (package / "_meta_registrations.py").write_text(META)
    before = imports(tmp_path)
    assert "operator torchvision::nms does not exist" in before.stderr
    assert install(tmp_path) == tmp_path / "phalanx_torchvision_ops.pth"
    after = imports(tmp_path)
    assert (after.stdout, after.returncode) == ("imported\n", 0), after.stderr


def test_operators_that_are_there_stay(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    loads = (
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    torch.library.define(f'torchvision::{name}', '(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
    )
    (package / "__init__.py").write_text(loads + "import torchvision._meta_registrations\n")
    (package / "_meta_registrations.py").write_text(META)
    install(tmp_path)
    after = imports(tmp_path)
    assert (after.stdout, after.returncode) == ("imported\n", 0), after.stderr
