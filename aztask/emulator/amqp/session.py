"""Sessions: transfer windows, handles and delivery ids (specification part 2.5).

Rules
1. Outgoing transfer frames wait while the peer's window is closed. `ready` says whether the broker
   may send more; if more than `MAX_WAITING` bytes wait, the session ends. It ends without an
   exception, because the caller serves other clients as well.
2. Our own window is renewed when half of it is used.
3. After an end from either side, further frames from the peer on this channel are dropped.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from aztask.emulator.amqp import (
    HANDLE_IN_USE,
    NOT_ALLOWED,
    RESOURCE_LIMIT_EXCEEDED,
    UNATTACHED_HANDLE,
    WINDOW_VIOLATION,
    AmqpError,
    LinkError,
    SessionError,
    outgoing,
)
from aztask.emulator.amqp.link import (
    SERIAL,
    AmqpLink,
    Inbound,
    LinkState,
    Outbound,
    ReceivingLink,
    SendingLink,
    parse_terminus,
)
from aztask.emulator.amqp.outgoing import frame
from aztask.emulator.amqp.performatives import (
    Attach,
    Begin,
    Detach,
    Disposition,
    Flow,
    Transfer,
)

WINDOW = 5000
MAX_WAITING = 64 * 1024 * 1024
READY_BYTES = 4 * 1024 * 1024
"""What may wait in all sessions of a connection while they still get messages."""
_PERFORMATIVE_ROOM = 128  # bytes of a frame kept for its header and performative


class SessionHandler(Protocol):
    """The calls that a session makes."""

    def attached(self, link: AmqpLink) -> None:
        """The peer asks for this link: accept or refuse it, now or later."""

    def received(self, link: ReceivingLink, message: Inbound) -> None:
        """The peer sent a complete message."""

    def credited(self, link: SendingLink) -> None:
        """The link's credit, its drain flag or the session's window changed."""

    def settled(self, deliveries: list[Outbound], disposition: Disposition) -> None:
        """The peer settles these deliveries, or asks to settle them."""

    def detached(self, link: AmqpLink) -> None:
        """The link ended; called once per link, whatever ended it."""


class SessionConnection(Protocol):
    """The part of a connection that its sessions use."""

    peer_frame_size: int
    waiting_bytes: int

    @property
    def handler(self) -> SessionHandler:
        """The object that receives the calls about links and messages."""

    def write_frame(self, channel: int, body: bytes) -> None:
        """Write one performative as a frame."""

    def write_raw(self, data: bytes) -> None:
        """Write a complete frame, header included."""

    def reserve(self, size: int) -> None:
        """Count `size` bytes of incomplete messages. Raises AmqpError over the limit."""

    def may_attach(self) -> bool:
        """Whether the connection has room for one more link."""


class AmqpSession:
    """One session; its channel number is the same in both directions."""

    def __init__(
        self, carrier: SessionConnection, channel: int, begin: Begin, handle_max: int
    ) -> None:
        self.carrier = carrier
        self.channel = channel
        self.links: dict[int, AmqpLink] = {}
        self.unsettled: dict[int, Outbound] = {}
        self.ended = False
        self._handle_max = min(handle_max, begin.handle_max)
        self._next_incoming = begin.next_outgoing_id
        self._window = WINDOW
        self._next_outgoing = 0
        self._peer_window = begin.incoming_window
        self._next_delivery = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self.write(outgoing.begin(channel, 0, WINDOW, self._handle_max))

    # -- writing

    def write(self, performative: bytes) -> None:
        """Write a performative that is not subject to a window."""
        if not self.ended:
            self.carrier.write_frame(self.channel, performative)

    def write_flow(self, link: tuple[int, int, int] | None, *, drain: bool = False) -> None:
        """Write a flow with the session's state, and a link's (handle, delivery count, credit)."""
        state = (self._next_incoming, self._window, self._next_outgoing, WINDOW)
        self.write(outgoing.flow(state, link, drain=drain))

    @property
    def ready(self) -> bool:
        """Whether a message would be written now, not queued behind a closed window."""
        free = self._peer_window > 0 and not self._waiting and not self.ended
        return free and self.carrier.waiting_bytes <= READY_BYTES

    def send_message(self, handle: int, tag: bytes, settled: bool, payload: bytes) -> int:
        """Send one message in as many frames as the peer's limit requires; return its delivery id.

        The session ends when more than `MAX_WAITING` bytes wait for the peer's window.
        """
        delivery_id = self._next_delivery
        self._next_delivery = (delivery_id + 1) & SERIAL
        room = self.carrier.peer_frame_size - _PERFORMATIVE_ROOM
        if len(payload) <= room:
            transfer = outgoing.transfer_frame(
                self.channel, handle, delivery_id, tag, settled=settled, payload=payload
            )
            if self._peer_window > 0 and not self._waiting and not self.ended:
                self._emit(transfer)  # the test of `_transfer` inlined: this runs once per message
            else:
                self._transfer(transfer)
            return delivery_id
        head = outgoing.transfer_start(handle, delivery_id, tag, settled)
        for start in range(0, len(payload), room):
            self._transfer(frame(self.channel, head + payload[start : start + room]))
            head = outgoing.transfer_continued(handle, start + 2 * room < len(payload))
        return delivery_id

    def _transfer(self, data: bytes) -> None:
        if self.ended:
            return
        if self._peer_window > 0 and not self._waiting:
            self._emit(data)
            return
        self._waiting.append(data)
        self._waited(len(data))
        if self._waiting_bytes > MAX_WAITING:
            self.end(
                SessionError(RESOURCE_LIMIT_EXCEEDED, "the session's incoming window stays closed")
            )

    def _waited(self, size: int) -> None:
        """Count `size` more bytes that wait (negative: fewer)."""
        self._waiting_bytes += size
        self.carrier.waiting_bytes += size

    def _emit(self, data: bytes) -> None:
        self._peer_window -= 1
        self._next_outgoing = (self._next_outgoing + 1) & SERIAL
        self.carrier.write_raw(data)

    def settle(self, delivery: Outbound) -> None:
        """Forget a delivery that is settled on this side."""
        self.unsettled.pop(delivery.delivery_id, None)
        delivery.link.unsettled.pop(delivery.delivery_id, None)

    def forget(self, link: AmqpLink) -> None:
        """Release everything held for a link that ended; called once per link.

        Its deliveries are forgotten. A later disposition of them must be ignored, because the peer
        repeats the settlement on another link.
        """
        if isinstance(link, SendingLink):
            for delivery_id in link.unsettled:
                self.unsettled.pop(delivery_id, None)
            link.unsettled = {}
        elif isinstance(link, ReceivingLink):
            self.carrier.reserve(-link.drop_partial())
        self.carrier.handler.detached(link)

    # -- reading

    def on_attach(self, attach: Attach, source: bytes, target: bytes) -> None:
        """Make a new link. source, target: as the peer encoded them."""
        if attach.handle in self.links:
            raise SessionError(HANDLE_IN_USE, f"handle {attach.handle} is attached already")
        if attach.handle > self._handle_max or not self.carrier.may_attach():
            raise SessionError(RESOURCE_LIMIT_EXCEEDED, "too many links")
        kind = SendingLink if attach.role else ReceivingLink
        link = kind(
            self,
            attach,
            parse_terminus(attach.source, source),
            parse_terminus(attach.target, target),
        )
        self.links[attach.handle] = link
        self.carrier.handler.attached(link)

    def on_detach(self, detach: Detach) -> None:
        """Process the peer's detach: it ends the link, or confirms our detach."""
        link = self._link(detach.handle)
        del self.links[detach.handle]
        if link.state is not LinkState.DETACHING:
            self.write(outgoing.detach(detach.handle, detach.closed))
            link.state = LinkState.DETACHED
            self.forget(link)
        link.state = LinkState.DETACHED

    def on_flow(self, flow: Flow) -> None:
        """Process the peer's flow: its window, and the credit of one link."""
        base = 0 if flow.next_incoming_id is None else flow.next_incoming_id
        in_flight = (self._next_outgoing - base) & SERIAL
        self._peer_window = max(0, flow.incoming_window - in_flight)
        self._release_waiting()
        if flow.handle is None:
            if flow.echo:
                self.write_flow(None)
            self._window_opened()
            return
        link = self._link(flow.handle)
        if link.state is LinkState.DETACHING:
            return
        if isinstance(link, ReceivingLink):
            link.flowed(flow)
        elif isinstance(link, SendingLink):
            link.flowed(flow)
            self.carrier.handler.credited(link)
            if flow.echo and not flow.drain:
                link.write_state()

    def _release_waiting(self) -> None:
        while self._waiting and self._peer_window > 0:
            data = self._waiting.popleft()
            self._waited(-len(data))
            self._emit(data)

    def _window_opened(self) -> None:
        for link in list(self.links.values()):
            if isinstance(link, SendingLink) and link.attached and link.credit:
                self.carrier.handler.credited(link)

    def on_transfer(self, transfer: Transfer) -> None:
        """Process one frame of a message. A LinkError detaches that link only."""
        self._next_incoming = (self._next_incoming + 1) & SERIAL
        self._window -= 1
        if self._window < 0:
            raise SessionError(WINDOW_VIOLATION, f"more than {WINDOW} transfers in one window")
        if self._window * 2 < WINDOW:
            self._window = WINDOW
            self.write_flow(None)
        link = self._link(transfer.handle)
        if link.state is LinkState.DETACHING:
            return
        if not isinstance(link, ReceivingLink) or not link.attached:
            raise SessionError(NOT_ALLOWED, f"a transfer on handle {transfer.handle}, not a sender")
        before = link.partial_size()
        try:
            message = link.transferred(transfer)
        except LinkError as error:
            link.detach(error)
            return
        self.carrier.reserve(link.partial_size() - before)
        if message is not None:
            self.carrier.handler.received(link, message)

    def on_disposition(self, disposition: Disposition) -> None:
        """Process the peer's settlement of messages that we sent; unknown ids are ignored.

        A disposition of the peer as sender needs no answer: we settle its messages at once.
        """
        if not disposition.role:
            return
        first = disposition.first
        last = first if disposition.last is None else disposition.last
        unsettled = self.unsettled
        if first == last:
            found = [unsettled[first]] if first in unsettled else []
        elif last - first < len(unsettled):
            found = [unsettled[i] for i in range(first, last + 1) if i in unsettled]
        else:
            found = [unsettled[i] for i in sorted(unsettled) if first <= i <= last]
        if found:
            self.carrier.handler.settled(found, disposition)

    def end(self, reason: AmqpError | None = None) -> None:
        """End the session and its links, from this side or in answer to the peer."""
        if self.ended:
            return
        self.write(outgoing.end(reason))
        self.abandon()

    def abandon(self) -> None:
        """End the session and its links without writing anything."""
        self.ended = True
        self._waiting.clear()
        self._waited(-self._waiting_bytes)
        links, self.links = list(self.links.values()), {}
        for link in links:
            if link.state in (LinkState.PENDING, LinkState.ATTACHED):
                link.state = LinkState.DETACHED
                self.forget(link)

    def _link(self, handle: int) -> AmqpLink:
        link = self.links.get(handle)
        if link is None:
            raise SessionError(UNATTACHED_HANDLE, f"handle {handle} is not attached")
        return link
