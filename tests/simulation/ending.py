"""The assertions about the end of a course: everything has ended, agrees, and leaves nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from aztask.errors import ResultTimeout, TaskFailed
from aztask.stores.records.base import State

from .book import Violation
from .course import RETENTION
from .programs import value_of

if TYPE_CHECKING:
    from .book import Life
    from .world import World


def is_still(world: World) -> bool:
    """Whether nothing happens any more, as far as the book knows."""
    if world.book.open and world.course.kind != "local" and world.now >= world.look_at:
        world.look_at = world.now + 100.0
        _learn(world)
    if world.book.open and not all(_may_stay(world.book.lives[each]) for each in world.book.open):
        return False
    if world.standing:
        return False
    if any(not worker.idle() for worker in world.workers) or world.workflows_are_open():
        return False
    return not _left(world)


def _learn(world: World) -> None:
    """Ends that were recorded by requests whose senders died before the answer came."""
    for task_id in sorted(world.book.open):
        record = world.record_of(world.book.lives[task_id])
        if record is not None and record.state.final and record.outcome is not None:
            key = (task_id, record.key.generation, record.key.hop)
            world.book.learned(key, record.outcome)


def _may_stay(life: Life) -> bool:
    """Whether the task need not end: one whose message was damaged."""
    return life.damaged


def _left(world: World) -> list[str]:
    """What waits in the queues, except for occurrences of the schedule."""
    left = []
    for label, sender in world.senders.items():
        for queue in world.program.queues(sender.app):
            stats = sender.broker.stats(queue)
            if stats.living:
                left.append(f"{label} {queue}: {stats}")
    return left


def check(world: World, name: str) -> None:
    """Everything must have ended by now. Raises Violation of this name."""
    for task_id in sorted(world.book.open):
        life = world.book.lives[task_id]
        if not _may_stay(life):
            record = world.record_of(life)
            state = "unknown to the store" if record is None else record.state.value
            raise Violation(name, f"{life.task} {task_id} has not ended, it is {state}", task_id)
    if left := _left(world):
        raise Violation(name, f"messages are left: {'; '.join(left)}")
    for label, workflow, _ in world.workflows:
        state = world.sender(label).app.workflows.result(workflow).state
        if state in ("started",):
            raise Violation(name, f"workflow {workflow} has not ended", f"{workflow}.")


def check_at_last(world: World) -> None:
    """What must be so at the end. Raises Violation."""
    _workers(world)
    _workflows(world)
    _events(world)
    _occurrences(world)
    if world.book.violations:
        raise world.book.violations[0]


def _workers(world: World) -> None:
    for worker in world.workers:
        core = worker.supervisor.core
        held = len(core.deliveries), sum(map(len, worker.machine.keepers)), len(worker.running())
        if any(held):
            raise Violation("leaves-nothing", f"{worker.name} still holds {held}")
    for label, sender in world.senders.items():
        if world.workflows_are_open():
            raise Violation("leaves-nothing", f"{label}: a workflow is open")
        dead = sum(
            sender.broker.stats(queue).dead or 0 for queue in world.program.queues(sender.app)
        )
        if dead < 0:
            raise Violation("leaves-nothing", f"{label}: {dead} dead letters")


def _workflows(world: World) -> None:
    for label, workflow, shape in world.workflows:
        result = world.sender(label).app.workflows.result(workflow)
        state = result.state
        if state == "pending":  # its sender died before the root, or it is purged by now
            if workflow in world.begun_workflows and not _is_old(world, label, workflow):
                raise Violation("workflow-agrees", f"workflow {workflow} is gone", f"{workflow}.")
            continue
        expected = value_of(shape)
        try:
            value: Any = result.get(timeout=0)
        except (TaskFailed, ResultTimeout) as error:
            raise Violation(
                "workflow-agrees", f"workflow {workflow} is {state}: {error}", f"{workflow}."
            ) from error
        if value != expected:
            raise Violation(
                "workflow-agrees",
                f"{workflow} has {value}, not {expected}",
                f"{workflow}.",
            )


def _is_old(world: World, label: str, workflow: str) -> bool:
    """Whether all members have ended a retention time ago: then the workflow may be purged."""
    ends = [
        life.ended_at
        for task_id, life in world.book.lives.items()
        if task_id.startswith(f"{workflow}.")
    ]
    before = world.time.now - RETENTION[label] + 120.0
    return bool(ends) and all(end is not None and end < before for end in ends)


def _events(world: World) -> None:
    for life in world.book.lives.values():
        final = sum(life.events.values())
        # The end of an at-most-once run that its worker could not record is told twice: as it was,
        # and as lost when another worker gives the run up.
        if final > 1 + life.generation + life.forgotten + life.given_up:
            raise Violation(
                "events-agree", f"{life.task_id} has ended {dict(life.events)}", life.task_id
            )
        if not final and life.states and not life.struck and life.states != [State.CANCELLED]:
            raise Violation(
                "events-agree", f"{life.task_id} has ended, no event says so", life.task_id
            )


def _occurrences(world: World) -> None:
    """Each occurrence of a schedule was sent, and each once: an id stands for one time."""
    for schedule, sent in world.book.occurrences.items():
        times = sorted(sent.values())
        for former, later in pairwise(times):
            if abs(later - former - world.course.every) > 1e-3:
                raise Violation(
                    "occurrence-once",
                    f"{schedule}: between {former:.3f} and {later:.3f} there should be "
                    f"{world.course.every:g} s",
                )
