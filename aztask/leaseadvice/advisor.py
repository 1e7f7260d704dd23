"""An app's copy of the lease advice: the last good document, read again at intervals.

Rules
1. No caller waits for it: a store across a network is read on a thread of its own. Only the very
   first call waits, for at most `FIRST_WAIT`, so that a short-lived sender gets advice, too.
2. If a read fails or the document is damaged, the last good one stays. One log line says so, and no
   further one until the error changes or a read succeeds in between.
3. A forked child reads anew, through a store of its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from aztask.address.owner import NO_OWNER, Owner
from aztask.config import Settings
from aztask.errors import AztaskError
from aztask.leaseadvice.advice import Advice
from aztask.leaseadvice.document import LeaseDocument, LeaseStore, Stored
from aztask.leaseadvice.learning import followed
from aztask.leaseadvice.stores import open_lease_store
from aztask.queues.base import Capabilities
from aztask.queues.lease.bounds import SHORTEST, Bounds
from aztask.support.forks import fork_safe_lock
from aztask.support.parts import Part

logger = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 60.0
LOCAL_REFRESH_SECONDS: Final = 2.0
"""Seconds between two reads of a file, which cost nothing."""
FIRST_WAIT: Final = 0.5


class OwnBroker(Protocol):
    """The part of an app's connections that the place of the document depends on."""

    broker_text: str | None

    def owner(self) -> Owner:
        """Whose entries of a shared document are used."""
        ...


class LeaseAdvisor:
    """Answers questions about the lease advice. Any thread may ask."""

    def __init__(
        self,
        settings: Settings,
        broker: OwnBroker | None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads nothing yet.

        * `broker`: from its address ``lease_advice="auto"`` is derived.
        * `now`: the clock by which the document's age is measured.
        """
        self.enabled = settings.lease_advice is not None
        self._settings = settings
        self._broker = broker
        self._refresh = REFRESH_SECONDS
        self._now = now
        self._lock = fork_safe_lock()
        self._pid = 0
        self._store: LeaseStore | None = None
        self._document = LeaseDocument()
        self._next_at = 0.0
        self._reading: threading.Thread | None = None
        self._part = Part("lease advice reader")
        self._complaint = ""

    @property
    def store(self) -> LeaseStore:
        """The store of this process. Raises ConfigurationError."""
        with self._lock:
            return self._opened()

    def lease_seconds(self, queue: str) -> float | None:
        """The advised lease of the queue, not clamped to bounds; None means the configured one."""
        return followed(self.document().entry(queue)) if self.enabled else None

    def lease_now(
        self, queue: str, configured: float, settings: Settings, capabilities: Capabilities
    ) -> float:
        """The lease to request: the advised one within bounds if the queue's leases adapt."""
        if not self.enabled or capabilities.fixed_lease or settings.adaptive is False:
            return configured
        advised = self.lease_seconds(queue)
        if advised is None:
            return configured
        return bounds_of(settings, capabilities.max_lease_seconds).clamp(advised)

    def advice(self, queue: str) -> Advice | None:
        """The advice with its reason; None if there is none."""
        return self.document().entry(queue).advice if self.enabled else None

    def document(self) -> LeaseDocument:
        """The last good document; reads it again if it is old."""
        now = self._now()
        if self._pid != os.getpid() or now >= self._next_at:
            with self._lock:
                self._begin_reading(now)
        return self._document

    def read(self) -> LeaseDocument:
        """Read the document now; on failure, log it and return the last good one."""
        try:
            self.learned(self.store.load())
        except AztaskError as error:
            self._complain(error)
        return self._document

    def learned(self, stored: Stored) -> None:
        """Use a document that this process has just read or published."""
        self._document = stored.document
        self._next_at = self._now() + self._refresh
        self._complaint = ""

    def close(self) -> None:
        """Close the connections of the store."""
        with self._lock:
            if self._store is not None and self._pid == os.getpid():
                self._store.close()
            self._store, self._next_at, self._pid = None, 0.0, 0

    def _begin_reading(self, now: float) -> None:
        first = self._pid != os.getpid()
        store = self._opened()
        if now < self._next_at:
            return  # another thread was faster
        self._next_at = now + self._refresh
        if not store.remote:
            self._read(store)
        elif self._reading is None or not self._reading.is_alive():
            thread = self._part.once(self._read, "aztask-lease-advice", store)
            self._reading = thread
            thread.start()
            if first:
                thread.join(FIRST_WAIT)

    def _read(self, store: LeaseStore) -> None:
        try:
            self._document = store.load().document
        except AztaskError as error:
            self._part.trouble(error)
            self._complain(error)
        else:
            self._complaint = ""

    def _complain(self, error: AztaskError) -> None:
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("lease advice cannot be read, the last one stays in force: %s", error)

    def _opened(self) -> LeaseStore:
        if self._store is None or self._pid != os.getpid():
            account = self._settings.lease_advice_account
            self._store = open_lease_store(
                self._settings.lease_advice or "",
                account=account.reveal() if account is not None else None,
                broker=None if self._broker is None else self._broker.broker_text,
                owner=NO_OWNER if self._broker is None else self._broker.owner(),
            )
            self._refresh = REFRESH_SECONDS if self._store.remote else LOCAL_REFRESH_SECONDS
            self._pid, self._next_at, self._reading = os.getpid(), 0.0, None
        return self._store


def bounds_of(settings: Settings, longest: float) -> Bounds:
    """The bounds for the leases of a queue with these settings.

    * `longest`: seconds that the service grants at once.

    By default a lease is at least 30 seconds and at most half of ``max_lease``, so that a crash is
    noticed within that time.
    """
    most = min(longest, settings.max_lease_seconds / 2)
    if isinstance(settings.adaptive, tuple):
        least, asked = settings.adaptive
        most = min(longest, asked)
        return Bounds(min(least, most), most)
    return Bounds(min(SHORTEST, most), most)
