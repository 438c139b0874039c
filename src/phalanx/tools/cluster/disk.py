"""A test that all nodes write to the same folder: each writes a mark and looks for the marks of others."""

import shutil
import time
from pathlib import Path

PATIENCE_S = 10.0  # a network file system may show the files of another node some seconds later


class SharedFolder:
    """A node's mark in `output_dir`; `token` is the same on all nodes and differs between checks."""

    def __init__(self, output_dir: Path, token: str, node: int) -> None:
        self.folder = output_dir / f".check_cluster_{token}"
        self.node = node
        self._made: list[Path] = []

    def write(self) -> None:
        """Write this node's mark; raises OSError."""
        self._made = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mark_file(self.node).write_text(self.folder.name)

    def missing(self, nodes: list[int], patience_s: float) -> list[int]:
        """Those of `nodes` whose marks are still not visible here after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            list(self.folder.iterdir())  # makes a network file system refresh its cache
            unseen = [node for node in nodes if not self._is_seen(node)]
            if not unseen or time.monotonic() > deadline:
                return unseen
            time.sleep(0.2)

    def remove(self) -> None:
        """Remove the marks, and the folders that this node created for them."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in self._made:
            try:
                folder.rmdir()
            except FileNotFoundError:  # another node has removed it
                continue
            except OSError:  # the folder is no longer empty
                return

    def _mark_file(self, node: int) -> Path:
        return self.folder / f"node_{node}"

    def _is_seen(self, node: int) -> bool:
        try:
            return self._mark_file(node).read_text() == self.folder.name
        except FileNotFoundError:
            return False
