"""An AMQP connection without a socket: a recording handler, and the frames of a client."""

from __future__ import annotations

from aztask.emulator.amqp import DECODE_ERROR, AmqpError, encode
from aztask.emulator.amqp.connection import AmqpConnection, ConnectionLimits
from aztask.emulator.amqp.decode import decode
from aztask.emulator.amqp.link import ReceivingLink, SendingLink
from aztask.emulator.amqp.outgoing import (
    HEADER_AMQP,
    Splitter,
    frame,
)
from aztask.emulator.amqp.performatives import parse

TAG = bytes(16)


def uuid_array(values):
    """AMQP's array of UUIDs."""
    return encode.array_of(0x98, [value.bytes for value in values])


def decode_exactly(buffer):
    """The one value that `buffer` holds. Raises AmqpError if more bytes follow it."""
    value, end = decode(buffer)
    if end != len(buffer):
        raise AmqpError(DECODE_ERROR, f"{len(buffer) - end} bytes follow the value")
    return value


class Recorder:
    """A handler that accepts every link and remembers the calls."""

    def __init__(self):
        self.links, self.received_, self.settled_, self.detached_ = [], [], [], []
        self.credited_ = 0

    def authenticated(self, user, password):
        return (user, password) == ("user", "right")

    def opened(self, peer):
        self.peer = peer

    def attached(self, link):
        self.links.append(link)
        if (link.source and link.source.address == "no") or (
            link.target and link.target.address == "no"
        ):
            link.refuse(AmqpError("amqp:not-found", "no such thing"))
            return
        link.accept(max_message_size=1000)
        if isinstance(link, ReceivingLink):
            link.max_message_size = 1000
            link.grant(10)

    def received(self, link, message):
        self.received_.append(message)

    def credited(self, link):
        self.credited_ += 1

    def settled(self, deliveries, disposition):
        self.settled_.append(([one.delivery_id for one in deliveries], disposition))
        for one in deliveries:
            one.link.session.settle(one)

    def detached(self, link):
        self.detached_.append(link)


class Wire:
    """A connection with its handler, and a parser of its output."""

    def __init__(self, handler=None, **limits):
        self.handler = handler or Recorder()
        self.connection = AmqpConnection(self.handler, "server", ConnectionLimits(**limits))
        self._splitter = Splitter(2**31)

    def feed(self, *parts):
        for part in parts:
            self.connection.receive(part)
        return self

    def headers(self, count=1):
        self._splitter.feed(self.connection.output())
        return [self._splitter.header() for _ in range(count)]

    def frames(self):
        self._splitter.feed(self.connection.output())
        found = []
        while (part := self._splitter.frame()) is not None:
            found.append(parse(part[2]))
        return found

    def started(self, window=2**31 - 1, frame_size=2**32 - 1):
        opened = encode.fields(0x10, [encode.string("c"), encode.NULL, encode.uint(frame_size)])
        begun = encode.fields(
            0x11, [encode.NULL, encode.uint(0), encode.uint(window), encode.uint(5)]
        )
        self.feed(HEADER_AMQP, frame(0, opened), frame(0, begun))
        assert self.headers() == [HEADER_AMQP]
        assert [type(one).__name__ for one in self.frames()] == ["Open", "Begin"]
        return self

    def attach(
        self, *, receive, handle=0, settled=2, address="q", name="l", filters=None, end="here"
    ):
        """Attach a link and return the answers. end: the address of the client's side."""
        there = encode.list_of([encode.string(address), *[encode.NULL] * 6, filters or encode.NULL])
        here = encode.list_of([encode.string(end)])
        source, target = (there, here) if receive else (here, there)
        self.feed(
            frame(
                0,
                encode.fields(
                    0x12,
                    [
                        *(encode.string(name), encode.uint(handle), encode.boolean(receive)),
                        *(encode.ubyte(settled), encode.ubyte(1)),
                        *(encode.described(0x28, source), encode.described(0x29, target)),
                        *(encode.NULL, encode.NULL, encode.uint(0)),
                    ],
                ),
            )
        )
        return self.frames()

    def detach(self, handle):
        self.feed(frame(0, encode.fields(0x16, [encode.uint(handle), encode.TRUE])))
        return self.frames()

    def flow(self, credit, *, handle=0, count=0, drain=False, incoming=0, window=2**31 - 1):
        numbers = [encode.uint(n) for n in (incoming, window, 0, 5, handle, count, credit, 0)]
        self.feed(frame(0, encode.fields(0x13, [*numbers, encode.boolean(drain)])))

    def transfer(self, delivery_id, payload, *, handle=0, more=False, **more_fields):
        items = [
            encode.uint(handle),
            encode.NULL if delivery_id is None else encode.uint(delivery_id),
            encode.NULL if delivery_id is None else encode.binary(b"tag"),
            encode.uint(more_fields.get("message_format", 0)),
            encode.boolean(more_fields.get("settled", False)),
            encode.boolean(more),
            encode.NULL,
            more_fields.get("state", encode.NULL),
            encode.NULL,
            encode.boolean(more_fields.get("aborted", False)),
        ]
        self.feed(frame(0, encode.fields(0x14, items) + payload))


def names(performatives):
    return [type(one).__name__ for one in performatives]


def sending(wire, credit=5):
    wire.attach(receive=True)
    wire.flow(credit)
    link = wire.handler.links[0]
    assert isinstance(link, SendingLink)
    return link


def dispose(wire, first, last=None, *, role=True, state=None, settled=False):
    items = [encode.boolean(role), encode.uint(first)]
    items.append(encode.NULL if last is None else encode.uint(last))
    items += [encode.boolean(settled), state or encode.NULL]
    wire.feed(frame(0, encode.fields(0x15, items)))
