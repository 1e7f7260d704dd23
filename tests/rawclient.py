"""A small AMQP client on a plain socket, for what no SDK would do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.outgoing import HEADER_AMQP, Splitter, frame
from aztask.emulator.amqp.performatives import Disposition, parse

MAX_FRAME = 1024 * 1024


def message(body: bytes, *, message_id: str = "") -> bytes:
    """An encoded message with a data body."""
    properties = encode.fields(sections.PROPERTIES, [encode.string(message_id)])
    return (properties if message_id else b"") + encode.described(
        sections.DATA, encode.binary(body)
    )


def open_frame() -> bytes:
    return frame(
        0, encode.fields(0x10, [encode.string("raw"), encode.NULL, encode.uint(MAX_FRAME)])
    )


def begin_frame(channel: int = 0) -> bytes:
    window = encode.uint(2**31 - 1)
    return frame(channel, encode.fields(0x11, [encode.NULL, encode.uint(0), window, window]))


def attach_frame(
    address: str, *, receive: bool = False, handle: int = 0, channel: int = 0, settled: int = 2
) -> bytes:
    here = encode.list_of([encode.string("here")])
    there = encode.list_of([encode.string(address)])
    source, target = (there, here) if receive else (here, there)
    return frame(
        channel,
        encode.fields(
            0x12,
            [
                *(encode.string(f"link-{handle}"), encode.uint(handle), encode.boolean(receive)),
                *(encode.ubyte(settled), encode.ubyte(0)),
                *(encode.described(0x28, source), encode.described(0x29, target)),
                *(encode.NULL, encode.NULL, encode.uint(0)),
            ],
        ),
    )


def transfer_frame(
    delivery_id: int,
    payload: bytes,
    *,
    handle: int = 0,
    channel: int = 0,
    more: bool = False,
    state: bytes = encode.NULL,
) -> bytes:
    tag = encode.binary(delivery_id.to_bytes(4))
    head = encode.fields(
        0x14,
        [
            *(encode.uint(handle), encode.uint(delivery_id), tag, encode.uint(0)),
            *(encode.FALSE, encode.boolean(more), encode.NULL, state),
        ],
    )
    return frame(channel, head + payload)


def credit_frame(credit: int, *, handle: int = 0, channel: int = 0) -> bytes:
    window = encode.uint(2**31 - 1)
    numbers = [encode.uint(0), window, encode.uint(0), window]
    link = [encode.uint(handle), encode.uint(0), encode.uint(credit)]
    return frame(channel, encode.fields(0x13, [*numbers, *link]))


def disposition_frame(
    first: int,
    last: int | None = None,
    *,
    state: bytes = b"\x00\x53\x24\x45",
    settled: bool = False,
) -> bytes:
    end = encode.NULL if last is None else encode.uint(last)
    items = [encode.TRUE, encode.uint(first), end, encode.boolean(settled), state]
    return frame(0, encode.fields(0x15, items))


class RawClient:
    """Connected to an emulator; `frames` yields what it says."""

    def __init__(self, port: int, *, handshake: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._splitter = Splitter(MAX_FRAME)
        if handshake:
            self.write(HEADER_AMQP + open_frame() + begin_frame())
            self.read_header()
            self.until("Open")
            self.until("Begin")

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_header(self) -> bytes:
        while (header := self._splitter.header()) is None:
            self._feed()
        return header

    def _feed(self) -> None:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError("the emulator closed the connection")
        self._splitter.feed(data)

    def frames(self) -> Iterator[Any]:
        """Performatives, for ever; EOFError when the connection ends."""
        while True:
            part = self._splitter.frame()
            if part is None:
                self._feed()
            elif part[2]:
                yield parse(part[2])

    def until(self, name: str) -> Any:
        """The next performative of this name."""
        return next(p for p in self.frames() if type(p).__name__ == name)

    def attach(self, address: str, **options: Any) -> Any:
        """Attach, and the answer."""
        self.write(attach_frame(address, **options))
        return self.until("Attach")

    def send(self, bodies: list[bytes], *, first: int = 0) -> list[Disposition]:
        """Send messages on handle 0 and wait for all their dispositions."""
        self.write(
            b"".join(transfer_frame(first + n, message(body)) for n, body in enumerate(bodies))
        )
        return [self.until("Disposition") for _ in bodies]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
