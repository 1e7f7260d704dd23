"""The source distribution of the SDK, downloaded by pip and unpacked once."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from tests.unpacking import unpack

VERSION = "7.15.0"
CACHE = Path(__file__).parent / ".downloaded"
PROJECT = CACHE / f"azure_servicebus-{VERSION}"


def unpacked() -> Path:
    """The folder with the SDK's ``tests``. Raises CalledProcessError when pip cannot download."""
    if not (PROJECT / "tests").is_dir():
        CACHE.mkdir(exist_ok=True)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", "azure-servicebus", "--dest", str(CACHE)),
                f"azure-servicebus=={VERSION}",
            ],
            check=True,
        )
        with tarfile.open(CACHE / f"{PROJECT.name}.tar.gz") as archive:
            unpack(archive, CACHE)
    return PROJECT
