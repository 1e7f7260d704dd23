"""The core of a worker as its parts see it: what they hand on to it, and what they report to it.

`aztask.worker.core` is the core. A part gets it in its constructor and calls its methods, so the
constructors say who calls whom.

Rules for unexpected errors
1. No single delivery ends the worker. An error while one is handled in the supervisor's loop is
   logged with its traceback, and the delivery is left to its lease. It is then redelivered, here or
   elsewhere, and its delivery counts: the service dead-letters one that fails each time.
2. The other deliveries of the batch go on (`each`).
3. An error that belongs to no delivery is a fault of the loop itself: it ends the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from aztask.limits.breakers import OpenBreaker
from aztask.limits.control import ControlState
from aztask.queues.base import Receiver
from aztask.queues.delivery import Delivery
from aztask.queues.lease.state import Lease
from aztask.worker.pipeline.work import HeldSession, WorkItem


class Source(Protocol):
    """What received a delivery: a queue's intake, or a slot of its sessions."""

    queue: str

    @property
    def receiver(self) -> Receiver:
        """The receiver through which the deliveries are renewed and settled."""

    @property
    def session(self) -> HeldSession | None:
        """The slot, if the delivery holds its session."""


class Aside(Protocol):
    """Takes deliveries whose handling failed unexpectedly."""

    def put_aside(self, item: WorkItem, error: Exception, /) -> None:
        """Leave the delivery to its lease, and log why."""


class Stages(Aside, Protocol):
    """The core. Only the supervisor's loop calls it; other threads post calls to its mailbox."""

    # -- what deliveries go on to ------------------------------------------------------------

    def claim(self, items: Iterable[WorkItem], /) -> None:
        """Own the start rows of these deliveries."""

    def late(self, items: Sequence[WorkItem], /) -> None:
        """Let claimed deliveries that missed their slots get others."""

    def finish(self, items: Iterable[WorkItem], /) -> None:
        """Record and settle these deliveries, which are decided."""

    def ended(self, items: Sequence[WorkItem], /) -> None:
        """Forget these deliveries, whatever their outcome."""

    # -- what comes in -----------------------------------------------------------------------

    def received(self, source: Source, deliveries: Sequence[Delivery], asked_at: float, /) -> None:
        """Take new deliveries. asked_at: when the receive began, in UTC epoch seconds."""

    def admitted(self, items: Sequence[WorkItem], /) -> None:
        """Take deliveries that have got their slots, were put off, or have to try again."""

    def reconsidered(self, item: WorkItem, /) -> None:
        """Take a delivery that waited in hand for the answer about a probe."""

    def claimed(self, items: Sequence[WorkItem], /) -> None:
        """Take deliveries back from the claim, whatever became of it."""

    def finished(self, items: Sequence[WorkItem], /) -> None:
        """Take deliveries back from the record and the settlement, whatever became of these."""

    def lease_renewed(self, lease: Lease, age: float, /) -> None:
        """A lease was renewed. age: the share of it that had passed."""

    def lease_lost(self, lease: Lease, /) -> None:
        """A lease has ended, as the broker or the clock says."""

    def control_changed(self, former: ControlState, now: ControlState, /) -> None:
        """Obey another state of pauses and scales."""

    def breakers_changed(self, changes: Sequence[tuple[OpenBreaker, str]], /) -> None:
        """Obey circuit breakers that have opened or closed. With each: what happened to it."""

    def cancel(self, task_ids: Sequence[str], /) -> None:
        """Stop these tasks, which were cancelled."""

    # -- what goes to a running task ---------------------------------------------------------

    def tell(self, item: WorkItem, packet: list[Any], /) -> None:
        """Send a control packet to the process that runs the delivery."""


def each(items: Iterable[WorkItem], handle: Callable[[WorkItem], object], aside: Aside) -> None:
    """Handle the items one by one; those that fail are put aside."""
    for item in items:
        try:
            handle(item)
        except Exception as error:  # noqa: BLE001  # rule 1
            aside.put_aside(item, error)


def failed_try(items: Iterable[WorkItem | None]) -> None:
    """Count a try of a stage that failed unexpectedly: the next one comes after a longer pause."""
    for item in items:
        if item is not None:
            item.tries += 1
