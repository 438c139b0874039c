"""Print how large the image of docker/Dockerfile.cuda is to download, counted from its packages in the index.

python scripts/image_size.py [EXTRAS] [CONSTRAINTS]   all and constraints.txt, as in the Dockerfile

Layers are compressed as wheels are, so the layer of `pip install` is about as large as its wheels together. The base
image and Debian's packages come on top.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"  # of Ubuntu 24.04
OWN = ("assets", "configs", "launch", "src", "tasks")  # what the Dockerfile copies, but for files of a few kB


def main() -> None:
    extras, constraints = (*sys.argv[1:], *("all", "constraints.txt")[len(sys.argv) - 1 :])
    command = [
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--quiet",
        "--system-certs",
        "--format",
        "pylock.toml",
        "--no-build",
    ]
    command += ["--constraint", constraints, "--python-platform", "x86_64-manylinux_2_28", "--python-version", PYTHON]
    for extra in extras.split(","):
        command += ["--extra", extra]
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "pylock.toml")
        subprocess.run([*command, "--output-file", lock], cwd=ROOT, check=True)
        packages = tomllib.loads(lock.read_text())["packages"]
    sizes = {package["name"]: package["wheels"][0]["size"] / 1e9 for package in packages}
    gpu = sum(
        size for name, size in sizes.items() if name.startswith(("nvidia-", "cuda-")) or name in ("torch", "triton")
    )
    files = [file for name in OWN for file in (ROOT / name).rglob("*") if file.is_file() and file.suffix != ".pyc"]
    print(f"{len(sizes)} packages           {sum(sizes.values()):6.2f} GB")
    print(f"  torch and CUDA       {gpu:6.2f} GB")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"  {name:20} {size:6.2f} GB")
    print(f"Phalanx, uncompressed  {sum(file.stat().st_size for file in files) / 1e9:6.2f} GB")


if __name__ == "__main__":
    main()
