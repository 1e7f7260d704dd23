"""All checks of ``aztask doctor``: broker, queues, permissions, clock, results, events, payloads.

Rules
1. Nothing is changed: no queue is created, no message is taken. (To measure the service's clock, a
   message of our own is scheduled, read and cancelled; in the events' directory a file is made and
   removed. `aztask.operate.orphans` removes payloads, if you ask for that.)
2. An unreachable broker is asked once, not once for each queue.
3. What several checks find in the same words is said once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from aztask.address.shards import read_shard_name
from aztask.app import App
from aztask.errors import (
    AztaskError,
    BrokerUnavailable,
    ConfigurationError,
    QueueDisabled,
    QueueNotFound,
)
from aztask.handler import Handler
from aztask.operate.exposed import exposed_findings
from aztask.operate.findings import (
    DAMAGED_ROWS,
    events_text,
    minute,
    named_rows,
    pause_findings,
    schedule_findings,
    store_text,
)
from aztask.operate.orphans import payload_findings
from aztask.operate.owners import owner_findings
from aztask.operate.queuechecks import judge
from aztask.operate.queues import LeftOut, all_queues
from aztask.operate.resharding import layout_findings
from aztask.operate.workers import Workers, lost_runs
from aztask.queues.base import Broker, Inspectable, Inspector, Permission, QueueFacts
from aztask.sending.queueplan import QueuePlan
from aztask.stores.records.base import Provisioned, State, WorkerRecord
from aztask.support.display import plural
from aztask.support.finding import Finding, Level, failed, fine, problem, warning

SKEW_SECONDS: Final = 30.0
REFUSED_SECONDS: Final = 300.0
"""Seconds between the clocks from which on signatures and tokens are refused, about."""

SLOW_SECONDS: Final = 1.0
SHOWN_PARTS: Final = 10


@dataclass(frozen=True, slots=True)
class Expectations:
    """What the queues are compared with.

    * `lease`: seconds; None means as the app says.
    * `named`: False if no app was given, so that only general rules apply.
    * `adapts`: the workers take a queue's sessions, and its lease where the app sets none.
    """

    lease: float | None
    named: bool = True
    adapts: bool = False

    def plan(self, app: App, facts: QueueFacts) -> QueuePlan:
        """What is required of the queue."""
        plan = app.queue_plan(facts.queue)
        if self.lease is not None:
            return replace(plan, lease=self.lease, lease_asked=True)
        if self.named and not self.adapts:
            return plan
        own = replace(plan.own, sessions=facts.sessions)
        if self.named and plan.lease_asked:
            return replace(plan, own=own)
        return replace(plan, own=own, lease=facts.lease_seconds or plan.lease)


def queues_to_examine(app: App, left_out: LeftOut, *, named: bool) -> tuple[str, ...]:
    """The app's queues. named: False if no app was given: those of the broker, if it may be asked.

    left_out: receives the queues of other programs.
    """
    if not named:
        with suppress(AztaskError):
            return tuple(all_queues(app, left_out) or app.queue_names())
    return tuple(app.queue_names())


def examine(
    app: App,
    queues: Sequence[str],
    *,
    lease: float | None = None,
    named: bool = True,
    collect: bool = False,
    adapts: bool = False,
) -> Iterator[Finding]:
    """Run all checks and yield each finding at once.

    * `lease`: the lease with which workers are started, in seconds.
    * `named`: False if no app was given, so that queues are checked against general rules only.
    * `collect`: remove the payloads that nothing refers to.
    * `adapts`: see `Expectations`.
    """
    said = set()
    expected = Expectations(lease, named, adapts)
    for finding in _all_findings(app, queues, expected, collect=collect):
        if (words := (finding.level, str(finding))) not in said:  # rule 3
            said.add(words)
            yield finding


def _all_findings(
    app: App, queues: Sequence[str], expectations: Expectations, *, collect: bool
) -> Iterator[Finding]:
    named = expectations.named
    what = f"{app.name}: {plural(len(app.tasks), 'task')}" if named else "none was given with -A"
    yield fine("app", "app", f"{what}; queues {', '.join(queues)}")
    if app.settings.signing_keys and not app.settings.id_key:
        yield warning(
            "app",
            "id-key",
            "messages are signed, but their ids can be guessed: a sender without a key could make "
            "duplicate detection drop a task or its retry",
            "set id_key or AZTASK_ID_KEY, the same for all senders and workers",
        )
    if app.settings.signing_keys and not app.settings.environment:
        yield warning(
            "app",
            "environment",
            "messages are signed for no environment: those of another one that has the same keys, "
            "such as staging, would be accepted here",
            "set environment or AZTASK_ENVIRONMENT, the same for all senders and workers",
        )
    for line in app.overruled:
        text, _, advice = line.rpartition("; ")
        yield warning("app", "variables", text, advice)
    yield from handler_findings(app)
    yield from _of_limits(app)
    if app.missing_file is None:
        yield from _of_broker(app, queues, expectations)
        yield from _of_results(app, named=named)
    else:  # rule 1: opening it would create it
        yield warning(
            "broker",
            "file",
            f"there is no queue file {app.missing_file}",
            "check the address and the working directory; the first send or worker creates it",
        )
    yield from _of_events(app)
    yield from exposed_findings(app)
    yield from payload_findings(app, collect=collect)


def handler_findings(app: App) -> Iterator[Finding]:
    """With signing keys: the queues in which handlers take unsigned messages."""
    if not app.settings.signing_keys:
        return
    handlers = [each for each in app.tasks.values() if isinstance(each, Handler)]
    if asked := sorted(str(each.queue) for each in handlers if each.unsigned):
        text = f"handlers take unsigned messages, as the code says: {', '.join(asked)}"
        yield fine("app", "unsigned", text)
    if silent := sorted(str(each.queue) for each in handlers if not each.unsigned):
        text = (
            "the app has signing keys, and handlers whose messages no program signs: "
            f"{', '.join(silent)}; any program that may send there decides what they get"
        )
        advice = (
            "write @app.handler(..., unsigned=True) if you mean that; the next release does not "
            "start a worker without it"
        )
        if app.codec.takes_old:
            yield warning("app", "unsigned", text, advice)
        else:
            advice = "write @app.handler(..., unsigned=True) if you mean that"
            yield problem("app", "unsigned", text, advice, ConfigurationError(f"{text}; {advice}"))


def _of_limits(app: App) -> Iterator[Finding]:
    """Tasks that name limits which are not declared: no worker starts with them."""
    for task in app.tasks.values():
        try:
            app.limits_of(task)
        except ConfigurationError as error:
            yield failed("app", "limits", error)


def contradictions(app: App, queues: Sequence[str], lease: float | None = None) -> list[Finding]:
    """Findings about queue settings that contradict the app's; only problems and warnings.

    Settings that cannot be read are no contradiction: a worker needs no permission to read them.
    """
    broker = app.broker
    if not isinstance(broker, Inspectable):
        return []
    inspector = broker.inspector()
    expectations = Expectations(lease)
    found: list[Finding] = []
    for queue in queues:
        facts = inspector.facts(queue)
        if facts.unread:
            break  # the next one could not be read, either, and waiting for it takes time
        found += judge(facts, expectations.plan(app, facts), broker.capabilities)
    return [each for each in found if each.level is not Level.OK]


def _of_broker(app: App, queues: Sequence[str], expectations: Expectations) -> Iterator[Finding]:
    try:
        broker = app.broker
        if not isinstance(broker, Inspectable):
            yield fine("broker", "broker", f"{app.address} cannot be checked")
            return
        inspector = broker.inspector()
        yield fine("broker", "broker", app.address)
        yield from inspector.surroundings()
        for queue in queues:
            yield from _of_queue(app, broker, inspector, queue, expectations)
        for queue in queues[:1]:
            yield from _of_clock(inspector, queue)
        yield from _of_shards(app)
    except BrokerUnavailable as error:
        text = str(error)
        advice = "make sure that no firewall lies between this machine and its port"
        if "check the address" not in text:
            advice = f"check the address, and {advice}"
        yield problem("broker", "answers", text, advice, error)
    except AztaskError as error:
        yield failed("broker", "broker", error)


def _of_queue(
    app: App, broker: Broker, inspector: Inspector, queue: str, expectations: Expectations
) -> Iterator[Finding]:
    subject = f"queue {queue}"
    began = time.monotonic()
    try:
        facts = inspector.facts(queue)
        yield from judge(facts, expectations.plan(app, facts), broker.capabilities)
        if facts.exists is False:
            return
        permissions = inspector.rights(queue)
    except QueueDisabled as error:  # concerns this queue only: the next one is checked
        yield failed(subject, "permissions", error)
        return
    except BrokerUnavailable:
        raise
    except AztaskError as error:
        yield failed(subject, "name", error)
        return
    yield from _of_permissions(subject, permissions)
    spent = time.monotonic() - began
    if spent > SLOW_SECONDS and not facts.unread:
        yield fine(subject, "speed", f"these checks took {spent:.1f} s")


def _of_shards(app: App) -> Iterator[Finding]:
    """The shards of queues, and former shards that hold messages."""
    yield from layout_findings(app)
    named, listed = set(app.queue_names()), list[str]()
    with suppress(ConfigurationError):  # some may read their queues, but not list all
        listed = all_queues(app, LeftOut())
    for name in listed:
        queue, number = read_shard_name(name)
        if not number or queue not in named or name in named:
            continue
        try:
            held = app.broker.stats(name)
        except QueueNotFound:  # left at an address where the shard of this number is not
            continue
        if held.living or held.dead:
            yield warning(
                f"queue {queue}",
                "shards",
                f"{name} holds {plural(held.living, 'message')} and "
                f"{plural(held.dead or 0, 'dead letter')}, and no worker reads it",
                f"declare app.queue({queue!r}, ..., old_shards={number + 1}) until it is empty",
            )


def _of_permissions(subject: str, permissions: Sequence[Permission]) -> Iterator[Finding]:
    granted = [each.name for each in permissions if each.known and each.error is None]
    if granted:
        yield fine(subject, "permissions", f"permissions found: {', '.join(granted)}")
    for each in permissions:
        if each.error is not None:
            yield failed(subject, f"right-{each.name}", each.error)
    unknown = [each.name for each in permissions if not each.known]
    if unknown:
        yield warning(
            subject,
            "permissions",
            f"permissions that cannot be checked without using them: {', '.join(unknown)}",
            "check the role that is assigned; docs/how-to/production names the required ones",
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
            "correct this machine's clock: the service refuses signatures and tokens from it",
            ConfigurationError(text),
        )
    elif abs(offset) >= SKEW_SECONDS:
        yield warning(
            "clock",
            "clock",
            text,
            "correct the clock: times in events and results are wrong (leases and delays are not)",
        )
    else:
        yield fine("clock", "clock", text)


def _of_results(app: App, *, named: bool) -> Iterator[Finding]:
    try:
        store = app.results
        if store is None:
            yield warning(
                "results",
                "results",
                "there is no result store: a redelivered message may run again although its task "
                "has finished, and .get() does not work",
                "set AZTASK_RESULTS, for example to local://",
            )
            return
        if isinstance(store, Provisioned):
            store.check()
        began = time.monotonic()
        workers = store.workers()
        spent = time.monotonic() - began
        damaged = store.recent(state=State.UNREADABLE, limit=DAMAGED_ROWS)
        held = store_text(store)
    except AztaskError as error:
        yield failed("results", "results", error)
        return
    known = sum(not worker.damage for worker in workers)
    yield fine(
        "results",
        "results",
        f"the result store answers in {1000 * spent:.0f} ms and knows {known} workers",
    )
    if held:
        yield fine("results", "size", held)
    yield from owner_findings(app, store)
    yield from pause_findings(store)
    yield from schedule_findings(app, store, named=named)
    yield from _of_priorities(app, workers)
    yield from _of_parts(workers)
    yield from _of_lost(app, workers)
    if known < len(workers):
        names = [(worker.name, worker.damage) for worker in workers if worker.damage]
        text = f"rows of workers that cannot be read: {named_rows(names)}"
        advice = "a live worker repairs its row with its next heartbeat; delete those that remain"
        yield warning("results", "workers", text, advice)
    if damaged:
        reasons = [(run.key.task_id, run.damage) for run in damaged]
        text = f"rows of tasks that cannot be read: {named_rows(reasons)}"
        advice = (
            "list them with aztask result --state unreadable, find out which program writes to the "
            "store, then run aztask dlq replay --reason unreadable-record"
        )
        yield warning("results", "damage", text, advice)


def _of_priorities(app: App, workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    """Queues of priorities that no worker serves, although some workers run."""
    now = time.time()
    served = {queue for each in workers if each.state_at(now) == "alive" for queue in each.queues}
    unserved = sorted(app.queue_weights().keys() - served)
    if served and unserved:
        yield warning(
            "results",
            "priorities",
            f"no worker serves {', '.join(unserved)}: messages of these priorities wait",
            "add them to -Q of a worker, or start one without -Q, which serves all of the app's",
        )


def _of_lost(app: App, workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    """At-most-once runs whose workers are gone."""
    readable = [worker for worker in workers if not worker.damage]
    try:
        lost = list(lost_runs(app, Workers(readable, {}, time.time())))
    except AztaskError as error:
        yield failed("results", "lost", error)
        return
    if lost:
        names = [(run.key.task_id, f"{run.task} on {worker.name}") for run, worker in lost]
        yield warning(
            "workers",
            "lost",
            f"{plural(len(lost), 'at-most-once task')} started on workers that are gone: "
            f"{named_rows(names)}",
            "a running worker of this app ends each as lost once its lease has passed; run one",
        )


def _of_parts(workers: Sequence[WorkerRecord]) -> Iterator[Finding]:
    """The failing parts of workers that run, the oldest first."""
    now = time.time()
    alive = [worker for worker in workers if worker.state_at(now) == "alive"]
    failing = sorted(
        ((each, worker.name) for worker in alive for each in worker.failing),
        key=lambda pair: pair[0].since,
    )
    for each, name in failing[:SHOWN_PARTS]:
        yield warning(
            "workers",
            "parts",
            f"{each.part} fails since {minute(each.since)} in worker {name}: {each.reason}",
            "the worker tries it again; its log has the traceback. Repair what the reason names",
        )
    if len(failing) > SHOWN_PARTS:
        yield warning(
            "workers",
            "parts",
            f"{len(failing) - SHOWN_PARTS} more parts of workers fail",
            "list them with aztask workers",
        )


def _of_events(app: App) -> Iterator[Finding]:
    directory = app.settings.events
    if directory is None:
        yield fine(
            "events",
            "events",
            "no events are written; to write them, set AZTASK_EVENTS to a directory",
        )
        return
    place = Path(directory).absolute()
    there = next(each for each in (place, *place.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            yield fine("events", "events", f"{place} can be written")
            yield fine("events", "size", events_text(place))
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror}"
        yield problem(
            "events",
            "events",
            text,
            "choose another directory, or allow this user to write there",
            ConfigurationError(text),
        )
