"""Malformed and hostile input never stops the emulator or harms another client."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from uuid import UUID

import fuzzing
import pytest
from azure.servicebus import ServiceBusMessage
from rawclient import (
    RawClient,
    attach_frame,
    begin_frame,
    credit_frame,
    disposition_frame,
    message,
    open_frame,
    transfer_frame,
)

from aztask.emulator.amqp import encode
from aztask.emulator.amqp.outgoing import HEADER_AMQP, HEADER_SASL, HEADER_TLS, frame

SECONDS = fuzzing.seconds() or 3.0


@pytest.fixture(scope="module")
def victim(bus, link):
    """A healthy client beside the hostile ones: calling it proves that it is served."""
    bus.create_queue("hostile")
    bus.create_queue("healthy")
    sender, receiver = link("healthy")

    def check():
        sender.send_messages(ServiceBusMessage("still here"))
        (got,) = receiver.receive_messages(1, max_wait_time=5)
        receiver.complete_message(got)

    return check


@pytest.fixture(autouse=True)
def no_faults(caplog, bus):
    """Check that the emulator logged no error, which would be a bug of its own."""
    yield
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert bus._emulator.server.endpoints is not None


def started():
    return HEADER_AMQP + open_frame() + begin_frame()


def nested(depth):
    value = encode.NULL
    for _ in range(depth):
        value = encode.compound(0xC1, 2, encode.string("k") + value)
    return encode.described(0x77, value)


CASES = {
    "not AMQP": b"GET / HTTP/1.1\r\n\r\n",
    "AMQP 0-9-1": b"AMQP\x00\x00\x09\x01",
    "TLS header": HEADER_TLS,
    "SASL without init": HEADER_SASL + b"\x00\x00\x00\x08\x02\x01\x00\x00" * 3,
    "SASL frame of AMQP type": HEADER_SASL + open_frame(),
    "size under 8": HEADER_AMQP + b"\x00\x00\x00\x07\x02\x00\x00\x00",
    "size zero": HEADER_AMQP + bytes(8),
    "size over the limit": HEADER_AMQP + b"\xff\xff\xff\xff\x02\x00\x00\x00",
    "data offset under 2": HEADER_AMQP + b"\x00\x00\x00\x08\x01\x00\x00\x00",
    "data offset past the end": HEADER_AMQP + b"\x00\x00\x00\x08\xff\x00\x00\x00",
    "unknown frame type": HEADER_AMQP + frame(0, b"", 7),
    "no open": HEADER_AMQP + begin_frame(),
    "open twice": HEADER_AMQP + open_frame() * 2,
    "open without a container": HEADER_AMQP + frame(0, encode.fields(0x10, [])),
    "begin twice": started() + begin_frame(),
    "channel over the limit": HEADER_AMQP + open_frame() + begin_frame(65535),
    "no begin": HEADER_AMQP + open_frame() + attach_frame("hostile"),
    "unknown performative": started() + frame(0, encode.fields(0x99, [encode.NULL])),
    "a performative that is no list": started() + frame(0, encode.described(0x12, encode.NULL)),
    "not described": started() + frame(0, encode.string("hello")),
    "too many fields": started() + frame(0, encode.fields(0x17, [encode.TRUE] * 30)),
    "wrong type of field": started() + frame(0, encode.fields(0x12, [encode.TRUE] * 3)),
    "negative handle": started()
    + frame(0, encode.fields(0x12, [encode.string("n"), encode.int32(-1), encode.TRUE])),
    "transfer before attach": started() + transfer_frame(0, message(b"x")),
    "duplicate handle": started() + attach_frame("hostile") * 2,
    "handle over the limit": started() + attach_frame("hostile", handle=2**32 - 1),
    "flow for no link": started() + credit_frame(5, handle=77),
    "transfer on a receiving link": started()
    + attach_frame("hostile", receive=True)
    + transfer_frame(0, message(b"x")),
    "forged delivery ids": started()
    + attach_frame("hostile", receive=True)
    + disposition_frame(0, 2**32 - 1)
    + disposition_frame(5, 1)
    + disposition_frame(2**31),
    "unknown delivery state": started()
    + attach_frame("healthy", receive=True)
    + disposition_frame(0, state=encode.described(0x99, encode.EMPTY_LIST)),
    "coordinator": started()
    + frame(
        0,
        encode.fields(
            0x12,
            [
                *(encode.string("tx"), encode.uint(0), encode.FALSE, encode.NULL, encode.NULL),
                encode.described(0x28, encode.EMPTY_LIST),
                encode.described(0x30, encode.EMPTY_LIST),
            ],
        ),
    ),
    "a list that lies": started() + frame(0, b"\x00\x53\x12\xd0\x00\x00\x00\x10\xff\xff\xff\xff"),
    "an array that lies": started()
    + frame(0, b"\x00\x53\x10\xc0\x20\x01\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40"),
    "a map with an odd count": started() + frame(0, b"\x00\x53\x10\xc0\x05\x01\xc1\x02\x01\x40"),
    "descriptors without end": started() + frame(0, bytes(60_000)),
    "nesting": started() + frame(0, nested(5000)),
    "vanishing inside a frame": started() + attach_frame("hostile")[:20],
    "vanishing inside a message": started()
    + attach_frame("hostile")
    + transfer_frame(0, message(b"x"), more=True),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_input(bus, victim, name):
    with RawClient(bus.port, handshake=False) as client:
        client.write(CASES[name])
        time.sleep(0.02)
    victim()


@pytest.mark.parametrize(
    "payload",
    [
        b"\x00",
        b"garbage",
        message(b"x")[:-1],
        encode.described(0x75, encode.string("not binary")),
        encode.described(0x78, encode.map_of([])) + message(b"x"),
        encode.described(0x73, encode.string("no list")) + message(b"x"),
        nested(200),
        encode.described(0x77, b"\xf0\x00\x00\x00\x05\x00\x0f\xff\xff\x40"),
        encode.described(0x77, b"\xd0\x00\x00\x00\x04\x00\x01\x00\x00"),
        encode.fields(0x73, [encode.string("x" * 500)]) + message(b"x"),
    ],
)
def test_malformed_messages_are_rejected(bus, victim, payload):
    with RawClient(bus.port) as client:
        client.attach("hostile")
        client.write(transfer_frame(0, payload))
        assert client.until("Disposition").state.descriptor == 0x25
        client.write(transfer_frame(1, message(b"fine")))
        assert client.until("Disposition").state.descriptor == 0x24
    victim()


def test_an_endless_message_is_limited(bus, victim):
    """The link ends 64 MB past the limit; the message's bytes are dropped long before."""
    with RawClient(bus.port) as client:
        client.attach("hostile")
        part = transfer_frame(0, b"x" * 60_000, more=True)
        for _ in range(1300):
            client.write(part)
        detach = client.until("Detach")
        assert detach.error.value[0] == "amqp:link:message-size-exceeded"
    victim()


def test_refused_links_carry_an_error(bus):
    with RawClient(bus.port) as client:
        answer = client.attach("nowhere")
        assert answer.target is None
        detach = client.until("Detach")
        assert detach.closed
        assert detach.error.value[0] == "amqp:not-found"
        assert len(detach.error.value) == 3


def test_a_rejected_delivery_has_a_complete_error_list(bus, victim):
    with RawClient(bus.port) as client:
        client.attach("hostile")
        client.write(transfer_frame(0, b"garbage"))
        state = client.until("Disposition").state
        assert [type(part).__name__ for part in state.value[0].value] == [
            "Symbol",
            "str",
            "NoneType",
        ]


def test_a_guessed_lock_token_settles_nothing(bus, victim):
    with RawClient(bus.port) as client:
        client.attach("hostile/$management", receive=True, handle=0)
        client.write(credit_frame(5) + attach_frame("hostile/$management", handle=1))
        client.until("Attach")
        body = encode.map_of(
            [
                (encode.string("disposition-status"), encode.string("completed")),
                (encode.string("lock-tokens"), encode.array_of(0x98, [UUID(int=7).bytes])),
            ]
        )
        operation = (encode.string("operation"), encode.string("com.microsoft:update-disposition"))
        request = (
            encode.fields(0x73, [encode.string("id")])
            + encode.described(0x74, encode.map_of([operation]))
            + encode.described(0x77, body)
        )
        client.write(transfer_frame(0, request, handle=1))
        assert b"com.microsoft:message-lock-lost" in client.until("Transfer").payload
    victim()


def test_a_client_that_does_not_read_gets_limited_output(bus, victim):
    sender = RawClient(bus.port)
    sender.attach("hostile")
    sender.send([b"x" * 50_000] * 400)
    sender.close()
    with RawClient(bus.port) as client:
        client.attach("hostile", receive=True)
        client.write(credit_frame(2**30))
        time.sleep(0.5)
        endpoint = next(e for e in bus._emulator.server.endpoints if e.client.container == "raw")
        assert endpoint._transport.get_write_buffer_size() < 12_000_000
        victim()


def test_a_client_that_asks_for_much_and_does_not_read_gets_limited_output(bus, victim):
    """300 requests for a megabyte each, in one piece."""
    bus.create_queue("large")
    with RawClient(bus.port) as client:
        client.attach("large")
        payload = message(b"x" * 900_000)
        for start in range(0, len(payload), 60_000):
            more = start + 60_000 < len(payload)
            client.write(transfer_frame(0, payload[start : start + 60_000], more=more))
        assert client.until("Disposition").state.descriptor == 0x24
    client = RawClient(bus.port)
    client.attach("large/$management", receive=True, handle=0)
    client.write(credit_frame(2**30) + attach_frame("large/$management", handle=1))
    client.until("Attach")
    operation = (encode.string("operation"), encode.string("com.microsoft:peek-message"))
    wanted = [
        (encode.string("from-sequence-number"), encode.long(0)),
        (encode.string("message-count"), encode.int32(1)),
    ]
    request = (
        encode.fields(0x73, [encode.string("id")])
        + encode.described(0x74, encode.map_of([operation]))
        + encode.described(0x77, encode.map_of(wanted))
    )
    client.write(b"".join(transfer_frame(n, request, handle=1) for n in range(300)))
    endpoint = next(e for e in bus._emulator.server.endpoints if e.client.container == "raw")
    sizes = []
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        sizes.append(endpoint._transport.get_write_buffer_size())
        time.sleep(0.02)
    assert 4_000_000 < max(sizes) < 30_000_000
    victim()
    client.close()


def valid_streams():
    sending = started() + attach_frame("hostile") + transfer_frame(0, message(b"x" * 50))
    receiving = (
        started()
        + attach_frame("hostile", receive=True)
        + credit_frame(3)
        + disposition_frame(0, 5)
    )
    managing = (
        started()
        + attach_frame("hostile/$management", receive=True)
        + attach_frame("hostile/$management", handle=1)
        + credit_frame(3)
        + transfer_frame(0, nested(3), handle=1)
    )
    closing = sending + frame(0, encode.fields(0x16, [encode.uint(0), encode.TRUE]))
    closing += frame(0, encode.fields(0x17, [])) + frame(0, encode.fields(0x18, []))
    return [sending, receiving, managing, closing]


def mutated(chance, data):
    """`data` with a few bytes changed, removed, doubled or moved."""
    data = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(8, len(data)) if len(data) > 8 else 0
        match chance.randrange(6):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                data[at] = chance.choice((0, 1, 0x40, 0x45, 0x7F, 0x80, 0xC0, 0xD0, 0xF0, 0xFF))
            case 2:
                del data[at : at + chance.randint(1, 20)]
            case 3:
                data[at:at] = data[at : at + chance.randint(1, 40)]
            case 4:
                data[at:at] = chance.randbytes(chance.randint(1, 20))
            case 5:
                data[at] ^= 1 << chance.randrange(8)
        if len(data) < 9:
            break
    return bytes(data)


def test_fuzz(bus, victim):
    """`fuzzing` says how long it runs, and how to repeat one."""
    seed = fuzzing.seed()
    print(f"AZTASK_FUZZ_SEED={seed}")
    chance = random.Random(seed)
    streams = valid_streams()
    deadline = time.monotonic() + SECONDS
    cases = 0
    while time.monotonic() < deadline:
        with RawClient(bus.port, handshake=False) as client:
            client.write(mutated(chance, chance.choice(streams)))
            if cases % 10 == 0:
                client.socket.settimeout(0.02)
                with contextlib.suppress(OSError):
                    client.socket.recv(65536)
        cases += 1
        if cases % 200 == 0:
            victim()
    victim()
    assert cases > 50, f"only {cases} cases in {SECONDS} s"
