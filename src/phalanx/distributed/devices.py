"""Checks of a rank's surroundings before it joins the world: its GPUs, and the interface to other nodes."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from phalanx.config import ConfigError
from phalanx.distributed.launch import Launch

SIOCGIFADDR = 0x8915  # of Linux's ioctl
ANYWHERE = "192.0.2.1"  # an address of documentation; a UDP socket that is connected to it sends nothing


def check_gpus(env: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where the machine has NVIDIA GPUs that torch cannot use: training would run on the CPU."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if hidden or torch.cuda.is_available():
        return
    listed = sum(line.startswith("GPU") for line in _nvidia_smi("-L"))
    count = listed or len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count == 0:
        return
    driver = next(iter(_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), "unknown")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise ConfigError(
        f"torch {torch.__version__}, built {built}, cannot use the {count} NVIDIA GPUs of {socket.gethostname()} "
        f"(driver {driver}); install a newer driver (580 or newer for CUDA 13), or the torch for the CUDA of this "
        'driver, from https://pytorch.org/get-started; to train on CPUs, set CUDA_VISIBLE_DEVICES=""'
    )


def _nvidia_smi(*options: str) -> list[str]:
    """The lines that nvidia-smi prints; none where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def choose_interface(launch: Launch) -> None:
    """Let gloo connect to other nodes by the interface towards MASTER_ADDR where GLOO_SOCKET_IFNAME is not set.

    Gloo would take the address of the node's own name, which Debian's /etc/hosts maps to 127.0.1.1. Raises ConfigError
    where GLOO_SOCKET_IFNAME names an interface that this node does not have, or where no interface can be chosen.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in present:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has {', '.join(present)}")
    if launch.world_size == launch.local_world_size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    by_address = _interfaces(present)
    if _resolved(socket.gethostname()) in by_address:
        return  # gloo takes this interface by itself
    if not by_address:
        raise ConfigError(f"{socket.gethostname()} has no interface but lo: no other node can reach it")
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, ANYWHERE):  # node 0 may know itself by 127.0.1.1 as well
        chosen = by_address.get(_address_towards(target))
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen
            return
    if len(by_address) > 1:
        host = socket.gethostname()
        raise ConfigError(
            f"{host}: this node's name stands for {_resolved(host) or 'no address'}, which no other node reaches; "
            f"set GLOO_SOCKET_IFNAME to one of {', '.join(by_address.values())}"
        )
    [os.environ["GLOO_SOCKET_IFNAME"]] = by_address.values()


def _resolved(name: str) -> str:
    """The IPv4 address of a name; empty where it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interfaces(names: list[str]) -> dict[str, str]:
    """The interfaces that have an IPv4 address which is not of the loopback, by this address."""
    by_address = {}
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                by_address[address] = name
    return by_address


def _address_towards(target: str) -> str:
    """This node's address on the way to `target`; empty where there is no way."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
        return address
