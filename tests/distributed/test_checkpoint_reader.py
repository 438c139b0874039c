"""A checkpoint is only data: a pickle that would run code is refused, and does not run it."""

import builtins
import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.config.trust import Use
from phalanx.distributed.mesh import World
from phalanx.run.checkpoint import Checkpointer, Progress
from phalanx.run.checkpoint_folder import complete, find
from phalanx.run.checkpoint_reader import Reader
from phalanx.tools.opening import open_checkpoint
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import RankError, run_ranks


class Payload:
    """Unpickling it creates a file and returns the metadata that it replaces."""

    def __init__(self, true: bytes, mark: Path) -> None:
        self.code = f"(open({str(mark)!r}, 'w').close(), __import__('pickle').loads({true!r}))[1]"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return builtins.eval, (self.code,)


def replace_metadata(checkpoint: Path, content: bytes) -> None:
    """Write another `.metadata`, with its size and checksum in meta.json."""
    (checkpoint / ".metadata").write_bytes(content)
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][".metadata"] = [len(content), zlib.crc32(content)]
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    assert complete(checkpoint) is None


@pytest.mark.full
def test_a_payload_that_returns_the_true_metadata(sd3_folder: Path, tmp_path: Path) -> None:
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=1")
    cfg = tiny_config(sd3_folder, tmp_path, *steps)
    run_ranks(fit, 1, cfg)
    newest = find(tmp_path / "out" / "checkpoints")
    assert newest is not None and newest.name == "step_000002"
    mark = tmp_path / "it_ran"
    true = (newest / ".metadata").read_bytes()
    pickle.loads(pickle.dumps(Payload(true, mark)))
    assert mark.exists()
    mark.unlink()
    replace_metadata(newest, pickle.dumps(Payload(true, mark)))

    said = ".metadata is damaged, or not a checkpoint's: it names builtins.eval, which no checkpoint contains"
    with pytest.raises(RankError, match=said):
        run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path / "other", *steps, f"trainer.resume={newest}"))
    with pytest.raises(ValueError, match=said):
        open_checkpoint(str(newest), "auto", Use())
    run_ranks(fit, 1, cfg)  # goes on from step 1, whose checkpoint is whole
    assert not mark.exists()


PROGRESS = {
    "step": 1,
    "samples_seen": 2,
    "updates": 3,
    "unfinished": None,
    "updates_beside": {"a": 1},
    "logger_ids": {"wandb": "abc"},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": -1},
        {"step": "1"},
        {"step": 10**30},
        {"step": 1.0},
        {"updates": -1},
        {"wandb_id": [1]},
        {"logger_ids": {"wandb": None}},
        {"logger_ids": ["wandb"]},
        {"unfinished": [1]},
        {"unfinished": {"reward/mean": None}},
        {"rescoring": "no"},
        {"updates_beside": {"a": -1}},
    ],
)
def test_counts_that_no_run_has(wrong: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    for progress, problem in ((PROGRESS, None), (PROGRESS | wrong, "meta.json is damaged, or of another program")):
        meta = {"files": {"a": [1, 0]}, "signature": {}, "progress": progress}
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        assert complete(tmp_path) == problem


WITH_A_LIST = json.dumps({"files": {}, "signature": [], "progress": PROGRESS})


@pytest.mark.parametrize("text", ["[" * 10**5, "[1]", '{"files": {"../a": [1, 0]}}', WITH_A_LIST])
def test_a_meta_json_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(text)
    assert complete(tmp_path) == "meta.json is damaged, or of another program"


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps([1, 2]), b"\x80\x04cos\nsystem\n."])
def test_other_bytes(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is damaged, or not a checkpoint's: "):
        Reader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [b"", b"garbage" * 99, pickle.dumps(print, protocol=2) * 99])
def test_files_that_hold_no_tensors(content: bytes, tmp_path: Path, world: World) -> None:
    """The message leaves out torch's advice to load the file unsafely."""
    checkpoints = Checkpointer(tmp_path, world, {}, 1)
    state = {"a": torch.ones(3)}
    checkpoints.save(state, Progress())
    checkpoints.wait()
    folder = tmp_path / "checkpoints" / "step_000000"
    (folder / "__0_0.distcp").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"a file is damaged, or contains no tensors|goes on behind its tensors"
    ) as error:
        checkpoints.load(folder, state)
    assert "weights_only" not in str(error.value) and "\n" not in str(error.value)


class ByGetattr(pickle.Pickler):
    """Pickles the members of enums as Python 3.11.2 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, _MEM_FORMAT_ENCODING) else NotImplemented


def test_metadata_of_an_early_python_3_11(tmp_path: Path) -> None:
    size = torch.Size([2])
    tensor = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0]), size)])
    stream = io.BytesIO()
    (tmp_path / "__0_0.distcp").write_bytes(bytes(9))
    place = {MetadataIndex("weight", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 9)}
    ByGetattr(stream).dump(Metadata({"weight": tensor}, storage_data=place))
    assert b"getattr" in stream.getvalue()
    (tmp_path / ".metadata").write_bytes(stream.getvalue())
    assert Reader(tmp_path).read_metadata().state_dict_metadata == {"weight": tensor}
    (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.")
    with pytest.raises(ValueError, match="it calls getattr on an object that is not a memory format"):
        Reader(tmp_path).read_metadata()


def test_only_tensors_of_the_folder_itself(sd3_folder: Path, tmp_path: Path) -> None:
    """torch would unpickle any other entry, and open any file that an entry names."""
    run_ranks(fit, 1, tiny_config(sd3_folder, tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1"))
    folder = find(tmp_path / "out" / "checkpoints")
    assert folder is not None
    metadata = FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"'\.\./elsewhere' is not a file of this folder"):
        Reader(folder).read_metadata()
    metadata.state_dict_metadata["more"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="BytesStorageMetadata, which no checkpoint contains"):
        Reader(folder).read_metadata()
