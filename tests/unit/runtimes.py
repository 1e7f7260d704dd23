"""What the parts of a worker share, for tests of one part."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aztask.events.event import Event
from aztask.lease.keeper import LeaseKeeper
from aztask.support.clock import SYSTEM_CLOCK
from aztask.worker.mailbox import Mailbox
from aztask.worker.options import WorkerOptions
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.runtime import WorkerRuntime
from aztask.worker.upkeep.journal import Journal


def make_runtime(
    app: Any,
    *,
    clock: Any = SYSTEM_CLOCK,
    keeper: LeaseKeeper | None = None,
    emit: Callable[[Event], object] = lambda event: None,
    name: str = "w",
    **options: Any,
) -> WorkerRuntime:
    """emit: gets the events. options: fields of `WorkerOptions`."""
    sink: Any = SimpleNamespace(emit=emit, flush=lambda: None, close=lambda: None)
    return WorkerRuntime(
        name=name,
        app=app,
        options=WorkerOptions(**options),
        clock=clock,
        keeper=LeaseKeeper(app.broker, clock=clock) if keeper is None else keeper,
        journal=Journal(sink, clock),
        mailbox=Mailbox(),
        deliveries=Deliveries(name, clock),
    )
