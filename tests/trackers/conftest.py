"""The trackers' libraries are imported once, here, without a network: the ranks, which are forks of this process, find
them there.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

# read as the libraries are imported
FOLDER = tempfile.TemporaryDirectory(prefix="phalanx_trackers_")
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "DO_NOT_TRACK": "true",
    "TRACKIO_DIR": f"{FOLDER.name}/trackio",
    "SWANLAB_MODE": "offline",
    "SWANLAB_SAVE_DIR": f"{FOLDER.name}/swanlab",
    "HF_HUB_OFFLINE": "1",
}
ELSEWHERE = ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "SWANLAB_API_KEY")
os.environ.update(SETTINGS)
for name in ELSEWHERE:
    os.environ.pop(name, None)

for name in ("mlflow", "mlflow.store.tracking.sqlalchemy_store", "swanlab", "trackio"):
    import_module(name)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for another machine fails, in the ranks of a test as well."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: object) -> None:
        assert self.family == socket.AF_UNIX or str(address).startswith(("('127.", "('::1")), address
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture
def trackio_folder() -> Iterator[Path]:
    """Where Trackio keeps what it is told."""
    yield Path(os.environ["TRACKIO_DIR"])
