"""Findings about what is paused, about schedules, and about sizes, and how they name rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError
from aztask.limits.breakers import OpenBreaker, breakers_of_apps
from aztask.limits.control import Controls
from aztask.schedules.engine import ScheduleEngine
from aztask.schedules.states import MISSED, state_of
from aztask.schedules.stored import DUE
from aztask.schedules.view import View
from aztask.stores.records.base import Measurable, ResultStore, StoreSize
from aztask.stores.records.controls import controls_of
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import schedules_of
from aztask.support.display import byte_text, plural, visible
from aztask.support.finding import Finding, failed, fine, warning

DAMAGED_ROWS: Final = 100
"""The most damaged rows that are counted."""
NAMED_ROWS: Final = 3
"""The most rows that one line names."""


def named_rows(rows: Sequence[tuple[str, str]]) -> str:
    """How many rows there are, and the first of them with their reasons."""
    count = f"{len(rows)}{'' if len(rows) < DAMAGED_ROWS else ' or more'}"
    first = "; ".join(f"{name} ({reason})" for name, reason in rows[:NAMED_ROWS])
    return f"{count}: {first}{'; ...' if len(rows) > NAMED_ROWS else ''}"


def visible_names(names: Sequence[str]) -> str:
    """The first of these names, and that there are more."""
    more = ", ..." if len(names) > NAMED_ROWS else ""
    return visible(", ".join(names[:NAMED_ROWS])) + more


def minute(at: float) -> str:
    """UTC epoch seconds as a date and a time to the minute."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


# -- what is paused --------------------------------------------------------------------------
#
# By operators, who may have forgotten it, or by breakers.


def pause_findings(store: ResultStore) -> Iterator[Finding]:
    """A warning for what is paused, and one for open circuit breakers; none if all runs."""
    controls = controls_of(store)
    if controls is None:
        return
    try:
        found = Controls(controls)
        state, unowned = found.read_both()
        pauses = state.listed()
        if unowned:
            names = [*map(str, unowned.listed()), *map(str, unowned.scales.values())]
            text = f"a release before 0.2 paused or scaled for every broker: {visible_names(names)}"
            advice = (
                "pause or scale them again, or resume them: then it is for this broker alone "
                "(aztask control)"
            )
            yield warning("results", "paused", text, advice)
        if pauses:
            rows = [(str(each), f"since {minute(each.at)}, by {each.by}") for each in pauses]
            text = f"paused for all workers: {named_rows(rows)}"
            yield warning("results", "paused", text, "to resume it, run aztask control resume")
    except AztaskError as error:
        yield failed("results", "paused", error)
    try:
        breakers = [row for each in breakers_of_apps(controls) for row in each.read().values()]
        if breakers:
            text = f"open circuit breakers: {named_rows([_described(row) for row in breakers])}"
            advice = (
                "find out why these tasks fail (aztask result --state failed); a breaker closes "
                "when a probe succeeds, or with aztask control resume --task NAME"
            )
            yield warning("results", "breakers", text, advice)
    except AztaskError as error:
        yield failed("results", "breakers", error)


def _described(row: OpenBreaker) -> tuple[str, str]:
    probes = f", failed probes: {row.failures}" if row.failures else ""
    return f"task {row.task}", f"since {minute(row.at)}, {row.why}{probes}"


# -- schedules -------------------------------------------------------------------------------
#
# Those that no running code claims, that are late, or that wait.


LATE_SECONDS: Final = 120.0
"""An occurrence that is later than this has no worker that makes or sends it. Workers take over
from one that died within a minute."""

UNOWNED_SECONDS: Final = 86400.0
UNOWNED: Final = (
    "start a worker of the app that made them; if it has another broker now, run its aztask doctor "
    "--adopt; or forget them with its app.schedules.delete(NAME)"
)
START: Final = (
    "start a worker whose code declares them (or aztask scheduler), without --no-schedules"
)


def schedule_findings(app: App, store: ResultStore, *, named: bool) -> Iterator[Finding]:
    """Nothing if there are no schedules; one line if all are well, else one for each trouble.

    * `named`: False if no app was given, so that only what is stored counts.
    """
    schedules = schedules_of(store)
    if schedules is None:
        return
    try:
        declared = set(app.schedules.declared) if named else set()
        found, orphans = _of_app(app, named=named) if schedules.any() else ({}, {})
        now = schedules.now()
        troubles = list(_troubles(app.schedules.engine, found, declared, now))
    except AztaskError as error:
        yield failed("schedules", "schedules", error)
        return
    yield from _unowned(orphans, now)
    if not found and not declared:
        return
    yield from troubles
    if not troubles:
        yield fine("schedules", "schedules", f"{plural(len(found), 'schedule')}, none is late")


Views = dict[str, View | Damaged]


def _of_app(app: App, *, named: bool) -> tuple[Views, Views]:
    """(the schedules of the app, or without one those of the broker; those without an owner)."""
    engine = app.schedules.engine
    found, orphans = Views(), Views()
    for name, view, owner in engine.all_views():
        if owner is None:
            found[name] = view
        elif not owner.known:
            orphans[name] = view
        elif not named and owner.of_broker == app.owner.of_broker:
            found.setdefault(name, view)
    return found, orphans


def _unowned(orphans: Views, now: float) -> Iterator[Finding]:
    """Schedules that no app has adopted, and that no release before 0.2 has moved for a day."""
    old = sorted(
        name
        for name, view in orphans.items()
        if isinstance(view, View) and now - _last_moved(view) > UNOWNED_SECONDS
    )
    if old:
        text = f"schedules without an owner, which no app has adopted: {', '.join(old)}"
        yield warning("schedules", "unowned", text, UNOWNED)


def _last_moved(view: View) -> float:
    schedule = view.schedule
    return max(schedule.made_at, schedule.watermark, schedule.last_at, view.claimed_at)


def _troubles(
    engine: ScheduleEngine, found: dict[str, View | Damaged], declared: set[str], now: float
) -> Iterator[Finding]:
    views = {name: view for name, view in found.items() if isinstance(view, View)}
    states = {name: state_of(engine, view, now) for name, view in views.items()}
    damaged = [(name, view.reason) for name, view in found.items() if isinstance(view, Damaged)]
    if damaged:
        text = f"schedules that cannot be read: {named_rows(damaged)}"
        advice = "delete them with app.schedules.delete(NAME); workers make those of the code again"
        yield warning("schedules", "damage", text, advice)
    if missing := sorted(declared - found.keys()):
        text = f"schedules of the code that no worker has made yet: {', '.join(missing)}"
        yield warning("schedules", "missing", text, START)

    def since(state: str, when: Callable[[View], float | None]) -> list[tuple[str, str]]:
        return [
            (name, f"since {minute(when(views[name]) or views[name].schedule.made_at)}")
            for name, found_state in states.items()
            if found_state == state
        ]

    if unclaimed := since("unclaimed", lambda view: view.claimed_at):
        text = f"stopped, because no running code claims them: {named_rows(unclaimed)}"
        advice = f"{START}; or forget them with app.schedules.delete(NAME)"
        yield warning("schedules", "unclaimed", text, advice)
    if paused := since("paused", lambda view: view.schedule.paused_at):
        text = f"paused schedules: {named_rows(paused)}"
        yield warning("schedules", "paused", text, "to go on, run aztask schedule resume NAME")
    if passed := [name for name, state in states.items() if state == MISSED]:
        text = f"schedules whose time has passed without their task: {', '.join(passed)}"
        advice = "send their tasks with aztask schedule trigger NAME, or remove them from the code"
        yield warning("schedules", "missed", text, advice)
    active = [view for name, view in views.items() if states[name] == "active"]
    late = [(view.name, why) for view in active if (why := _late(engine, view, now))]
    if late:
        text = f"late schedules: {named_rows(late)}"
        yield warning("schedules", "late", text, f"read the workers' log; or {START}")


def _late(engine: ScheduleEngine, view: View, now: float) -> str:
    """Why the schedule is late; "" if it is not, or if its definition cannot be verified here."""
    for made in view.open:
        if made.state == DUE and now - made.made_at > LATE_SECONDS:
            return f"the task of {minute(made.at)} is not sent"
    try:
        due = engine.next_due(view)
    except (AztaskError, Damaged):
        return ""
    if due is not None and now - due > LATE_SECONDS:
        return f"due at {minute(due)}, no worker makes it"
    return ""


# -- how much the result store and the event directory hold ----------------------------------


def store_text(store: ResultStore) -> str | None:
    """What the store holds; None if it cannot say."""
    return _stored_size(store.size()) if isinstance(store, Measurable) else None


def _stored_size(size: StoreSize) -> str:
    least = "" if size.complete else "at least "
    parts = [f"{least}{size.rows:,} runs"]
    if size.unfinished is not None:
        parts[0] += f", {size.unfinished:,} of them not ended"
    if size.file_bytes is not None:
        parts.append(f"a file of {byte_text(size.file_bytes)}")
    if size.blobs is not None:
        parts.append(f"{size.blobs:,} blobs of {byte_text(size.blob_bytes or 0)}")
    return f"the result store holds {'; '.join(parts)}"


def events_text(directory: Path) -> str:
    """How many event files the directory holds, those that are still open included."""
    count, size = 0, 0
    for pattern in ("date=*/hour=*/[!._]*.jsonl", ".*.jsonl"):
        for path in directory.glob(pattern):
            try:
                size += path.lstat().st_size
            except OSError:
                continue  # a worker has deleted or renamed it
            count += 1
    return f"{count:,} event files of {byte_text(size)} in {directory}"
