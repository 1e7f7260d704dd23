"""What the brokers of all services do alike: closing, forks, names, and what a service cannot do.

Rules
1. A broker belongs to the process that made it. Closed, or in a forked child, every call raises
   BrokerError; closing it there does no I/O.
2. A name or an option that the service does not have is refused before anything is asked of it.
   What it has is written in its `Capabilities`.
3. An adapter fills in the steps, whose names begin with an underscore.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from aztask.errors import BrokerError, CapabilityError, ConfigurationError, InvalidQueueName
from aztask.message.envelope import Envelope
from aztask.queues.base import (
    PREFIX,
    AnySession,
    Capabilities,
    Listing,
    Peeked,
    Position,
    QueueOptions,
    QueueStats,
    Receiver,
    ReceiverOptions,
)
from aztask.queues.kinds import BrokerKind


class BrokerSkeleton(ABC):
    """A broker of a service, without its steps. Any thread may call.

    title: what one of the service's queues is called, in errors.
    """

    title: ClassVar[str]

    def __init__(self, kind: BrokerKind, capabilities: Capabilities | None = None) -> None:
        """capabilities: where this broker's are not those of its kind."""
        self._kind = kind
        self._capabilities = kind.capabilities if capabilities is None else capabilities
        self._pid = os.getpid()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What the service can do, and its limits."""
        return self._capabilities

    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the service allows the name."""
        self._kind.check_name(queue)

    # -- queues ------------------------------------------------------------------------------

    def declare(self, queue: str, options: QueueOptions = QueueOptions()) -> None:
        """Create the queue, or apply the explicit options to the existing one.

        Raises CapabilityError for an option that the service does not have.
        """
        self._usable_for(queue)
        can = self._capabilities
        for value, known, what in (
            (options.sessions, can.sessions, "sessions"),
            (options.duplicate_window, can.duplicate_detection, "duplicate detection"),
            (options.max_deliveries, can.own_limits, "their own delivery limit"),
            (options.time_to_live, can.own_limits, "their own time to live"),
        ):
            if value and not known:
                raise CapabilityError(
                    f"{self.title}s do not have {what}; remove the setting for {queue!r}, or use "
                    "Service Bus"
                )
        self._declare(queue, options)

    @abstractmethod
    def _declare(self, queue: str, options: QueueOptions) -> None: ...

    def delete(self, queue: str) -> None:
        """Delete the queue, its dead letters, and their messages. Raises QueueNotFound."""
        self._usable_for(queue)
        self._delete(queue)

    @abstractmethod
    def _delete(self, queue: str) -> None: ...

    def listing(self) -> Listing:
        """All queues of the service but the mailboxes, those with foreign names apart."""
        self._usable()
        names = [name for name in self._names() if not name.startswith(PREFIX)]
        return listing(names, self.check_name)

    @abstractmethod
    def _names(self) -> Iterable[str]:
        """The names of the service's queues, without those that hold dead letters."""

    def queues(self) -> list[str]:
        """The sorted names of the queues that aztask can use."""
        return list(self.listing().queues)

    def stats(self, queue: str) -> QueueStats:
        """The queue's counts. Raises QueueNotFound."""
        self._usable_for(queue)
        return self._stats(queue)

    @abstractmethod
    def _stats(self, queue: str) -> QueueStats: ...

    def peek(
        self,
        queue: str,
        *,
        dead_letter: bool = False,
        after: Position | None = None,
        limit: int = 100,
    ) -> list[Peeked]:
        """Read messages without leasing them, in order of position, starting behind `after`.

        Raises CapabilityError for `after` where the service shows only its first messages.
        """
        self._usable_for(queue)
        if after is not None and not self._capabilities.paged_peek:
            raise CapabilityError(
                f"a {self.title} shows only its first {self._capabilities.peek_limit} messages; "
                "peek without 'after'"
            )
        return self._peek(queue, dead_letter, after, limit)

    @abstractmethod
    def _peek(
        self, queue: str, dead_letter: bool, after: Position | None, limit: int
    ) -> list[Peeked]: ...

    def purge(self, queue: str, *, dead_letter: bool = False) -> int:
        """Delete the queue's messages, or its dead letters; returns how many were deleted."""
        self._usable_for(queue)
        return self._purge(queue, dead_letter)

    @abstractmethod
    def _purge(self, queue: str, dead_letter: bool) -> int: ...

    # -- messages ----------------------------------------------------------------------------

    @abstractmethod
    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """See `Broker.send`. It begins with `_usable_for`, or with `_usable` for a known name."""

    @abstractmethod
    def check(self, envelope: Envelope, *, reserve: int = 0) -> None:
        """Refuse an envelope that could not be stored; see `Broker.check`."""

    def cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        """Remove scheduled messages by message id; returns how many were removed.

        Raises CapabilityError if the service cannot do that.
        """
        if not self._capabilities.cancel_scheduled:
            raise CapabilityError(
                f"{self.title}s cannot cancel a delayed message by its id; cancel the task instead "
                "(aztask cancel): a worker drops it when it is due"
            )
        self._usable_for(queue)
        return self._cancel_scheduled(queue, message_ids)

    def _cancel_scheduled(self, queue: str, message_ids: Sequence[str]) -> int:
        raise NotImplementedError(f"{type(self).__name__} has the capability and not the step")

    def send_timer(self, queue: str, envelope: Envelope) -> int:
        """Store one delayed message; returns the number by which `cancel_timer` removes it.

        Raises CapabilityError if the service numbers none.
        """
        raise self._no_numbers()

    def cancel_timer(self, queue: str, number: int) -> bool:
        """Remove the scheduled message of this number; see `send_timer`."""
        raise self._no_numbers()

    def _no_numbers(self) -> CapabilityError:
        return CapabilityError(
            f"{self.title}s cancel no delayed message by its number; use cancel_scheduled"
        )

    def receiver(
        self,
        queue: str,
        *,
        lease: float,
        prefetch: int = 0,
        session: str | AnySession | None = None,
        dead_letter: bool = False,
        delete: bool = False,
        poll_ceiling: float | None = None,
    ) -> Receiver:
        """A receiver whose leases last `lease` seconds. It fetches nothing in advance.

        Raises ConfigurationError for a lease that is not possible here, and CapabilityError for a
        session where there are none.
        """
        self._usable_for(queue)
        can = self._capabilities
        if session is not None and not can.sessions:
            raise CapabilityError(
                f"queue {queue!r} is declared with sessions=True, but {self.title}s have no "
                "sessions; remove it, or use Service Bus or local://"
            )
        if not 0 < lease <= can.max_lease_seconds:
            raise ConfigurationError(
                f"a lease of {lease!r} s is not possible here; choose more than 0 and at most "
                f"{can.max_lease_seconds:.0f} s"
            )
        options = ReceiverOptions(queue, lease, session, dead_letter, delete, can.max_message_bytes)
        return self._receiver(options, poll_ceiling)

    @abstractmethod
    def _receiver(self, options: ReceiverOptions, poll_ceiling: float | None) -> Receiver: ...

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close all connections. Leased messages stay leased until their leases end."""
        self._closed = True
        if self._pid == os.getpid():
            self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def _usable(self) -> None:
        """Raise BrokerError unless this broker may be used here."""
        if self._closed:
            raise BrokerError(f"the {self.title} broker was closed; make another one")
        if self._pid != os.getpid():
            raise BrokerError("this broker belongs to the parent process; make another one here")

    def _usable_for(self, queue: str) -> None:
        """Raise unless this broker may be used here, and for this queue."""
        self._usable()
        self.check_name(queue)


def listing(names: Iterable[str], check: Callable[[str], None]) -> Listing:
    """Sort the names into a `Listing`. check: raises InvalidQueueName for a foreign name."""
    known = sorted(names)
    foreign = tuple(name for name in known if not _allowed(name, check))
    return Listing(tuple(name for name in known if name not in foreign), foreign)


def _allowed(name: str, check: Callable[[str], None]) -> bool:
    try:
        check(name)
    except InvalidQueueName:
        return False
    return True
