"""The small HTTP server: what it answers, and that no client holds it up."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from aztask.errors import ConfigurationError
from aztask.telemetry.http import (
    FRESH_SECONDS,
    LONGEST_HEAD,
    MOST_CONNECTIONS,
    HttpAnswer,
    PageServer,
)


def broken():
    raise RuntimeError("broken")


@pytest.fixture
def server():
    pages = {"/ok": lambda: HttpAnswer(200, b"ok\n"), "/broken": broken}
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


def connected(server):
    return socket.create_connection(server.server_address[:2], timeout=10)


def test_when_it_is_full_the_oldest_without_a_whole_request_makes_room(server):
    slow = [connected(server) for _ in range(MOST_CONNECTIONS)]
    for each in slow:
        each.sendall(b"GET /ok")
    assert asked(server, "/ok") == (200, b"ok\n")
    assert slow[0].recv(1) == b"", "the oldest is closed"
    slow[-1].sendall(b" HTTP/1.1\r\n\r\n")
    assert slow[-1].recv(100).startswith(b"HTTP/1.1 200 OK\r\n"), "the others are not"
    for each in slow:
        each.close()


def test_whole_requests_that_wait_for_a_page_make_room_too(paused):
    server, go_on = paused
    waiting = [connected(server) for _ in range(MOST_CONNECTIONS + 10)]
    for each in waiting:
        each.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
    assert asked(server, "/ok") == (200, b"ok\n")
    go_on.set()
    assert waiting[-1].recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    for each in waiting:
        each.close()


def test_a_request_that_came_while_others_were_accepted_is_whole():
    go_on = {path: threading.Event() for path in ("/slow", "/first", "/second")}
    begun = {path: threading.Event() for path in go_on}

    def waits(path):
        def made():
            begun[path].set()
            assert go_on[path].wait(30)
            return HttpAnswer(200, b"ok\n")

        return made

    pages = {"/ok": lambda: HttpAnswer(200, b"ok\n"), **{path: waits(path) for path in go_on}}
    server = PageServer("127.0.0.1", 0, pages, quick=("/ok", "/first", "/second"))
    server.start()

    def asking(path):
        client = connected(server)
        client.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return client

    with ExitStack() as clients:
        for _ in range(MOST_CONNECTIONS - 2):
            clients.enter_context(asking("/slow"))
        late = clients.enter_context(connected(server))
        assert asked(server, "/ok")[0] == 200  # all are accepted, and all but one wait
        clients.enter_context(asking("/first"))
        assert begun["/first"].wait(10)
        # These are accepted in one go, in the middle of which the late request comes.
        for path in ("/second", "/slow", "/ok"):
            last = clients.enter_context(asking(path))
        go_on["/first"].set()
        assert begun["/second"].wait(10)
        late.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        go_on["/second"].set()
        assert last.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        go_on["/slow"].set()
        assert late.recv(100).startswith(b"HTTP/1.1 200 OK\r\n"), "an older one makes room"
    server.stop()


def test_a_full_server_closes_no_connection_while_no_other_one_comes(server):
    open_ones = [connected(server) for _ in range(MOST_CONNECTIONS)]
    time.sleep(0.5)  # all are accepted, and the server has looked for more
    for each in open_ones:
        each.sendall(b"GET /ok HTTP/1.1\r\n\r\n")
    for each in open_ones:
        assert each.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        each.close()


@pytest.fixture
def paused():
    """A server whose page /slow waits, and the event that it waits for."""
    go_on, numbers = threading.Event(), itertools.count(1)

    def slow():
        number = next(numbers)
        go_on.wait(30)
        return HttpAnswer(200, b"%d" % number)

    pages = {"/ok": lambda: HttpAnswer(200, b"ok\n"), "/slow": slow}
    made = PageServer("127.0.0.1", 0, pages, quick=("/ok",))
    made.start()
    yield made, go_on
    go_on.set()
    made.stop()


def test_a_page_is_made_once_for_all_who_wait(paused):
    server, go_on = paused
    clients = [connected(server) for _ in range(10)]
    for each in clients:
        each.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        assert asked(server, "/ok")[0] == 200  # so that the request has been read
    go_on.set()
    answers = [b"".join(iter(lambda: each.recv(100), b"")) for each in clients]  # noqa: B023
    assert [each[-1:] for each in answers] == [b"1"] + [b"2"] * 9


def test_a_client_that_reads_nothing_delays_no_other_one():
    pages = {"/large": lambda: HttpAnswer(200, b"x" * 50_000_000)}
    server = PageServer("127.0.0.1", 0, pages, seconds=2.0)
    server.start()
    with connected(server) as lazy:
        lazy.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        lazy.recv(1)
        assert len(asked(server, "/large")[1]) == 50_000_000
        assert asked(server, "/none") == (404, b"not found\n")
        with suppress(ConnectionError):
            while lazy.recv(1 << 20):
                pass
    server.stop()


def test_a_quick_page_is_made_at_most_ten_times_a_second(monkeypatch):
    now, made = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr("aztask.telemetry.http.time", clock)
    page = {"/ok": lambda: HttpAnswer(200, b"%d" % (made.append(1) or len(made)))}
    server = PageServer("127.0.0.1", 0, page, quick=("/ok",))
    server.start()
    assert [asked(server, "/ok")[1] for _ in range(3)] == [b"1"] * 3
    now[0] += 2 * FRESH_SECONDS
    assert asked(server, "/ok")[1] == b"2"
    server.stop()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\0\xff \xfe \xfd\r\n\r\n", 400),
        (b"GET http://elsewhere/ok HTTP/1.1\r\n\r\n", 400),
        (b"GET /ok\r\n\r\n", 400),
        (b"GET /none HTTP/1.1\n\n", 404),
        (b"DELETE /ok HTTP/1.1\r\n\r\n", 501),
        (b"GET /ok HTTP/1.1\r\nA: " + b"a" * LONGEST_HEAD, 431),
    ],
)
def test_what_is_no_request_for_a_page(server, sent, status):
    with connected(server) as client:
        client.sendall(sent)
        assert client.recv(100).startswith(b"HTTP/1.1 %d " % status)
    assert asked(server, "/ok")[0] == 200


# -- floods ------------------------------------------------------------------------------------

CONNECTIONS, RATE = 1500, 500
KINDS = {
    "silent": b"",
    "incomplete": b"GET /healthz HTTP/1.1\r\nHost: a",
    "pages": b"GET /page HTTP/1.1\r\n\r\n",
}


def flood(address, sent):
    """Open `CONNECTIONS` at `RATE` a second and hold the last few hundred; returns the seconds."""
    held = deque()
    began = time.monotonic()
    for number in range(CONNECTIONS):
        time.sleep(max(0.0, began + number / RATE - time.monotonic()))
        client = socket.create_connection(address, timeout=10)
        with suppress(ConnectionError):
            client.sendall(sent)
        held.append(client)
        if len(held) > 2 * MOST_CONNECTIONS:
            held.popleft().close()
    took = time.monotonic() - began
    for client in held:
        client.close()
    return took


@pytest.mark.parametrize("kind", KINDS)
def test_probes_are_answered_during_a_flood_from_their_own_address(kind):
    """Each within the second that Kubernetes gives a probe."""
    pages = {
        "/healthz": lambda: HttpAnswer(200, b"ok\n"),
        "/page": lambda: HttpAnswer(200, b"x" * 100_000),
    }
    server = PageServer("127.0.0.1", 0, pages, quick=("/healthz",))
    server.start()
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood, server.server_address, KINDS[kind])
        answered = 0
        while not flooding.done():
            began = time.monotonic()
            assert asked(server, "/healthz") == (200, b"ok\n")
            assert time.monotonic() - began < 1.0
            answered += 1
            time.sleep(0.1)
        assert flooding.result() < 2 * CONNECTIONS / RATE, "the flood was as fast as it should be"
    assert answered >= 10
    server.stop()


WITHOUT_FILES = """
import resource, socket, sys, urllib.request
from aztask.telemetry.http import HttpAnswer, PageServer

server = PageServer("127.0.0.1", 0, {"/ok": lambda: HttpAnswer(200, b"ok")}, quick=("/ok",))
server.start()
print(server.server_address[1], flush=True)
import os
highest = max(map(int, os.listdir("/proc/self/fd")))
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, before[1]))
print("limited", flush=True)
sys.stdin.read()
resource.setrlimit(resource.RLIMIT_NOFILE, before)  # the interpreter opens libraries when it ends
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="lists its open files")
def test_it_answers_when_the_process_can_open_no_more_files():
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_FILES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    port = int(process.stdout.readline())
    assert process.stdout.readline() == b"limited\n"
    slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(60)]
    for _ in range(5):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ok", timeout=10) as answer:
            assert answer.read() == b"ok"
    for each in slow:
        each.close()
    process.communicate(timeout=10)
    assert process.returncode == 0


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
    made.stop()
