"""What a pool asks of the operating system: processes, and a link to each of them.

Three implementations: `aztask.worker.pool.forking`, over sockets and a fork server of Linux;
`aztask.worker.pool.portablelink`, over streams and new interpreters of any system; and the stepped
one of the tests, which is neither a process nor a thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from aztask.worker.mailbox import HasDescriptor

ANSWERS_A_TURN: Final = 512
"""How many answers of one process a turn of the worker handles, about."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a pool and what it runs.

    app: ``module:app``. slots: tasks that run at the same time in each process. worker: the
    worker's name. pool: one of `aztask.worker.options.POOLS`.
    """

    app: str
    processes: int
    slots: int
    worker: str = ""
    pool: str = "processes"

    @property
    def alone(self) -> bool:
        """Whether there is one slot in all, so that a task cannot wait for another one."""
        return self.processes * self.slots == 1

    @property
    def foreground(self) -> bool:
        """Whether its process has the terminal, so that a debugger can ask there."""
        return self.pool == "solo"

    def scaled(self, concurrency: int) -> PoolPlan:
        """The same pool for another number of tasks at the same time; solo stays as it is."""
        if self.foreground:
            return self
        if self.pool == "processes":
            return replace(self, processes=concurrency)
        return replace(self, slots=concurrency)


class Link(Protocol):
    """The worker's link to one pool process. Packets are those of `aztask.worker.pool.runner`."""

    hung_up: bool
    """Whether the process has closed its side: no further answer comes."""

    @property
    def outbox(self) -> HasDescriptor:
        """What the mailbox watches for answers."""

    @property
    def pid(self) -> int:
        """Its process id; 0 as long as it has not started."""

    @property
    def status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, and if it is not known."""

    @property
    def failed(self) -> str:
        """Why it could not be started; else ""."""

    def send(self, packet: list[Any], /) -> bool:
        """Put a delivery into its inbox, [] to retire a slot; False if that is full, or it has
        ended."""

    def tell(self, packet: list[Any], /) -> bool:
        """Send a control packet; False if it does not read them. One that has ended misses it."""

    def answers(self) -> list[list[Any]]:
        """Its answers since the last call, up to some hundreds."""

    def unread(self) -> list[int]:
        """Take its unread deliveries back: their numbers. It will not see them."""

    def running(self) -> dict[int, float]:
        """What its slots run: {delivery number: start}, on the clock of the deadlines."""

    def memory(self) -> int:
        """The bytes of memory that it uses."""

    def kill(self) -> None:
        """Kill it, and what its tasks have started."""

    def wait(self, seconds: float | None = None, /) -> None:
        """Wait until it is dead, for `seconds` or a few at most."""

    def close(self) -> None:
        """Free what the link has open."""


class Starter(Protocol):
    """Starts pool processes. Only the supervisor's thread calls."""

    def start(self, plan: PoolPlan, /) -> Link:
        """Start a process. Raises OSError if that is impossible now."""

    def ended(self) -> list[Link]:
        """The processes that have ended since the last call."""

    def check(self, now: float, /) -> None:
        """Mend what starts processes, if it does not answer; cheap enough for every tick."""

    def close(self) -> None:
        """End what starts processes, and all that it has started."""
