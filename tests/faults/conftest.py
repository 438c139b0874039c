"""Two hosts on one machine: two network namespaces, joined by a veth pair, with the names that Debian would give them."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Job

ADDRESSES = "10.78.0.1", "10.78.0.2"
NAMES = "node-a", "node-b"
RENAME = 'hostname "$0" && exec "$@"'


class Hosts:
    """Two hosts, of these ADDRESSES and NAMES, on which jobs can be started; `link` cuts and mends the wire.

    As on Debian, a host's own name stands for 127.0.1.1 there, and no variable names the interface to the other one.
    """

    def __init__(self, name: str) -> None:
        self.names = [f"{name}a", f"{name}b"]
        self.interfaces = [f"v{name}a", f"v{name}b"]  # at most 15 characters
        for host in self.names:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        a, b = self.interfaces
        ip("link", "add", a, "netns", self.names[0], "type", "veth", "peer", "name", b, "netns", self.names[1])
        for i, (host, interface) in enumerate(zip(self.names, self.interfaces, strict=True)):
            ip("-n", host, "addr", "add", f"{ADDRESSES[i]}/24", "dev", interface)
            ip("-n", host, "link", "set", interface, "up")
            folder = Path("/etc/netns", host)  # `ip netns exec` mounts what is in it over /etc
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n127.0.1.1 {NAMES[i]}\n{ADDRESSES[1 - i]} {NAMES[1 - i]}\n"
            (folder / "hosts").write_text(names)

    def job(self, host: int, model: Path, folder: Path, *overrides: str, **env: str) -> Job:
        """Start node `host` of a job of two nodes."""
        place = {"NODE_RANK": str(host), "MASTER_ADDR": ADDRESSES[0]}
        return Job(
            model,
            folder,
            *overrides,
            env={"NNODES": "2", **place, **env},
            prefix=["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", RENAME, NAMES[host]],
            name=f"node_{host}",
        )

    def link(self, up: bool) -> None:
        ip("-n", self.names[0], "link", "set", self.interfaces[0], "up" if up else "down")

    def close(self) -> None:
        for host in self.names:
            subprocess.run(["ip", "netns", "del", host], check=False)
            shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def no_namespaces() -> str | None:
    """Why this machine cannot make network namespaces; None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
        if shutil.which(command) is None:
            return f"network namespaces need the command {command} (of the package {package})"
    probe = f"probe{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = no_namespaces()
    if reason is not None:
        pytest.skip(reason)
    made = Hosts(f"ph{uuid.uuid4().hex[:6]}")
    yield made
    made.close()
