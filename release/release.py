"""Builds what a release uploads, and tries it: ``tox -e release``, half an hour.

Usage: python release/release.py [FOLDER]

Rules
1. FOLDER gets both wheels, the source distribution and the site; it must be new or empty. Without
   one, it is dist/release, and what an earlier run left there is removed.
2. Each archive passes ``twine check --strict`` and is installed in an environment of its own, for
   each Python of `PYTHONS`. There ``aztask demo --json`` must end with 0, every task succeeded.
3. A Python that this machine lacks is Debian's, in a folder (`tests.pythons`: as root, with
   debootstrap). One that cannot be had is printed as not tried. One failure is enough to end with
   1.
4. Nothing is uploaded: ``.github/workflows/release.yml`` does, from a tag.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.pythons.checks import PYTHONS as DEBIANS  # noqa: E402
from tests.pythons.checks import Python  # noqa: E402
from tests.pythons.places import InChroot, NotHere, OnMachine, Place, interpreter  # noqa: E402

DEFAULT: Final = ROOT / "dist" / "release"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
DEBIAN: Final = ROOT / ".tox" / "debian"
"""``tox -e pythons`` keeps its Debians there, too."""
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


def place_for(version: str, work: Path, archives: Path) -> Place:
    """Where a version runs: here, else in the Debian that has it. Raises NotHere."""
    here = OnMachine(Python(version), work, archives)
    of_debian = [each for each in DEBIANS if each.version == version and each.suite]
    if interpreter(version) or not of_debian:
        here.folder = str(work)
        return here
    place = InChroot(of_debian[0], DEBIAN, archives)
    place.folder = "/tmp"  # noqa: S108  # the chroot's own, new for each command
    return place


def try_archive(archive: Path, version: str) -> Row:
    """Install an archive in a new environment, and run the demo there."""
    what = f"{archive.name} on Python {version}"
    with tempfile.TemporaryDirectory() as folder:
        place = place_for(version, Path(folder), archive.parent)
        try:
            place.prepare()
        except NotHere as reason:
            return Row(what, NOT_TRIED, str(reason))
        path = f"{place.wheels}/{archive.name}"
        done = place.output("python", "-m", "pip", "install", "-q", path)
        if done.returncode:
            return Row(what, "failed", failure(done))
        return _try_command(what, place, archive.name.startswith("aztask_emulator"))


def _try_command(what: str, place: Place, emulator: bool) -> Row:
    if emulator:
        done = place.output("aztask-emulator", "--help")
        return Row(what, "failed", failure(done)) if done.returncode else Row(what, "ok", "--help")
    done = place.output("aztask", "demo", "--json")
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
