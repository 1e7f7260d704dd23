"""The small HTTP server: what it answers, and that no client holds it up."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

import pytest

from aztask.errors import ConfigurationError
from aztask.telemetry.http import MOST_CONNECTIONS, Answer, PageServer


def broken():
    raise RuntimeError("broken")


@pytest.fixture
def server():
    pages = {"/ok": lambda: Answer(200, b"ok\n"), "/broken": broken}
    made = PageServer("127.0.0.1", 0, pages)
    made.start()
    yield made
    made.stop()


def asked(server, path, method="GET"):
    request = urllib.request.Request(f"{server.url}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_answers_its_pages_alone(server, caplog):
    assert asked(server, "/ok") == (200, b"ok\n")
    assert asked(server, "/ok?a=b") == (200, b"ok\n")
    assert asked(server, "/ok", "HEAD") == (200, b"")
    assert asked(server, "/../etc/passwd") == (404, b"not found\n")
    assert asked(server, "/ok", "POST")[0] == 501
    assert asked(server, "/broken") == (500, b"error, see the log\n")
    assert "the page /broken failed" in caplog.text


def test_slow_clients_do_not_exhaust_it(server):
    slow = [socket.create_connection(server.server_address[:2]) for _ in range(MOST_CONNECTIONS)]
    for each in slow:
        each.sendall(b"GET /ok")
    with socket.create_connection(server.server_address[:2], timeout=10) as refused:
        assert refused.recv(1) == b"", "closed at once"
    for each in slow:
        each.close()
    for _ in range(100):
        try:
            assert asked(server, "/ok") == (200, b"ok\n")
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    else:
        pytest.fail("it does not answer when the slow clients have gone")


def test_a_client_that_sends_byte_by_byte_is_cut_off():
    server = PageServer("127.0.0.1", 0, {}, seconds=0.3)
    server.start()
    with socket.create_connection(server.server_address[:2], timeout=10) as client:
        client.sendall(b"GET /ok HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"X")
                time.sleep(0.1)
    server.stop()


def test_an_address_that_is_taken_is_reported(server):
    with pytest.raises(ConfigurationError, match="choose another address with --http"):
        PageServer("127.0.0.1", server.server_address[1], {})


def test_ipv6(server):
    try:
        made = PageServer("::1", 0, {})
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    assert made.url.startswith("http://[::1]:")
    made.server_close()
