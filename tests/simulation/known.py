"""``python -m tests.simulation.known``: how soon the simulation finds the faults that it must find.

Each patch under ``faults/`` brings back a fault of a former release. It is applied to a copy of the
tree, and courses of fresh seeds are run there until an assertion fails: it must be one of those
named here, and no crash.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PATCHES: Final = Path(__file__).parent / "faults"


@dataclass(frozen=True, slots=True)
class Known:
    """A known fault. found_by: the assertions that may find it; kind: of the courses that can."""

    found_by: tuple[str, ...]
    kind: str | None = None


KNOWN: Final = {
    "completed-without-its-clone": Known(("everything-ends", "nothing-is-lost"), "bus"),
    "deadline-of-twice-the-lease": Known(("deadline-is-true",), "local"),
    "settled-without-token": Known(("settled-by-its-holder", "one-outcome"), "local"),
    "schedules-of-another-owner": Known(("foreign",), "local"),
    "workflows-of-another-owner": Known(("foreign", "workflow-agrees"), "local"),
    "purge-with-anothers-retention": Known(("rows-are-kept",), "local"),
    "member-that-only-looks-lost": Known(("member-is-lost", "workflow-agrees"), "local"),
    "starter-stores-the-root-first": Known(("everything-ends",), None),
    "permit-kept-after-a-kill": Known(("everything-ends", "nothing-is-stuck"), "local"),
    "unique-key-survives": Known(("unique-is-free",), None),
    "settlement-counted-as-lost": Known(("settled-is-not-lost",), "storage"),
    "purge-of-an-open-graph": Known(("everything-ends", "workflow-agrees"), "local"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.known")
    parser.add_argument("names", nargs="*", default=sorted(KNOWN), help="which faults; all")
    parser.add_argument("--seeds", type=int, default=10, help="fresh seeds for each fault")
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest time for each")
    parser.add_argument("--seed", type=int, help="the first seed, instead of a fresh one")
    options = parser.parse_args()
    missed = 0
    for name in options.names:
        with tempfile.TemporaryDirectory(prefix="aztask-known-") as folder:
            copy = _copy(Path(folder), name)
            times = []
            for number in range(options.seeds):
                first = secrets.randbelow(10**9) if options.seed is None else options.seed + number
                took, found = _find(copy, KNOWN[name], first, options.seconds)
                good = found in KNOWN[name].found_by
                missed += not good
                print(f"{name}: seed {first}: {took:.1f} s, {found or 'nothing found'}", flush=True)
                times.append(took)
            print(f"{name}: median {statistics.median(times):.1f} s of {options.seeds}", flush=True)
    return 1 if missed else 0


def _copy(folder: Path, name: str) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "aztask", "tests/simulation"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.split(b"\0")  # fmt: skip
    for each in filter(None, listed):
        path = os.fsdecode(each)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())
    patch = (PATCHES / f"{name}.patch").read_bytes()
    subprocess.run(["git", "apply", "-"], cwd=folder, input=patch, check=True)
    return folder


def _find(copy: Path, known: Known, seed: int, seconds: float) -> tuple[float, str]:
    """The seconds until an assertion failed, and its name; "" if none did."""
    kind: Sequence[str] = () if known.kind is None else ("--kind", known.kind)
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--processes", "1"]
    began = time.monotonic()
    result = subprocess.run(
        [*command, "--seconds", str(seconds), "--names", *kind],
        cwd=copy, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    took = time.monotonic() - began
    if f"aztask from {copy}" not in result.stdout:
        raise RuntimeError(f"the copy was not used: {result.stdout}{result.stderr}")
    found = re.search(r"^found (\S+)", result.stdout, re.MULTILINE)
    return took, found[1] if found else ""


if __name__ == "__main__":
    sys.exit(main())
