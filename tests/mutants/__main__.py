"""The command line: ``python -m tests.mutants --help``."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import marks, processes, reach, trying
from .making import Mutant, mutants_of
from .modules import MODULES, Source, find
from .trying import Trial

DRAW = 40
GOOD = 90.0


def main() -> int:
    options = _options()
    began = time.monotonic()
    sources = find(options.module or MODULES)
    reasons = marks.read()
    made = {source.name: mutants_of(source) for source in sources}
    drawn = _draw(made, reasons, options)
    if options.list:
        print("\n\n".join(marks.write(mutant) for mutant in drawn))
        return 0
    processes.warm_up()
    with tempfile.TemporaryDirectory(prefix="aztask-mutants-") as name:
        folder = Path(name)
        reached = reach.measure(sources, folder, options.processes, options.tests)
        _say(f"{len(reached.seconds)} tests pass; {len(drawn)} mutants to try", began)
        trials = []
        for trial in _try_all(drawn, reached, folder, options.processes):
            trials.append(trial)
            _tell(trial, options.verbose or options.marks)
            if len(trials) % 100 == 0:
                _say(f"{len(trials)} tried", began)
    if options.marks:
        return _report_marks(trials)
    _report_stale(made, reasons, sources)
    good = _report(made, trials, reasons, sources)
    _say("done", began)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws other mutants (default 1)")
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
    return parser.parse_args()


def _draw(
    made: dict[str, list[Mutant]], reasons: dict[marks.Key, str], options: argparse.Namespace
) -> list[Mutant]:
    drawn: list[Mutant] = []
    for name, mutants in made.items():
        pool = [mutant for mutant in mutants if (mutant.key in reasons) == options.marks]
        if not options.all and not options.marks and len(pool) > options.draw:
            chosen = random.Random(f"{options.seed}:{name}").sample(range(len(pool)), options.draw)
            pool = [pool[n] for n in sorted(chosen)]
        drawn += pool
    return drawn


def _try_all(
    drawn: Sequence[Mutant], reached: reach.Reach, folder: Path, count: int
) -> Iterator[Trial]:
    waiting = list(enumerate(drawn))[::-1]
    running: list[Trial] = []
    while waiting or running:
        while waiting and len(running) < count:
            n, mutant = waiting.pop()
            trial = trying.start(mutant, reached, folder / f"mutant-{n}")
            if trial.run is None:
                yield trial
            else:
                running.append(trial)
        for trial in list(running):
            if trial.run is not None and processes.poll(trial.run):
                running.remove(trial)
                trying.end(trial)
                yield trial
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
) -> bool:
    """Print the scores; whether every module has its 90 %."""
    good = True
    print(f"\n{'module':42}{'mutants':>8}{'marked':>8}{'tried':>7}{'noticed':>9}{'score':>8}")
    for source in sources:
        mine = [trial for trial in trials if trial.mutant.source is source]
        noticed = sum(trial.noticed for trial in mine)
        marked = sum(mutant.key in reasons for mutant in made[source.name])
        score = 100.0 * noticed / len(mine) if mine else 100.0
        good = good and score >= GOOD
        low = "  too low" if score < GOOD else ""
        print(
            f"{source.name:42}{len(made[source.name]):8}{marked:8}{len(mine):7}{noticed:9}"
            f"{score:7.1f}%{low}"
        )
    print(f"{sum(trial.noticed for trial in trials)} of {len(trials)} mutants were noticed")
    return good


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
