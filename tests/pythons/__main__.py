"""The command line: ``python -m tests.pythons --help``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .checks import CHECKS, PYTHONS, Check
from .places import ROOT, NotHere, Place, place_of

NOT_TRIED = "not tried"


def main() -> int:
    options = _options()
    checks = [
        check
        for check in CHECKS
        if (check.name in options.check if options.check else not check.asked)
    ]
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="aztask-wheel-") as folder:
        for python in PYTHONS:
            if not options.only or python.version in options.only:
                place = place_of(python, options.work.resolve(), Path(folder))
                rows.append((python, _tried(place, checks, Path(folder))))
    for python, answers in rows:
        print(f"{python.version}: {', '.join(answers)}")
    return any("failed" in answer for _, answers in rows for answer in answers)


def _options() -> argparse.Namespace:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(prog="python -m tests.pythons", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder for the Pythons")
    parser.add_argument("--only", action="append", help="a version; may be repeated")
    parser.add_argument("check", nargs="*", help=f"of {', '.join(names)}")
    options = parser.parse_args()
    if unknown := sorted({*options.check} - {*names}):
        parser.error(f"there is no check {unknown[0]!r}: choose from {', '.join(names)}")
    return options


@cache
def _wheel(folder: Path) -> str:
    """The name of the package's wheel, made once: it is the same for every Python."""
    words = ["wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel.name


def _tried(place: Place, checks: Sequence[Check], wheels: Path) -> list[str]:
    """What came of each check, in words."""
    try:
        place.prepare()
    except NotHere as reason:
        return [f"{NOT_TRIED}: {reason}"]
    wheel = f"{place.wheels}/{_wheel(wheels)}"
    return [f"{check.name} {_answer(place, check, wheel)}" for check in checks]


def _answer(place: Place, check: Check, wheel: str) -> str:
    packages = [each.format(wheel=wheel) for each in check.requirements]
    if place.run("python", "-m", "pip", "install", "-q", *packages):
        return "failed: its packages cannot be installed"
    for command in check.commands:
        print(f"$ {' '.join(command)}", flush=True)
        if code := place.run(*command):
            return f"failed: exit {code} of {' '.join(command[:4])}"
    return "passed"


if __name__ == "__main__":
    sys.exit(main())
