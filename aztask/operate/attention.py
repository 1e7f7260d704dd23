"""What needs a person first, in words: from figures that were read, controls and schedules.

Rules
1. Problems come before warnings; in each, what stops work comes before what slows it.
2. What cannot be read is a notice too, and hides no other.
3. Dead letters, pauses and open breakers are warnings: the rest goes on beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError
from aztask.operate.action import results_of
from aztask.operate.controls import controls
from aztask.operate.overview import Figures
from aztask.operate.schedules import schedules
from aztask.operate.workers import heartbeats
from aztask.queues.base import QueueStats
from aztask.stores.records.base import WorkerRecord
from aztask.support import clock
from aztask.support.display import plural, safe_str
from aztask.support.finding import Level

_BAD_SCHEDULES: Final = {
    "missed": "missed its time",
    "unclaimed": "is claimed by no running code",
    "unreadable": "cannot be read",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that needs attention.

    * `about`: ``queue``, ``worker``, ``schedule``, ``pause``, ``breaker``, ``dead`` or ``service``.
    * `name`: of the queue, worker, schedule or task.
    """

    level: Level
    about: str
    name: str
    text: str


def attention(app: App, figures: Figures) -> list[Notice]:
    """What needs attention, the most urgent first. figures: one reading of the overview."""
    found = [
        *(Notice(Level.PROBLEM, "service", "", each) for each in figures.problems),
        *_workers(figures),
        *_queues(figures),
        *_controls(app),
        *_schedules(app, figures),
    ]
    return sorted(found, key=lambda each: each.level is not Level.PROBLEM)


def _workers(figures: Figures) -> Iterator[Notice]:
    for each in figures.workers:
        name = each.record.name
        if each.state == "silent":
            yield _silent(each.record)
        for part in each.record.failing if each.state == "alive" else ():
            text = f"worker {name}: {part.part} fails: {part.reason}"
            yield Notice(Level.PROBLEM, "worker", name, text)


def silent_workers(app: App) -> list[Notice]:
    """The workers of this broker that fell silent within a day.

    Raises BrokerUnavailable, and ConfigurationError without a result store.
    """
    found = heartbeats(results_of(app), clock.wall(), everyone=False)
    return [_silent(each) for each in found.records if found.state(each) == "silent"]


def _silent(record: WorkerRecord) -> Notice:
    tasks = plural(record.running, "task")
    text = (
        f"worker {record.name} is silent: it was killed or cannot reach the store; it ran {tasks}"
    )
    level = Level.PROBLEM if record.running else Level.WARNING
    return Notice(level, "worker", record.name, text)


def _queues(figures: Figures) -> Iterator[Notice]:
    served = {
        queue for each in figures.workers if each.state == "alive" for queue in each.record.queues
    }
    known = any(figures.workers)
    for stats in figures.queues:
        count = stats.waiting
        if known and count and stats.queue not in served:
            text = f"queue {stats.queue} has {plural(count, 'message')} and no running worker"
            yield Notice(Level.PROBLEM, "queue", stats.queue, text)
    for stats in figures.queues:
        if stats.dead:
            text = f"queue {stats.queue} has {plural(stats.dead, 'dead letter')}"
            yield Notice(Level.WARNING, "dead", stats.queue, text)


def backlog(queues: Sequence[QueueStats]) -> int:
    """How many messages wait in these queues."""
    return sum(each.waiting for each in queues)


def _controls(app: App) -> Iterator[Notice]:
    try:
        found = controls(app)
    except ConfigurationError:
        return  # without a result store nothing can be paused
    except AztaskError as error:
        yield Notice(Level.PROBLEM, "service", "", f"pauses cannot be read: {safe_str(error)}")
        return
    for name, breaker in found.breakers:
        text = f"the circuit breaker of {breaker.task} in {name} is open: {breaker.why}"
        yield Notice(Level.WARNING, "breaker", breaker.task, text)
    for pause in found.pauses:
        by = f" by {pause.by}" if pause.by else ""
        yield Notice(Level.WARNING, "pause", pause.name, f"{pause} is paused{by}")


def _schedules(app: App, figures: Figures) -> Iterator[Notice]:
    try:
        yield from bad_schedules(app, [each.record for each in figures.workers])
    except ConfigurationError:
        return
    except AztaskError as error:
        yield Notice(Level.PROBLEM, "service", "", f"schedules cannot be read: {safe_str(error)}")


def bad_schedules(app: App, workers: Sequence[WorkerRecord] | None = None) -> list[Notice]:
    """Schedules that missed a time, that no code claims, that are damaged, or are put aside.

    workers: see `schedules`.

    Raises BrokerUnavailable, and ConfigurationError without a result store.
    """
    listed, aside = schedules(app, workers)
    found = []
    for name, why in aside.items():
        text = f"schedule {name} was put aside by worker {why.worker}: {why.reason}"
        found.append(Notice(Level.PROBLEM, "schedule", name, text))
    for each in listed:
        if each.owner is None and each.state in _BAD_SCHEDULES:
            text = f"schedule {each.name} {_BAD_SCHEDULES[each.state]}"
            found.append(Notice(Level.WARNING, "schedule", each.name, text))
    return found
