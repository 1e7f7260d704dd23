"""The worker's answers to what tasks asked of it and wait for.

An answer is "" (done), `LOST`, `TOO_LARGE` and a text, or another text that says why not.
"""

from __future__ import annotations

import threading
from typing import Any

from aztask.context import TaskLease
from aztask.errors import CapabilityError, LeaseLost, MessageTooLarge

LOST = "lost"
"""Instead of a reason: the lease is lost."""

TOO_LARGE = "too large: "
"""Before a reason: the value is larger than the broker takes."""


class Answers:
    """One answer for each delivery at a time: a task waits for one thing."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._answers: dict[int, tuple[str, Any]] = {}

    def answer(self, number: int, error: str, value: Any = None) -> None:
        """The worker did it ("") or could not (why)."""
        with self._condition:
            self._answers[number] = (error, value)
            self._condition.notify_all()

    def wait(self, number: int, lease: TaskLease) -> Any:
        """The answer's value.

        Raises LeaseLost when the lease ends first, MessageTooLarge, CapabilityError.
        """
        with self._condition:
            while number not in self._answers:
                lease.ensure()
                self._condition.wait(min(1.0, lease.remaining_seconds))
            error, value = self._answers.pop(number)
        if error == LOST:
            raise LeaseLost
        if error.startswith(TOO_LARGE):
            raise MessageTooLarge(error.removeprefix(TOO_LARGE))
        if error:
            raise CapabilityError(error)
        return value
