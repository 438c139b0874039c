"""The tiny judge, taught once a machine: pytest's cache keeps it as long as the file that makes it stays the same."""

import hashlib
import os
from pathlib import Path

import pytest

from tests.vllm import tiny_vlm


@pytest.fixture(scope="session")
def judge_model(pytestconfig: pytest.Config) -> Path:
    """A model folder; see tiny_vlm."""
    digest = hashlib.sha256(Path(tiny_vlm.__file__).read_bytes()).hexdigest()[:16]
    folder = Path(pytestconfig.cache.mkdir("tiny_vlm")) / digest
    if not folder.is_dir():
        made = folder.with_suffix(f".{os.getpid()}")
        tiny_vlm.build(made)
        made.rename(folder)
    return folder
