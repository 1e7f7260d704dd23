"""A WebSocket front of an AMQP server, as the hosted service has one on port 443.

It takes ``wss`` connections of the subprotocol that Azure uses and carries their bytes to a TCP
port of 127.0.0.1 and back.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

SUBPROTOCOL = "AMQPWSB10"
PIECE = 65536


@dataclass
class Front:
    """port: where it listens. paths: what the clients asked for, one for each connection."""

    port: int = 0
    paths: list[str] = field(default_factory=list)


@contextmanager
def front_of(target: int, context: ssl.SSLContext) -> Iterator[Front]:
    """A front that is stopped at the end. context: with its certificate."""
    front = Front()

    def carry(client: ServerConnection) -> None:
        assert client.request is not None
        front.paths.append(client.request.path)
        with socket.create_connection(("127.0.0.1", target)) as server:
            back = threading.Thread(target=_carry_back, args=(server, client), daemon=True)
            back.start()
            with suppress(OSError):
                for data in client:
                    assert isinstance(data, bytes)
                    server.sendall(data)
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join()

    server = serve(carry, "127.0.0.1", 0, ssl=context, subprotocols=[SUBPROTOCOL], compression=None)
    front.port = server.socket.getsockname()[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield front
    finally:
        server.shutdown()
        thread.join()


def _carry_back(server: socket.socket, client: ServerConnection) -> None:
    with suppress(OSError, ConnectionClosed):
        while data := server.recv(PIECE):
            client.send(data)
    client.close()
