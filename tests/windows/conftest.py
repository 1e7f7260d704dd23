"""A Windows Python under Wine for the tests of this folder: see `tests/winepython.py`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from winepython import NEEDED, ROOT, Windows, pip, run_wine, unpacked, windows_path

APPS = Path(__file__).parent / "apps"


@pytest.fixture(scope="session")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windows]:
    """A Windows Python that imports this checkout."""
    if shutil.which("wine") is None:
        pytest.fail("Wine is not installed: apt-get install wine wine64", pytrace=False)
    folder = tmp_path_factory.mktemp("windows")
    python = unpacked(folder)
    site = folder / "site"
    platform = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary=:all:")
    pip("install", "--target", str(site), *platform, *NEEDED)
    paths = ["python313.zip", ".", *map(windows_path, (site, ROOT)), "import site", ""]
    (python.parent / "python313._pth").write_text("\r\n".join(paths))
    made = Windows(python, folder / "wine")
    run_wine(made, "wineboot", "--init")
    try:
        yield made
    finally:
        run_wine(made, "wineserver", "--kill")
        for pid in made.processes(""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with an app; its queue file is in it."""
    shutil.copy(APPS / "shop.py", tmp_path)
    shutil.copy(APPS / "killing.py", tmp_path)
    return tmp_path
