"""The source distributions of Celery and Kombu, downloaded by pip; the tests are unpacked once."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.unpacking import unpack

CACHE = Path(__file__).parent / ".downloaded"


def tests_of(project: str) -> Path:
    """The folder that holds the tests of `project` as ``t``, in the version that is installed here.

    Raises CalledProcessError if pip cannot download it.
    """
    version = importlib.metadata.version(project)
    folder = CACHE / f"{project}-{version}"
    if not (folder / "t" / "integration").is_dir():
        CACHE.mkdir(exist_ok=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", project, "--dest", str(CACHE), f"{project}=={version}"),
            ],
            check=True,
        )
        with tarfile.open(CACHE / f"{folder.name}.tar.gz") as archive:
            unpack(archive, CACHE, _tests(archive, folder.name))
    return folder


def _tests(archive: tarfile.TarFile, name: str) -> Iterator[tarfile.TarInfo]:
    """Only the tests: the packages themselves are the installed ones."""
    wanted = (f"{name}/t/__init__", f"{name}/t/integration/", f"{name}/t/canvas_helpers")
    for member in archive.getmembers():
        if member.name.startswith(wanted):
            yield member
