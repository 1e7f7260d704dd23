"""AMQP in the frames of RFC 6455."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from aztask.emulator import websocket
from aztask.emulator.amqp.outgoing import HEADER_AMQP, HEADER_SASL
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.websocket import BadFrame, FrameReader, answer, framed

HEADERS = {
    "host": "localhost:5300",
    "upgrade": "websocket",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-protocol": "other, AMQPWSB10",
}


def masked(payload, code=0x82, mask=b"\x01\x02\x03\x04"):
    """A frame as a client sends it."""
    plain = framed(payload)
    size = len(plain) - len(payload)
    body = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
    return bytes((code, plain[1] | 0x80)) + plain[2:size] + mask + body


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
def test_frames_of_every_size_are_read(size):
    payload = bytes(number % 251 for number in range(size))
    wire = masked(payload) + masked(b"next")
    reader = FrameReader()
    found = [frame for at in range(0, len(wire), 999) for frame in reader.feed(wire[at : at + 999])]
    assert found == [(2, payload), (2, b"next")]


@pytest.mark.parametrize(
    "frame",
    [
        framed(b"no mask"),
        masked(b"text", code=0x81),
        masked(b"reserved", code=0xC2),
        masked(b"", code=0x09),
        masked(b"x" * 126, code=0x89),
        masked(b"x", code=0x83),
        b"\x82\xff" + (2**40).to_bytes(8),
    ],
    ids=range(7),
)
def test_violations_end_the_connection(frame):
    with pytest.raises(BadFrame):
        FrameReader().feed(frame)


def test_the_handshake_of_the_specification():
    """The key and its answer are the example of RFC 6455, part 1.3."""
    text = (answer(websocket.PATH, HEADERS, key_required=False) or b"").decode()
    assert "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in text
    assert "Sec-WebSocket-Protocol: AMQPWSB10\r\n" in text


@pytest.mark.parametrize(
    "changed",
    [
        {"upgrade": "h2c"},
        {"sec-websocket-key": ""},
        {"host": "evil.example"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "[::1"},
    ],
)
def test_requests_that_get_no_websocket(changed):
    assert answer(websocket.PATH, {**HEADERS, **changed}, key_required=False) is None


def test_pages_of_this_machine_and_clients_with_a_key_get_one():
    local = {**HEADERS, "origin": "http://127.0.0.1:8000"}
    assert answer(websocket.PATH, local, key_required=False)
    assert answer(websocket.PATH, {**HEADERS, "host": "emulator"}, key_required=True)
    assert answer("/elsewhere", HEADERS, key_required=True) is None


REQUEST = (
    b"GET /$servicebus/websocket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def conversation(*parts, admin=False):
    """Send parts to a fresh emulator, each after an answer; return the answers."""

    async def scenario():
        emulator = Emulator(Options(port=0, admin_port=0))
        await emulator.start()
        port = emulator.admin_port if admin else emulator.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answers = []
        try:
            for part in parts:
                writer.write(part)
                answers.append(await asyncio.wait_for(reader.read(65536), 5))
                gc.collect()  # the stream of the HTTP request is garbage; the connection stays
        finally:
            writer.close()
            await asyncio.sleep(0.05)
            left = len(emulator.server.endpoints)
            await emulator.stop()
        return answers, left

    return asyncio.run(scenario())


@pytest.mark.parametrize("admin", [False, True], ids=["AMQP's port", "administration"])
def test_a_connection_over_either_port(admin):
    ping = masked(b"still there?", code=0x89)
    close = masked(b"\x03\xe8", code=0x88)
    parts = (REQUEST, masked(HEADER_SASL), ping, close)
    (upgraded, sasl, pong, closed), left = conversation(*parts, admin=admin)
    assert upgraded.startswith(b"HTTP/1.1 101 ")
    assert sasl[2:].startswith(HEADER_SASL)
    assert pong == framed(b"still there?", 0x8A & 0x0F)
    assert closed[:1] == b"\x88"
    assert left == 0


def test_the_port_still_speaks_plain_amqp():
    (header,), left = conversation(HEADER_AMQP)
    assert (header, left) == (HEADER_AMQP, 0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [(b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 "), (b"GET /" + b"x" * 20_000, b"")],
    ids=["no WebSocket", "too long"],
)
def test_other_requests_to_the_port(request_, said):
    (found,), left = conversation(request_)
    assert found.startswith(said)
    assert (bool(found), left) == (bool(said), 0)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (masked(b"text", code=0x81), 1003),
        (b"\x82\xff" + (2**40).to_bytes(8), 1009),
        (framed(b"no mask"), 1002),
        (masked(b"a part of nothing", code=0x80), 1002),
        (masked(b"begun", code=0x02) + masked(b"begun anew", code=0x82), 1002),
        (masked(b"\x0f\xa1", code=0x88), 4001),
        (masked(b"", code=0x88), 1000),
        (masked(b"\x03", code=0x88), 1002),
        (masked(b"\x03\xee", code=0x88), 1002),
    ],
    ids=range(9),
)
def test_the_code_of_a_close(frames, code):
    (_, closed), left = conversation(REQUEST, frames)
    assert closed == b"\x88\x02" + code.to_bytes(2)
    assert left == 0


def test_a_message_in_parts_with_a_ping_between_them():
    reader = FrameReader()
    parts = masked(b"one", code=0x02) + masked(b"?", code=0x89) + masked(b"two", code=0x00)
    wire = parts + masked(b"three", code=0x80) + masked(b"next")
    found = [frame for byte in wire for frame in reader.feed(bytes([byte]))]
    assert found == [(2, b"one"), (9, b"?"), (0, b"two"), (0, b"three"), (2, b"next")]


def test_many_small_frames_take_little_time():
    wire = masked(b"") * (256 * 1024 // 6)
    started = time.process_time()
    assert len(FrameReader().feed(wire)) == 256 * 1024 // 6
    assert time.process_time() - started < 0.5


def test_a_large_frame_may_come_in_small_pieces():
    wire = masked(bytes(websocket.MAX_FRAME))
    reader = FrameReader()
    started = time.process_time()
    found = [frame for at in range(0, len(wire), 100) for frame in reader.feed(wire[at : at + 100])]
    assert [len(payload) for _, payload in found] == [websocket.MAX_FRAME]
    assert time.process_time() - started < 3.0
