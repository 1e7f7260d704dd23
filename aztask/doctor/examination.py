"""The whole examination: broker, queues, rights, clock, results and events, one finding at a time.

Rules
1. Nothing is changed: no queue is made, no message is taken. (A clock is learned from a message of
   our own that is scheduled, looked at and cancelled; a file is made in the events' directory and
   removed.)
2. A broker that does not answer is asked once, not once for each queue.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from aztask.app import App
from aztask.brokers.base import Broker
from aztask.brokers.inspection import Inspectable, Inspector, QueueFacts, Right
from aztask.doctor.queuechecks import judge
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError, QueueDisabled
from aztask.results.base import Provisioned, State
from aztask.sending.queueplan import QueuePlan
from aztask.support.finding import Finding, Level, failed, fine, problem, warning

SKEW_SECONDS: Final = 30.0
REFUSED_SECONDS: Final = 300.0
"""A signature or a token is refused when the clocks are about that far apart."""

SLOW_SECONDS: Final = 1.0
DAMAGED_ROWS: Final = 100
NAMED_ROWS: Final = 3
"""Of damaged rows so many are counted, and so many named."""


@dataclass(frozen=True, slots=True)
class Expectations:
    """lease: seconds, None as the app says. named: whether there is an app to compare with."""

    lease: float | None
    named: bool = True

    def plan(self, app: App, facts: QueueFacts) -> QueuePlan:
        """What is needed of the queue."""
        plan = app.queue_plan(facts.queue)
        if self.lease is not None:
            return replace(plan, lease=self.lease, lease_asked=True)
        if self.named:
            return plan
        own = replace(plan.own, sessions=facts.sessions)
        return replace(plan, own=own, lease=facts.lease_seconds or plan.lease)


def examine(
    app: App, queues: Sequence[str], *, lease: float | None = None, named: bool = True
) -> Iterator[Finding]:
    """Everything that can be said, as it is found.

    lease: what workers are started with. named: False where nobody named an app, so that queues are
    compared with nothing but general rules.
    """
    what = f"{app.name}: {len(app.tasks)} tasks" if named else "none was named"
    yield fine("app", "app", f"{what}; queues {', '.join(queues)}")
    yield from _of_broker(app, queues, Expectations(lease, named))
    yield from _of_results(app)
    yield from _of_events(app)


def contradictions(app: App, queues: Sequence[str], lease: float | None = None) -> list[Finding]:
    """Settings of the queues that contradict the app's: cheap, and silent about what is fine.

    What cannot be read is no contradiction: a worker needs no right to read settings.
    """
    broker = app.broker
    if not isinstance(broker, Inspectable):
        return []
    inspector = broker.inspector()
    wish = Expectations(lease)
    found: list[Finding] = []
    for queue in queues:
        facts = inspector.facts(queue)
        if facts.unread:
            break  # the next one would not be read either, and waiting for that takes time
        found += judge(facts, wish.plan(app, facts), broker.capabilities)
    return [each for each in found if each.level is not Level.OK]


def _of_broker(app: App, queues: Sequence[str], wish: Expectations) -> Iterator[Finding]:
    try:
        broker = app.broker
        if not isinstance(broker, Inspectable):
            yield fine("broker", "broker", f"{app.address} cannot be looked at")
            return
        inspector = broker.inspector()
        yield fine("broker", "broker", app.address)
        yield from inspector.surroundings()
        for queue in queues:
            yield from _of_queue(app, broker, inspector, queue, wish)
        yield from _of_clock(inspector, queues[0])
    except BrokerUnavailable as error:
        advice = "check the address, and that its port can be reached from here"
        yield problem("broker", "answers", str(error), advice, error)
    except AztaskError as error:
        yield failed("broker", "broker", error)


def _of_queue(
    app: App, broker: Broker, inspector: Inspector, queue: str, wish: Expectations
) -> Iterator[Finding]:
    subject = f"queue {queue}"
    began = time.monotonic()
    try:
        facts = inspector.facts(queue)
        yield from judge(facts, wish.plan(app, facts), broker.capabilities)
        if facts.exists is False:
            return
        rights = inspector.rights(queue)
    except QueueDisabled as error:  # of this queue alone: the next one is examined
        yield failed(subject, "rights", error)
        return
    except BrokerUnavailable:
        raise
    except AztaskError as error:
        yield failed(subject, "name", error)
        return
    yield from _of_rights(subject, rights)
    spent = time.monotonic() - began
    if spent > SLOW_SECONDS and not facts.unread:
        yield fine(subject, "speed", f"these looks took {spent:.1f} s")


def _of_rights(subject: str, rights: Sequence[Right]) -> Iterator[Finding]:
    granted = [right.name for right in rights if right.known and right.error is None]
    if granted:
        yield fine(subject, "rights", f"rights that were found: {', '.join(granted)}")
    for right in rights:
        if right.error is not None:
            yield failed(subject, f"right-{right.name}", right.error)
    unknown = [right.name for right in rights if not right.known]
    if unknown:
        yield warning(
            subject,
            "rights",
            f"rights that cannot be tried without using them: {', '.join(unknown)}",
            "look at the role that was assigned; docs/how-to/production names what is needed",
        )


def _of_clock(inspector: Inspector, queue: str) -> Iterator[Finding]:
    offset = inspector.clock_offset(queue)
    if offset is None:
        return
    way = "ahead of" if offset > 0 else "behind"
    text = f"the service's clock is {abs(offset):.1f} s {way} this machine's"
    if abs(offset) >= REFUSED_SECONDS:
        yield problem(
            "clock",
            "clock",
            text,
            "correct this machine's clock: signatures and tokens are refused when it is that far",
            ConfigurationError(text),
        )
    elif abs(offset) >= SKEW_SECONDS:
        yield warning(
            "clock",
            "clock",
            text,
            "leases and delays do not mind; times in events and results do: correct the clock",
        )
    else:
        yield fine("clock", "clock", text)


def _of_results(app: App) -> Iterator[Finding]:
    try:
        store = app.results
        if store is None:
            yield warning(
                "results",
                "results",
                "there is no result store: a redelivered message may run again although it had "
                "finished, and .get() has nothing to wait for",
                "set AZTASK_RESULTS, for example to local://",
            )
            return
        if isinstance(store, Provisioned):
            store.check()
        began = time.monotonic()
        workers = store.workers()
        spent = time.monotonic() - began
        damaged = store.recent(state=State.UNREADABLE, limit=DAMAGED_ROWS)
    except AztaskError as error:
        yield failed("results", "results", error)
        return
    known = sum(not worker.damage for worker in workers)
    yield fine(
        "results",
        "results",
        f"the result store answers in {1000 * spent:.0f} ms and knows {known} workers",
    )
    if known < len(workers):
        names = [(worker.name, worker.damage) for worker in workers if worker.damage]
        text = f"rows of workers that cannot be read: {_named(names)}"
        advice = "a living worker repairs its row with its next heartbeat; delete those that stay"
        yield warning("results", "workers", text, advice)
    if damaged:
        reasons = [(run.key.task_id, run.damage) for run in damaged]
        text = f"rows of tasks that cannot be read: {_named(reasons)}"
        advice = (
            "list them with aztask result --state unreadable, find out who writes to the store, "
            "then aztask dlq replay --reason unreadable-record"
        )
        yield warning("results", "damage", text, advice)


def _named(rows: Sequence[tuple[str, str]]) -> str:
    """How many, and the first of them with their reasons."""
    count = f"{len(rows)}{'' if len(rows) < DAMAGED_ROWS else ' or more'}"
    first = "; ".join(f"{name} ({reason})" for name, reason in rows[:NAMED_ROWS])
    return f"{count}: {first}{'; ...' if len(rows) > NAMED_ROWS else ''}"


def _of_events(app: App) -> Iterator[Finding]:
    directory = app.settings.events
    if directory is None:
        yield fine("events", "events", "no events are written; AZTASK_EVENTS says where to")
        return
    place = Path(directory).absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            yield fine("events", "events", f"{place} can be written")
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror}"
        yield problem(
            "events",
            "events",
            text,
            "choose another directory, or let this user write there",
            ConfigurationError(text),
        )
