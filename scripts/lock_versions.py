"""Write the files of constraints, or check that each one has a solution on every version of Python.

    python scripts/lock_versions.py            # the newest versions that work together
    python scripts/lock_versions.py --check    # resolves as `pip install --constraint FILE 'phalanx[EXTRAS]'` would

uv resolves from the metadata of the index, without downloading wheels.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.13", "3.12", "3.11")
# File: the extras that it pins. A solution for them is one for each of them, and for any part of `all`.
LOCKS = {
    "constraints.txt": "all,base,docs,test",
    "constraints-vllm.txt": "all,vllm",
    "constraints-vllm-omni.txt": "all,vllm-omni",
}
# uv prefers the newest versions of other packages, whose combination only an older vLLM allows.
NEWEST = {"constraints-vllm.txt": "vllm==0.32.*\n"}
HEADER = "# Versions for Python 3.11 to 3.13 on Linux with the extras {}. `make lock` writes them anew.\n"


MAC = ("aarch64-apple-darwin", "14.0")  # a platform of uv, and the oldest macOS for which torch has wheels


def resolve(extras: str, python: str, *options: str, platform: str = "linux") -> str:
    """uv's solution, one `name==version` per line. Where there is none, uv says why and this script ends."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--quiet", "--system-certs", "--no-annotate", "--no-header"]
    command += ["--python-version", python, "--python-platform", platform, *options]
    for extra in extras.split(","):
        command += ["--extra", extra]
    env = os.environ | {"MACOSX_DEPLOYMENT_TARGET": MAC[1]}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{Path(sys.argv[0]).name}: no solution for the extras {extras} on Python {python}, {platform}")
    return done.stdout


def write(name: str) -> None:
    """Resolve for each Python, from the newest on; none takes a newer version of a package than those before it."""
    extras = LOCKS[name]
    bounds = NEWEST.get(name, "")
    for python in PYTHONS:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(bounds)
            file.flush()
            versions = resolve(extras, python, "--constraint", file.name)
        # Without what follows a +, the name of a build of torch: the file serves all of its builds.
        versions = re.sub(r"\+\w+$", "", versions, flags=re.MULTILINE)
        bounds = NEWEST.get(name, "") + versions.replace("==", "<=")
    (ROOT / name).write_text(HEADER.format(extras) + versions)


def check(name: str) -> None:
    for python in PYTHONS:
        resolve(LOCKS[name], python, "--constraint", name)
        print(f"{name}: [{LOCKS[name]}] has a solution on Python {python}", flush=True)
        if name == "constraints.txt":
            resolve("all", python, "--constraint", name, "--only-binary", ":all:", platform=MAC[0])
            print(f"{name}: [all] has wheels for macOS {MAC[1]} on Python {python}", flush=True)


def main() -> None:
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    checks = bool(sys.argv[1:])
    for name in LOCKS:
        if not checks:
            write(name)
        check(name)


if __name__ == "__main__":
    main()
