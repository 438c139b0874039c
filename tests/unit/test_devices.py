"""GPUs that torch cannot use, and the interface through which a node reaches the others."""

import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.distributed.launch_env import Launch
from phalanx.run import devices, start
from phalanx.run.devices import stay_near_gpu
from phalanx.telemetry.step_metrics import peak_memory_gb
from tests.helpers.checks import refused
from tests.helpers.configs import train
from tests.helpers.ranks import run_ranks
from tests.helpers.shells import write_tool

TWO_NODES = Launch(rank=0, world_size=4, local_rank=0, local_world_size=2)
ONE_NODE = Launch(rank=0, world_size=2, local_rank=0, local_world_size=2)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs and an old driver."""
    (tmp_path / "bin").mkdir()
    body = 'case $1 in -L) echo "GPU 0: H100"; echo "GPU 1: H100" ;; *) echo 535.104.05; echo 535.104.05 ;; esac'
    write_tool(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


def test_gpus_that_torch_cannot_use_are_an_error(smi: Path) -> None:
    with pytest.raises(ConfigError) as error:
        devices.check_gpus({})
    message = str(error.value)
    assert "cannot use the 2 NVIDIA GPUs" in message and "(driver 535.104.05)" in message
    assert message.endswith('to train on CPUs, set CUDA_VISIBLE_DEVICES=""') and "\n" not in message


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_cpus_on_purpose(smi: Path, hidden: str) -> None:
    devices.check_gpus({"CUDA_VISIBLE_DEVICES": hidden})


def test_no_gpus(smi: Path) -> None:
    write_tool(smi, "nvidia-smi", "echo failed; exit 9")
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs")
    devices.check_gpus({})


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of a T4."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))


NO_BFLOAT16 = "Tesla T4 (compute capability 7.5) does not compute in bfloat16, which needs 8.0; set "


def test_bfloat16_on_a_gpu_without_it(t4: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is refused as soon as it knows its device; float32 is computed there, and bfloat16 on CPUs."""
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with refused(f"model.dtype: {NO_BFLOAT16}model.dtype=float32", ConfigError):
        devices.check_dtype("model.dtype", "bfloat16", gpu)
    devices.check_dtype("model.dtype", "float32", gpu)
    devices.check_dtype("model.dtype", "bfloat16", cpu)
    world = SimpleNamespace(device=gpu, role="", samples=True)
    monkeypatch.setattr(start, "start_world", lambda *_: world)
    with refused(f"model.dtype: {NO_BFLOAT16}model.dtype=float32", ConfigError):
        start.start_job(train("model.dtype=bfloat16"))
    judged = train("model.dtype=float32", "reward.model.path=judge", "reward.functions=[{path: ocr}]")
    with refused(f"reward.model.dtype: {NO_BFLOAT16}reward.model.dtype=float32", ConfigError):
        start.build_rewards(judged, world, (), {})  # type: ignore[arg-type]


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9x")
    with pytest.raises(ConfigError, match=rf"^GLOO_SOCKET_IFNAME=eth9x: {socket.gethostname()} has .*\blo\b"):
        devices.choose_interface(ONE_NODE)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose host name resolves to 127.0.1.1, with two interfaces."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the variable that the function sets is unset after the test
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(devices, "_interface_names", lambda names: {"10.0.0.2": "eth0", "10.1.0.2": "ib0"})
    monkeypatch.setattr(devices, "_address_towards", {"node-a": "10.1.0.2", devices.ANYWHERE: "10.0.0.2"}.get)


def test_the_interface_towards_node_0(debian: None) -> None:
    devices.choose_interface(ONE_NODE)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    devices.choose_interface(TWO_NODES)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_node_0_knows_itself_by_loopback(debian: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_address_towards", {"node-a": "127.0.0.1", devices.ANYWHERE: "10.0.0.2"}.get)
    devices.choose_interface(TWO_NODES)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(devices, "_address_towards", lambda target: "")
    with pytest.raises(ConfigError, match=r"set GLOO_SOCKET_IFNAME to one of eth0, ib0$"):
        devices.choose_interface(TWO_NODES)
    monkeypatch.setattr(devices, "_interface_names", lambda names: {"10.0.0.2": "eth0"})
    devices.choose_interface(TWO_NODES)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_name_that_others_reach_is_left_to_gloo(debian: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.0.2")
    devices.choose_interface(TWO_NODES)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def bound(root: Path) -> tuple[set[int], set[int], bool]:
    """What stay_near_gpu chooses, the CPUs of a thread that was there before, and whether all CPUs were free at first."""
    free, threads = os.sched_getaffinity(0), list[int]()
    began, done = threading.Event(), threading.Event()

    def idle() -> None:
        threads.append(threading.get_native_id())
        began.set()
        done.wait()

    threading.Thread(target=idle).start()
    began.wait()
    chosen = stay_near_gpu("0000:0f:00.0", root)
    seen = os.sched_getaffinity(threads[0])
    assert os.sched_getaffinity(0) == seen
    done.set()
    return chosen, seen, len(free) == os.cpu_count()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems bind no process to CPUs")
@pytest.mark.parametrize("node", ["1", "-1", None])
def test_a_rank_stays_near_its_gpu(node: str | None, tmp_path: Path) -> None:
    """Only where the machine says which CPUs these are, and nobody has bound the process before."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == 1:
        pytest.skip("one CPU is near to everything")
    near, gpu = tmp_path / "devices/system/node/node1", tmp_path / "bus/pci/devices/0000:0f:00.0"
    near.mkdir(parents=True)
    (near / "cpulist").write_text(f"{cpus[0]},4000-4001\n")
    gpu.mkdir(parents=True)
    if node is not None:
        (gpu / "numa_node").write_text(f"{node}\n")
    chosen, seen, unbound = run_ranks(bound, 1, tmp_path, init=False)[0]
    assert (chosen, seen) == (({cpus[0]}, {cpus[0]}) if node == "1" and unbound else (set(), set(cpus)))


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_memory_of_a_process_is_in_the_units_of_its_system(
    platform: str, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3_000_000))
    assert peak_memory_gb(torch.device("cpu")) == pytest.approx(3_000_000 * unit / 1e9)
