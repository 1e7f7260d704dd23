"""One AMQP connection as a state machine: bytes in, calls to a handler, bytes out.

Rules
1. `ConnectionState` lists the states. `_ACCEPTED` lists the performatives that each state accepts;
   any other performative is an error.
2. After our close, only the peer's close matters. Everything else is dropped.
3. Links, buffered bytes and channels of one connection are limited (`ConnectionLimits`), so that a
   peer cannot use unlimited memory.
4. SASL ANONYMOUS, EXTERNAL and MSSBCBS prove nothing here: their clients put a token to ``$cbs``
   later. SASL PLAIN carries the name and value of the shared access key; a correct key needs no
   token (specification part 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from aztask.emulator.amqp import (
    FRAME_SIZE_TOO_SMALL,
    FRAMING_ERROR,
    ILLEGAL_STATE,
    NOT_ALLOWED,
    RESOURCE_LIMIT_EXCEEDED,
    AmqpError,
    SessionError,
    outgoing,
    performatives,
)
from aztask.emulator.amqp.encode import NULL
from aztask.emulator.amqp.link import raw_fields
from aztask.emulator.amqp.outgoing import (
    EMPTY_FRAME,
    FRAME_HEAD,
    HEADER_AMQP,
    HEADER_SASL,
    HEADER_SIZE,
    MIN_MAX_FRAME_SIZE,
    TYPE_AMQP,
    TYPE_SASL,
    Frame,
    Splitter,
)
from aztask.emulator.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslInit,
    Transfer,
)
from aztask.emulator.amqp.session import AmqpSession, SessionHandler

SASL_MECHANISMS = ["MSSBCBS", "PLAIN", "ANONYMOUS", "EXTERNAL"]
SASL_OK, SASL_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may use.

    max_frame_size: bytes. partial_bytes: bytes of incomplete messages, over all links.
    idle_timeout: milliseconds. The others are counts.
    """

    max_frame_size: int = 65536
    channel_max: int = 4999
    handle_max: int = 4999
    max_links: int = 5000
    partial_bytes: int = 64 * 1024 * 1024
    idle_timeout: int = 240_000


class ConnectionState(Enum):
    """What the connection waits for."""

    START = "waiting for a protocol header"
    SASL = "waiting for sasl-init"
    HEADER = "waiting for the AMQP header"
    OPENING = "waiting for open"
    OPEN = "open"
    CLOSING = "waiting for the peer's close"
    CLOSED = "closed"


class ConnectionHandler(SessionHandler, Protocol):
    """The calls that a connection makes, in addition to those of its sessions."""

    def authenticated(self, user: str, password: str) -> bool:
        """Return whether these SASL PLAIN credentials are correct."""

    def opened(self, peer: Open) -> None:
        """Called once, when the connection is open."""


Tracer = Callable[[str, int, Any], None]
"""(direction: "->" in or "<-" out, channel, performative or bytes)"""

# Every frame compares the state. An attribute of an Enum takes ten times as long to look up.
_OPEN, _CLOSING, _CLOSED = ConnectionState.OPEN, ConnectionState.CLOSING, ConnectionState.CLOSED

_IN_SESSION: dict[type, Callable[[AmqpSession, Any], None]] = {
    Flow: AmqpSession.on_flow,
    Transfer: AmqpSession.on_transfer,
    Disposition: AmqpSession.on_disposition,
    Detach: AmqpSession.on_detach,
}
_WHEN_OPEN = frozenset((*_IN_SESSION, Begin, Attach, End, Close))
_ACCEPTED: dict[ConnectionState, frozenset[type]] = {
    ConnectionState.OPENING: frozenset((Open,)),
    ConnectionState.OPEN: _WHEN_OPEN,
    ConnectionState.CLOSING: frozenset((Close,)),
}


class AmqpConnection:
    """The server's end of one connection."""

    def __init__(
        self,
        handler: ConnectionHandler,
        container: str,
        limits: ConnectionLimits,
        tracer: Tracer | None = None,
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.state = ConnectionState.START
        self.trusted = False
        self.peer: Open | None = None
        self.peer_frame_size = MIN_MAX_FRAME_SIZE
        self.waiting_bytes = 0
        self.sessions: dict[int, AmqpSession] = {}
        self._container = container
        self._tracer = tracer
        self._splitter = Splitter(MIN_MAX_FRAME_SIZE)
        self._output: list[bytes] = []
        self.wake: Callable[[], None] = lambda: None
        self._partial_bytes = 0
        self._dispatch: dict[type, Callable[[int, Any, bytes], None]] = {
            Open: self._on_open,
            Begin: self._on_begin,
            Attach: self._on_attach,
            End: self._on_end,
            Close: self._on_close,
        }

    # -- bytes

    def receive(self, data: bytes) -> None:
        """Process bytes from the peer: call the handler and collect the output."""
        if self.state is _CLOSED:
            return
        splitter = self._splitter
        splitter.feed(data)
        try:
            while True:
                if self.state is not _OPEN:
                    if self._step():
                        continue
                    break
                part = splitter.frame()
                if part is None:
                    break
                self._on_part(*part)
        except AmqpError as error:
            self.close(error)

    def output(self) -> bytes:
        """Return the bytes to write to the peer and clear them.

        `wake` is called when there is new output.
        """
        parts, self._output = self._output, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _put(self, data: bytes) -> None:
        if not self._output:
            self.wake()
        self._output.append(data)

    def _step(self) -> bool:
        """Process one header or frame while the connection is not open.

        Returns False when the buffer holds no complete header or frame.
        """
        if self.state is ConnectionState.CLOSED:
            return False
        if self.state in (ConnectionState.START, ConnectionState.HEADER):
            header = self._splitter.header()
            if header is not None:
                self._on_header(header)
            return header is not None
        part = self._splitter.frame()
        if part is None:
            return False
        if self.state is ConnectionState.SASL:
            self._on_sasl(part)
        else:
            self._on_part(*part)
        return True

    # -- headers and SASL

    def _on_header(self, header: bytes) -> None:
        if header == HEADER_AMQP:
            self._put(HEADER_AMQP)
            self._splitter.max_frame_size = self.limits.max_frame_size
            self.state = ConnectionState.OPENING
        elif header == HEADER_SASL and self.state is ConnectionState.START:
            self._put(HEADER_SASL)
            self._put(outgoing.sasl_mechanisms(SASL_MECHANISMS))
            self.state = ConnectionState.SASL
        else:  # part 2.2: answer with the supported header, then close the socket
            self._put(HEADER_SASL if self.state is ConnectionState.START else HEADER_AMQP)
            self.state = ConnectionState.CLOSED

    def _on_sasl(self, part: Frame) -> None:
        kind, _, body = part
        init = performatives.parse_sasl(body) if kind == TYPE_SASL else None
        if not isinstance(init, SaslInit):
            self.state = ConnectionState.CLOSED
            return
        accepted = self._authenticate(init)
        self._put(outgoing.sasl_outcome(SASL_OK if accepted else SASL_FAILED))
        self.state = ConnectionState.HEADER if accepted else ConnectionState.CLOSED

    def _authenticate(self, init: SaslInit) -> bool:
        """Return whether the connection may continue; see rule 4."""
        if init.mechanism != "PLAIN":
            return init.mechanism in SASL_MECHANISMS
        parts = (init.initial_response or b"").split(b"\x00")  # authorization id, user, password
        if len(parts) != 3:
            return False
        user, password = (part.decode("utf-8", "replace") for part in parts[1:])
        self.trusted = self.handler.authenticated(user, password)
        return self.trusted

    # -- performatives

    def _on_part(self, kind: int, channel: int, body: bytes) -> None:
        """Process one AMQP frame; SASL frames have their own function."""
        if kind != TYPE_AMQP:
            raise AmqpError(FRAMING_ERROR, f"a frame of type {kind}")
        if not body:
            return
        try:
            performative = performatives.parse(body)
        except AmqpError:
            if self.state is _CLOSING:
                return
            raise
        if self._tracer:
            self._tracer("->", channel, performative)
        kind_of = type(performative)
        accepted = _WHEN_OPEN if self.state is _OPEN else _ACCEPTED[self.state]
        if kind_of not in accepted:
            if self.state is _CLOSING:
                return
            raise AmqpError(ILLEGAL_STATE, f"{kind_of.__name__.lower()} while {self.state.value}")
        action = _IN_SESSION.get(kind_of)
        if action is not None:
            self._in_session(channel, action, performative)
        else:
            self._dispatch[kind_of](channel, performative, body)

    def _on_open(self, _channel: int, peer: Open, _body: bytes) -> None:
        self.peer = peer
        limits = self.limits
        self.state = ConnectionState.OPEN
        self.write_frame(
            0,
            outgoing.open_(
                self._container, limits.max_frame_size, limits.channel_max, limits.idle_timeout
            ),
        )
        if peer.max_frame_size < MIN_MAX_FRAME_SIZE:
            raise AmqpError(
                FRAME_SIZE_TOO_SMALL, f"max-frame-size must be at least {MIN_MAX_FRAME_SIZE}"
            )
        self.peer_frame_size = min(peer.max_frame_size, 1024 * 1024)
        self.handler.opened(peer)

    def _on_begin(self, channel: int, begin: Begin, _body: bytes) -> None:
        previous = self.sessions.get(channel)
        if previous is not None and not previous.ended:
            raise AmqpError(ILLEGAL_STATE, f"channel {channel} has a session already")
        if channel > self.limits.channel_max or begin.remote_channel is not None:
            raise AmqpError(NOT_ALLOWED, f"no session can begin on channel {channel}")
        self.sessions[channel] = AmqpSession(self, channel, begin, self.limits.handle_max)

    def _on_attach(self, channel: int, attach: Attach, body: bytes) -> None:
        raw = raw_fields(body) + [NULL] * 7  # absent fields at the end are null
        source, target = raw[5], raw[6]
        self._in_session(channel, lambda session, a: session.on_attach(a, source, target), attach)

    def _in_session(
        self, channel: int, action: Callable[[AmqpSession, Any], None], value: Any
    ) -> None:
        """Call `action` on the channel's session. A SessionError ends that session only."""
        session = self.sessions.get(channel)
        if session is None:
            raise AmqpError(NOT_ALLOWED, f"channel {channel} has no session")
        if session.ended:
            return
        try:
            action(session, value)
        except SessionError as error:
            session.end(error)

    def _on_end(self, channel: int, _end: End, _body: bytes) -> None:
        session = self.sessions.get(channel)
        if session is None:
            raise AmqpError(NOT_ALLOWED, f"channel {channel} has no session")
        session.end()

    def _on_close(self, _channel: int, _close: Close, _body: bytes) -> None:
        if self.state is ConnectionState.OPEN:
            self.write_frame(0, outgoing.close())
        self.state = ConnectionState.CLOSED
        self.lost()

    # -- ending

    def close(self, reason: AmqpError | None = None) -> None:
        """Close from this side, with a close performative if the state allows one."""
        if self.state in (ConnectionState.OPENING, ConnectionState.OPEN):
            if self.state is ConnectionState.OPENING:
                self.write_frame(0, outgoing.open_(self._container, 512, 0, 0))
            self.write_frame(0, outgoing.close(reason))
            self.state = ConnectionState.CLOSING
        else:
            self.state = ConnectionState.CLOSED
        self.lost()

    def lost(self) -> None:
        """End every session and link: the peer no longer reads."""
        for session in self.sessions.values():
            session.abandon()
        self.sessions = {}

    def keep_alive(self) -> None:
        """Write an empty frame, so that the peer's idle timeout does not expire."""
        if self.state is ConnectionState.OPEN:
            self._put(EMPTY_FRAME)

    # -- for the sessions

    def write_frame(self, channel: int, body: bytes) -> None:
        """Add one performative to the output, as a frame."""
        if self._tracer:
            self._tracer("<-", channel, body)
        if not self._output:
            self.wake()
        self._output.append(FRAME_HEAD.pack(len(body) + HEADER_SIZE, 2, TYPE_AMQP, channel) + body)

    def write_raw(self, data: bytes) -> None:
        """Add a complete frame to the output."""
        if self._tracer:
            self._tracer("<-", data[6] << 8 | data[7], data[8:])
        if not self._output:
            self.wake()
        self._output.append(data)

    def reserve(self, size: int) -> None:
        """Count `size` more bytes of incomplete messages (negative: fewer).

        Raises AmqpError when they exceed the limit.
        """
        self._partial_bytes += size
        if self._partial_bytes > self.limits.partial_bytes:
            raise AmqpError(RESOURCE_LIMIT_EXCEEDED, "too many bytes of incomplete messages")

    def may_attach(self) -> bool:
        """Return whether the connection has room for one more link."""
        return sum(len(session.links) for session in self.sessions.values()) < self.limits.max_links
