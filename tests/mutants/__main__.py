"""The command line: ``python -m tests.mutants --help``."""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import marks, planted, processes, reach, trying
from .copies import Copy
from .making import Mutant, mutants_of
from .modules import MODULES, Source, find
from .trying import Trial

DRAW = 40
GOOD = 90.0
SMALL_MODULES, SMALL_DRAW = 4, 3
SMALL_SECONDS = 80.0
"""When a small draw begins no more mutants; those that run may take a little longer."""
SMALL_COST = 6.0
"""Seconds of tests for each module of a small draw."""
SMALL_GOOD, SMALL_LEAST = 25.0, 8
"""A dozen mutants are too few to judge by, but if so few of at least eight are noticed, something
broke."""


def main() -> int:
    options = _options()
    began = time.monotonic()
    sources = find(options.module or MODULES)
    if options.map:
        return _map(sources, options)
    reasons = marks.read()
    made = {source.name: mutants_of(source) for source in sources}
    drawn = _draw(made, reasons, options)
    if options.list:
        print("\n\n".join(marks.write(mutant) for mutant in drawn))
        return 0
    processes.warm_up()
    with tempfile.TemporaryDirectory(prefix="aztask-mutants-") as name:
        folder = Path(name)
        copies = _copies(folder, options.processes)
        reached = _reach(drawn, options, copies, folder)
        _say(f"{len(reached.seconds)} tests pass; {len(drawn)} mutants to try", began)
        trials: list[Trial] = []
        try:
            _try_planted(reached, copies, folder)
            for trial in _try_all(drawn, reached, folder, copies, began + options.seconds):
                trials.append(trial)
                _tell(trial, options.verbose or options.marks)
                if len(trials) % 100 == 0:
                    _say(f"{len(trials)} tried", began)
        except trying.Blind as error:
            print(f"the run is blind: {error}")
            return 2
    if options.marks:
        return _report_marks(trials)
    _report_stale(made, reasons, sources)
    good = _report(made, trials, reasons, sources, options.enough)
    _say("done", began)
    return 0 if good else 1


def _copies(folder: Path, count: int) -> list[Copy]:
    first = Copy.of_tree(folder / "tree-0")
    return [first, *(first.another(folder / f"tree-{n}") for n in range(1, count))]


def _map(sources: Sequence[Source], options: argparse.Namespace) -> int:
    """Learn which files of tests concern which module, and write that down."""
    processes.warm_up()
    with tempfile.TemporaryDirectory(prefix="aztask-mutants-") as name:
        folder = Path(name)
        files = options.tests or reach.all_files()
        reached = reach.measure(files, _copies(folder, options.processes), folder)
    reach.note_near(reached, sources)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", default="1", help="draws other mutants (default 1)")
    parser.add_argument(
        "--draw", type=int, default=DRAW, help=f"mutants of each module (default {DRAW})"
    )
    parser.add_argument("--all", action="store_true", help="try all mutants, not a sample")
    parser.add_argument("--module", action="append", help="an import path; may be repeated")
    parser.add_argument("--tests", nargs="+", help="try with these files of tests alone")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default 2)")
    parser.add_argument("--list", action="store_true", help="show the mutants, try none")
    parser.add_argument("--verbose", action="store_true", help="say which test notices each")
    parser.add_argument(
        "--marks", action="store_true", help="try the marked mutants: whether one is noticed"
    )
    parser.add_argument(
        "--small", action="store_true", help="a few mutants of a few modules, for every change"
    )
    parser.add_argument(
        "--map", action="store_true", help="learn anew which tests concern which module"
    )
    options = parser.parse_args()
    options.enough = SMALL_GOOD if options.small else GOOD
    options.seconds = SMALL_SECONDS if options.small else math.inf
    if options.small:
        options.draw = SMALL_DRAW
        options.module = random.Random(options.seed).sample(MODULES, SMALL_MODULES)
    return options


def _draw(
    made: dict[str, list[Mutant]], reasons: dict[marks.Key, str], options: argparse.Namespace
) -> list[Mutant]:
    """The seed alone decides. A mutant that is marked is drawn nevertheless, and then skipped."""
    drawn: list[Mutant] = []
    for name, mutants in made.items():
        pool = mutants
        if not options.all and not options.marks and len(pool) > options.draw:
            chosen = random.Random(f"{options.seed}:{name}").sample(range(len(pool)), options.draw)
            pool = [pool[n] for n in sorted(chosen)]
        drawn += [mutant for mutant in pool if (mutant.key in reasons) == options.marks]
    return drawn


def _reach(
    drawn: Sequence[Mutant], options: argparse.Namespace, copies: Sequence[Copy], folder: Path
) -> reach.Reach:
    """What the tests reach that concern the drawn mutants, and the planted ones."""
    sources = list({mutant.source.name: mutant.source for mutant in drawn}.values())
    if moved := reach.moved_on(sources):
        print(f"since tests/mutants/near.json was written, {len(moved)} modules have changed")
    files = options.tests or reach.files_near(sources, SMALL_COST if options.small else math.inf)
    return reach.measure(list(dict.fromkeys([planted.TESTS, *files])), copies, folder)


def _try_planted(reached: reach.Reach, copies: Sequence[Copy], folder: Path) -> None:
    """Raises Blind unless the first planted mutant is noticed, and the second is not."""
    ours = [test for test in reached.seconds if test.startswith(f"{planted.TESTS}::")]
    only = reached.among(ours)
    (folder / "planted").mkdir()
    for mutant, expected in ((planted.noticed(), True), (planted.unchanged(), False)):
        (trial,) = _try_all([mutant], only, folder / "planted", copies[:1], math.inf)
        if trial.noticed != expected:
            what = "was not noticed" if expected else f"failed {trial.noticed_by}"
            raise trying.Blind(f"the planted mutant {marks.write(mutant)}\n{what}")


def _try_all(
    drawn: Sequence[Mutant],
    reached: reach.Reach,
    folder: Path,
    copies: Sequence[Copy],
    until: float,
) -> Iterator[Trial]:
    """Each trial as it ends. After `until`, on the monotonic clock, none begins."""
    waiting = list(enumerate(drawn))[::-1]
    running: list[Trial] = []
    free = list(copies)
    while waiting or running:
        while waiting and free and time.monotonic() < until:
            n, mutant = waiting.pop()
            copy = free.pop()
            trial = trying.start(mutant, reached, folder / f"mutant-{n}", copy)
            if trial.run is None:
                free.append(copy)
                yield trial
            else:
                running.append(trial)
        for trial in list(running):
            if trial.run is not None and processes.poll(trial.run):
                running.remove(trial)
                trying.end(trial)
                if trial.copy is not None:
                    trial.copy.restore()
                    free.append(trial.copy)
                yield trial
        if waiting and not running and time.monotonic() >= until:
            print(f"{len(waiting)} mutants were not tried: the time is over")
            return
        time.sleep(0.01)


def _tell(trial: Trial, verbose: bool) -> None:
    mutant = trial.mutant
    place = f"{mutant.source.path.name}:{mutant.first}"
    if not trial.noticed:
        why = f"{len(trial.tests)} tests pass" if trial.tests else "no test reaches it"
        print(f"\n# survived: {place}, {why}\n{marks.write(mutant)}\n", flush=True)
    elif verbose:
        print(f"{place} {mutant.before} -> {mutant.after}: {trial.noticed_by}", flush=True)


def _report(
    made: dict[str, list[Mutant]],
    trials: Sequence[Trial],
    reasons: dict[marks.Key, str],
    sources: Sequence[Source],
    enough: float,
) -> bool:
    """Print the scores; whether every module has enough, in per cent.

    Of a small draw one module has too few: there all of them count together.
    """
    good = True
    print(f"\n{'module':42}{'mutants':>8}{'marked':>8}{'tried':>7}{'noticed':>9}{'score':>8}")
    for source in sources:
        mine = [trial for trial in trials if trial.mutant.source is source]
        noticed = sum(trial.noticed for trial in mine)
        marked = sum(mutant.key in reasons for mutant in made[source.name])
        score = 100.0 * noticed / len(mine) if mine else 100.0
        good = good and (score >= GOOD or enough < GOOD)
        low = "  too low" if score < GOOD else ""
        print(
            f"{source.name:42}{len(made[source.name]):8}{marked:8}{len(mine):7}{noticed:9}"
            f"{score:7.1f}%{low}"
        )
    noticed = sum(trial.noticed for trial in trials)
    print(f"{noticed} of {len(trials)} mutants were noticed")
    if enough < GOOD and len(trials) < SMALL_LEAST:
        print("too few to judge by; the planted ones were judged as they should be")
        return True
    return good and (not trials or 100.0 * noticed / len(trials) >= enough)


def _report_stale(
    made: dict[str, list[Mutant]], reasons: dict[marks.Key, str], sources: Sequence[Source]
) -> None:
    known = {mutant.key for mutants in made.values() for mutant in mutants}
    names = {source.short for source in sources}
    for key in reasons:
        if key[0] in names and key not in known:
            print(f"this mark fits no mutant any more; remove it: {key}")


def _report_marks(trials: Sequence[Trial]) -> int:
    """Marks of mutants that a test notices are wrong: they do make a difference."""
    wrong = [trial for trial in trials if trial.noticed]
    for trial in wrong:
        print(f"\n# noticed by {trial.noticed_by}; remove the mark:\n{marks.write(trial.mutant)}")
    print(f"{len(trials)} marks tried, {len(wrong)} of them wrong")
    return 1 if wrong else 0


def _say(text: str, began: float) -> None:
    print(f"[{time.monotonic() - began:5.0f} s] {text}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
