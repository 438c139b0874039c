"""InfiniBand and RoCE as NCCL sees them. Where it cannot use them, it sends by TCP without a word."""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

VERBS = "libibverbs.so.1"  # NCCL opens it at run time


def is_there(root: Path = Path("/")) -> bool:
    """Whether this machine has InfiniBand or RoCE devices, below the `root` of its file system."""
    return any(any(root.glob(f"{place}/*")) for place in ("sys/class/infiniband", "dev/infiniband"))


def unused(root: Path = Path("/"), env: Mapping[str, str] = os.environ, verbs: str = VERBS) -> str | None:
    """Why NCCL would not use the devices of this machine, and what helps; None if it would, or if there are none.

    verbs: the library to open.
    """
    if not is_there(root) or "NCCL_NET_PLUGIN" in env:  # such as the one for EFA, which brings its own transport
        return None
    if env.get("NCCL_IB_DISABLE", "0") != "0":
        return f"NCCL_IB_DISABLE={env['NCCL_IB_DISABLE']}; unset it"
    if env.get("NCCL_NET", "").lower() == "socket":
        return f"NCCL_NET={env['NCCL_NET']}; unset it"
    try:
        ctypes.CDLL(verbs)
    except OSError:
        return (
            f"{verbs} cannot be opened; install libibverbs1 and ibverbs-providers, in the image if this is a container"
        )
    if not any(root.glob("dev/infiniband/uverbs*")):
        return "/dev/infiniband has no uverbs*; start the container with --device=/dev/infiniband"
    states = [file.read_text() for file in root.glob("sys/class/infiniband/*/ports/*/state")]
    if states and not any("ACTIVE" in state for state in states):
        return "no port is active; look at ibstat"
    return None
