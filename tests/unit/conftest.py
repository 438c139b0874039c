"""Fixtures that unit tests share: of train.sh, and of plans."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.shells import SHELLS, stub_folder


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    """Each shell in turn."""
    command = SHELLS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """See stub_folder."""
    return stub_folder(tmp_path)


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[[Path], Path]:
    """Makes copies of model folders that hold nothing but configurations."""

    def copy(source: Path) -> Path:
        names = {"model_index.json", "config.json", "scheduler_config.json", "guider_config.json"}

        def others(_: str, found: list[str]) -> list[str]:
            return [name for name in found if "." in name and name not in names]

        return Path(shutil.copytree(source, tmp_path / source.name, ignore=others, dirs_exist_ok=True))

    return copy
