"""Runs courses, and says what came of them."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aztask.support.clock import SYSTEM_CLOCK

from .book import Book, Violation
from .course import Course, draw
from .world import World


@dataclass
class Report:
    """What a course was like. name: the assertion that failed, "crash" for an error, "" for none.

    trace: of the task that it is about, if it failed.
    """

    course: Course
    name: str = ""
    text: str = ""
    trace: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    virtual: float = 0.0
    steps: int = 0
    seconds: float = 0.0


def run(course: Course) -> Report:
    """Run one course. A violation or an error of the world is in the report."""
    report, began = Report(course), time.process_time()
    with _no_collections():
        world = World(course)
        with _no_real_time(world.book):
            _run(world, report)
    report.counts, report.faults, report.points = world.book.counts, world.faults, world.points
    report.virtual, report.steps = world.now, world.steps
    report.seconds = time.process_time() - began
    return report


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage once, at the end: a course is short, and what it does must not depend on it.

    What is there before is looked at no more, which makes that collection short.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


@contextmanager
def _no_real_time(book: Book) -> Iterator[None]:
    """Complain if this thread reads the clock of the machine: a course would not repeat.

    That clock is the default of whatever takes one, so a forgotten argument is not seen otherwise.
    A wait of some seconds for another thread is refused: none comes, and the world's time stands.
    """
    mine = threading.get_ident()
    really_wait = threading.Condition.wait

    def wait(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None and threading.get_ident() == mine:
            raise RuntimeError(f"a wait of {timeout:g} s for another thread")
        return really_wait(self, timeout)

    def guarded(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            if threading.get_ident() == mine:
                where = "".join(traceback.format_stack(limit=3)[:-1])
                book.complain("no-crash", f"the clock of the machine was read:\n{where}")
            return read(*arguments)

        return reading

    names = ("monotonic", "wall", "sleep")
    before = {name: getattr(SYSTEM_CLOCK, name) for name in names}
    try:
        for name, read in before.items():
            object.__setattr__(SYSTEM_CLOCK, name, guarded(read))
        threading.Condition.wait = wait  # type: ignore[method-assign]
        yield
    finally:
        threading.Condition.wait = really_wait  # type: ignore[method-assign]
        for name, read in before.items():
            object.__setattr__(SYSTEM_CLOCK, name, read)


def _run(world: World, report: Report) -> None:
    try:
        world.run()
    except Violation as violation:
        report.name, report.text = violation.name, str(violation)
        report.trace = trace_of(world, violation.task_id)
        if violation.__cause__ is not None:
            report.trace += traceback.format_exception(violation.__cause__)
    except Exception as error:  # noqa: BLE001  # the next course is run
        report.name, report.text = "crash", f"{type(error).__name__}: {error}"
        report.trace = traceback.format_exc().splitlines()


def run_seed(seed: int) -> Report:
    """Run the course of a seed."""
    return run(draw(seed))


def trace_of(world: World, task_id: str) -> list[str]:
    """What happened to a task, and to the actors; "" for the actors alone."""
    return [
        f"{at - world.began:9.2f}  {who:10}  {what}{f'  [{which}]' if which else ''}"
        for at, who, what, which in world.book.trace
        if not which or (task_id and which.startswith(task_id))
    ]
