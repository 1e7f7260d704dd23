"""Inspects Service Bus queues, and our permissions on them.

Rules
1. Settings are read if we have the permission to manage. The permissions to listen and to send are
   checked by opening links and by a peek: nothing is received and nothing is sent.
2. The clock is learned from a message that is scheduled ahead, peeked at and cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from aztask.address.addresses import ServiceBusAddress
from aztask.errors import AztaskError, BrokerError, BrokerUnavailable, QueueNotFound
from aztask.queues.base import Permission, QueueFacts
from aztask.queues.servicebus import private
from aztask.queues.servicebus.admin import Administration
from aztask.queues.servicebus.clock import BusClock
from aztask.queues.servicebus.kind import KIND
from aztask.support.finding import Finding, fine, warning

BASIC: Final = "Basic"
ACTIVE: Final = "Active"
TIER: Final = "tier"
MANAGE: Final = "needs the permission to manage"


class BusInspector:
    """Inspects the queues of a namespace.

    listen, send: use the permission without effect, and raise the service's refusal.
    learn: learn the service's time, if possible.
    """

    def __init__(
        self,
        address: ServiceBusAddress,
        admin: Administration,
        clock: BusClock,
        *,
        listen: Callable[[str], Any],
        send: Callable[[str], Any],
        learn: Callable[[str], Any],
    ) -> None:
        self._address = address
        self._admin = admin
        self._clock = clock
        self._listen = listen
        self._send = send
        self._learn = learn

    def facts(self, queue: str) -> QueueFacts:
        """The queue's settings, in one request. Unread without the permission to manage."""
        KIND.check_name(queue)
        self._address.check_entity(queue)
        try:
            known = self._admin.recent(queue)
        except QueueNotFound:
            return QueueFacts(queue, exists=False)
        except BrokerUnavailable:
            # the administration is another service, on another port; a worker does not need it
            unread = f"the administration does not answer{self._admin.hint()}"
            return QueueFacts(queue, unread=unread)
        except BrokerError as error:
            return QueueFacts(queue, unread=str(error))
        except AztaskError as error:
            lacking = MANAGE if MANAGE in str(error) else str(error)
            return QueueFacts(queue, unread=lacking)
        facts = QueueFacts(
            queue,
            exists=True,
            duplicate_window=0.0,
            sessions=bool(known.requires_session),
            max_deliveries=known.max_delivery_count,
            dead_letters=True,
            active=known.status == ACTIVE,
        )
        if known.requires_duplicate_detection:
            window = _seconds(known.duplicate_detection_history_time_window)
            facts = replace(facts, duplicate_window=window)
        return replace(facts, lease_seconds=_seconds(known.lock_duration))

    def rights(self, queue: str) -> list[Permission]:
        """The permissions Listen and Send. Raises BrokerUnavailable."""
        found = []
        for name, attempt in (("listen", self._listen), ("send", self._send)):
            try:
                attempt(queue)
            except BrokerUnavailable:
                raise
            except AztaskError as error:
                found.append(Permission(name, error))
            else:
                found.append(Permission(name))
        return found

    def clock_offset(self, queue: str) -> float | None:
        """Seconds that the service's clock is ahead of ours; None if unknown."""
        if not self._clock.known:
            self._learn(queue)
        return self._clock.offset if self._clock.known else None

    def surroundings(self) -> list[Finding]:
        """The tier, and whether the SDK has the calls that make settling fast."""
        found = []
        with suppress(AztaskError):
            found.append(self._tier(self._admin.tier()))
        if not private.available():
            found.append(
                warning(
                    "azure-servicebus",
                    "sdk",
                    "this version renews and settles one message at a time",
                    "install a version that aztask was tested with: azure-servicebus>=7.15,<8",
                )
            )
        if self._address.entity:
            found.append(
                fine("broker", "entity", f"the connection string is for {self._address.entity!r}")
            )
        return found

    @staticmethod
    def _tier(tier: str) -> Finding:
        if tier != BASIC:
            return fine("broker", TIER, f"the namespace has the {tier} tier")
        return warning(
            "broker",
            TIER,
            "the namespace has the Basic tier: no duplicate detection, no sessions",
            "a retry whose worker dies at the wrong moment may run twice; Standard avoids it",
        )


def _seconds(value: object) -> float | None:
    return value.total_seconds() if isinstance(value, timedelta) else None
