"""The Kombu transport itself: one connection, its broker, its channels and their lease keeper."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from kombu.transport import virtual

from aztask.brokers.base import Broker, NameChecker
from aztask.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    ContentRefused,
    SendUnconfirmed,
)
from aztask.lease.keeper import LeaseKeeper
from aztask.message.codec import Codec
from aztask.message.contenttypes import CONTENT_TYPES
from aztask.support.display import one_line
from aztask.transport.address import address_of, broker_of, shown
from aztask.transport.boxes import Boxes
from aztask.transport.channel import Channel
from aztask.transport.names import translated_name
from aztask.transport.options import TransportOptions, nothing
from aztask.transport.reaching import check_reachable, quiet_requests
from aztask.transport.unacked import log_lost

_LONGEST_WAIT = 1.0
_LOCAL_WAIT = 0.05
_SHARED_WAIT = 0.2
_SHORTEST_WAIT = 0.15


class Transport(virtual.Transport):
    """One connection: its broker, its channels, and the keeper of the delivered messages."""

    Channel = Channel
    driver_type = "aztask"
    driver_name = "aztask"
    can_parse_url = True
    connection_errors = (BrokerUnavailable, SendUnconfirmed, ConnectionError, OSError)
    channel_errors = (BrokerError,)
    implements = virtual.Transport.implements.extend(exchange_type=frozenset({"direct", "topic"}))

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
        self._pid = 0
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
        if self._broker is None or self._pid != os.getpid():
            self._broker, self._close_broker = self.options.open()
            self._keeper, self._boxes, self._pid = None, None, os.getpid()
            quiet_requests(self._broker)
        return self._broker

    @property
    def keeper(self) -> LeaseKeeper:
        """Renews the messages that this connection's channels deliver; started at the first use."""
        broker = self.broker
        if self._keeper is None:
            self._keeper = LeaseKeeper(broker, on_lost=log_lost).start()
        return self._keeper

    @property
    def boxes(self) -> Boxes:
        """The mailboxes of this connection; made at the first use."""
        if self._boxes is None or self._pid != os.getpid():
            broker = self.broker  # forgets the boxes of the parent process
            self._boxes = Boxes(broker, enabled=self.options.remote_control)
        return self._boxes

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

    def check_body(self, body: bytes, content_type: str) -> None:
        """Raise CodecError unless a consumer can decode `body` safely."""
        if content_type not in self.options.accept:
            raise ContentRefused(
                f"content type {one_line(repr(content_type), 60)} is not accepted here;"
                " the transport option accept names further ones"
            )
        if content_type in CONTENT_TYPES.values():
            self._codec.decode_body(body, content_type)

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message to its consumer. Raises socket.timeout after `timeout` seconds."""
        ends_at = None if timeout is None else monotonic() + timeout
        while not any(channel.deliver_one() for channel in list(self.channels)):
            left = _LONGEST_WAIT if ends_at is None else ends_at - monotonic()
            if not self._wait(max(0.0, min(left, _LONGEST_WAIT))) and left <= 0:
                raise TimeoutError

    def _wait(self, wait: float) -> bool:
        """Receive, waiting at most `wait` seconds and at most until a held message is due."""
        due = [channel.seconds_to_due() for channel in list(self.channels)]
        wait = min([wait, *(each for each in due if each is not None)])
        if wait < _SHORTEST_WAIT and any(each is not None for each in due):
            sleep(wait)  # a receive from a remote service may take longer
            return False
        return self._fetch(wait)

    def _fetch(self, wait: float) -> bool:
        """Receive from the consumers' queues in turns, waiting at most `wait` seconds in all."""
        sources = [(ch, source) for ch in list(self.channels) for source in ch.open_sources()]
        if not sources:
            for channel in list(self.channels)[:1]:
                channel.unacked.wait_for_change(min(wait, _LOCAL_WAIT))
            return False
        self._turn += 1
        first = self._turn % len(sources)
        turns = sources[first:] + sources[:first]
        if any(channel.may_wake for channel in list(self.channels)):
            wait = min(wait, _SHARED_WAIT)
        if len(turns) > 1:
            if any(channel.fetch(source, 0.0) for channel, source in turns):
                return True
            share = _LOCAL_WAIT if not self.broker.capabilities.remote else wait / len(turns)
            wait = min(wait, share)
        channel, source = turns[0]
        return bool(channel.fetch(source, wait))

    def close_connection(self, connection: Any) -> None:
        """Close the channels, stop renewing, and close the broker if it was opened here."""
        super().close_connection(connection)
        if self._pid != os.getpid():
            return
        if self._boxes is not None:
            self._boxes.close()
        if self._keeper is not None:
            self._keeper.stop()
        self._close_broker()
        self._keeper = self._broker = self._boxes = None
