"""The worker's answers to requests that running tasks wait for.

An answer's error is "" (done), `LOST`, `TOO_LARGE` followed by a text, or any other text that says
why the request failed.
"""

from __future__ import annotations

import threading
from typing import Any

from aztask.context import TaskLease
from aztask.errors import CapabilityError, LeaseLost, MessageTooLarge

LOST = "lost"
"""The lease is lost."""

TOO_LARGE = "too large: "
"""Prefix of the reason: the value is larger than the broker takes."""


class Answers:
    """One answer per delivery at a time, because a task waits for one request at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._answers: dict[int, tuple[str, Any]] = {}

    def answer(self, number: int, error: str, value: Any = None) -> None:
        """Store the answer and wake the task. error: see the module; value: what was asked for."""
        with self._condition:
            self._answers[number] = (error, value)
            self._condition.notify_all()

    def wait(self, number: int, lease: TaskLease) -> Any:
        """Wait for the answer and return its value.

        Raises LeaseLost if the lease ends first, MessageTooLarge, CapabilityError.
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
