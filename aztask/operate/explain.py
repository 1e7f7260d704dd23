"""What happened to one task, in order: from its rows in the result store and from event files.

Rules
1. Rows know every start that they keep, and every outcome. Deliveries, renewals and lost leases
   come from events only. A start or an outcome that both know is one entry.
2. What is missing is shown as a gap, never guessed: rows drop old starts, workers may run without
   events, and a worker that dies writes no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from aztask.app import App
from aztask.errors import ConfigurationError, NotFound, StepError
from aztask.operate.eventlog import GAP, EventLog, LogEntry, events_of, gap, seconds
from aztask.operate.steps import steps
from aztask.operate.workflows import workflow
from aztask.settlement import DeadLetter, Decision, Defer, Hold, Resubmit, name_of
from aztask.steps.parts import Found, Take, parts_of
from aztask.steps.records import FAILED, STEP
from aztask.steps.records import WAITING as WAITING_RECORD
from aztask.stores.events.event import Event
from aztask.stores.records.base import GIVEN_BACK, Outcome, RunRecord, State
from aztask.support.display import plural


def explain(app: App, task_id: str, directory: Path | None = None) -> History:
    """What happened to a task, or to the tasks of a workflow.

    directory: of its events; the app's own by default. Raises NotFound, and ConfigurationError
    without a result store and events.
    """
    store, place = app.results, directory or app.settings.events
    if store is None and place is None:
        raise ConfigurationError(
            "nothing to read: set AZTASK_RESULTS to the result store, or --events to a "
            "directory of events"
        )
    latest = store.get(task_id) if store is not None else None
    runs = store.history(task_id) if store is not None else []
    log = events_of(place, task_id) if place is not None else None
    more = list(_steps(app, task_id)) if store is not None else []
    state = latest.state if latest is not None else None
    found = history_of(task_id, runs, log, state=state, more=more)
    if found is not None and (streams := parts_of(store, app.codec)) is not None:
        entries = list(found.entries)
        for take, entry in emitted(streams.read(task_id)):
            later = (n for n, each in enumerate(entries) if (each.at or 0.0) > take.at)
            entries.insert(next(later, len(entries)), entry)
        return replace(found, entries=tuple(entries))
    if found is None and store is not None:
        found = _of_workflow(app, task_id)
    if found is None:
        raise NotFound(
            f"neither the result store nor the events know a task {task_id!r}; it may not have "
            "started yet"
        )
    return found


def _of_workflow(app: App, workflow_id: str) -> History | None:
    """The history of a workflow: when its tasks started and ended, and what the others wait for.

    None if there is no such workflow. Its tasks have their own histories under their ids.
    """
    try:
        found = workflow(app, workflow_id)
    except (NotFound, ConfigurationError):
        return None
    root = found.root
    entries = [LogEntry(root.at, START, f"the workflow starts, of {plural(root.tasks, 'task')}")]
    waiting: list[LogEntry] = []
    for node in found.all_nodes():
        name = f"{node.task} {node.task_id}"
        if node.started_at is not None:
            entries.append(LogEntry(node.started_at, START, f"{name} starts"))
        if node.state is not None and node.ended_at is not None:
            why = node.failure
            error = f": {why.error_type}: {why.error}" if why is not None else ""
            entries.append(LogEntry(node.ended_at, node.state.value, f"{name} {node.state}{error}"))
        if node.waits:
            waiting.append(gap(f"{name}: {node.waits}"))
    if root.cancelled_at is not None:
        entries.append(LogEntry(root.cancelled_at, "cancelled", "the workflow is cancelled"))
    if root.ended_at is not None:
        text = f"the workflow has ended: {root.state}"
        entries.append(LogEntry(root.ended_at, root.state.value, text))
    entries.sort(key=lambda entry: entry.at or 0.0)
    all_entries = (*entries, *waiting)
    return History(
        workflow_id, "workflow", "", root.state, entries=all_entries, shown=root.state.value
    )


def _steps(app: App, task_id: str) -> Iterator[LogEntry]:
    """What the task has recorded, and the signals that wait for it."""
    try:
        found = steps(app, task_id)
    except NotFound:
        found = []
    except StepError as damaged:
        yield gap(str(damaged))
        return
    for each in found:
        record = each.record
        if record.kind == STEP:
            text = f"step {record.label}: {record.state}"
        elif record.state == WAITING_RECORD:
            text = f"{_WAITS.get(record.kind, record.kind)} {record.label}: waits"
        else:
            end = "its time ended" if record.state == FAILED else "ended"
            text = f"{_WAITS.get(record.kind, record.kind)} {record.label}: {end}"
        yield LogEntry(record.at, "step", text, "row")
    waits = app.sends.signals.store
    if waits is not None:
        for signal in waits.read(task_id).signals:
            yield LogEntry(
                signal.at, "signal", f"signal {signal.name}, which no wait has taken", "row"
            )


_WAITS: Final = {
    "wait": "wait",
    "signal": "wait for signal",
    "call": "wait for task",
    "any": "wait for the first of",
}


def emitted(found: Found) -> Iterator[tuple[Take, LogEntry]]:
    """The takes of a task's stream, and an entry for each."""
    for take in found.takes:
        count = len(found.parts.get(take.name, ()))
        text = f"first of {plural(count, 'part')} of take {take.token}"
        if take.base:
            text += f", which goes on after {plural(take.kept, 'part')}"
        yield take, LogEntry(take.at, "emitted", text, "row")


# What the rows of a task's runs say: every start that they keep, every outcome, and what lacks.


START = "start"


def entries_of(runs: Sequence[RunRecord]) -> Iterator[LogEntry]:
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


def _run(run: RunRecord) -> Iterator[LogEntry]:
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
        yield LogEntry(each.at, START, text, "row", each.worker)
    if run.started_at is None:
        if run.outcome is None:
            yield gap(f"hop {hop} was sent, and no worker has started it")
    else:
        yield LogEntry(run.started_at, START, f"start {number + 1} of hop {hop}", "row", run.worker)
    if run.outcome is not None:
        yield LogEntry(run.outcome.at, run.shown_state, ended(run.outcome), "row", run.worker)


def ended(outcome: Outcome) -> str:
    """How a run ended, and what followed, in words."""
    if outcome.parked:
        return f"waiting: {outcome.error}"
    text = outcome.state.value
    if outcome.duration:
        text += f" after a run of {seconds(outcome.duration)}"
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


SAME_SECONDS: Final = 5.0
"""A row's time and an event's may differ by so much and mean the same: other threads wrote them."""

OUTCOMES: Final = {
    "succeeded": "succeeded",
    "failed": "failed",
    "resubmitted": "retrying",
    "snoozed": "snoozed",
    "waiting": "waiting",
    "cancelled": "cancelled",
    "expired": "expired",
}
"""The state in a row for the event of the same outcome."""

ENDS: Final = (*OUTCOMES, "lease_lost", "settle_failed", "dead_lettered")


@dataclass(frozen=True, slots=True)
class History:
    """A task's history: what is known of the task, and its entries in order.

    * `shown`: its state as `AsyncResult.state` has it; "" if the result store does not know it.
    """

    task_id: str
    task: str = ""
    queue: str = ""
    state: State | None = None
    workflow: str = ""
    parent: str = ""
    entries: tuple[LogEntry, ...] = ()
    shown: str = ""

    @property
    def gaps(self) -> int:
        """How many gaps there are."""
        return sum(entry.kind == GAP for entry in self.entries)


def history_of(
    task_id: str,
    runs: Sequence[RunRecord],
    log: EventLog | None,
    *,
    state: State | None,
    more: Sequence[LogEntry] = (),
) -> History | None:
    """The history of a task; None if nothing is known of it.

    * `runs`: its rows, the oldest first.
    * `log`: its events; None if no event directory is known.
    * `state`: the state that the result store reports, None if it does not know the task.
    * `more`: further entries.
    """
    events = log.events if log is not None else []
    if not runs and not events and state is None:
        return None
    entries = _merged(list(entries_of(runs)), [*(_entry(each) for each in events), *more])
    started = any(run.started_at is not None for run in runs)
    entries = [*_missing_events(log, started=started), *_with_gaps(entries, events, state)]
    known = [(each.task, each.queue) for each in events if each.task]
    known += [(each.task, each.queue) for each in runs if each.task]
    workflow = next((each.workflow_id for each in events if each.workflow_id), None)
    parent = next((each.parent_id for each in events if each.parent_id), None)
    task, queue = known[-1] if known else ("", "")
    shown = "" if state is None else state.value
    if runs and runs[-1].state is state:
        shown = runs[-1].shown_state
    found = tuple(entries)
    return History(task_id, task, queue, state, workflow or "", parent or "", found, shown)


# -- events ----------------------------------------------------------------------------------


_BEFORE_DELIVERY: Final = (
    "enqueued",
    "send_unconfirmed",
    "occurrence_sent",
    "occurrence_skipped",
    "operator_acted",
)


def _entry(event: Event) -> LogEntry:
    number = event.delivery_count if event.event not in _BEFORE_DELIVERY else None
    return LogEntry(event.ts, event.event, _text(event), "event", event.worker, number)


def _text(event: Event) -> str:
    """What the event says, in words."""
    error = ": ".join(each for each in (event.error_type, event.error) if each)
    if event.event in _WORDS:
        return _WORDS[event.event](event)
    text = "failed" if event.event == "resubmitted" else str(event.event)
    text += _known(" after a run of {}", event.duration_seconds)
    text += ", and is retried" if event.event == "resubmitted" else ""
    text += _known(", {} of the lease left", event.margin_seconds)
    return f"{text}: {error}" if error else text


def _started(event: Event) -> str:
    text = "the task starts" + _known(" {} after due", event.wait_seconds)
    return text + _known(", lease of {}", event.lease_seconds)


def _renewed(event: Event) -> str:
    text = "lease renewed" + _known(" for {}", event.lease_seconds)
    return text + _known(", {} were left", event.margin_seconds)


def _lost(event: Event) -> str:
    text = "the lease is lost" if event.event == "lease_lost" else "the settlement failed"
    text += _known(" after holding it for {}", event.held_seconds)
    return f"{text}: {event.error}" if event.error else text


def _acted(event: Event) -> str:
    text = f"{event.by or 'someone'} said: {event.reason}"
    return f"{text}; {event.error_type}: {event.error}" if event.error_type else text


_WORDS: Final[dict[str, Callable[[Event], str]]] = {
    "enqueued": lambda event: f"sent to queue {event.queue}",
    "send_unconfirmed": lambda event: (
        f"sent to queue {event.queue}, but not confirmed: the broker may have it or not"
    ),
    "received": lambda event: f"delivery {event.delivery_count} received from queue {event.queue}",
    "started": _started,
    "renewed": _renewed,
    "lease_lost": _lost,
    "settle_failed": _lost,
    "put_off": lambda event: f"put off: {event.reason}",
    "occurrence_sent": lambda event: f"sent by {event.reason}",
    "occurrence_skipped": lambda event: f"skipped: {event.reason}",
    "operator_acted": _acted,
    "dead_lettered": lambda event: (
        f"dead-lettered: {': '.join(each for each in (event.error_type, event.error) if each)}"
    ),
}


def _known(text: str, value: float | None) -> str:
    return "" if value is None else text.format(seconds(value))


# -- merging ---------------------------------------------------------------------------------


def _merged(rows: list[LogEntry], events: list[LogEntry]) -> list[LogEntry]:
    """Rows and events in order; a start or outcome that both know becomes one entry.

    Gaps of the rows, which have no time, stay before the entry that they were before.
    """
    for number, row in enumerate(rows):
        place = _match(row, events)
        if place is not None:
            event = events[place]
            events[place] = replace(event, text=_both(event, row), source="both")
            rows[number] = replace(row, at=event.at, kind="")
    timed: list[tuple[float, int, LogEntry]] = []
    latest = 0.0
    for row in reversed(rows):
        if row.at is not None:
            latest = row.at
        timed.append((row.at if row.at is not None else latest or float("inf"), 0, row))
    timed.reverse()
    timed += [(event.at or 0.0, 1, event) for event in events]
    timed.sort(key=lambda each: each[:2])
    return [entry for *_, entry in timed if entry.kind]


def _match(row: LogEntry, events: Sequence[LogEntry]) -> int | None:
    """The event that says the same as a row's entry, not used yet."""
    best: tuple[float, int] | None = None
    for place, event in enumerate(events):
        if row.at is None or event.at is None or event.source != "event":
            continue
        if event.worker != row.worker and row.worker:
            continue
        same = event.kind == "received" if row.kind == START else False
        if same or OUTCOMES.get(event.kind) == row.kind:
            apart = abs(event.at - row.at)
            if apart <= SAME_SECONDS and (best is None or apart < best[0]):
                best = (apart, place)
    return None if best is None else best[1]


def _both(event: LogEntry, row: LogEntry) -> str:
    if row.kind == START:
        return f"{event.text}: {row.text}"
    return f"{event.text}; {row.text.rpartition('; ')[2]}"


# -- gaps ------------------------------------------------------------------------------------


def _missing_events(log: EventLog | None, *, started: bool) -> Iterator[LogEntry]:
    if log is None:
        yield gap(
            "no event directory is configured here (events=, AZTASK_EVENTS or --events): "
            "deliveries, renewals and lost leases are not known"
        )
    elif not log.events:
        yield gap(
            f"none of {log.files} event files here names this task: deliveries, renewals and lost "
            "leases are not known"
        )
    elif not any(event.event in ("enqueued", "send_unconfirmed") for event in log.events):
        yield gap("no event of its send: the sender wrote none, or elsewhere")
    elif started and not any(event.event == "received" for event in log.events):
        yield gap("no event of its deliveries: the workers wrote none, or elsewhere")
    if log is not None and log.compacted:
        yield gap(f"{log.compacted} compacted event files were not searched: read them with Spark")
    if log is not None and log.unreadable:
        yield gap(f"{log.unreadable} event files could not be read: check their permissions")


@dataclass(slots=True)
class _Held:
    """The delivery that a walk through the entries is in."""

    entry: LogEntry
    ended: bool = False
    renewals: int = 0


def _with_gaps(
    entries: Sequence[LogEntry], events: Sequence[Event], state: State | None
) -> Iterator[LogEntry]:
    """The entries, with a gap wherever deliveries, ends or renewals have no event."""
    renewals = {
        (each.worker, each.ts): each.renewals for each in events if each.renewals is not None
    }
    held: _Held | None = None
    for entry in entries:
        if entry.kind == "received":
            if held is not None:
                yield from _unended(held)
            yield from _skipped(held, entry)
            held = _Held(entry)
        elif held is not None and entry.kind == "renewed":
            held.renewals += 1
        elif held is not None and entry.kind in ENDS and entry.source != "row":
            count = renewals.get((entry.worker, entry.at or 0.0))
            if count is not None and count > held.renewals and not held.ended:
                missing = count - held.renewals
                yield gap(f"{missing} of {count} renewals have no event")
            held.ended = True
        yield entry
    if held is not None and not held.ended:
        if state is not None and state.final:
            yield from _unended(held)
        else:
            yield gap(f"{held.entry.worker} holds the task now, or has died")


def _unended(held: _Held) -> Iterator[LogEntry]:
    if not held.ended and "given back" not in held.entry.text:
        number, worker = held.entry.delivery, held.entry.worker
        yield gap(
            f"no event says how delivery {number} on {worker} ended: the worker died, was frozen, "
            "or gave it back"
        )


def _skipped(before: _Held | None, now: LogEntry) -> Iterator[LogEntry]:
    """Deliveries between two known ones; a count that falls belongs to a new message."""
    last = (before.entry.delivery if before is not None else 0) or 0
    count = now.delivery or 0
    if count > last + 1:
        first = last + 1
        one = first == count - 1
        which = f"delivery {first} has" if one else f"deliveries {first} to {count - 1} have"
        yield gap(f"{which} no event")
