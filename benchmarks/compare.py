"""Compares the speed of this tree with an earlier one, in interleaved rounds.

Usage: python benchmarks/compare.py BASE [--parts local,servicebus,emulator,storagequeue,
           limits,unique,workflows,schedules]
           [--pairs 15] [--bound 3] [--check]
Further parts: celery-local, celery-servicebus, celery-storagequeue; of these, --only "5 ms, one -P
solo" measures what has such a name alone, with more pairs where a figure was unclear.

BASE is a git revision, or a folder with an earlier tree. Each pair measures both trees in two new
processes, which take turns slice by slice, so that what slows the machine slows both; for the
figures see `compare_round.py`, and for those of Celery's workers `celery_round.py`. The ratio of a
pair is the median of its slices' ratios. The output has the medians, the median of the ratios
new/old of all pairs, and its 95 % interval (from order statistics, which assume nothing about the
distribution).

A figure holds if its whole interval is within the bound. If a rate varies so much that its interval
is wider than the bound, the CPU time per task decides, because it varies less; if that is the wider
one, the rate does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from common import figure, machine

HERE = Path(__file__).parent
TREE = HERE.parent
PARTS = (
    *("local", "servicebus", "emulator", "storagequeue"),
    *("limits", "unique", "workflows", "schedules"),
)
CPU = " (CPU)"
"""The suffix of figures that are CPU time per task, in microseconds: less is better."""
REQUESTS = " (requests)"
"""The suffix of figures that are requests per task: less is better."""

Slices = dict[str, list[float]]
"""{figure: its value in each slice of a round}"""
Figures = dict[str, list[list[float]]]
"""{figure: its slices in each round}"""


@dataclass(frozen=True)
class Ratio:
    """new/old, pair by pair: the median and the ends of its 95 % interval."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> Ratio:
        ordered = sorted(
            statistics.median(map(_quotient, *pair)) for pair in zip(new, old, strict=True)
        )
        skip = _outside(len(ordered))
        return cls(statistics.median(ordered), ordered[skip], ordered[-1 - skip])


def _quotient(new: float, old: float) -> float:
    """new/old; 1.0 where both are nothing, as the requests of sends that need none."""
    return new / old if old else math.inf if new else 1.0


def _outside(count: int) -> int:
    """The number of values at each end outside of the median's 95 % interval."""
    below, skip = 0.0, 0
    while below + math.comb(count, skip) / 2**count <= 0.025:
        below += math.comb(count, skip) / 2**count
        skip += 1
    return max(0, skip - 1)


@contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """Yield the folder of an earlier tree, checked out if `base` is a revision."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="aztask-base-") as folder:
        target = Path(folder) / "tree"
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(target), base], check=True)
        try:
            yield target
        finally:
            subprocess.run([*git, "remove", "--force", str(target)], check=True)


class Round:
    """A process that measures `part` with the code of `tree`; it stands still between its turns."""

    def __init__(
        self, tree: Path, part: str, environment: Mapping[str, str], figures: Figures
    ) -> None:
        paths = os.pathsep.join([str(tree), str(HERE)])
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "compare_round.py"), part],
            env={**os.environ, **environment, "PYTHONPATH": paths, "COMPARE_TURNS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._figures = figures
        self.waits = self._until_turn()

    def go_on(self) -> None:
        """Let it measure its next slice. Raises RuntimeError if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.waits = self._until_turn()

    def _until_turn(self) -> bool:
        """Whether it waits for its turn; else it has ended, and its values are there."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line == "turn\n":
            return True
        if self._process.wait() or not line:
            raise RuntimeError("a round failed; its error is above")
        slices: Slices = json.loads(line)
        for name, values in slices.items():
            self._figures.setdefault(name, []).append(values)
        return False


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Run Azurite, and yield the environment of the rounds, which has its address."""
    sys.path[:0] = [str(TREE / "tests"), str(TREE)]
    from azurite import running  # noqa: PLC0415  # only this part needs it

    with running(folder) as server:
        yield {"COMPARE_BROKER": server.connection_string}


@contextmanager
def emulator() -> Iterator[dict[str, str]]:
    """Run this tree's emulator with a proxy before it, and yield the environment of the rounds."""
    sys.path[:0] = [str(TREE / "tests"), str(TREE)]
    from servicebus import Bench  # noqa: PLC0415  # only this part needs it

    bench = Bench()
    try:
        yield {
            "AZTASK_SERVICEBUS_ADMIN": bench.admin,
            "COMPARE_BROKER": bench.direct,
            "COMPARE_DELAYED": bench.delayed,
        }
    finally:
        bench.close()


def served(part: str, folder: Path) -> AbstractContextManager[dict[str, str]]:
    """The service that both trees share, for a part that needs one."""
    if part.endswith("storagequeue"):
        return azurite(folder)
    return emulator() if part == "celery-servicebus" else nullcontext({})


def pairs_of(part: str, old_tree: Path, pairs: int) -> tuple[Figures, Figures]:
    """Measure all pairs: (new figures, old figures)."""
    new: Figures = {}
    old: Figures = {}
    dice = random.Random(part)
    with (
        tempfile.TemporaryDirectory(prefix="aztask-compare-") as folder,
        served(part, Path(folder)) as environment,
    ):
        for _ in range(pairs):
            rounds = []
            for tree, figures, queue in ((TREE, new, "new"), (old_tree, old, "old")):
                own = {**environment, "COMPARE_QUEUE": queue} if environment else {}
                rounds.append(Round(tree, part, own, figures))
            while waiting := [each for each in rounds if each.waits]:
                dice.shuffle(waiting)
                for each in waiting:
                    each.go_on()
    return new, old


class Verdict(Enum):
    """What a figure's interval says about the bound."""

    HOLDS = "holds"
    WORSE = "WORSE"
    UNCLEAR = "unclear"
    SEE_CPU = "see CPU"
    SEE_RATE = "see rate"


def verdict(name: str, ratios: Mapping[str, Ratio], bound: float) -> Verdict:
    """Holds when the whole interval is within the bound; worse when all of it is beyond.

    The CPU time decides where the interval of the rate is too wide, and the rate where that of the
    CPU time is.
    """
    ratio = ratios[name]
    if name.endswith((CPU, REQUESTS)):
        within, beyond = ratio.high <= 1 + bound, ratio.low > 1 + bound
        rate = ratios.get(name.removesuffix(CPU)) if name.endswith(CPU) else None
        if not (within or beyond) and rate is not None and rate.low >= 1 - bound:
            return Verdict.SEE_RATE
    else:
        within, beyond = ratio.low >= 1 - bound, ratio.high < 1 - bound
        if not within and ratio.high - ratio.low > bound and f"{name}{CPU}" in ratios:
            return Verdict.SEE_CPU
    return Verdict.HOLDS if within else Verdict.WORSE if beyond else Verdict.UNCLEAR


def _middle(rounds: Sequence[Sequence[float]]) -> float:
    """The median of all slices of all rounds."""
    return statistics.median(value for slices in rounds for value in slices)


def report(new: Figures, old: Figures, bound: float) -> bool:
    """Print a line for each figure. True if all hold."""
    ratios = {name: Ratio.of(new[name], old[name]) for name in new}
    verdicts = {name: verdict(name, ratios, bound) for name in ratios}
    for name, ratio in ratios.items():
        print(
            f"  {verdicts[name].value:<8} {name:<44} {figure(_middle(new[name])):>9} "
            f"{figure(_middle(old[name])):>9}   {ratio.middle:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f})"
        )
    return set(verdicts.values()) <= {Verdict.HOLDS, Verdict.SEE_CPU, Verdict.SEE_RATE}


def main() -> None:
    """Compare the parts, print the figures, and exit 1 with ``--check`` if one is worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--bound", type=float, default=3.0, help="per cent")
    parser.add_argument("--only", default="", help="of Celery's workers: part of a figure's name")
    parser.add_argument("--check", action="store_true", help="exit 1 unless all figures hold")
    options = parser.parse_args()
    os.environ["COMPARE_ONLY"] = options.only
    print(f"comparison: this tree beside {options.base}, {options.pairs} interleaved pairs")
    print(machine(("kombu", "msgpack", "azure-servicebus", "azure-storage-queue")))
    print(f"\n  {'':<8} {'':<44} {'new':>9} {'old':>9}   new/old (95 % interval)")
    fine = True
    with tree_of(options.base) as old_tree:
        for part in options.parts.split(","):
            print(f"{part}", flush=True)
            fine &= report(*pairs_of(part, old_tree, options.pairs), options.bound / 100)
    if options.check and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()
