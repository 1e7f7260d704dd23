"""Settlement: the action that a disposition or a management request asks for, and its execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from aztask.emulator.amqp import INVALID_FIELD, AmqpError, outgoing, sections
from aztask.emulator.amqp.encode import Described
from aztask.emulator.amqp.link import Outbound, SendingLink
from aztask.emulator.amqp.performatives import Disposition
from aztask.emulator.broker import stored
from aztask.emulator.broker.broker import Lock, Service
from aztask.emulator.broker.conditions import DEAD_LETTER, LOCK_LOST, SESSION_LOST, as_amqp
from aztask.emulator.broker.dispatch import StoreChange, undone
from aztask.errors import AztaskError
from aztask.queues.engine import Engine


class SettlementKind(Enum):
    """The five ways to settle a delivery."""

    COMPLETE = "complete"
    ABANDON = "abandon"
    RELEASE = "release"
    DEFER = "defer"
    DEAD_LETTER = "dead-letter"


@dataclass(frozen=True, slots=True)
class SettlementAction:
    """A settlement with its arguments.

    reason, description: of a dead letter. properties: application properties to set on the message.
    echo: the encoded outcome that confirms the settlement to the client. transaction: the id of the
    transaction that the settlement belongs to, None for none.
    """

    kind: SettlementKind
    reason: str = ""
    description: str = ""
    properties: dict[str, Any] = field(default_factory=dict)
    echo: bytes = outgoing.ACCEPTED
    transaction: bytes | None = None


COMPLETE = SettlementAction(SettlementKind.COMPLETE)
RELEASE = SettlementAction(SettlementKind.RELEASE, echo=outgoing.RELEASED)
TRANSACTIONAL = 0x34
_ACCEPTED, _REJECTED, _RELEASED, _MODIFIED, _RECEIVED = 0x24, 0x25, 0x26, 0x27, 0x23
_NAMES = {
    "amqp:accepted:list": _ACCEPTED,
    "amqp:rejected:list": _REJECTED,
    "amqp:released:list": _RELEASED,
    "amqp:modified:list": _MODIFIED,
    "amqp:received:list": _RECEIVED,
    "amqp:transactional-state:list": TRANSACTIONAL,
}


def action_of(state: Described | None) -> SettlementAction | None:
    """Return the action that a delivery state asks for, or None if it settles nothing.

    A modified outcome always counts the delivery, because SDKs abandon without delivery-failed.
    Raises AmqpError for an unknown state.
    """
    if state is None:
        return None
    code = state.descriptor if isinstance(state.descriptor, int) else _NAMES.get(state.descriptor)
    if code == _ACCEPTED:
        return COMPLETE
    fields = state.value if isinstance(state.value, list) else []
    if code == _RELEASED:
        return RELEASE
    if code == _REJECTED:
        return _rejection(fields[0] if fields else None)
    if code == _MODIFIED:
        fields = [*fields, None, None, None]
        kind = SettlementKind.DEFER if fields[1] is True else SettlementKind.ABANDON
        return SettlementAction(kind, properties=_texts(fields[2]), echo=outgoing.MODIFIED)
    if code in (_RECEIVED, TRANSACTIONAL):
        return _transactional(fields) if code == TRANSACTIONAL else None
    raise AmqpError(INVALID_FIELD, f"unknown delivery state {str(state.descriptor)[:40]!r}")


def transaction_of(state: Described | None) -> bytes | None:
    """Return the id of the transaction that a delivery state names, None for another state."""
    if state is None or state.descriptor not in (TRANSACTIONAL, "amqp:transactional-state:list"):
        return None
    fields = state.value if isinstance(state.value, list) else []
    return fields[0] if fields and isinstance(fields[0], bytes) else b""


def _transactional(fields: list[Any]) -> SettlementAction | None:
    number, outcome = [*fields, None, None][:2]
    if not isinstance(number, bytes) or not isinstance(outcome, Described):
        raise AmqpError(INVALID_FIELD, "a transactional state without a transaction or an outcome")
    inner = action_of(outcome)
    return None if inner is None else replace(inner, transaction=number)


def _rejection(error: Any) -> SettlementAction:
    fields = error.value if isinstance(error, Described) and isinstance(error.value, list) else []
    condition, description, info = [*fields, None, None, None][:3]
    properties = _texts(info)
    named = isinstance(condition, str) and condition != DEAD_LETTER
    reason = properties.pop(stored.REASON, None) or (condition if named else "")
    text = properties.pop(stored.DESCRIPTION, None) or (description if named else "")
    return SettlementAction(
        SettlementKind.DEAD_LETTER,
        str(reason or "")[: stored.MAX_REASON],
        str(text or "")[: stored.MAX_REASON],
        properties,
        outgoing.REJECTED,
    )


def _texts(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def settle(
    engine: Engine,
    queue: str,
    dead: bool,
    action: SettlementAction,
    leases: Sequence[tuple[int, str]],
) -> list[bool]:
    """Settle inside the transaction; return False for each lease that was lost.

    Raises AmqpError before anything is settled.
    """
    if action.properties:
        for seq, token in leases:
            _modify(engine, queue, dead, (seq, token), action.properties)
    match action.kind:
        case SettlementKind.COMPLETE:
            return engine.complete(queue, leases, dead_letter=dead)
        case SettlementKind.ABANDON:
            return engine.abandon(queue, leases, dead_letter=dead)
        case SettlementKind.RELEASE:
            return engine.release(queue, leases, dead_letter=dead)
        case SettlementKind.DEFER:
            return engine.defer(queue, leases, dead_letter=dead)
        case SettlementKind.DEAD_LETTER:
            return engine.dead_letter(
                queue, leases, action.reason, action.description, dead_letter=dead
            )


def _modify(
    engine: Engine, queue: str, dead: bool, lease: tuple[int, str], properties: dict[str, Any]
) -> None:
    """Set application properties on a leased message; with a lost lease nothing changes.

    Raises AmqpError if they would be more than a message has room for.
    """
    payload = changed_payload(engine, queue, dead, lease[0], properties)
    if payload is not None:
        engine.update(queue, *lease, payload, dead_letter=dead)


def changed_payload(
    engine: Engine, queue: str, dead: bool, seq: int, properties: dict[str, Any]
) -> bytes | None:
    """Return what a message with these properties is stored as; None if the message is gone.

    Raises AmqpError if they would be more than a message has room for.
    """
    found = engine.peek(queue, seq, 1, dead_letter=dead)
    if not found or found[0].seq != seq:
        return None
    message = stored.unpack(found[0].payload)
    bare = stored.with_properties(message.bare, properties)
    sections.check_properties(sections.cut(bare))
    return stored.with_bare(message, bare).pack()


class DispositionSettler(StoreChange):
    """Settles deliveries of one link, as one disposition of the client asks."""

    __slots__ = (
        *("_action", "_answer", "_broker", "_deliveries", "_held", "_link", "_refused"),
        "atomic",
    )

    def __init__(
        self,
        broker: Service,
        link: SendingLink,
        deliveries: list[Outbound],
        action: SettlementAction,
        disposition: Disposition,
    ) -> None:
        self._broker = broker
        self._link = link
        self._deliveries = deliveries
        self._action = action
        self._answer = not disposition.settled
        self._held: list[bool] = []
        self._refused: AmqpError | None = None
        self.atomic = action is COMPLETE

    def execute(self) -> None:
        lock: Lock = self._deliveries[0].context
        leases = [(lock.seq, lock.token)]
        if len(self._deliveries) > 1:
            leases = [(d.context.seq, d.context.token) for d in self._deliveries]
        if self._action is COMPLETE:
            self._held = self._broker.engine.complete(lock.queue, leases, dead_letter=lock.dead)
            return
        with undone(self._broker.namespace.database) as failure:
            self._held = settle(self._broker.engine, lock.queue, lock.dead, self._action, leases)
        self._refused = failure.error
        if self._action.kind is not SettlementKind.COMPLETE:
            self._broker.queue_changed(lock.queue, lock.dead)

    def succeed(self) -> None:
        """Confirm the deliveries whose lock was held; reject the others as lock-lost."""
        if self._refused is not None:
            self._reject(self._refused)
            return
        session = self._link.session
        locks = self._broker.locks
        for delivery in self._deliveries:
            locks.discard(delivery.context.token)
            session.settle(delivery)
        if not self._answer:
            return
        if self._held == [True]:  # the usual case, on the shortest path
            number = self._deliveries[0].delivery_id
            session.write(outgoing.disposition(False, number, number, self._action.echo))
            return
        lock: Lock = self._deliveries[0].context
        lost = SESSION_LOST if lock.session is not None and not lock.dead else LOCK_LOST
        failure = b"" if all(self._held) else outgoing.rejected(lost.condition, lost.description)
        self._confirm([self._action.echo if held else failure for held in self._held])

    def _confirm(self, states: list[bytes]) -> None:
        """Write one disposition for each run of consecutive ids with the same outcome."""
        session = self._link.session
        ids = [delivery.delivery_id for delivery in self._deliveries]
        start = 0
        for index in range(1, len(ids) + 1):
            ends = index == len(ids) or states[index] is not states[start]
            if ends or ids[index] != ids[index - 1] + 1:
                session.write(
                    outgoing.disposition(False, ids[start], ids[index - 1], states[start])
                )
                start = index

    def fail(self, error: AztaskError) -> None:
        """Reject with the error: nothing was settled. The locks stay as they are."""
        self._reject(as_amqp(error))

    def _reject(self, reason: AmqpError) -> None:
        for delivery in self._deliveries:
            self._link.session.settle(delivery)
        if self._answer:
            state = outgoing.rejected(reason.condition, reason.description)
            self._confirm([state] * len(self._deliveries))
