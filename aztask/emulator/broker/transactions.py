"""Transactions: declare, work, discharge (specification part 4, and the service's protocol guide).

Rules
1. Work is checked when it arrives and kept in memory. Nothing is stored, sent or settled before the
   discharge, which does all of it in one transaction of the store, or nothing. Only the numbers of
   scheduled messages are taken at once, because the client is told them.
2. A transaction ends with the control link that declared it, with its connection, and after
   `TIMEOUT_SECONDS`: it is then rolled back. Its id is unknown from then on.
3. A message that was settled under a transaction which is rolled back stays locked, as on the
   service. Its client may settle it again, or let the lock expire.
4. If one lock was lost before the discharge, the whole transaction is rolled back. So it is if work
   was refused that the client sent settled: it gets no answer, so the discharge tells it.
5. A connection has at most `MAX_OPEN` transactions, which hold at most `MAX_BYTES` of messages:
   what is declared and never discharged would fill the memory.

If the process dies after the commit and before the answer, the work is done and the client does not
know it, as when a connection breaks on the service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from uuid import uuid4

from aztask.emulator.amqp import (
    DECODE_ERROR,
    NOT_ALLOWED,
    NOT_IMPLEMENTED,
    RESOURCE_LIMIT_EXCEEDED,
    AmqpError,
    encode,
    outgoing,
    sections,
)
from aztask.emulator.amqp.encode import Described
from aztask.emulator.amqp.link import AmqpLink, Inbound, Outbound, ReceivingLink
from aztask.emulator.broker.broker import Lock, Service
from aztask.emulator.broker.conditions import LOCK_LOST, SESSION_LOST, as_amqp
from aztask.emulator.broker.dispatch import StoreChange, undone
from aztask.emulator.broker.settlement import (
    TRANSACTIONAL,
    SettlementAction,
    changed_payload,
    settle,
)
from aztask.errors import AztaskError

TIMEOUT_SECONDS: Final = 120.0
MAX_MESSAGES: Final = 100
MAX_OPEN: Final = 100
MAX_BYTES: Final = 64 * 1024 * 1024
UNKNOWN_ID: Final = "amqp:transaction:unknown-id"
ROLLBACK: Final = "amqp:transaction:rollback"
_DECLARE, _DISCHARGE, _DECLARED = 0x31, 0x32, 0x33
_NAMES: dict[Any, int] = {"amqp:declare:list": _DECLARE, "amqp:discharge:list": _DISCHARGE}


def transactional(number: bytes, outcome: bytes) -> bytes:
    """Return the encoded state that confirms work under a transaction. outcome: encoded."""
    return encode.described(TRANSACTIONAL, encode.list_of([encode.binary(number), outcome]))


class TransactionWork(Protocol):
    """A part of a transaction."""

    @property
    def count(self) -> int:
        """How many messages it sends or settles."""

    @property
    def size(self) -> int:
        """How many bytes it holds."""

    def run(self) -> None:
        """Do it, inside the store's transaction. Raises AmqpError: then nothing is done."""

    def end(self, committed: bool) -> None:
        """The transaction was committed or rolled back."""


class SettledLocks:
    """Messages that a transaction settles by their locks.

    Raises AmqpError for changes of their properties that a message has no room for: then they do
    not join, as nothing does that is refused (rule 1).
    """

    def __init__(self, broker: Service, locks: Sequence[Lock], action: SettlementAction) -> None:
        self._broker, self._locks, self._action = broker, locks, action
        for lock in locks if action.properties else ():
            changed_payload(broker.engine, lock.queue, lock.dead, lock.seq, action.properties)

    @property
    def count(self) -> int:
        """How many messages are settled."""
        return len(self._locks)

    @property
    def size(self) -> int:
        """Count no bytes: locks are small, and `count` limits them."""
        return 0

    def run(self) -> None:
        broker, first = self._broker, self._locks[0]
        leases = [(lock.seq, lock.token) for lock in self._locks]
        if not all(settle(broker.engine, first.queue, first.dead, self._action, leases)):
            raise SESSION_LOST if first.session is not None and not first.dead else LOCK_LOST
        broker.queue_changed(first.queue, first.dead)

    def end(self, committed: bool) -> None:
        for lock in self._locks if committed else ():
            self._broker.locks.discard(lock.token)


class SettledDeliveries(SettledLocks):
    """Deliveries of one link that a transaction settles."""

    def __init__(
        self, broker: Service, deliveries: Sequence[Outbound], action: SettlementAction
    ) -> None:
        super().__init__(broker, [delivery.context for delivery in deliveries], action)
        self._deliveries = deliveries

    def end(self, committed: bool) -> None:
        super().end(committed)
        for delivery in self._deliveries:
            delivery.settling = False
            if committed:
                delivery.link.session.settle(delivery)


@dataclass(slots=True)
class _Transaction:
    """The work of a transaction that is not discharged. deadline: by the lease clock.

    refused: why it can no longer be committed (rule 4), None if it can.
    """

    control: AmqpLink
    deadline: float
    refused: AmqpError | None = None
    work: list[TransactionWork] = field(default_factory=list)

    def end(self, committed: bool) -> None:
        for each in self.work:
            each.end(committed)


class Transactions:
    """The transactions of one connection, by id."""

    def __init__(self, broker: Service) -> None:
        self._broker = broker
        self._open: dict[bytes, _Transaction] = {}

    def declare(self, control: AmqpLink) -> bytes:
        """Begin a transaction and return its id. Raises AmqpError if too many are open."""
        if len(self._open) >= MAX_OPEN:
            raise AmqpError(
                RESOURCE_LIMIT_EXCEEDED, f"{MAX_OPEN} transactions are open: discharge them"
            )
        number = uuid4().bytes
        deadline = self._broker.clock.monotonic() + TIMEOUT_SECONDS
        self._open[number] = _Transaction(control, deadline)
        return number

    def add(self, number: bytes, work: TransactionWork) -> None:
        """Make `work` part of a transaction. Raises AmqpError."""
        known = self._open.get(number)
        if known is None:
            raise unknown(number)
        if sum(each.count for each in known.work) + work.count > MAX_MESSAGES:
            raise AmqpError(
                NOT_ALLOWED,
                f"Cannot send more than {MAX_MESSAGES} messages in a single transaction",
            )
        held = sum(each.size for other in self._open.values() for each in other.work)
        if held and held + work.size > MAX_BYTES:
            raise AmqpError(
                RESOURCE_LIMIT_EXCEEDED,
                f"the transactions of a connection hold at most {MAX_BYTES} bytes of messages",
            )
        known.work.append(work)

    def work(self, number: bytes) -> Sequence[TransactionWork]:
        """Return the work of a transaction, which grows until the discharge. Raises AmqpError."""
        known = self._open.get(number)
        if known is None:
            raise unknown(number)
        return known.work

    def refuse(self, number: bytes, error: AmqpError) -> None:
        """Roll a transaction back at its discharge: work was refused, and no answer says so."""
        known = self._open.get(number)
        if known is not None and known.refused is None:
            known.refused = error

    def take(self, number: bytes) -> _Transaction:
        """Return a transaction that is discharged now. Raises AmqpError."""
        known = self._open.pop(number, None)
        if known is None:
            raise unknown(number)
        return known

    def tick(self) -> None:
        """Roll back the transactions that have lasted too long."""
        if self._open:
            now = self._broker.clock.monotonic()
            self._roll_back(lambda each: each.deadline <= now)

    def detached(self, link: AmqpLink) -> None:
        """Roll back the transactions of a control link that ended."""
        self._roll_back(lambda each: each.control is link)

    def _roll_back(self, chosen: Callable[[_Transaction], bool]) -> None:
        for number in [number for number, each in self._open.items() if chosen(each)]:
            self._open.pop(number).end(False)


def unknown(number: bytes) -> AmqpError:
    """Return the error for work under a transaction that is not open."""
    return AmqpError(
        UNKNOWN_ID,
        f"no transaction {number[:32].hex()!r} is open: it was discharged,"
        " rolled back, or not declared on this connection",
    )


class ControlLink:
    """A link to the coordinator, which declares and discharges transactions."""

    def __init__(self, broker: Service, link: ReceivingLink, transactions: Transactions) -> None:
        self._broker = broker
        self._link = link
        self._transactions = transactions

    def received(self, inbound: Inbound) -> None:
        """Answer a declare at once, a discharge after its commit."""
        try:
            if inbound.settled:
                raise AmqpError(NOT_ALLOWED, "a message to the coordinator must not be settled")
            code, fields = _request(inbound.payload)
            if code == _DECLARE:
                number = self._transactions.declare(self._link)
                state = encode.described(_DECLARED, encode.list_of([encode.binary(number)]))
                self.answer(inbound, state)
                return
            number, failed = [*fields, None, None][:2]
            known = self._transactions.take(number if isinstance(number, bytes) else b"")
        except AmqpError as error:
            self.answer(inbound, outgoing.rejected(error.condition, error.description))
            return
        if failed is True:
            known.end(False)
            self.answer(inbound, outgoing.ACCEPTED)
        else:
            self._broker.committer.submit(_Discharge(self._broker, self, inbound, known))

    def answer(self, inbound: Inbound, state: bytes) -> None:
        """Settle a message to the coordinator with the state that is its answer."""
        number = inbound.delivery_id
        if not inbound.settled:
            self._link.session.write(outgoing.disposition(True, number, number, state))


def _request(payload: bytes) -> tuple[int, list[Any]]:
    """Return the code and the fields of a declare or discharge. Raises AmqpError."""
    value = sections.cut(payload).value
    descriptor = value.descriptor if isinstance(value, Described) else None
    code = _NAMES.get(descriptor, descriptor) if isinstance(descriptor, (int, str)) else None
    if code not in (_DECLARE, _DISCHARGE):
        raise AmqpError(NOT_IMPLEMENTED, "the coordinator takes declare and discharge only")
    if not isinstance(value.value, list):
        raise AmqpError(DECODE_ERROR, "a declare or discharge that is no list")
    return int(code), value.value


class _Discharge(StoreChange):
    """Does the work of a transaction, all of it or nothing."""

    def __init__(
        self, broker: Service, control: ControlLink, inbound: Inbound, known: _Transaction
    ) -> None:
        self._broker = broker
        self._control = control
        self._inbound = inbound
        self._known = known
        self._error: AmqpError | None = None

    def execute(self) -> None:
        self._error = self._known.refused
        if self._error is not None:
            return
        with undone(self._broker.namespace.database) as failure:
            for work in self._known.work:
                work.run()
        self._error = failure.error

    def succeed(self) -> None:
        """Confirm the discharge, or tell why all of it was rolled back."""
        self._known.end(self._error is None)
        state = outgoing.ACCEPTED
        if self._error is not None:
            state = outgoing.rejected(ROLLBACK, str(self._error))
        self._control.answer(self._inbound, state)

    def fail(self, error: AztaskError) -> None:
        """Nothing was done: tell the error of the store."""
        self._known.end(False)
        self._control.answer(self._inbound, outgoing.rejected(ROLLBACK, str(as_amqp(error))))
