"""Long bodies over a slow connection, where a whole body takes longer than one may wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import RequestsTransport
from azure.core.rest import HttpRequest

from aztask.stores.payloads.blob import WHOLE_BYTES, PiecewiseTransport

BODY = bytes(range(256)) * 64 * 1024  # 16 MiB: more than the kernel keeps for a connection
CONNECT_SECONDS = 0.4
PIECE = 1 << 20
PAUSE = 0.06


class SlowServer:
    """Takes one request at a time, a mebibyte in `PAUSE` seconds, and counts its bytes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/x"
        self.taken: list[bytes] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                self._answer(peer)

    def _answer(self, peer: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += peer.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")]
        length = int(lengths[0].partition(b":")[2])
        while len(body) < length and (more := peer.recv(PIECE)):
            body += more
            time.sleep(PAUSE * len(more) / PIECE)
        self.taken.append(body)
        peer.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[SlowServer]:
    made = SlowServer()
    yield made
    made.close()


def put(transport: RequestsTransport, url: str, body: bytes) -> int:
    with transport:
        request = HttpRequest("PUT", url, content=body)
        answer = transport.send(request, connection_timeout=CONNECT_SECONDS, read_timeout=30)
        return int(answer.status_code)


def test_the_sdks_own_transport_gives_up(server: SlowServer) -> None:
    """Else there would be no reason for another one."""
    with pytest.raises(AzureError):
        for _ in range(3):  # on a loaded machine one may be in time
            put(RequestsTransport(), server.url, BODY)


def test_a_long_body_may_take_longer(server: SlowServer) -> None:
    began = time.monotonic()
    assert put(PiecewiseTransport(), server.url, BODY) == 201
    assert time.monotonic() - began > CONNECT_SECONDS
    assert server.taken == [BODY]


@pytest.mark.parametrize("size", [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1])
def test_a_body_of_any_size_arrives(server: SlowServer, size: int) -> None:
    assert put(PiecewiseTransport(), server.url, BODY[:size]) == 201
    assert server.taken == [BODY[:size]]


def test_opening_it_again_does_no_harm(server: SlowServer) -> None:
    transport = PiecewiseTransport()
    transport.open()
    transport.open()
    assert put(transport, server.url, b"x") == 201
