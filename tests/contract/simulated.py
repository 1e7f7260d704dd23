"""The wire of the simulation for the contract's tests, some of which call from several threads.

In a simulated world there is one thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, TypeVar

from services import Calm, Fate, Line, Service, Wire
from stepped import Time

from aztask.support.clock import SYSTEM_CLOCK, Clock

Answer = TypeVar("Answer")


class LockedLine(Line):
    """Sends one request at a time."""

    lock = RLock()

    def request(
        self, service: Service, operation: str, execute: Callable[[], Answer], **options: Any
    ) -> Answer:
        with self.lock:
            return super().request(service, operation, execute, **options)


def line(clock: Clock = SYSTEM_CLOCK, fate: Fate = Calm()) -> Line:
    """The way of a program to services of any kind."""
    return LockedLine(Wire(Time(), fate), "contract", clock)
