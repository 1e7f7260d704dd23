"""Makes the lease that `App.receive` and `App.areceive` hold, from the app's settings."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from aztask.brokers.base import ANY_SESSION, Broker, Position
from aztask.config import Settings
from aztask.lease.held import HeldLease, LeaseTerms
from aztask.support.durations import to_seconds


class Receiving(Protocol):
    """What an app knows about the queues that it receives from."""

    @property
    def broker(self) -> Broker: ...

    def queue_settings(self, name: str) -> Settings: ...

    def lease_now(self, name: str) -> float: ...

    def has_sessions(self, name: str) -> bool: ...


def held_lease(
    app: Receiving,
    queue: str,
    wait: float | timedelta,
    lease: float | timedelta | None,
    session: str | None,
    deferred: Position | None,
    stop: threading.Event | None = None,
) -> HeldLease:
    """The lease for these options of `App.receive`; it receives when its block is entered.

    * `stop`: once it is set, the wait for a message ends within a second.

    Raises ConfigurationError for a lease that the queue's settings do not allow.
    """
    settings = app.queue_settings(queue)
    if lease is not None:
        settings = replace(settings, lease_seconds=to_seconds(lease, "lease"))
    return HeldLease(
        app.broker,
        queue,
        LeaseTerms(
            app.lease_now(queue) if lease is None else settings.lease_seconds,
            settings.max_lease_seconds,
            settings.renew_at,
        ),
        wait=to_seconds(wait, "wait"),
        session=session or (ANY_SESSION if app.has_sessions(queue) else None),
        deferred=deferred,
        stop=stop,
    )
