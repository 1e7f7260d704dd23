"""`aztask migrate check` on public Celery applications, beside a plain graph of their imports.

    python -m tests.celeryprojects [FOLDER]

FOLDER keeps what pip downloads, a temporary folder by default. Nothing of the applications is
installed or run. The exit code is 1 if a name of Celery, Kombu or a package around them is imported
somewhere and not in the list, or if a check takes too long.

The graph knows nothing of apps, tasks and settings: it lists each ``import`` and ``from`` of such a
package with its line, and the names that are used of a module that is imported whole.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any, NamedTuple

APPLICATIONS = (
    "geonode==5.1.1",
    "pretix==2026.8.0",
    "mayan-edms==4.12.2",
    "apache-superset==6.1.0",
)
AROUND = re.compile(
    r"(celery|kombu|billiard|vine|amqp|django_celery_\w+|celery_\w+|\w*redbeat)(\.|$)"
)
OURS = {"celery", "kombu", "billiard", "vine", "amqp"}
"""These are never modules of an application, although many have a ``celery.py``."""

CPU_SECONDS_PER_LINE = 60 / 850_000
ALWAYS_SECONDS = 2.0
"""To start Python, and to look at the folders."""


class Imported(NamedTuple):
    """A name that a file imports."""

    file: str
    line: int
    name: str


def graph(folder: Path, own: set[str]) -> Iterator[Imported]:
    """Every import of a name of Celery and what is around it."""
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{each.name}" for each in node.names]
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names if "." in each.name]
            else:
                continue
            for name in names:
                if AROUND.match(name) and name.partition(".")[0] not in own:
                    yield Imported(str(path), node.lineno, name)


def told(name: str, names: set[str]) -> bool:
    """Whether a list has the name, the module that it is in, or something of it."""
    last = name.split(".")
    parts = {".".join(last[:count]) for count in range(1, len(last) + 1)}
    return bool(parts & names) or any(each.startswith(f"{name}.") for each in names)


def check(folder: Path) -> tuple[list[dict[str, Any]], float, float]:
    """What the command lists, and its seconds of CPU and wall time."""
    before, began = getrusage(RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "aztask", "migrate", "check", "--all", "--json", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, after = time.monotonic() - began, getrusage(RUSAGE_CHILDREN)
    assert ended.returncode in (0, 1) and ended.stdout, ended.stderr
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [json.loads(line) for line in ended.stdout.splitlines()], cpu, wall


def fetch(application: str, folder: Path) -> Path:
    """The Python files of a release, unpacked below `folder`."""
    there = folder / application.replace("==", "-")
    if not there.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        with tempfile.TemporaryDirectory() as wheels:
            subprocess.run(
                [*command, "--only-binary", ":all:", "-d", wheels, application], check=True
            )
            (wheel,) = Path(wheels).iterdir()
            with zipfile.ZipFile(wheel) as archive:
                wanted = [each for each in archive.namelist() if each.endswith(".py")]
                archive.extractall(there, wanted)
    return there


def lines_of(folder: Path) -> int:
    """The lines of its Python files."""
    return sum(path.read_bytes().count(b"\n") for path in folder.rglob("*.py") if path.is_file())


def judge(application: str, folder: Path) -> bool:
    """Print one application's line, and what was missed; True if all is well."""
    root = fetch(application, folder)
    own = {path.stem for path in root.rglob("*")} - OURS
    uses, cpu, wall = check(root)
    names = {
        f"celery.signals.{use['name']}" if use["section"] == "signals" else use["name"]
        for use in uses
        if use.get("sure")
    }
    imports = list(graph(root, own))
    missed = [each for each in imports if not told(each.name, names)]
    lines = lines_of(root)
    limit = ALWAYS_SECONDS + lines * CPU_SECONDS_PER_LINE
    unknown = sum(use.get("sure") == "unknown" for use in uses)
    print(
        f"{application:24}{lines:>9,}{len(imports):>10,}{len(uses):>8,}{unknown:>9,}{len(missed):>8,}"
        f"{cpu:>8.1f}{wall:>8.1f}"
    )
    for each in missed:
        print(f"  missed: {each.file}:{each.line}: {each.name}")
    if cpu > limit:
        print(f"  too slow: {cpu:.1f} s of CPU, more than {limit:.1f} s for {lines:,} lines")
    return not missed and cpu <= limit


def main(folder: Path) -> int:
    """Check each application."""
    print(
        f"{'application':24}{'lines':>9}{'imports':>10}{'uses':>8}{'unknown':>9}{'missed':>8}"
        f"{'CPU s':>8}{'wall s':>8}"
    )
    good = [judge(each, folder) for each in APPLICATIONS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as kept:
        sys.exit(main(Path(kept)))
