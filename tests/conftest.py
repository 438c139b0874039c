"""Settings of every test process, what `make test` leaves to `make test-all`, and the tiny models that tests share."""

import hashlib
import os
import shutil

# One thread: forked ranks inherit no OpenMP pool, and sums have one order. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan, tiny_z_image
from tests.tiny_edit import tiny_qwen_image_edit

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `full` the cases that their test's mark `quick` does not name."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is None:
            continue
        test, _, case = item.nodeid.partition("[")
        unknown.setdefault(test, set(mark.args)).discard(case.removesuffix("]"))
        if case.removesuffix("]") not in mark.args:
            item.add_marker(pytest.mark.full)
    wrong = [f"{test}: no case is called {name!r}" for test, names in unknown.items() for name in sorted(names)]
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("quick: " + "; ".join(wrong))


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny StableDiffusion3Pipeline without T5; read only."""
    return tiny_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="session")
def sd3_t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny StableDiffusion3Pipeline with T5; read only."""
    return tiny_sd3(tmp_path_factory.mktemp("models") / "sd3_t5", t5=True)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny QwenImagePipeline; read only."""
    return tiny_qwen_image(tmp_path_factory.mktemp("models") / "qwen_image")


@pytest.fixture(scope="session")
def flux_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxPipeline with an embedded guidance; read only."""
    return tiny_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="session")
def judge_model(pytestconfig: pytest.Config) -> Path:
    """The tiny judge, taught once a machine: pytest's cache keeps it as long as tiny_vlm.py and the questions stay the
    same; read only.
    """
    from tests import tiny_vlm

    sources = (Path(tiny_vlm.__file__).read_text(), *tiny_vlm.QUESTIONS)
    digest = hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
    folder = Path(pytestconfig.cache.mkdir("tiny_vlm")) / digest
    if not folder.is_dir():
        made = folder.with_suffix(f".{os.getpid()}")
        tiny_vlm.build(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(made)  # another run of pytest was first
    return folder


@pytest.fixture(scope="session")
def z_image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ZImagePipeline; read only."""
    return tiny_z_image(tmp_path_factory.mktemp("models") / "z_image")


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny WanPipeline of text to video; read only."""
    return tiny_wan(tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="session")
def qwen_edit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny QwenImageEditPlusPipeline; read only."""
    return tiny_qwen_image_edit(tmp_path_factory.mktemp("models") / "qwen_image_edit")
