"""Releases of azure-servicebus, each installed into a folder of its own for a test."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCENARIO = HERE / "scenario.py"
INSTALL_SECONDS = 300


def installed(version: str) -> Path:
    """Return the folder with this release, to put first on PYTHONPATH.

    Its dependencies are those of the current environment.

    It is downloaded once and kept. Raises RuntimeError with the end of pip's output.
    """
    folder = HERE / ".installed" / version
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.parent / f"{version}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _install(version, partial)
            partial.rename(folder)
    return folder


def _install(version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(folder), f"azure-servicebus=={version}"],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"azure-servicebus {version} cannot be installed: {done.stderr[-500:]}")
