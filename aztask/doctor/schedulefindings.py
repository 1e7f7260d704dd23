"""Findings about schedules: those that no running code claims, that are late, or that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from aztask.app import App
from aztask.doctor.naming import minute, named_rows
from aztask.errors import AztaskError
from aztask.results.base import ResultStore
from aztask.results.damage import Damaged
from aztask.results.schedules import schedules_of
from aztask.schedules.engine import ScheduleEngine, View
from aztask.schedules.stored import DUE, Schedule
from aztask.support.display import plural
from aztask.support.finding import Finding, failed, fine, warning

LATE_SECONDS: Final = 120.0
"""An occurrence that is later than this has no worker that makes or sends it. Workers take over
from one that died within a minute."""

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
        found = dict(app.schedules.engine.views()) if schedules.any() else {}
        now = schedules.now()
    except AztaskError as error:
        yield failed("schedules", "schedules", error)
        return
    if not found and not declared:
        return
    troubles = list(_troubles(app.schedules.engine, found, declared, now))
    yield from troubles
    if not troubles:
        yield fine("schedules", "schedules", f"{plural(len(found), 'schedule')}, none is late")


def _troubles(
    engine: ScheduleEngine, found: dict[str, View | Damaged], declared: set[str], now: float
) -> Iterator[Finding]:
    views = {name: view for name, view in found.items() if isinstance(view, View)}
    states = {name: view.schedule.state_at(now) for name, view in views.items()}
    damaged = [(name, view.reason) for name, view in found.items() if isinstance(view, Damaged)]
    if damaged:
        text = f"schedules that cannot be read: {named_rows(damaged)}"
        advice = "delete them with app.schedules.delete(NAME); workers make those of the code again"
        yield warning("schedules", "damage", text, advice)
    if missing := sorted(declared - found.keys()):
        text = f"schedules of the code that no worker has made yet: {', '.join(missing)}"
        yield warning("schedules", "missing", text, START)

    def since(state: str, when: Callable[[Schedule], float | None]) -> list[tuple[str, str]]:
        return [
            (name, f"since {minute(when(views[name].schedule) or 0.0)}")
            for name, found_state in states.items()
            if found_state == state
        ]

    if unclaimed := since("unclaimed", lambda schedule: schedule.claimed_at):
        text = f"stopped, because no running code claims them: {named_rows(unclaimed)}"
        advice = f"{START}; or forget them with app.schedules.delete(NAME)"
        yield warning("schedules", "unclaimed", text, advice)
    if paused := since("paused", lambda schedule: schedule.paused_at):
        text = f"paused schedules: {named_rows(paused)}"
        yield warning("schedules", "paused", text, "to go on, run aztask schedule resume NAME")
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
