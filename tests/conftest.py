"""Settings of every test process, the selection of `make test` and `make test-all`, and tiny models shared by tests."""

import hashlib
import os
import random
import shutil
import time

# One thread, because forked ranks inherit no OpenMP pool, and so that sums have a fixed order. Set before torch is
# imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Equal bits are promised in the mode that phalanx chooses; see phalanx.make_products_exact.
os.environ.pop("MKL_CBWR", None)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.distributed.mesh import World
from phalanx.models import trained
from phalanx.run import start
from tests.helpers.llada2 import tiny_llada2
from tests.helpers.lm import tiny_blocks, tiny_lm
from tests.helpers.policies import one_rank
from tests.helpers.tiny import tiny_flux, tiny_qwen_image, tiny_sd3, tiny_wan, tiny_z_image
from tests.helpers.tiny_edit import tiny_qwen_image_edit
from tests.helpers.tiny_flux2 import tiny_flux2, tiny_flux2_klein
from tests.helpers.tiny_hunyuan import tiny_hunyuan_video_15
from tests.helpers.tiny_i2v import tiny_wan_a14b, tiny_wan_i2v
from tests.helpers.tiny_ltx2 import tiny_ltx2
from tests.helpers.tiny_qwen_image_21 import tiny_qwen_image_21
from tests.helpers.tiny_vision import tiny_vision

torch.set_num_threads(1)
if "LINEAR" in os.environ:  # the library that another processor would prefer; see `make test-instruction-sets`
    trained.preferred = start.preferred = lambda: os.environ["LINEAR"]


@pytest.hookimpl(tryfirst=True)  # before the selection by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as `full` if their test's mark `quick` does not name them, and as `long` if its mark `seldom` does."""
    unknown: dict[tuple[str, str], set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        case = case.removesuffix("]")
        for name, other in (("quick", "full"), ("seldom", "long")):
            mark, *others = [*item.iter_markers(name), None]
            if mark is None:
                continue
            if any(others):
                raise pytest.UsageError(f"{test} has two marks `{name}`, of which one would count")
            unknown.setdefault((name, test), set(mark.args)).discard(case)
            if (case in mark.args) == (name == "seldom"):
                item.add_marker(other)
    wrong = [f"{name}: {test}: no case is called {case!r}" for (name, test), cases in unknown.items() for case in cases]
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("; ".join(sorted(wrong)))
    if "TESTS_ORDER" in os.environ:
        files = sorted({item.path for item in items})
        random.Random(os.environ["TESTS_ORDER"]).shuffle(files)
        places = {path: place for place, path in enumerate(files)}
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Leave out what `.ci/run` has no time for on a slow machine; its tests come in another order with each commit."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("CI has no time left on this machine; `make test-rest` takes all of these tests")


def model_folder(make: Callable[..., Path], name: str, **options: Any) -> Any:
    """A fixture that returns the folder of a tiny model, which is made once per session and read-only."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make(tmp_path_factory.mktemp("models") / name, **options)

    return folder


sd3_folder = model_folder(tiny_sd3, "sd3")
sd3_t5_folder = model_folder(tiny_sd3, "sd3_t5", t5=True)
qwen_folder = model_folder(tiny_qwen_image, "qwen_image")
qwen_edit_folder = model_folder(tiny_qwen_image_edit, "qwen_image_edit")
qwen_21_folder = model_folder(tiny_qwen_image_21, "qwen_image_21")
flux_folder = model_folder(tiny_flux, "flux")
flux_kontext_folder = model_folder(tiny_flux, "flux_kontext", kontext=True)
flux2_folder = model_folder(tiny_flux2, "flux2")
flux2_klein_folder = model_folder(tiny_flux2_klein, "flux2_klein")
z_image_folder = model_folder(tiny_z_image, "z_image")
wan_folder = model_folder(tiny_wan, "wan")
hunyuan_folder = model_folder(tiny_hunyuan_video_15, "hunyuan_video_15")
a14b_folder = model_folder(tiny_wan_a14b, "a14b")
i2v_folder = model_folder(tiny_wan_i2v, "i2v", sees=False, two=True)
ltx2_folder = model_folder(tiny_ltx2, "ltx2")
hunyuan_i2v_folder = model_folder(tiny_hunyuan_video_15, "hunyuan_video_15_i2v", images=True)
lm_folder = model_folder(tiny_lm, "lm")
blocks_folder = model_folder(tiny_blocks, "blocks")
llada2_folder = model_folder(tiny_llada2, "llada2")
vision_folder = model_folder(tiny_vision, "vision", family="qwen2_5_vl")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed all generators, so that a test's unseeded draws do not depend on earlier tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `datasets` keep its copies of Parquet files in the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def world() -> Iterator[World]:
    """A world of only this process."""
    with one_rank() as world:
        yield world


@pytest.fixture(scope="session")
def judge_model(pytestconfig: pytest.Config) -> Path:
    """The tiny judge, read-only. It is taught once per machine: pytest's cache keeps it until tiny_vlm.py or the
    questions change.
    """
    from tests.helpers import tiny_vlm

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
