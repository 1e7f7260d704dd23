"""The critical path of a workflow: the tasks whose delay would have delayed its end.

Rules
1. The path is walked back from the task that ended last. Before a task comes the one that its event
   names as its parent. If the parent is a group, the member that ended last comes before it.
2. Task ids of a workflow are ``WORKFLOW.NUMBER``, and numbers rise in the order of the graph: the
   tasks of a group have numbers between the group's own and that of the task which waits for it
   (`aztask.canvas.compiler`). So the walk ends, whatever the events say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """A task of a workflow, all its runs together. Times are seconds since 1970.

    * `parent`: the id of the task or group before it, or None.
    * `started`: of its first run, None if no event has it; `ended`: of its last one.
    """

    task_id: str
    parent: str | None
    started: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class Step:
    """One task of a critical path.

    * `wait_seconds`: from the end of the step before it to its start; 0 for the first step.
    * `run_seconds`: from its first start to its last end, with the delays of its retries.
    """

    task_id: str
    wait_seconds: float
    run_seconds: float


def critical_path(workflow: str, tasks: Iterable[TaskTimes]) -> list[Step]:
    """The steps of one workflow's critical path, the first task first.

    tasks: those that have ended.
    """
    found = {number: each for each in tasks if (number := _number(workflow, each.task_id))}
    numbers = sorted(found)
    path: list[TaskTimes] = []
    number = max(numbers, key=lambda each: found[each].ended, default=None)
    while number is not None:
        task = found[number]
        path.append(task)
        parent = _number(workflow, task.parent or "")
        if parent is None or parent >= number:
            break
        if parent in found:
            number = parent
        else:
            members = numbers[bisect_right(numbers, parent) : bisect_left(numbers, number)]
            number = max(members, key=lambda each: found[each].ended, default=None)
    return _steps(path[::-1])


def _number(workflow: str, task_id: str) -> int | None:
    """The number of a node in its task id; None for another workflow's task."""
    name, _, number = task_id.rpartition(".")
    return int(number) if name == workflow and number.isascii() and number.isdigit() else None


def _steps(path: list[TaskTimes]) -> list[Step]:
    steps: list[Step] = []
    before: float | None = None
    for task in path:
        start = task.ended if task.started is None else min(task.started, task.ended)
        # clocks of two machines may differ: a wait is never shown as negative
        wait = 0.0 if before is None else max(0.0, start - before)
        steps.append(Step(task.task_id, wait, task.ended - start))
        before = task.ended
    return steps
