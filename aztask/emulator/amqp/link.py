"""Links: one direction of message flow inside a session (specification part 2.6).

Rules
1. The peer's handle is also ours: a handle is unique in its session for both directions.
2. A link is PENDING from the peer's attach until the broker accepts or refuses it, then ATTACHED.
   After our detach it is DETACHING: messages from the peer are dropped until its own detach.
3. Credit is the number of messages that the receiver granted, minus those sent since. It is never
   negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from aztask.emulator.amqp import (
    DECODE_ERROR,
    INVALID_FIELD,
    MESSAGE_SIZE_EXCEEDED,
    NOT_ALLOWED,
    AmqpError,
    LinkError,
    encode,
    outgoing,
)
from aztask.emulator.amqp.decode import decode, skip
from aztask.emulator.amqp.encode import Described, Symbol, undescribed
from aztask.emulator.amqp.performatives import Attach, Flow, Transfer

# -- sources and targets: where a link begins and ends (specification part 3.5) ------------
#
# Rule: a terminus is echoed byte for byte, except for the fields that the broker sets.


SOURCE = 0x28
TARGET = 0x29
COORDINATOR = 0x30
FILTER_FIELD = 7

_DESCRIPTORS: dict[Any, int] = {
    SOURCE: SOURCE,
    TARGET: TARGET,
    COORDINATOR: COORDINATOR,
    "amqp:source:list": SOURCE,
    "amqp:target:list": TARGET,
    "amqp:coordinator:list": COORDINATOR,
}


@dataclass(frozen=True, slots=True)
class Terminus:
    """One end of a link.

    kind: SOURCE, TARGET or COORDINATOR. filters: of a source, by name, without descriptors.
    raw: the bytes that the peer sent.
    """

    kind: int
    address: str
    dynamic: bool
    filters: dict[str, Any]
    raw: bytes


def parse_terminus(value: Described | None, raw: bytes) -> Terminus | None:
    """Return the terminus of an attach's field, or None for null.

    Raises AmqpError for any other value.
    """
    if value is None:
        return None
    kind = _DESCRIPTORS.get(value.descriptor) if _hashable(value.descriptor) else None
    fields = value.value
    if kind is None or not isinstance(fields, list):
        raise AmqpError(INVALID_FIELD, "a source or target is neither")
    address = fields[0] if fields and kind != COORDINATOR else None
    filters = fields[FILTER_FIELD] if kind == SOURCE and len(fields) > FILTER_FIELD else None
    return Terminus(
        kind=kind,
        address=_address(address),
        dynamic=kind != COORDINATOR and len(fields) > 4 and fields[4] is True,
        filters={
            str(name): undescribed(value)
            for name, value in (filters if isinstance(filters, dict) else {}).items()
        },
        raw=raw,
    )


def _hashable(descriptor: Any) -> bool:
    return type(descriptor) in (int, str, Symbol)


def _address(value: Any) -> str:
    """Return an address as text: SDKs send strings, symbols and binaries [seen]."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def raw_fields(described_list: bytes) -> list[bytes]:
    """Return the encoded items of an encoded described list.

    The list must have been decoded before: nothing is checked here.
    """
    position = skip(described_list, 1)
    code = described_list[position]
    if code == encode.EMPTY_LIST[0]:
        return []
    width = 1 if code >> 4 == 0xC else 4
    count = int.from_bytes(described_list[position + 1 + width : position + 1 + 2 * width])
    position += 1 + 2 * width
    items = []
    for _ in range(count):
        end = skip(described_list, position)
        items.append(described_list[position:end])
        position = end
    return items


def with_filter(source: Terminus, name: str, value: bytes) -> bytes:
    """Return the peer's source with the filter `name` set to an encoded value.

    The value gets the descriptor of the peer's filter, if that had one.
    """
    items = raw_fields(source.raw)
    filters, _ = decode(items[FILTER_FIELD])
    pairs = [(encode.symbol(name), _described_like(filters.get(name), name, value))]
    items[FILTER_FIELD] = encode.map_of(pairs)
    return encode.described(SOURCE, encode.list_of(items))


def _described_like(original: Any, name: str, value: bytes) -> bytes:
    if not isinstance(original, Described):
        return value
    if isinstance(original.descriptor, int):
        return b"\x00" + encode.ulong(original.descriptor) + value
    return b"\x00" + encode.symbol(name) + value


SERIAL = 0xFFFFFFFF
"""Delivery counts and ids are 32-bit serial numbers (RFC 1982): arithmetic is modulo 2**32."""
SETTLED_MODE = 1
MAX_TAG = 32
MAX_DROPPED = 64 * 1024 * 1024
NULL_TERMINUS = b"\x40"


class LinkState(Enum):
    """The life of a link, as in rule 2."""

    PENDING = "pending"
    ATTACHED = "attached"
    DETACHING = "detaching"
    DETACHED = "detached"


class LinkChannel(Protocol):
    """The part of a session that its links and the broker use."""

    unsettled: dict[int, Outbound]
    ended: bool

    @property
    def ready(self) -> bool:
        """Whether a message would be written now, not queued behind a closed window."""

    def write(self, performative: bytes) -> None:
        """Write a performative that is not subject to a window."""

    def write_flow(self, link: tuple[int, int, int] | None, *, drain: bool = False) -> None:
        """Write a flow with the session's state, and a link's (handle, delivery count, credit)."""

    def send_message(self, handle: int, tag: bytes, settled: bool, payload: bytes) -> int:
        """Send one message and return its delivery id."""

    def settle(self, delivery: Outbound) -> None:
        """Forget a delivery that is settled."""

    def forget(self, link: AmqpLink) -> None:
        """Release everything that the session holds for a link that ended."""


class AmqpLink:
    """The common part of both directions. The broker stores its own object in `context`."""

    receiving = False

    def __init__(
        self, session: LinkChannel, attach: Attach, source: Terminus | None, target: Terminus | None
    ) -> None:
        self.session = session
        self.name = attach.name
        self.handle = attach.handle
        self.modes = (attach.snd_settle_mode, attach.rcv_settle_mode)
        self.properties = attach.properties
        self.source = source
        self.target = target
        self.state = LinkState.PENDING
        self.context: Any = None

    def _attach(self, source: bytes, target: bytes, size: int, properties: bytes) -> None:
        self.session.write(
            outgoing.attach(
                self.name,
                self.handle,
                receiver=self.receiving,
                modes=self.modes,
                source=source,
                target=target,
                max_message_size=size,
                properties=properties,
            )
        )

    def accept(
        self,
        *,
        max_message_size: int = 0,
        properties: bytes = NULL_TERMINUS,
        source: bytes | None = None,
    ) -> None:
        """Answer the attach.

        max_message_size: bytes, 0 for no limit. properties, source: encoded; source replaces the
        peer's own, because the answer to a session filter names the session.
        """
        if self.state is not LinkState.PENDING:
            return
        self.state = LinkState.ATTACHED
        ends = [end.raw if end else NULL_TERMINUS for end in (self.source, self.target)]
        self._attach(source or ends[0], ends[1], max_message_size, properties)

    def refuse(self, reason: AmqpError) -> None:
        """Answer with an attach whose termini are null, then detach (part 2.6.3).

        The specification asks for the one on our side only. But go-amqp (`link.go`) expects the
        detach only after an attach without both, and loses the connection otherwise.
        """
        if self.state is not LinkState.PENDING:
            return
        self._attach(NULL_TERMINUS, NULL_TERMINUS, 0, NULL_TERMINUS)
        self.detach(reason)

    def detach(self, reason: AmqpError | None = None) -> None:
        """End the link from this side, with the reason if there is one."""
        if self.state in (LinkState.PENDING, LinkState.ATTACHED):
            self.state = LinkState.DETACHING
            self.session.forget(self)
            self.session.write(outgoing.detach(self.handle, True, reason))

    @property
    def attached(self) -> bool:
        """Whether messages may flow on this link."""
        return self.state is LinkState.ATTACHED

    def used(self) -> tuple[int, ...]:
        """Return numbers that change with every use of the link."""
        return ()


class Inbound:
    """A complete message from the peer.

    message_format: 0 if the peer sent none. state: the delivery state that came with it, such as a
    transaction's. too_large: the message exceeded the link's limit and its payload was dropped.
    """

    __slots__ = ("delivery_id", "message_format", "payload", "settled", "state", "too_large")

    def __init__(
        self, delivery_id: int, message_format: int, settled: bool, payload: bytes
    ) -> None:
        self.delivery_id = delivery_id
        self.message_format = message_format
        self.settled = settled
        self.payload = payload
        self.state: Described | None = None
        self.too_large = False


class ReceivingLink(AmqpLink):
    """The peer sends, we receive: assembles messages from transfer frames."""

    receiving = True

    def __init__(
        self, session: LinkChannel, attach: Attach, source: Terminus | None, target: Terminus | None
    ) -> None:
        super().__init__(session, attach, source, target)
        self.max_message_size = 0
        self._granted = 0
        self._delivery_count = attach.initial_delivery_count or 0
        self._credit_left = 0
        self._first: Transfer | None = None
        self._partial = bytearray()
        self._dropped = 0  # bytes dropped of a message that is too large

    def grant(self, credit: int) -> None:
        """Let the peer send `credit` messages; the credit is renewed when half of it is used."""
        self._granted = self._credit_left = credit
        self._write_credit()

    def used(self) -> tuple[int, ...]:
        return self._delivery_count, len(self._partial)

    def flowed(self, flow: Flow) -> None:
        """Apply the peer's flow: take its delivery count, and answer an echo."""
        if flow.delivery_count is not None:
            self._delivery_count = flow.delivery_count
        if flow.echo and self.attached:
            self._write_credit()

    def _write_credit(self) -> None:
        self.session.write_flow((self.handle, self._delivery_count, self._credit_left))

    def partial_size(self) -> int:
        """Return how many bytes of an incomplete message are held."""
        return len(self._partial)

    def drop_partial(self) -> int:
        """Forget the incomplete message and return how many bytes it had."""
        dropped = len(self._partial)
        self._first, self._partial, self._dropped = None, bytearray(), 0
        return dropped

    def transferred(self, transfer: Transfer) -> Inbound | None:
        """Add one transfer frame; return the message that it completes, or None.

        Raises LinkError.
        """
        first = self._first
        if first is None:
            first = transfer
            if transfer.delivery_id is None or transfer.delivery_tag is None:
                raise LinkError(NOT_ALLOWED, "a delivery begins without delivery-id and tag")
            if len(transfer.delivery_tag) > MAX_TAG:
                raise LinkError(DECODE_ERROR, f"a delivery-tag of more than {MAX_TAG} bytes")
        elif transfer.delivery_id not in (None, first.delivery_id):
            raise LinkError(NOT_ALLOWED, "a delivery begins inside another one on the same link")
        if transfer.settled:
            first.settled = True
        if transfer.aborted:
            self.drop_partial()
            self._count()
            return None
        payload = self._within_limit(transfer.payload)
        if transfer.more:
            self._first = first
            self._partial += payload
            return None
        return self._complete(first, payload)

    def _within_limit(self, payload: bytes) -> bytes:
        """Return the payload, or no bytes once the message is too large.

        The rest of a large message is dropped, so that its sender gets a rejected disposition and
        keeps its link. A message of more than `MAX_DROPPED` bytes detaches the link (LinkError).
        """
        size = len(self._partial) + len(payload)
        if not self._dropped and not (self.max_message_size and size > self.max_message_size):
            return payload
        self._dropped += size
        self._partial.clear()
        if self._dropped > MAX_DROPPED:
            raise LinkError(
                MESSAGE_SIZE_EXCEEDED,
                f"a message of more than {self.max_message_size} bytes; send smaller ones",
            )
        return b""

    def _complete(self, first: Transfer, rest: bytes) -> Inbound:
        payload = bytes(self._partial) + rest if self._partial else rest
        settled = self.modes[0] == SETTLED_MODE or bool(first.settled)
        message = Inbound(first.delivery_id or 0, first.message_format or 0, settled, payload)
        message.state = first.state
        message.too_large = self._dropped > 0
        self.drop_partial()
        self._count()
        return message

    def _count(self) -> None:
        self._delivery_count = (self._delivery_count + 1) & SERIAL
        self._credit_left -= 1
        if self._credit_left * 2 < self._granted:
            self._credit_left = self._granted
            self._write_credit()


class Outbound:
    """A message that was sent to the peer and is not settled. The broker owns `context`."""

    __slots__ = ("context", "delivery_id", "link", "settling")

    def __init__(self, delivery_id: int, link: SendingLink, context: Any) -> None:
        self.delivery_id = delivery_id
        self.link = link
        self.context = context
        self.settling = False


class SendingLink(AmqpLink):
    """We send, the peer receives: tracks its credit and its unsettled deliveries."""

    def __init__(
        self, session: LinkChannel, attach: Attach, source: Terminus | None, target: Terminus | None
    ) -> None:
        super().__init__(session, attach, source, target)
        self.delivery_count = 0
        self.credit = 0
        self.draining = False
        self.unsettled: dict[int, Outbound] = {}
        self._flows = 0
        self.pre_settled = attach.snd_settle_mode == SETTLED_MODE
        self.max_message_size = attach.max_message_size

    def used(self) -> tuple[int, ...]:
        return self.delivery_count, self._flows, len(self.unsettled)

    def flowed(self, flow: Flow) -> None:
        """Apply the peer's flow: its credit counts from its delivery count (part 2.6.7)."""
        self._flows += 1
        if flow.link_credit is not None:
            counted = 0 if flow.delivery_count is None else flow.delivery_count
            credit = (counted + flow.link_credit - self.delivery_count) & SERIAL
            self.credit = credit if credit <= SERIAL // 2 else 0
        self.draining = flow.drain

    def drained(self) -> None:
        """Answer a drain: use up the credit, because there is nothing to send."""
        self.delivery_count = (self.delivery_count + self.credit) & SERIAL
        self.credit = 0
        self.draining = False
        self.session.write_flow((self.handle, self.delivery_count, 0), drain=True)

    def write_state(self) -> None:
        """Write this link's state, the answer to an echo."""
        self.session.write_flow((self.handle, self.delivery_count, self.credit))

    def send(self, payload: bytes, tag: bytes, context: Any = None) -> None:
        """Send one message. With a `context` it stays unsettled until the peer's disposition."""
        self.delivery_count = (self.delivery_count + 1) & SERIAL
        if self.credit:
            self.credit -= 1
        settled = self.pre_settled or context is None
        delivery_id = self.session.send_message(self.handle, tag, settled, payload)
        if not settled:
            delivery = Outbound(delivery_id, self, context)
            self.unsettled[delivery_id] = delivery
            self.session.unsettled[delivery_id] = delivery
