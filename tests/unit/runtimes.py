"""What the parts of a worker share, for tests of one part, and a core that notes what it gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aztask.queues.lease.keeper import LeaseKeeper
from aztask.stores.events.event import Event
from aztask.support.clock import SYSTEM_CLOCK
from aztask.worker.mailbox import EventMailbox
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.work import WorkItem
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.shell import ThreadShell
from aztask.worker.upkeep.journal import Journal


def make_runtime(
    app: Any,
    *,
    clock: Any = SYSTEM_CLOCK,
    keeper: LeaseKeeper | None = None,
    emit: Callable[[Event], object] = lambda event: None,
    name: str = "w",
    deliveries: Deliveries | None = None,
    mailbox: Any = None,
    **options: Any,
) -> WorkerRuntime:
    """emit: gets the events. options: fields of `WorkerOptions`."""
    sink: Any = SimpleNamespace(emit=emit, flush=lambda: None, close=lambda: None)
    return WorkerRuntime(
        name=name,
        app=app,
        options=WorkerOptions(**options),
        shell=ThreadShell(clock=clock),
        keeper=LeaseKeeper(app.broker, clock=clock) if keeper is None else keeper,
        journal=Journal(sink, clock),
        mailbox=EventMailbox() if mailbox is None else mailbox,
        deliveries=Deliveries(name, clock) if deliveries is None else deliveries,
        clock=clock,
    )


class Noting:
    """A core that notes what its parts hand on and report; a test of a part looks there.

    No delivery may be put aside, unless `confines` is set.
    """

    def __init__(self, *, confines: bool = False) -> None:
        self.to_claim: list[WorkItem] = []
        self.to_finish: list[WorkItem] = []
        self.done: list[WorkItem] = []
        self.missed: list[WorkItem] = []
        self.passed: list[WorkItem] = []
        self.aside: list[tuple[WorkItem, Exception]] = []
        self.told: list[tuple[WorkItem, list[Any]]] = []
        self.taken: list[Any] = []
        self.lost: list[Any] = []
        self.renewed: list[tuple[Any, float]] = []
        self.states: list[Any] = []
        self.cancelled: list[str] = []
        self.confines = confines

    def claim(self, items: Any) -> None:
        self.to_claim += items

    def late(self, items: Any) -> None:
        self.missed += items

    def finish(self, items: Any) -> None:
        self.to_finish += items

    def ended(self, items: Any) -> None:
        self.done += items

    def received(self, source: Any, deliveries: Any, asked_at: float) -> None:
        self.taken.append((source, deliveries))

    def admitted(self, items: Any) -> None:
        self.passed += items

    def reconsidered(self, item: WorkItem) -> None:
        raise AssertionError("no breaker probes here")

    def claimed(self, items: Any) -> None:
        raise AssertionError("no claim lane is here")

    def finished(self, items: Any) -> None:
        raise AssertionError("no finish lane is here")

    def lease_renewed(self, lease: Any, age: float) -> None:
        self.renewed.append((lease, age))

    def lease_lost(self, lease: Any) -> None:
        self.lost.append(lease)

    def control_changed(self, former: Any, now: Any) -> None:
        self.states.append(now)

    def breakers_changed(self, changes: Any) -> None:
        raise AssertionError("no breaker opens here")

    def cancel(self, task_ids: Any) -> None:
        self.cancelled += task_ids

    def tell(self, item: WorkItem, packet: list[Any]) -> None:
        self.told.append((item, packet))

    def put_aside(self, item: WorkItem, error: Exception) -> None:
        if not self.confines:
            raise AssertionError(f"{item} was put aside") from error
        self.aside.append((item, error))
