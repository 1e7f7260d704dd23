"""The AMQP listener: sockets and the tick.

Rules
1. `AmqpConnection` interprets the bytes; this module only moves them. Output is written once per
   turn of the loop, after the turn's transaction is committed.
2. While a socket's write buffer is full, its connection is not read and gets no deliveries.
3. If only one client is active, its bytes are answered at once. With several, one transaction per
   turn of the loop holds the changes of all of them.
4. A bug in the emulator closes the connection that met it and writes a log line. The others
   continue, whether it was met while reading, while writing or in a tick.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from aztask.emulator.amqp import CONNECTION_FORCED, INTERNAL_ERROR, AmqpError
from aztask.emulator.amqp.connection import (
    AmqpConnection,
    ConnectionLimits,
    ConnectionState,
    Tracer,
)
from aztask.emulator.broker.broker import Service
from aztask.emulator.broker.client import Client
from aztask.emulator.faults import Faults

log = logging.getLogger(__name__)

CONTAINER = "aztask-emulator"
TICK_SECONDS = 0.02
SLOW_TICK_EVERY = 25  # ticks between two checks of tokens and time-outs
HANDSHAKE_SECONDS = 30.0
CLOSING_SECONDS = 5.0
READ_BYTES = 256 * 1024
WRITE_HIGH_WATER = 4 * 1024 * 1024
_CLOSED = (
    ConnectionState.CLOSED
)  # compared twice per read; an attribute of an Enum is slow to look up


class Endpoint(asyncio.BufferedProtocol):
    """One client's socket. All sockets read into the same buffer, which is emptied at once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._committer = server.broker.committer
        self._transport: asyncio.Transport | None = None
        self.client = Client(server.broker)
        tracer = server.tracer
        self.connection = AmqpConnection(
            self.client,
            CONTAINER,
            server.limits,
            None if tracer is None else self._traced(tracer),
        )
        self.connection.wake = partial(server.output_waiting, self)
        # The time of the last tick would be wrong here and at each read: if the clock has jumped
        # since, the next tick would take a client for idle that has just spoken.
        self._monotonic = server.broker.clock.monotonic
        self.since = self.last_read = self.last_write = self._monotonic()
        self.remote = ""
        faults = server.broker.faults
        self._faults = faults if faults.on_output else None
        self._late: deque[bytes] = deque()
        self._late_bytes = 0
        self._full = 0  # how many of the two are full: the socket, what the fault latency holds

    def _traced(self, tracer: Callable[[str, str, int, Any], None]) -> Tracer:
        return lambda direction, channel, data: tracer(self.remote, direction, channel, data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve a socket that was accepted."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # TCP's always is
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self.remote = "{}:{}".format(*(transport.get_extra_info("peername") or ("?", 0))[:2])
        self._server.endpoints.add(self)

    def get_buffer(self, _hint: int) -> memoryview:
        """Return the shared buffer: a new one for each read would cost three system calls."""
        return self._server.buffer

    def buffer_updated(self, size: int) -> None:
        """Process bytes from the client."""
        self.read(bytes(self._server.buffer[:size]))

    def read(self, data: bytes) -> None:
        """Process these bytes of AMQP."""
        server = self._server
        self.last_read = self._monotonic()
        server.active.add(self)
        self._committer.reading = True
        self.guarded(self.connection.receive, data)
        if self.connection.state is _CLOSED:
            server.output_waiting(self)
        self._committer.finish_reading(now=server.solo)

    def guarded(self, action: Callable[..., None], *values: object) -> None:
        """Do something for this client; a bug that it meets closes this connection (rule 4)."""
        try:
            action(*values)
        except Exception:
            log.exception("%s: closing the connection after a bug of the emulator", self.remote)
            self.connection.close(AmqpError(INTERNAL_ERROR, "a bug of the emulator, see its log"))

    def flush(self) -> None:
        """Write the collected output, and close the socket of a closed connection."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = self.connection.output()
        if data:
            self.last_write = self._server.time
            if self._faults is None:
                transport.write(data)
            else:
                self._write_with_faults(data, self._faults)
        if self.connection.state is _CLOSED:
            if self._late and self._faults is not None:
                asyncio.get_running_loop().call_later(self._faults.latency, transport.close)
            else:
                transport.close()

    def _write_with_faults(self, data: bytes, faults: Faults) -> None:
        """Write later, or break the connection instead: its answers are lost, not its work."""
        if self.client.links and faults.drops():
            self.abort()
        elif faults.latency:
            if self._late_bytes <= WRITE_HIGH_WATER < self._late_bytes + len(data):
                self.pause_writing()
            self._late.append(data)
            self._late_bytes += len(data)
            asyncio.get_running_loop().call_later(faults.latency, self._write_late)
        elif self._transport is not None:
            self._transport.write(data)

    def _write_late(self) -> None:
        data = self._late.popleft()
        if self._late_bytes > WRITE_HIGH_WATER >= self._late_bytes - len(data):
            self.resume_writing()
        self._late_bytes -= len(data)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause_writing(self) -> None:
        """Stop reading and delivering: the write buffer is full (rule 2)."""
        self._full += 1
        if self._transport is not None:
            self._transport.pause_reading()
        self.client.paused(True)

    def resume_writing(self) -> None:
        """Resume reading and delivering: the write buffer has room."""
        self._full -= 1
        if self._full:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self.client.paused(False)

    def connection_lost(self, _error: Exception | None) -> None:
        """End the connection's links: the socket is closed."""
        self._server.endpoints.discard(self)
        self.connection.lost()
        self._server.broker.committer.plan_flush()

    def abort(self) -> None:
        """Close the socket at once; unsent output is lost."""
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Enforce the time-outs of the handshake, of the close and of idle connections."""
        state = self.connection.state
        if state is ConnectionState.OPEN:
            self._check_open(now)
            return
        closing = state is ConnectionState.CLOSING
        waited = now - (self.last_write if closing else self.since)
        if waited > (CLOSING_SECONDS if closing else HANDSHAKE_SECONDS):
            self.abort()

    def _check_open(self, now: float) -> None:
        if now - self.last_read > 2 * self.connection.limits.idle_timeout / 1000:
            self.connection.close(AmqpError(CONNECTION_FORCED, "the client was idle for too long"))
            return
        try:
            self.client.check_idle()
        except AmqpError as error:
            self.connection.close(error)
            return
        idle = self.connection.peer.idle_timeout if self.connection.peer else None
        if idle and now - self.last_write > idle / 2000:
            self.connection.keep_alive()


class Server:
    """Listens, ticks, and holds all connections.

    tracer: called with (remote address, direction, channel, frame) for each frame. solo: at most
    one client was active in the last tick (rule 3).
    """

    def __init__(
        self,
        broker: Service,
        limits: ConnectionLimits | None = None,
        tracer: Callable[[str, str, int, Any], None] | None = None,
    ) -> None:
        self.broker = broker
        self.limits = limits or ConnectionLimits()
        self.tracer = tracer
        self.endpoints: set[Endpoint] = set()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self.active: set[Endpoint] = set()
        self.solo = False
        self._with_output: set[Endpoint] = set()
        self._server: asyncio.Server | None = None
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self.time = broker.clock.monotonic()  # of the last tick: cheap, and exact enough
        self._restart_at = self.time + broker.faults.restart

    async def start(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        protocol: Callable[[Server], asyncio.BaseProtocol] = Endpoint,
    ) -> int:
        """Listen, with TLS if there is a `context`; return the bound port. Raises OSError.

        protocol: makes the first protocol of each connection.
        """
        loop = asyncio.get_running_loop()
        self.broker.committer.after_flush = self._flush_all
        self.broker.dispatcher.plan_flush = self.broker.committer.plan_flush
        self._server = await loop.create_server(
            lambda: protocol(self), host, port, ssl=context, backlog=512
        )
        self._tick()
        return int(self._server.sockets[0].getsockname()[1])

    def output_waiting(self, endpoint: Endpoint) -> None:
        """Write this endpoint's output at the end of the turn."""
        self._with_output.add(endpoint)
        if not self.broker.committer.flushing:
            self.broker.committer.plan_flush()

    def _flush_all(self) -> None:
        output_waiting, self._with_output = self._with_output, set()
        for endpoint in output_waiting:
            endpoint.guarded(endpoint.flush)

    def _tick(self) -> None:
        """Check everything that depends on time: locks, schedules, tokens, time-outs."""
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
        self._ticks += 1
        self.time = self.broker.clock.monotonic()
        try:
            self._pass_time()
        except Exception:
            log.exception("a tick of the emulator failed; the next one runs as usual")

    def _pass_time(self) -> None:
        broker = self.broker
        self.solo, self.active = len(self.active) < 2, set()
        for endpoint in list(self.endpoints):
            endpoint.guarded(endpoint.client.tick)
        broker.dispatcher.tick()
        if self._ticks % SLOW_TICK_EVERY == 0:
            for endpoint in list(self.endpoints):
                if broker.access.required:
                    endpoint.guarded(endpoint.client.check_tokens)
                endpoint.client.note_use()
                endpoint.guarded(endpoint.check, self.time)
            if broker.faults.restart and self.time >= self._restart_at:
                self._restart_at = self.time + broker.faults.restart
                log.info("all connections are broken, as the option --fault restart asks")
                for endpoint in list(self.endpoints):
                    endpoint.abort()
            for path in broker.namespace.idle():
                self._delete_idle(path)
        if broker.forwarder.due():
            broker.committer.plan_flush()

    def _delete_idle(self, path: str) -> None:
        if self.broker.namespace.find(path) is None:
            return  # it was a subscription of a topic that was deleted just now
        log.info("%s was not used for as long as its auto-delete on idle says: deleted", path)
        for entity in self.broker.namespace.delete(path):
            self.entity_deleted(entity.path)

    def entity_deleted(self, path: str) -> None:
        """Detach all links to a deleted entity."""
        for endpoint in self.endpoints:
            endpoint.client.entity_deleted(path)
        self.broker.committer.plan_flush()

    async def stop(self) -> None:
        """Close every connection and stop listening."""
        if self._timer:
            self._timer.cancel()
        if self._server:
            self._server.close()
        for endpoint in list(self.endpoints):
            endpoint.connection.close(AmqpError(CONNECTION_FORCED, "the emulator is stopping"))
            endpoint.flush()
        await asyncio.sleep(0)
        for endpoint in list(self.endpoints):
            endpoint.abort()
        await asyncio.sleep(0)
