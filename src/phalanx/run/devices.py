"""Checks of a rank's machine before the rank joins the world: its GPUs and its network interface to other nodes."""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from phalanx.config.messages import ConfigError
from phalanx.distributed.launch_env import Launch

# The ioctl for an interface's address. Both systems have the four bytes of the address in the same place of the answer.
SIOCGIFADDR = 0xC0206921 if sys.platform == "darwin" else 0x8915
ANYWHERE = "192.0.2.1"  # an address reserved for documentation; connecting a UDP socket to it sends nothing


def check_gpus(env: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the machine has NVIDIA GPUs that torch cannot use, since training would run on the CPU."""
    hidden = env.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if hidden or torch.cuda.is_available():
        return
    listed = sum(line.startswith("GPU") for line in nvidia_smi("-L"))
    count = listed or len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count == 0:
        return
    driver = next(iter(nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")), "unknown")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    raise ConfigError(
        f"torch {torch.__version__}, built {built}, cannot use the {count} NVIDIA GPUs of {socket.gethostname()} "
        f"(driver {driver}); install a newer driver (580 or newer for CUDA 13), or the torch for the CUDA of this "
        'driver, from https://pytorch.org/get-started; to train on CPUs, set CUDA_VISIBLE_DEVICES=""'
    )


def check_dtype(key: str, dtype: str, device: torch.device) -> None:
    """Raise ConfigError if a model is to compute in bfloat16 on a GPU that would only emulate it, slowly."""
    if dtype != "bfloat16" or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    raise ConfigError(
        f"{key}: {name} (compute capability {major}.{minor}) does not compute in bfloat16, which needs 8.0; "
        f"set {key}=float32"
    )


def stay_near_gpu(address: str, root: Path = Path("/sys")) -> set[int]:
    """Keep this process on the CPUs of its GPU's NUMA node: pinned memory on another one halves the speed of copies.

    address: of the GPU on the PCI bus, such as 0000:0f:00.0. A process that somebody has bound to some of the machine's
    CPUs is left alone, as in a container with a set of CPUs. Returns the CPUs chosen, empty if none were.
    """
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()
    if len(allowed) < (os.cpu_count() or 0):
        return set()
    try:
        node = int((root / f"bus/pci/devices/{address}/numa_node").read_text())
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):  # a virtual machine may hide them; the node is -1 on a machine with only one
        return set()
    near = set[int]()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        near |= set(range(int(first), int(last or first) + 1)) & allowed
    if not near or near == allowed:
        return set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread.name), near)
    return near


def gpu_address(number: int) -> str:
    """The address of a visible GPU on the PCI bus."""
    of_gpu: Any = torch.cuda.get_device_properties(number)
    return f"{of_gpu.pci_domain_id:04x}:{of_gpu.pci_bus_id:02x}:{of_gpu.pci_device_id:02x}.0"


def nvidia_smi(*options: str) -> list[str]:
    """The lines that nvidia-smi prints; none if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def choose_interface(launch: Launch) -> None:
    """Make gloo connect to other nodes through the interface towards MASTER_ADDR, unless GLOO_SOCKET_IFNAME is set.

    By default, gloo uses the address of the host's name, which Debian's /etc/hosts maps to 127.0.1.1. Raises
    ConfigError if GLOO_SOCKET_IFNAME names an interface that this node does not have, or if none can be chosen.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in present:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={name}: {socket.gethostname()} has {', '.join(present)}")
    if launch.world_size == launch.local_world_size or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    by_address = _interface_names(present)
    if _host_ipv4(socket.gethostname()) in by_address:
        return  # gloo uses this interface by default
    if not by_address:
        raise ConfigError(f"{socket.gethostname()} has no interface but lo: no other node can reach it")
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, ANYWHERE):  # on node 0, MASTER_ADDR may resolve to 127.0.1.1 as well
        chosen = by_address.get(_address_towards(target))
        if chosen is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen
            return
    if len(by_address) > 1:
        host = socket.gethostname()
        raise ConfigError(
            f"{host}: this node's name resolves to {_host_ipv4(host) or 'no address'}, which other nodes cannot reach; "
            f"set GLOO_SOCKET_IFNAME to one of {', '.join(by_address.values())}"
        )
    [os.environ["GLOO_SOCKET_IFNAME"]] = by_address.values()


def _host_ipv4(name: str) -> str:
    """The IPv4 address of a name; empty if it has none."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _interface_names(names: list[str]) -> dict[str, str]:
    """Map the IPv4 addresses of interfaces, except loopback addresses, to the interfaces' names."""
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
    """This node's source address for packets to `target`; empty if there is no route."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
        return address
