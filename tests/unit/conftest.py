"""What the tests of train.sh share."""

import shutil
from pathlib import Path

import pytest

from tests.shells import SHELLS, stub_folder


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest) -> list[str]:
    """Each shell in turn."""
    found = SHELLS[request.param]
    if shutil.which(found[0]) is None:
        pytest.skip(f"{found[0]} is not installed")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """See stub_folder."""
    return stub_folder(tmp_path)
