"""What is a broken connection and what is a bug: the SDK's own handlers, on the emulator."""

from __future__ import annotations

import ast
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from aztask.address.addresses import ServiceBusAddress
from aztask.address.urls import parse_broker
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus import private, symptoms
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.servicebus.client import BusClient
from aztask.queues.servicebus.errors import SDK_ERRORS
from aztask.testing import RunningEmulator, emulator

LEASE = 30.0
NOT_AMQP = {
    "http": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "zeros": bytes(64),
    "another protocol's header": b"AMQP\x00\x00\x09\x01",
    "a header and rubbish": b"AMQP\x00\x01\x00\x00" + b"\xff" * 64,
    "nothing": b"",
    "half a header": b"AMQ",
}


def _frame(body: bytes, kind: int = 0) -> bytes:
    return (8 + len(body)).to_bytes(4, "big") + bytes((2, kind, 0, 0)) + body


RUBBISH = {
    "bytes of all kinds": bytes(range(256)) * 8,
    "a frame that ends within a value": _frame(b"\x00\x53\x14\xc0\xff\xff\xa0\xff"),
    "a frame of an unknown kind": _frame(b"\x00\x53\x14\x45", kind=7),
    "a frame with a type that does not exist": _frame(b"\x00\x53\x14\xc0\x03\x02\x3f\x3f"),
    "a described value without a value": _frame(b"\x00\x53\x14"),
    "a frame of a wrong length": b"\x00\x00\x00\x01\x02\x00\x00\x00",
}


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningEmulator]:
    with emulator() as running:
        made = ServiceBusBroker(_address(running), admin=running.admin_connection_string)
        made.declare("q", QueueOptions(lease=LEASE))
        made.close()
        yield running


def _address(bus: RunningEmulator, port: int | None = None) -> ServiceBusAddress:
    text = bus.connection_string.replace(f":{bus.port}", f":{port or bus.port}", 1)
    address = parse_broker(text)
    assert isinstance(address, ServiceBusAddress)
    return address


class Line:
    """A TCP proxy. Told `rubbish`, it sends that to the client, once, in place of an answer."""

    def __init__(self, target: int) -> None:
        self.rubbish = b""
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                service = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, service]
                for ends in ((client, service, False), (service, client, True)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(self.rubbish if self.rubbish and answers else data)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def line(bus: RunningEmulator) -> Iterator[Line]:
    made = Line(bus.port)
    yield made
    made.close()


@pytest.fixture
def client(bus: RunningEmulator) -> Iterator[BusClient]:
    made = BusClient(_address(bus))
    yield made
    made.finish()


# -- bugs -----------------------------------------------------------------------------------------


def test_a_wrong_argument_is_a_bug_and_shows_where_it_is(client: BusClient) -> None:
    """The SDK would wrap it: "Handler failed", as for a connection that broke."""
    receiver = client.receiver("q")
    private.open_link(receiver, 10.0)
    with pytest.raises((TypeError, AttributeError, ValueError)) as caught:
        private.renew_many(receiver, [object()], 5.0)  # type: ignore[list-item]
    assert not isinstance(caught.value, SDK_ERRORS)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].filename.endswith(".py")
    assert any("azure" in frame.filename for frame in frames)
    assert not private.is_open(receiver)  # its state is unknown, so it is not used again


def test_a_bug_of_ours_within_a_call_of_the_sdk_is_raised_as_it_is(client: BusClient) -> None:
    receiver = client.receiver("q")
    private.open_link(receiver, 10.0)
    with pytest.raises(ZeroDivisionError), private._translated(receiver):
        1 / 0  # noqa: B018
    with pytest.raises(AttributeError, match="NoneType"), private._translated(client.sender("q")):
        None.upper()  # type: ignore[attr-defined]


def test_a_bug_is_not_sent_again_and_not_called_an_outage(
    bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = ServiceBusBroker(_address(bus), admin=bus.admin_connection_string)
    calls = []

    def broken(self: object, *args: object, **options: object) -> None:
        calls.append(args)
        raise ValueError("a bug in a part of the SDK")

    try:
        broker.send("q", [Envelope(b"x")])
        monkeypatch.setattr("azure.servicebus._pyamqp.client.SendClient.send_message", broken)
        with pytest.raises(ValueError, match="a bug in a part of the SDK"):
            broker.send("q", [Envelope(b"x")])
        assert len(calls) == 1
        monkeypatch.undo()
        broker.send("q", [Envelope(b"x")])
    finally:
        broker.close()


# -- broken connections ---------------------------------------------------------------------------


@pytest.mark.parametrize("answer", NOT_AMQP.values(), ids=NOT_AMQP)
def test_what_does_not_speak_amqp_is_not_reached(bus: RunningEmulator, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    with caller:
                        caller.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        broker = ServiceBusBroker(_address(bus, port), admin=bus.admin_connection_string)
        with pytest.raises(BrokerUnavailable, match="does not answer"):
            broker.send("q", [Envelope(b"x")])
        with pytest.raises(BrokerUnavailable, match="does not answer"):
            broker.receiver("q", lease=LEASE).receive(1, 0.1)
        server.close()
        broker.close()


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH)
def test_a_connection_whose_bytes_make_no_sense_is_replaced(
    bus: RunningEmulator, line: Line, rubbish: bytes
) -> None:
    broker = ServiceBusBroker(_address(bus, line.port), admin=bus.admin_connection_string)
    try:
        receiver = broker.receiver("q", lease=LEASE)
        broker.send("q", [Envelope(b"x", message_id=os.urandom(8).hex())])
        receiver.receive(100, 0.2)
        line.rubbish = rubbish
        with pytest.raises((BrokerUnavailable, SendUnconfirmed)):
            broker.send("q", [Envelope(b"x", message_id=os.urandom(8).hex())])
        with pytest.raises(BrokerUnavailable):
            broker.peek("q", limit=1)
        with suppress(BrokerUnavailable):  # an empty queue answers nothing that could be damaged
            receiver.receive(1, 0.2)
        line.rubbish = b""
        broker.send("q", [Envelope(b"x", message_id=os.urandom(8).hex())])
        assert broker.peek("q", limit=1)
    finally:
        broker.close()


def test_a_handler_that_was_closed_is_a_broken_connection(client: BusClient) -> None:
    receiver = client.receiver("q")
    private.open_link(receiver, 10.0)
    receiver.close()
    with pytest.raises(SDK_ERRORS, match="shutdown"):
        receiver.peek_messages()


def test_a_handler_that_lost_its_parts_is_a_broken_connection(client: BusClient) -> None:
    """As when another thread drops the connection between two steps of a receive."""
    receiver = client.receiver("q")
    private.open_link(receiver, 10.0)
    private.disconnect(receiver)
    with pytest.raises(SDK_ERRORS):
        private.pull(receiver, 1, 0.1)


def test_a_socket_that_another_thread_closed_is_a_broken_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    with pytest.raises(ConnectionError):
        private._arrived(SimpleNamespace(sock=ours), 0.0)


def test_a_connection_is_cut_at_any_byte(bus: RunningEmulator) -> None:
    """Renewing, sending and peeking meet nothing but errors of the SDK or of the socket."""
    for cut in range(200, 3200, 300):
        with _Cut(bus.port, cut) as port:
            broker = ServiceBusBroker(_address(bus, port), admin=bus.admin_connection_string)
            with suppress(BrokerUnavailable, SendUnconfirmed):
                broker.send("q", [Envelope(b"x", message_id=f"cut-{cut}")])
                broker.peek("q", limit=1)
            broker.close()


class _Cut:
    """A proxy that ends every connection after so many bytes of answers."""

    def __init__(self, target: int, after: int) -> None:
        self._target, self._after = target, after
        self._server = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> int:
        threading.Thread(target=self._serve, daemon=True).start()
        port: int = self._server.getsockname()[1]
        return port

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                service = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._up, args=(client, service), daemon=True).start()
                threading.Thread(target=self._down, args=(service, client), daemon=True).start()

    def _up(self, client: socket.socket, service: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                service.sendall(data)

    def _down(self, service: socket.socket, client: socket.socket) -> None:
        left = self._after
        with suppress(OSError), client, service:
            while left > 0 and (data := service.recv(left)):
                client.sendall(data)
                left -= len(data)
            for each in (client, service):
                each.shutdown(socket.SHUT_RDWR)


# -- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "file", "functions"), symptoms._RAISED)
def test_the_sdk_raises_these_errors_there(kinds, file: str, functions: tuple[str, ...]) -> None:
    """An SDK that changes one of the places fails this test."""
    tree = ast.parse((symptoms._SDK / file).read_text())
    found = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for name in functions:
        assert any(isinstance(each, ast.Raise) for each in ast.walk(found[name]))


def test_the_functions_that_read_a_connection_exist() -> None:
    source = "".join(
        (symptoms._SDK / "_pyamqp" / name).read_text()
        for name in ("_connection.py", "_transport.py")
    )
    for name in symptoms._READING:
        assert f"def {name}(" in source


def test_our_private_calls_are_where_the_table_expects_them() -> None:
    assert Path(private.__file__).parent == symptoms._OURS
