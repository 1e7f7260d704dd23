"""The points at which an actor can die or freeze: failpoints, and the ends of each request."""

from __future__ import annotations

from typing import Protocol


class Death(BaseException):  # no error: no handler may catch it
    """The process has died here. Nothing that still runs of it may have an effect."""


class Pointed(Protocol):
    """What is told of every point: the world."""

    def point(self, name: str) -> None:
        """The actor whose step this is has come to a point. Raises Death if it dies there."""


class Failpoints:
    """Stands where an armed failpoint of aztask would: reports each step that is reached."""

    def __init__(self, world: Pointed) -> None:
        self._world = world

    def reached(self, step: str, times: int, process: int) -> None:
        """A step was reached by so many deliveries: that is one point, if there were any."""
        if times:
            self._world.point(step)
