"""What the rows of a task's runs say: every start that they keep, every outcome, and what lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from aztask.explain.entries import Entry, gap, seconds
from aztask.results.base import Outcome, RunRecord, State
from aztask.results.starts import GIVEN_BACK
from aztask.settlement import DeadLetter, Decision, Defer, Hold, Resubmit, name_of

START = "start"


def entries_of(runs: Sequence[RunRecord]) -> Iterator[Entry]:
    """The entries of all runs, the oldest run first."""
    for generation, group in groupby(runs, key=lambda run: run.key.generation):
        if generation:
            yield gap(f"replayed from the dead letters: generation {generation} begins")
        following = 0
        for run in group:
            if run.key.hop > following:
                which = _range(following, run.key.hop - 1)
                yield gap(f"hop {which} has no row in the result store: purged, or never started")
            following = run.key.hop + 1
            yield from _run(run)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _run(run: RunRecord) -> Iterator[Entry]:
    if run.state is State.UNREADABLE:
        yield gap(f"the row of hop {run.key.hop} cannot be read: {run.damage}")
        return
    earlier, hop = run.earlier, run.key.hop
    if earlier.dropped:
        yield gap(f"the row of hop {hop} keeps its last 20 starts; {earlier.dropped} are dropped")
    number = earlier.dropped
    for number, each in enumerate(earlier.kept, earlier.dropped + 1):
        text = f"start {number} of hop {hop}"
        if each.end == GIVEN_BACK:
            text += ", given back before the task ran"
        elif each.end:
            text += f", which ended as {each.end}{': ' if each.error else ''}{each.error}"
        else:
            text += ", whose end was never recorded"
        yield Entry(each.at, START, text, "row", each.worker)
    if run.started_at is None:
        if run.outcome is None:
            yield gap(f"hop {hop} was sent, and no worker has started it")
    else:
        yield Entry(run.started_at, START, f"start {number + 1} of hop {hop}", "row", run.worker)
    if run.outcome is not None:
        yield Entry(run.outcome.at, run.state.value, ended(run.outcome), "row", run.worker)


def ended(outcome: Outcome) -> str:
    """How a run ended, and what followed, in words."""
    text = outcome.state.value
    if outcome.duration:
        text += f" after {seconds(outcome.duration)}"
    if outcome.error_type:
        first = outcome.error.splitlines()[:1]
        text += f": {': '.join([outcome.error_type, *first])}"
    return f"{text}; {settled(outcome.settlement)}"


def settled(settlement: Decision) -> str:
    """A settlement in words, with its reason."""
    if isinstance(settlement, DeadLetter):
        reason = settlement.reason
        if settlement.description:
            reason += f" ({settlement.description})"
        return f"settlement: dead-letter, {reason}"
    if isinstance(settlement, Resubmit | Defer | Hold) and settlement.delay:
        return f"settlement: {name_of(settlement)}, due in {seconds(settlement.delay)}"
    return f"settlement: {name_of(settlement)}"
