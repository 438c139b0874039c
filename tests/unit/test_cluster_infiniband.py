"""Whether NCCL would use InfiniBand, on machines whose /sys and /dev are folders made here."""

import ctypes.util
from pathlib import Path

import pytest

from phalanx.tools.cluster.infiniband import VERBS, is_there, unused

HERE = "libc.so.6"  # a library that can be opened


def machine(root: Path, *, state: str = "4: ACTIVE\n", verbs: bool = True) -> Path:
    """A machine with one adapter of one port; verbs: its device is there, as it is not in a plain container."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    if verbs:
        (root / "dev/infiniband").mkdir(parents=True)
        (root / "dev/infiniband/uverbs0").touch()
    return root


def test_a_machine_without_it(tmp_path: Path) -> None:
    assert not is_there(tmp_path) and unused(tmp_path, {}, "libnone.so") is None
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)  # the kernel's module without an adapter
    assert not is_there(tmp_path) and unused(tmp_path, {}, "libnone.so") is None


def test_one_that_is_used(tmp_path: Path) -> None:
    assert is_there(machine(tmp_path)) and unused(tmp_path, {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}, HERE) is None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1; unset it"),
        ({"NCCL_NET": "Socket"}, "NCCL_NET=Socket; unset it"),
        ({"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "ofi"}, None),
    ],
)
def test_variables(env: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    assert unused(machine(tmp_path), env, HERE) == expected


def test_an_image_without_the_library(tmp_path: Path) -> None:
    """The devices are there, in /sys or in /dev alone, but nothing can open them."""
    message = (
        "libnone.so cannot be opened; install libibverbs1 and ibverbs-providers, in the image if this is a container"
    )
    assert unused(machine(tmp_path / "a"), {}, "libnone.so") == message
    (tmp_path / "b/dev/infiniband").mkdir(parents=True)
    (tmp_path / "b/dev/infiniband/uverbs0").touch()
    assert unused(tmp_path / "b", {}, "libnone.so") == message
    assert VERBS == "libibverbs.so.1"
    if ctypes.util.find_library("ibverbs") is None:
        assert "libibverbs.so.1 cannot be opened" in str(unused(machine(tmp_path / "c"), {}))


def test_a_container_without_the_device(tmp_path: Path) -> None:
    message = "/dev/infiniband has no uverbs*; start the container with --device=/dev/infiniband"
    assert unused(machine(tmp_path, verbs=False), {}, HERE) == message


def test_a_port_that_is_down(tmp_path: Path) -> None:
    assert unused(machine(tmp_path, state="1: DOWN\n"), {}, HERE) == "no port is active; look at ibstat"


def test_the_image_has_it() -> None:
    text = Path("docker/Dockerfile.cuda").read_text()
    for needed in (
        "libibverbs1",
        "ibverbs-providers",
        "--network=host",
        "--ulimit memlock=-1",
        "--device=/dev/infiniband",
    ):
        assert needed in text, needed
