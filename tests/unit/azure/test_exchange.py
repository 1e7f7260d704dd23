"""Many requests over several connections by one thread, against servers that misbehave."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    ServiceRequestError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)
from azure.core.rest import HttpRequest
from hypothesis import given, settings
from hypothesis import strategies as st

from aztask.azure.connection import Response, WireRequest
from aztask.azure.transport import EXCHANGING, LeanTransport

OK = b"HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nhi"


class Link:
    """A client's connection, as the server's script sees it."""

    def __init__(self, server: Server, connection: socket.socket) -> None:
        self._server = server
        self.socket = connection
        self._file = connection.makefile("rb")

    def request(self) -> str:
        """The next request's path, when it has come in full; "" at the end."""
        path, length = "", 0
        while line := self._file.readline().strip():
            path = path or line.split()[1].decode()
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if len(self._file.read(length)) < length:
            return ""
        if path:
            self._server.seen[path] += 1
        return path

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def end(self) -> None:
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Server:
    """Runs `script` for each connection, on a thread of its own."""

    def __init__(self, script: Callable[[Link], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.seen: Counter[str] = Counter()
        self.accepted = 0
        self._links: list[Link] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            link = Link(self, connection)
            self._links.append(link)
            self._threads.append(threading.Thread(target=self._serve, args=(link,), daemon=True))
            self._threads[-1].start()

    def _serve(self, link: Link) -> None:
        with suppress(OSError):
            self._script(link)
        link.end()

    def leave(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.leave()
        for link in self._links:
            link.end()
        for thread in self._threads:
            thread.join(5)


def well(link: Link) -> None:
    while link.request():
        link.say(OK)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Link], None]], Server]]:
    servers = []

    def start(script: Callable[[Link], None]) -> Server:
        servers.append(Server(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def transport() -> Iterator[LeanTransport]:
    with LeanTransport() as made:
        yield made


def exchange(
    transport: LeanTransport, port: int, items: list[int], *, body: str = "x", **options: float
) -> list[Response | AzureError]:
    url = f"http://127.0.0.1:{port}"

    def compose(item: int) -> WireRequest:
        return WireRequest.of(HttpRequest("POST", f"{url}/{item}", content=body))

    return transport.exchange(
        url,
        items,
        compose,
        lambda answer: answer,
        connections=int(options.get("connections", 4)),
        connecting=5.0,
        reading=options.get("reading", 5.0),
    )


def statuses(answers: list[Response | AzureError]) -> list[int | str]:
    return [
        each.status_code if isinstance(each, Response) else type(each).__name__ for each in answers
    ]


def test_each_item_gets_its_own_answer(serve, transport):
    def echo(link: Link) -> None:
        while path := link.request():
            time.sleep(random.random() / 1000)
            link.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(path) + path.encode())

    server = serve(echo)
    answers = exchange(transport, server.port, list(range(200)))
    assert [each.text() for each in answers] == [f"/{n}" for n in range(200)]
    assert set(server.seen.values()) == {1}
    assert server.accepted == 4


def test_connections_are_used_again_also_by_single_requests(serve, transport):
    server = serve(well)
    for _ in range(3):
        assert statuses(exchange(transport, server.port, [1, 2, 3, 4])) == [201] * 4
    transport.send(HttpRequest("POST", f"http://127.0.0.1:{server.port}/"), read_timeout=5.0)
    assert server.accepted == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n",
    ],
    ids=["chunks", "length", "nothing"],
)
def test_an_answer_may_come_byte_by_byte(serve, transport, answer):
    def slow(link: Link) -> None:
        while link.request():
            for n in range(len(answer)):
                link.say(answer[n : n + 1])
                time.sleep(0.0002)

    server = serve(slow)
    answers = exchange(transport, server.port, [1, 2, 3], connections=2)
    assert {each.content for each in answers} == {b"" if b"204" in answer else b"abcde"}


def test_an_answer_without_a_length_ends_with_its_connection(serve, transport):
    def until_the_end(link: Link) -> None:
        link.request()
        link.say(b"HTTP/1.1 200 OK\r\n\r\nab")
        time.sleep(0.05)
        link.say(b"cd")

    server = serve(until_the_end)
    answers = exchange(transport, server.port, [1, 2, 3], connections=1)
    assert [each.content for each in answers] == [b"abcd"] * 3
    assert server.accepted == 3


def test_a_server_that_closes_after_each_answer(serve, transport):
    def once(link: Link) -> None:
        link.request()
        link.say(OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))

    server = serve(once)
    assert statuses(exchange(transport, server.port, list(range(50)))) == [201] * 50
    assert set(server.seen.values()) == {1}


def test_a_connection_that_breaks_leaves_open_what_happened_to_one_request_alone(serve, transport):
    broken = threading.Event()

    def break_once(link: Link) -> None:
        while link.request():
            if not broken.is_set():
                broken.set()
                link.say(OK[:20])
                return
            link.say(OK)

    server = serve(break_once)
    answers = statuses(exchange(transport, server.port, list(range(40))))
    assert Counter(answers) == {201: 39, "ServiceResponseError": 1}
    assert set(server.seen.values()) == {1}, "nothing was sent twice"


@pytest.mark.parametrize("answer", [b"SMTP ready\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000])
def test_what_is_not_http_leaves_open_what_happened(serve, transport, answer):
    def babble(link: Link) -> None:
        link.request()
        link.say(answer)
        link.request()

    server = serve(babble)
    assert statuses(exchange(transport, server.port, [1])) == ["ServiceResponseError"]


def test_no_answer_in_time_concerns_one_request_alone(serve, transport):
    def deaf_to_seven(link: Link) -> None:
        while path := link.request():
            if path == "/7":
                link.request()
            link.say(OK)

    server = serve(deaf_to_seven)
    answers = exchange(transport, server.port, list(range(30)), reading=1.5)
    assert isinstance(answers[7], ServiceResponseTimeoutError)
    assert statuses(answers[:7] + answers[8:]) == [201] * 29
    assert set(server.seen.values()) == {1}


def test_a_silent_service_is_not_waited_for_by_each_request_in_turn(serve, transport):
    server = serve(lambda link: link.request() and link.request())
    began = time.monotonic()
    answers = statuses(exchange(transport, server.port, list(range(200)), reading=0.3))
    assert time.monotonic() - began < 8.0
    asked = len(server.seen)
    assert 4 <= asked <= 16, "a busy machine may try some more before the first time-out"
    assert Counter(answers) == {
        "ServiceResponseTimeoutError": asked,
        "ServiceRequestTimeoutError": 200 - asked,
    }


def test_nobody_listens(transport):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    answers = exchange(transport, port, [1, 2, 3])
    assert statuses(answers) == ["ServiceRequestError"] * 3


def test_a_server_that_goes_away_leaves_open_only_what_was_under_way(serve, transport):
    def leave(link: Link) -> None:
        for _ in range(5):
            link.request()
            link.say(OK)
        server.leave()
        link.request()

    server = serve(leave)
    answers = exchange(transport, server.port, list(range(100)), connections=1)
    assert statuses(answers)[:5] == [201] * 5
    assert isinstance(answers[5], ServiceResponseError)
    rest = answers[6:]
    # the kernel may have accepted a connection for the server before it went
    unsure = [each for each in rest if isinstance(each, ServiceResponseError)]
    assert len(unsure) <= 1
    assert sum(isinstance(each, ServiceRequestError) for each in rest) == len(rest) - len(unsure)
    assert len(server.seen) <= 7


def test_a_request_that_is_larger_than_what_the_kernel_takes(serve, transport):
    def reluctant(link: Link) -> None:
        time.sleep(0.1)
        well(link)

    server = serve(reluctant)
    answers = exchange(transport, server.port, [1, 2, 3], body="x" * 12_000_000, connections=2)
    assert statuses(answers) == [201] * 3


def test_a_request_that_was_not_sent_in_full_did_not_happen(serve, transport):
    def never_reads(link: Link) -> None:
        time.sleep(2)

    server = serve(never_reads)
    answers = exchange(transport, server.port, [1], body="x" * 50_000_000, reading=0.3)
    assert statuses(answers) == ["ServiceRequestError"]


def test_an_answer_that_comes_before_the_request_was_read(serve, transport):
    def refuse(link: Link) -> None:
        link.socket.recv(1000)
        link.say(b"HTTP/1.1 413 Too large\r\nContent-Length: 0\r\n\r\n")
        time.sleep(1)

    server = serve(refuse)
    answers = exchange(transport, server.port, [1, 2], body="x" * 50_000_000, connections=1)
    assert statuses(answers) == [413, 413]
    assert server.accepted == 2, "what is left of a request cannot be taken for another one"


def test_what_comes_unasked_is_not_taken_for_the_next_answer(serve, transport):
    def twice(link: Link) -> None:
        while link.request():
            link.say(OK + OK.replace(b"201", b"200"))

    server = serve(twice)
    assert statuses(exchange(transport, server.port, list(range(5)), connections=1)) == [201] * 5


def test_a_request_that_cannot_be_composed_concerns_itself_alone(serve, transport):
    server = serve(well)
    url = f"http://127.0.0.1:{server.port}"

    def compose(item: int) -> WireRequest:
        if item == 1:
            raise ClientAuthenticationError("no token")
        headers = {"X-A": "b\r\nX-C: d"} if item == 2 else {}
        return WireRequest.of(HttpRequest("POST", url, headers=headers))

    answers = transport.exchange(
        url,
        list(range(4)),
        compose,
        lambda answer: answer,
        connections=2,
        connecting=1.0,
        reading=5.0,
    )
    expected = [201, "ClientAuthenticationError", "ServiceRequestError", 201]
    assert statuses(answers) == expected


def test_a_thousand_connections_that_break_are_not_too_many(serve, transport):
    def reset(link: Link) -> None:
        link.request()

    server = serve(reset)
    answers = exchange(transport, server.port, list(range(1500)), connections=2)
    assert set(statuses(answers)) == {"ServiceResponseError"}
    assert max(server.seen.values()) == 1


def test_exchanges_side_by_side_share_the_connections(serve, transport):
    def slow(link: Link) -> None:
        while link.request():
            time.sleep(0.01)
            link.say(OK)

    server = serve(slow)
    found: list[list[int | str]] = []

    def work() -> None:
        found.append(statuses(exchange(transport, server.port, list(range(40)), connections=8)))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[201] * 40] * 6
    assert server.accepted <= EXCHANGING + 6
    exchange(transport, server.port, list(range(40)), connections=8)
    assert transport._lent == 0


def test_ctrl_c_closes_the_connections(serve, transport):
    ended = threading.Semaphore(0)

    def wait_for_the_end(link: Link) -> None:
        while link.request():
            pass
        ended.release()

    server = serve(wait_for_the_end)
    url = f"http://127.0.0.1:{server.port}"

    def compose(item: int) -> WireRequest:
        if item == 2:
            raise KeyboardInterrupt
        return WireRequest.of(HttpRequest("POST", f"{url}/{item}"))

    with pytest.raises(KeyboardInterrupt) as caught:  # it keeps the frames, so nothing is collected
        transport.exchange(url, [1, 2, 3], compose, len, connections=3, connecting=1.0, reading=5.0)
    for _ in range(3):
        assert ended.acquire(timeout=5)
    assert transport._lent == 0
    del caught


WAYS = st.sampled_from(["well", "well", "well", "reset", "half", "close", "nothing", "late"])


@settings(max_examples=25, deadline=None)
@given(ways=st.lists(WAYS, min_size=1, max_size=12), connections=st.integers(1, 5))
def test_whatever_a_server_does_nothing_is_sent_twice(ways, connections):
    """A request that was seen is answered or in doubt; one that certainly did not happen was not
    seen."""

    def script(link: Link) -> None:
        while path := link.request():
            way = ways[int(path[1:]) % len(ways)]
            if way == "reset":
                return
            if way == "half":
                link.say(OK[:30])
                return
            if way == "nothing":
                link.request()
                return
            if way == "late":
                time.sleep(0.01)
            close = b"\r\nConnection: close\r\n\r\n"
            link.say(OK.replace(b"\r\n\r\n", close) if way == "close" else OK)
            if way == "close":
                return

    server = Server(script)
    try:
        with LeanTransport() as transport:
            answers = exchange(
                transport, server.port, list(range(12)), connections=connections, reading=0.1
            )
    finally:
        server.close()
    for n, answer in enumerate(answers):
        seen = server.seen[f"/{n}"]
        assert seen <= 1
        if isinstance(answer, Response):
            assert answer.status_code == 201
            assert seen == 1
        if isinstance(answer, ServiceRequestError):
            assert seen == 0


# -- A service that refuses what is too much -------------------------------------------------------

BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"


def limited(transport: LeanTransport, port: int, *, rate: int) -> None:
    """Have the transport know that it gets too many refusals above this rate."""
    url = f"http://127.0.0.1:{port}/0"
    transport.paces.answered(url, 503, None)
    begun = time.monotonic()
    for number in range(rate):
        transport.paces.answered(url, 201, None)
        time.sleep(max(0.0, begun + number / rate - time.monotonic()))
    time.sleep(max(0.0, begun + 1.05 - time.monotonic()))


def same(transport: LeanTransport, port: int, count: int) -> list[Response | AzureError]:
    """So many requests to one resource."""
    url = f"http://127.0.0.1:{port}/0"
    composed = WireRequest.of(HttpRequest("POST", url, content="x"))
    return transport.exchange(
        url,
        list(range(count)),
        lambda _: composed,
        lambda answer: answer,
        connections=4,
        connecting=5.0,
        reading=5.0,
    )


def test_requests_to_a_busy_service_wait_for_their_places(serve, transport):
    server = serve(well)
    begun = time.monotonic()
    assert statuses(same(transport, server.port, 60)) == [201] * 60
    alone = time.monotonic() - begun
    limited(transport, server.port, rate=40)
    begun = time.monotonic()
    assert statuses(same(transport, server.port, 60)) == [201] * 60
    # at 32 a second, of which half a second's may come at once
    assert time.monotonic() - begun > max(0.9, alone)
    assert server.seen["/0"] == 120, "each is sent once"


def test_a_refusal_is_the_answer_of_its_request_alone(serve, transport):
    answers = iter([OK, BUSY, OK] * 20)
    lock = threading.Lock()

    def script(link: Link) -> None:
        while link.request():
            with lock:
                answer = next(answers)
            link.say(answer)

    server = serve(script)
    assert sorted(statuses(same(transport, server.port, 60))) == [201] * 40 + [503] * 20
    assert server.seen["/0"] == 60, "what was refused is the caller's to send again"


def test_a_connection_that_ends_while_it_waits_is_replaced(serve, transport):
    def once(link: Link) -> None:
        link.request()
        link.say(OK)

    server = serve(once)
    limited(transport, server.port, rate=10)
    begun = time.process_time()
    found = statuses(same(transport, server.port, 12))
    # A request may go out over a connection that ends at that moment: its effect is open then.
    assert set(found) <= {201, "ServiceResponseError", "ServiceRequestError"}
    assert found.count(201) >= 6
    assert time.process_time() - begun < 0.5, "it waits, and does not spin"
