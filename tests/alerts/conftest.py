"""Prometheus and promtool, from Debian's package, unpacked without being installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("AZTASK_PROGRAMS", Path(__file__).parent / ".programs"))


@pytest.fixture(scope="session")
def programs() -> Path:
    """A directory with ``prometheus`` and ``promtool``."""
    found = shutil.which("promtool")
    if found and shutil.which("prometheus"):
        return Path(found).parent
    folder = CACHE / "prometheus"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "usr/bin/promtool").exists():
            _unpack(folder)
    return folder / "usr/bin"


def _unpack(folder: Path) -> None:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            pytest.skip(f"neither prometheus nor {program} is installed")
    download = CACHE / "download"
    download.mkdir(exist_ok=True)
    subprocess.run(
        ["apt-get", "download", "prometheus"],
        cwd=download,
        check=True,
        capture_output=True,
        timeout=300,
    )
    (package,) = download.glob("prometheus_*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, timeout=120)
    shutil.rmtree(download)
