"""Builds what a release uploads, and tries it: ``tox -e release``, half an hour.

Usage: python release/release.py [FOLDER]

Rules
1. FOLDER gets both wheels, the source distribution and the site; it must be new or empty. Without
   one, it is dist/release, and what an earlier run left there is removed.
2. Each archive passes ``twine check --strict`` and is installed in an environment of its own, for
   each Python of `PYTHONS`. There ``aztask demo --json`` must end with 0, every task succeeded.
3. A Python that is not here is printed as not tried; one failure is enough to end with 1.
4. Nothing is uploaded: ``.github/workflows/release.yml`` does, from a tag.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
DEFAULT: Final = ROOT / "dist" / "release"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
NOT_TRIED: Final = "not tried"


@dataclass(frozen=True)
class Row:
    """One line of what is printed at the end. state: ``ok``, ``not tried`` or ``failed``."""

    what: str
    state: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.state:10} {self.what}{': ' if self.text else ''}{self.text}"


def run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; what it prints is kept for the error."""
    return subprocess.run(  # noqa: S603  # without a shell, and commands of this file
        command, text=True, capture_output=True, check=False, **options
    )


def failure(done: subprocess.CompletedProcess[str]) -> str:
    """How a command failed, with the last lines that it printed."""
    lines = [each.strip() for each in (done.stderr + done.stdout).splitlines() if each.strip()]
    return f"exit code {done.returncode}: {'; '.join(lines[-3:])}"


def interpreter(version: str) -> str | None:
    """A Python of this version: the first that starts, on the PATH, of uv or of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    of_pyenv = sorted(map(str, root.glob(f"versions/{version}.*/bin/python")))
    found = [shutil.which(f"python{version}"), _of_uv(version), *of_pyenv]
    return next((each for each in found if each and _version_of(each) == version), None)


def _of_uv(version: str) -> str | None:
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = run(["uv", "python", "find", "--no-project", version], env=environment)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _version_of(python: str) -> str:
    # What pyenv puts on the PATH is there for versions that are not chosen, too, and fails then.
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return run([python, "-c", script]).stdout.strip()
    except OSError:
        return ""


# -- the steps -------------------------------------------------------------------------------------


def build(folder: Path) -> Iterator[Row]:
    """Both wheels and the source distribution."""
    commands = {
        "wheel and source distribution": [sys.executable, "-m", "build", "-o", folder, ROOT],
        "wheel of the emulator": [sys.executable, ROOT / "release" / "emulatorwheel.py", folder],
    }
    for what, command in commands.items():
        done = run(command)
        yield Row(what, "failed", failure(done)) if done.returncode else Row(what, "ok")


def check_metadata(archives: Sequence[Path]) -> Row:
    """What the index would refuse, or show badly."""
    done = run([sys.executable, "-m", "twine", "check", "--strict", *archives])
    state = "ok" if done.returncode == 0 else "failed"
    return Row("metadata", state, "" if state == "ok" else failure(done))


def try_archive(archive: Path, version: str) -> Row:
    """Install an archive in a new environment, and run the demo there."""
    what = f"{archive.name} on Python {version}"
    python = interpreter(version)
    if python is None:
        return Row(what, NOT_TRIED, f"there is no python{version} here")
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        steps: list[list[str | Path]] = [
            [python, "-m", "venv", environment],
            [environment / "bin" / "python", "-m", "pip", "install", "-q", archive],
        ]
        for step in steps:
            if (done := run(step, cwd=folder)).returncode:
                return Row(what, "failed", failure(done))
        return _try_command(what, environment / "bin", Path(folder))


def _try_command(what: str, programs: Path, folder: Path) -> Row:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("AZTASK_")}
    clean.pop("PYTHONPATH", None)
    if (programs / "aztask-emulator").exists():
        done = run([programs / "aztask-emulator", "--help"], cwd=folder, env=clean)
        return Row(what, "failed", failure(done)) if done.returncode else Row(what, "ok", "--help")
    done = run([programs / "aztask", "demo", "--json"], cwd=folder, env=clean)
    if done.returncode:
        return Row(what, "failed", failure(done))
    found = json.loads(done.stdout.splitlines()[-1])
    if found["tasks"] != found["succeeded"]:
        return Row(what, "failed", f"{found['succeeded']} of {found['tasks']} tasks succeeded")
    return Row(what, "ok", f"{found['tasks']} tasks in {found['seconds']:.0f} s")


def check_workflow() -> Row:
    """What can be said of the workflow without GitHub: zizmor's rules, offline."""
    workflow = ROOT / ".github" / "workflows" / "release.yml"
    done = run(["zizmor", "--offline", "--no-progress", workflow])
    return Row("workflow", "failed", failure(done)) if done.returncode else Row("workflow", "ok")


def build_site(folder: Path) -> Row:
    """The documentation, without a warning."""
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", folder / "doctrees"]
    target = folder / "site"
    done = run([sys.executable, "-m", "sphinx", *options, ROOT / "docs", target])
    shutil.rmtree(folder / "doctrees", ignore_errors=True)
    if done.returncode:
        return Row("site", "failed", failure(done))
    return Row("site", "ok", f"{sum(1 for _ in target.rglob('*.html'))} pages")


def rows(folder: Path) -> Iterator[Row]:
    """All steps, each as soon as it has ended."""
    yield from build(folder)
    archives = sorted(each for each in folder.iterdir() if each.suffix in {".whl", ".gz"})
    if len(archives) != 3:
        yield Row("archives", "failed", f"there are {len(archives)}, not 3")
        return
    yield check_metadata(archives)
    for version in PYTHONS:
        for archive in archives:
            yield try_archive(archive, version)
    yield build_site(folder)
    yield check_workflow()


def main(arguments: Sequence[str]) -> int:
    """Run all steps, and print each; returns the exit code."""
    folder = Path(arguments[0]) if arguments else DEFAULT
    if not arguments:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty")  # noqa: T201  # a script's output
        return 2
    failed = False
    for row in rows(folder):
        print(row, flush=True)  # noqa: T201
        failed = failed or row.state == "failed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
