"""Where a Python runs: this machine, or a Debian in a folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .checks import Python

ROOT = Path(__file__).parents[2]
SOURCE = "/aztask"
WHEELS = "/wheels"
ISOLATED = ("unshare", "--mount", "--propagation", "private")
SECONDS = 3600.0
OURS = re.compile("AZTASK_|PYTHONPATH$")
PASSED_ON = re.compile(r"(?i)(https?|no)_proxy|.*_CA_BUNDLE|SSL_CERT_FILE")


class NotHere(Exception):
    """This Python cannot be tried on this machine; the text says why, and what to install."""


class Place(ABC):
    """A virtual environment of one Python, and the folders that its commands know."""

    source: str
    wheels: str
    environment: Path
    folder: str
    """Where commands run: in the source tree, unless it is set."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the virtual environment anew. Raises NotHere."""

    @abstractmethod
    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` here, in `folder`."""

    def run(self, *words: str) -> int:
        """Run a program of the virtual environment; returns its exit code."""
        return subprocess.run(self._program(words), check=False).returncode

    def output(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the virtual environment without variables for Python and aztask."""
        clean = {name: text for name, text in os.environ.items() if not OURS.match(name)}
        command = self._program(words)
        return subprocess.run(command, env=clean, text=True, capture_output=True, check=False)

    def _program(self, words: Sequence[str]) -> list[str]:
        return self.command([str(self.environment / "bin" / words[0]), *words[1:]])


class OnMachine(Place):
    """A Python of this machine."""

    def __init__(self, python: Python, work: Path, wheels: Path) -> None:
        self._python = python
        self.source = self.folder = str(ROOT)
        self.wheels = str(wheels)
        self.environment = work / python.version

    def prepare(self) -> None:
        found = interpreter(self._python.version)
        if found is None:
            raise NotHere(f"there is no python{self._python.version} here")
        shutil.rmtree(self.environment, ignore_errors=True)
        subprocess.run([found, "-m", "venv", str(self.environment)], check=True)

    def command(self, words: Sequence[str]) -> list[str]:
        return ["env", "-C", self.folder, "PYTHONDONTWRITEBYTECODE=1", *words]


class InChroot(Place):
    """A Python of a Debian suite."""

    def __init__(self, python: Python, work: Path, wheels: Path) -> None:
        self._python = python
        self._folder = work / python.suite
        self._wheels = wheels
        self._settings = pip_settings()
        self.source = self.folder = SOURCE
        self.wheels = WHEELS
        self.environment = Path("/venv")

    def prepare(self) -> None:
        name = f"python{self._python.version}"
        if not self._folder.is_dir():
            self._make(name)
        self._make_mount_points()
        for words in (
            ["rm", "-rf", str(self.environment)],
            [name, "-m", "venv", str(self.environment)],
        ):
            if subprocess.run(self.command(words), check=False).returncode:
                raise NotHere(f"{name} of Debian {self._python.suite} makes no environment")

    def _make(self, name: str) -> None:
        for program, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux")):
            if shutil.which(program) is None:
                raise NotHere(f"{program} is missing: apt-get install {package}")
        if os.geteuid() != 0:
            raise NotHere("making a chroot needs root")
        part = self._folder.with_name(f"{self._folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        include = f"--include={name},{name}-venv,ca-certificates"
        words = [*ISOLATED, "debootstrap", "--variant=minbase", include]
        done = subprocess.run([*words, self._python.suite, str(part), mirror()], check=False)
        if done.returncode:
            raise NotHere(f"Debian {self._python.suite} has no {name}, or cannot be reached")
        part.rename(self._folder)

    def _binds(self) -> dict[str, str]:
        """{path inside: path of this machine}, mounted read-only."""
        binds = {SOURCE: str(ROOT), WHEELS: str(self._wheels)}
        same = ["/etc/resolv.conf", "/etc/hosts", *local_paths(self._settings.values())]
        return binds | {path: path for path in same if Path(path).exists()}

    def _make_mount_points(self) -> None:
        for inside, outside in self._binds().items():
            point = self._folder / inside.lstrip("/")
            if Path(outside).is_dir():
                point.mkdir(parents=True, exist_ok=True)
            else:
                point.parent.mkdir(parents=True, exist_ok=True)
                if point.is_symlink():
                    point.unlink()
                point.touch()

    def command(self, words: Sequence[str]) -> list[str]:
        root = shlex.quote(str(self._folder))
        lines = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        lines.append(f"mount -t tmpfs tmpfs {root}/tmp")
        for inside, outside in self._binds().items():
            target = f"{root}{shlex.quote(inside)}"
            lines.append(f"mount --bind {shlex.quote(outside)} {target}")
            lines.append(f"mount -o remount,bind,ro {target}")
        given = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/tmp",  # of the chroot
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._settings,
        }
        pairs = [f"{name}={value}" for name, value in given.items()]
        inside = ["chroot", str(self._folder), "env", "-i", "-C", self.folder, *pairs, *words]
        script = " && ".join([*lines, f"exec {shlex.join(inside)}"])
        return [*ISOLATED, "sh", "-c", script]


def interpreter(version: str) -> str | None:
    """A Python of this version: the first that starts, on the PATH, of uv or of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(map(str, root.glob(f"versions/{version}.*/bin/python")))
    never = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    of_uv = _output("uv", "python", "find", "--no-project", version, environment=never)
    found = [shutil.which(f"python{version}"), (of_uv or "").strip(), *of_pyenv]
    return next((each for each in found if each and _version_of(each) == version), None)


def _version_of(python: str) -> str:
    # What pyenv puts on the PATH is there for versions that are not chosen, too, and fails then.
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    return (_output(python, "-c", script) or "").strip()


def place_of(python: Python, work: Path, wheels: Path) -> Place:
    return InChroot(python, work, wheels) if python.suite else OnMachine(python, work, wheels)


def mirror() -> str:
    """The address of Debian's packages that apt uses. Raises NotHere."""
    only = ("--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian")
    found = (_output("apt-get", "indextargets", *only) or "").split()
    if not found:
        raise NotHere("apt knows no mirror of Debian: apt-get update")
    return found[0]


def pip_settings() -> dict[str, str]:
    """The settings of this machine's pip, and of its proxy, as variables."""
    found = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
    return found | read_settings(_output(sys.executable, "-m", "pip", "config", "list") or "")


def read_settings(listed: str) -> dict[str, str]:
    """{variable: value} of the lines of ``pip config list``, such as ``global.index-url='...'``."""
    found = {}
    for line in listed.splitlines():
        key, equals, value = line.partition("=")
        name = key.rpartition(".")[2].upper().replace("-", "_")
        if equals and name.isidentifier():
            text = value.strip("'\"").encode().decode("unicode_escape")
            found[f"PIP_{name}"] = " ".join(text.split())
    return found


def local_paths(values: Iterable[str]) -> list[str]:
    """Files and folders that settings name; of a local index, the folder around it."""
    found = []
    for word in " ".join(values).split():
        if word.startswith("file://"):
            found.append(str(Path(word.removeprefix("file://")).parent))
        elif word.startswith("/"):
            found.append(word)
    return sorted(set(found))


def _output(*words: str, environment: Mapping[str, str] | None = None) -> str | None:
    """What a command prints; None if it fails or there is no such program."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
