"""The least part of a course that still fails: delta debugging over its decisions.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002): halves are left
out, then quarters, and so on, as long as the same assertion fails. Afterwards the steps are taken
in their plain order, if it fails so, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from .course import Course


def shrink(course: Course, fails: Callable[[Course], bool], seconds: float) -> Course:
    """A shorter course for which `fails` is true as well, found within about so many seconds."""
    end = time.monotonic() + seconds
    best, size = course, max(1, len(course.decisions) // 2)
    while time.monotonic() < end:
        shorter = _without_one_part(best, size, fails, end)
        if shorter is not None:
            best = shorter
            size = max(1, min(size, len(best.decisions) // 2))
        elif size == 1:
            break
        else:
            size = max(1, size // 2)
    for change in ({"shuffled": False}, {"workers": 1}, {"slots": 1}):
        simpler = replace(best, **change)
        if time.monotonic() < end and simpler != best and fails(simpler):
            best = simpler
    return best


def _without_one_part(
    course: Course, size: int, fails: Callable[[Course], bool], end: float
) -> Course | None:
    for first in range(0, len(course.decisions), size):
        if time.monotonic() >= end:
            return None
        left = course.decisions[:first] + course.decisions[first + size :]
        shorter = course.with_decisions(left)
        if fails(shorter):
            return shorter
    return None
