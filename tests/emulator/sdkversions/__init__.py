"""Clients from PyPI, each release installed into a folder of its own for a test."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SCENARIO = HERE / "scenario.py"
PROTON = "0.40.0"
PROTON_SCENARIO = HERE / "proton_scenario.py"
INSTALL_SECONDS = 300


def proton() -> Path:
    """Return the folder with Apache's qpid-proton, a client in C, to put first on PYTHONPATH."""
    return _kept(f"proton-{PROTON}", [f"python-qpid-proton=={PROTON}"])


def installed(version: str) -> Path:
    """Return the folder with this release of azure-servicebus, to put first on PYTHONPATH.

    Its dependencies are those of the current environment.
    """
    return _kept(version, ["--no-deps", f"azure-servicebus=={version}"])


def _kept(name: str, arguments: list[str]) -> Path:
    """Return the folder of that name, with what pip installs for these arguments.

    It is downloaded once and kept. Raises RuntimeError with the end of pip's output.
    """
    folder = HERE / ".installed" / name
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.parent / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            _install(arguments, partial)
            partial.rename(folder)
    return folder


def _install(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [*(sys.executable, "-m", "pip", "install", "--quiet"), "--target", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments[-1]} cannot be installed: {done.stderr[-500:]}")
