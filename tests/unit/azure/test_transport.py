"""The lean HTTP transport, against a server that says what the test wants."""

import socket
import threading

import pytest
from azure.core.exceptions import ServiceRequestError, ServiceResponseError
from azure.core.rest import HttpRequest

from aztask.azure.transport import LeanTransport

OK = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\nX-Ms-Thing: a\r\n\r\nhi"


class Server:
    """Answers each connection with its own list of answers, one for each request."""

    def __init__(self, *connections):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = []
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(connections,), daemon=True)
        self._thread.start()

    def _serve(self, connections):
        for answers in connections:
            connection, _ = self._listener.accept()
            with connection:
                for answer in answers:
                    self.seen.append(connection.recv(65536))
                    connection.sendall(answer)
            self.ended.set()

    def close(self):
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def serve():
    servers = []

    def start(*connections):
        servers.append(Server(*connections))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def transport():
    with LeanTransport() as made:
        yield made


def request(server, method="POST", path="/q?a=1", **options):
    return HttpRequest(method, f"http://127.0.0.1:{server.port}{path}", **options)


def test_a_request_goes_out_in_one_piece(serve, transport):
    server = serve([OK])
    response = transport.send(request(server, content="<x>ü</x>", headers={"X-A": "b"}))
    assert (response.status_code, response.reason, response.text()) == (201, "Created", "hi")
    assert response.headers["x-ms-thing"] == response.headers["X-Ms-Thing"] == "a"
    head, _, body = server.seen[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /q?a=1 HTTP/1.1\r\n")
    assert b"Content-Length: 9" in head
    assert body == "<x>ü</x>".encode()


def test_connections_are_kept(serve, transport):
    server = serve([OK, OK])
    for _ in range(2):
        transport.send(request(server))
    assert len(server.seen) == 2


def test_a_connection_that_the_server_closed_is_not_used_again(serve, transport):
    server = serve([OK], [OK])
    for _ in range(2):
        assert transport.send(request(server)).status_code == 201
        server.ended.wait(5)


@pytest.mark.parametrize("header", [b"Connection: close", b"Keep-Alive: timeout=1"])
def test_a_connection_that_will_be_closed_is_not_used_again(serve, transport, header):
    answer = OK.replace(b"X-Ms-Thing: a", header)
    server = serve([answer], [answer])
    for _ in range(2):
        transport.send(request(server))


def test_chunks_are_put_together(serve, transport):
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    )
    server = serve([chunked, OK])
    assert transport.send(request(server, "GET")).content == b"abcde"
    assert transport.send(request(server)).content == b"hi"


def test_no_content_has_no_body(serve, transport):
    server = serve([b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", OK])
    assert transport.send(request(server, "DELETE")).content == b""
    assert transport.send(request(server)).content == b"hi"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SMTP ready\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(300)) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nHalf",
    ],
    ids=range(8),
)
def test_a_broken_answer_leaves_open_what_happened(serve, transport, answer):
    server = serve([answer])
    with pytest.raises(ServiceResponseError):
        transport.send(request(server), read_timeout=2.0)


def test_no_answer_in_time_leaves_open_what_happened(transport):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        with pytest.raises(ServiceResponseError):
            transport.send(HttpRequest("GET", url), read_timeout=0.05)


def test_no_connection_means_that_nothing_happened(transport):
    with pytest.raises(ServiceRequestError):
        transport.send(HttpRequest("GET", "http://127.0.0.1:1/"))


def test_a_header_cannot_smuggle_another(serve, transport):
    server = serve([OK])
    with pytest.raises(ServiceRequestError, match="line break"):
        transport.send(request(server, headers={"X-A": "b\r\nX-C: d"}))
    transport.send(request(server))
