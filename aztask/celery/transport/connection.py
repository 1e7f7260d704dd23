"""The Kombu transport itself: one connection, its broker, its channels and their lease keeper."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, Final, TypeAlias
from urllib.request import getproxies

from kombu.transport import virtual

from aztask.celery.transport.boxes import Boxes
from aztask.celery.transport.channel import Channel
from aztask.celery.transport.consumers import QueueConsumer
from aztask.celery.transport.looped import LoopedConnection
from aztask.celery.transport.names import translated_name
from aztask.celery.transport.options import TransportOptions, address_of, broker_of, nothing, shown
from aztask.celery.transport.scheduled import extend_inspect
from aztask.celery.transport.unacked import Changes, LogLost
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    ContentRefused,
    SendUnconfirmed,
)
from aztask.message.codec import Codec
from aztask.message.foreign import CONTENT_TYPES
from aztask.message.payload import inner_type
from aztask.queues.base import Broker, NameChecker, Networked
from aztask.queues.lease.keeper import LeaseKeeper

REQUEST_LOG: Final = "azure.core.pipeline.policies.http_logging_policy"
"""azure-core logs each request and each answer there, at INFO."""

LONGEST_CHECK: Final = 10.0

_OTHER_WAYS: Final = ("AZTASK_SERVICEBUS_TRANSPORT", "AZTASK_SERVICEBUS_ENDPOINT")
_LONGEST_WAIT = 1.0
_LOCAL_WAIT = 0.05
_SHARED_WAIT = 0.2
_SHORTEST_WAIT = 0.15
_STANDSTILL = 0.002
"""Seconds for which a receive on the event loop's thread may wait for the service."""
_GATHER_SECONDS = 0.004
"""How long an event loop's thread lets room gather, if the prefetch count leaves little."""
_GATHERINGS = 4
"""So many times at most, as long as the room grows."""

Turn: TypeAlias = tuple[Channel, QueueConsumer]


class Transport(virtual.Transport):
    """One connection: its broker, its channels, and the keeper of the delivered messages."""

    Channel = Channel
    driver_type = "aztask"
    driver_name = "aztask"
    can_parse_url = True
    connection_errors = (BrokerUnavailable, SendUnconfirmed, ConnectionError, OSError)
    channel_errors = (BrokerError,)
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic"})
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        named = broker_of(client, os.environ)
        if (address := address_of(client)) is not None:
            client.hostname = address  # one form, also after a failover took the URL apart
        self.options = TransportOptions.read(client.transport_options, named)
        self._codec = Codec(limits=self.options.limits)
        self._broker: Broker | None = None
        self._close_broker: Callable[[], None] = nothing
        self._keeper: LeaseKeeper | None = None
        self._boxes: Boxes | None = None
        if self.options.remote_control:
            exchanges = frozenset({"direct", "topic", "fanout"})
            self.implements = self.implements.extend(exchange_type=exchanges)
        self._changes = Changes()
        self._looped: LoopedConnection | None = None
        self._loop_receives = False  # instead of the thread: see `receive_now`
        self._pid = os.getpid()
        self._turn = 0

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """Empty: an address has no parts that could be filled in."""
        return {}

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL for banners and logs. Secrets are masked, whatever the arguments say."""
        return shown(uri)

    @property
    def broker(self) -> Broker:
        """The broker of this process; a child opens its own after a fork."""
        if self._pid != os.getpid():  # without a call: each send comes here
            self._notice_fork()
        if self._broker is None:
            self._broker, self._close_broker = self.options.open()
            self._keeper = self._boxes = None
            quiet_requests(self._broker)
        return self._broker

    def _notice_fork(self) -> None:
        """In a child, forget what belongs to the parent: it has threads, or may be locked."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._broker = self._keeper = self._boxes = self._looped = None
            self._close_broker = nothing
            self._loop_receives = False
            self._changes = Changes()

    @property
    def keeper(self) -> LeaseKeeper:
        """Renews the messages that this connection's channels deliver; started at the first use."""
        broker = self.broker
        if self._keeper is None:
            self._keeper = LeaseKeeper(broker, reports=LogLost()).start()
        return self._keeper

    @property
    def boxes(self) -> Boxes:
        """The mailboxes of this connection; made at the first use."""
        if self._boxes is None or self._pid != os.getpid():
            self._boxes = Boxes(self.broker, enabled=self.options.remote_control)
        return self._boxes

    @property
    def changes(self) -> Changes:
        """What may allow this connection's next receive."""
        self._notice_fork()
        return self._changes

    def address(self, queue: str) -> str:
        """The queue's name in the broker, translated if the options say so."""
        if not self.options.translate_names:
            return queue
        broker = self.broker
        return (
            translated_name(queue, broker.check_name) if isinstance(broker, NameChecker) else queue
        )

    def establish_connection(self) -> Any:
        """Open the broker, and check that its host accepts connections.

        A broker object of an app is not checked: it says itself what is unreachable.
        Raises BrokerUnavailable, so that Kombu tries again, or tries the next of several URLs.
        Raises ConfigurationError for a URL that cannot be right, unless there are others to try.
        """
        try:
            if not isinstance(self.options.broker, Broker):
                check_reachable(self.broker, self.client.connect_timeout)
        except ConfigurationError as error:
            if len(self.client.alt) > 1:
                raise BrokerUnavailable(str(error)) from error
            raise
        return super().establish_connection()

    def decoded(self, body: bytes, content_type: str) -> Any:
        """The content of a body, checked, if aztask knows its format; else None.

        Raises CodecError for one that cannot be decoded.
        """
        if inner_type(content_type) is not None:
            raise ContentRefused(
                "its arguments are stored beside the queue, where only aztask's workers read them"
            )
        if content_type not in CONTENT_TYPES.values():
            return None
        return self._codec.decode_body(body, content_type)

    # -- receiving ---------------------------------------------------------------------------

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message to its consumer. Raises socket.timeout after `timeout` seconds."""
        self._notice_fork()
        ends_at = None if timeout is None else monotonic() + timeout
        try:
            while not any(channel.deliver_one() for channel in list(self.channels)):
                left = _LONGEST_WAIT if ends_at is None else ends_at - monotonic()
                if not self._wait(max(0.0, min(left, _LONGEST_WAIT))) and left <= 0:
                    raise TimeoutError
        finally:
            if self._looped is not None:
                self._looped.ring()  # the loop finds the rest, also if a consumer has raised

    def deliver_round(self) -> bool:
        """Deliver at most one message of each channel, and all commands before; False if none."""
        channels, delivered = list(self.channels), False
        for channel in channels:
            while channel.commands and channel.deliver_one():
                delivered = True
        for channel in channels:
            delivered |= channel.deliver_one()
        return delivered

    def fetch_commands(self) -> None:
        """Receive the commands of all channels, before messages that have just come."""
        for channel in list(self.channels):
            channel.fetch_commands()

    def seconds_to_due(self) -> float | None:
        """Seconds until a message that is held until its time is due; None without one."""
        due = [channel.seconds_to_due() for channel in list(self.channels)]
        return min((each for each in due if each is not None), default=None)

    def _wait(self, wait: float) -> bool:
        """Receive, waiting at most `wait` seconds and at most until a held message is due."""
        due = self.seconds_to_due()
        wait = wait if due is None else min(wait, due)
        if self._looped is not None:
            return self.receive_now() or self._looped.wait(wait)
        if wait < _SHORTEST_WAIT and due is not None:
            sleep(wait)  # a receive from a remote service may take longer
            return False
        seen = self.changes.count
        turns = self._turns()
        if not turns:
            self.changes.wait(seen, min(wait, _LOCAL_WAIT))
            return False
        return self._receive(turns, wait)

    def receive_once(self) -> bool:
        """For an event loop: receive, or wait until a consumer may.

        True if messages came, or still wait to be delivered: nothing is received before they are.
        """
        if not self._may_receive():
            self.changes.wait_until(self._may_receive, _LONGEST_WAIT)
            if not all(channel.delivered for channel in list(self.channels)):
                return True
        self._gather_room()
        turns = self._turns() if self._may_receive() else []
        received = bool(turns) and self._receive(turns, _LONGEST_WAIT)
        self._loop_receives = received and self._loop_may_receive(turns)
        return received

    def _gather_room(self) -> None:
        """Let room gather while tasks end quickly: a receive costs the same for one and for many.

        With tasks that take longer, the room does not grow in one pause, and that is all they wait.
        """
        room = self._room()
        for _ in range(_GATHERINGS):
            if not any(channel.scarce for channel in list(self.channels)):
                return
            sleep(_GATHER_SECONDS)
            before, room = room, self._room()
            if room <= before:
                return

    def _room(self) -> int:
        return sum(channel.room for channel in list(self.channels))

    def _loop_may_receive(self, turns: Sequence[Turn]) -> bool:
        """True if the next receive returns at once, or after one round trip of a remote broker.

        A remote queue that has just given as many as it was asked for has more. With several
        queues one of them may be empty, and a receive would wait for it. If the network is slow,
        the loop does not wait for it: no process of a prefork pool would get a task then.
        """
        if not self.broker.capabilities.remote:
            return True
        return len(turns) == 1 and turns[0][1].gave_all and turns[0][1].waited <= _STANDSTILL

    def receive_now(self) -> bool:
        """For the loop's thread: receive, if it is its turn; False if nothing came.

        Its turn begins when messages have come and more are there, and ends when no more come: to
        receive them costs less than to hand over to the thread that waits for them.
        """
        if not self._loop_receives:
            return False
        received = more = False
        try:
            turns = self._turns()
            if self._loop_may_receive(turns):  # a consumer may have come since
                received = self._first_that_gives(turns)
                more = received and self._loop_may_receive(turns)
        finally:
            if not more:
                self._loop_receives = False
                self.changes.note()  # it is the thread's turn
        return received

    def _may_receive(self) -> bool:
        """True if it is the thread's turn, all that came was delivered, and there is room."""
        channels = list(self.channels)
        return (
            not self._loop_receives
            and all(channel.delivered for channel in channels)
            and any(True for channel in channels for _ in channel.open_sources())
        )

    def _turns(self) -> list[Turn]:
        """The consumers that may receive now.

        With priorities, the one comes first that has had the least for its weight; else another one
        is the first each time.
        """
        sources = [(ch, source) for ch in list(self.channels) for source in ch.open_sources()]
        if self.options.priorities:
            return sorted(sources, key=lambda turn: turn[1].served)
        self._turn += 1
        first = self._turn % len(sources) if sources else 0
        return sources[first:] + sources[:first]

    @staticmethod
    def _first_that_gives(turns: Sequence[Turn]) -> bool:
        """Receive from the first of these queues that has messages; False if none has.

        The empty ones before it do not save up what they did not take.
        """
        for number, (channel, source) in enumerate(turns):
            before = source.served
            if channel.fetch(source, 0.0):
                for _, empty in turns[:number]:
                    empty.served = max(empty.served, before)
                return True
        return False

    def _receive(self, turns: list[Turn], wait: float) -> bool:
        """Receive from the consumers' queues in turns, waiting at most `wait` seconds in all."""
        if any(channel.may_wake for channel in list(self.channels)):
            wait = min(wait, _SHARED_WAIT)
        if len(turns) > 1:
            if self._first_that_gives(turns):
                return True
            share = _LOCAL_WAIT if not self.broker.capabilities.remote else wait / len(turns)
            wait = min(wait, share)
        channel, source = turns[0]
        return bool(channel.fetch(source, wait))

    # -- an event loop -----------------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Take part in an event loop of Kombu from now on: see `aztask.celery.transport.looped`."""
        self._notice_fork()
        if self._looped is None:
            self._loop_receives = False
            self._looped = LoopedConnection(self, loop)
            for channel in list(self.channels):
                channel.enter_loop()
            self._looped.ring()  # for what a blocking connection received and did not deliver

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Leave the event loop, and stop receiving; a blocking drain may go on."""
        self._notice_fork()
        looped, self._looped = self._looped, None
        if looped is not None:
            looped.close()

    @property
    def looped(self) -> bool:
        """True if an event loop of this process delivers this connection's messages."""
        self._notice_fork()
        return self._looped is not None

    def least_served(self) -> float:
        """What the consumer has had that comes next; a further one starts there.

        From 0 it would get all turns, until it has had as much as the others in all their time.
        """
        served = (each for channel in list(self.channels) for each in channel.served())
        return min(served, default=0.0)

    def consuming(self) -> None:
        """There is a further consumer: have the event loop's thread receive for it."""
        extend_inspect()
        if self._looped is not None:
            self._looped.start()
        self.changes.note()

    def arrived(self) -> None:
        """Another thread has something for the one that delivers: wake that one."""
        if self._looped is not None:
            self._looped.ring()
        else:
            self.changes.note()

    def close_connection(self, connection: Any) -> None:
        """Close the channels, stop renewing, and close the broker if it was opened here."""
        self.unregister_from_event_loop(connection, None)
        super().close_connection(connection)
        if self._boxes is not None:
            self._boxes.close()
        if self._keeper is not None:
            self._keeper.stop()
        self._close_broker()
        self._keeper = self._broker = self._boxes = None


def check_reachable(broker: Broker, seconds: float | None) -> None:
    """Raise BrokerUnavailable unless the service's host accepts a TCP connection.

    It costs nothing and sends nothing, so it proves neither the credentials nor the queues. It is
    skipped where the service is not reached directly: through a proxy, or another endpoint.

    * `seconds`: the time-out; None for `LONGEST_CHECK`.
    """
    if not isinstance(broker, Networked):
        return
    if getproxies() or any(os.environ.get(name) for name in _OTHER_WAYS):
        return
    host, port = broker.server
    port = port or broker.capabilities.port
    try:
        socket.create_connection((host, port), min(seconds or LONGEST_CHECK, LONGEST_CHECK)).close()
    except OSError as error:
        raise BrokerUnavailable(
            f"{host}:{port} does not accept connections: {error.strerror or error}; check the"
            " address, the network and the firewall"
        ) from error


def quiet_requests(broker: Broker) -> None:
    """Keep azure-core's lines about each request out of the log.

    Celery logs everything from INFO on. Your own level for that logger is left as it is.
    """
    log = logging.getLogger(REQUEST_LOG)
    if broker.capabilities.remote and log.level == logging.NOTSET:
        log.setLevel(logging.WARNING)
