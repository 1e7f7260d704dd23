"""One HTTP answer, read from bytes: what is accepted, and what is bounded."""

import io

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from azure.core.rest import HttpRequest

from aztask.azure.connection import (
    IDLE_SECONDS,
    Connection,
    MalformedAnswer,
    TruncatedResponse,
    WireRequest,
    read_answer,
)

URL = "http://127.0.0.1:10001/shop/q/messages?a=1"


def read(text, method="GET", *, ended=True):
    return read_answer(io.BytesIO(text), HttpRequest(method, URL), ended=ended)


def test_a_body_of_a_given_length():
    answer = read(b"HTTP/1.1 201 Made It\r\nContent-Length: 3\r\nX-A: b\r\n\r\nabcd")
    assert (answer.status_code, answer.reason, answer.content) == (201, "Made It", b"abc")
    assert answer.headers["x-a"] == answer.headers["X-A"] == "b"
    assert answer.keep_alive == IDLE_SECONDS


def test_a_body_in_chunks_with_trailers():
    text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = read(text + b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n")
    assert answer.content == b"abcde"


def test_a_body_that_ends_with_the_connection():
    text = b"HTTP/1.1 200 OK\r\n\r\nabc"
    answer = read(text)
    assert (answer.content, answer.keep_alive) == (b"abc", 0.0)
    with pytest.raises(TruncatedResponse):
        read(text, ended=False)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("PUT", 204), ("GET", 304)])
def test_some_answers_have_no_body(method, status):
    text = f"HTTP/1.1 {status} x\r\nContent-Length: 3\r\n\r\n".encode()
    assert read(text, method).content == b""


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
        b"",
    ],
)
def test_an_answer_that_ends_too_soon(text):
    with pytest.raises(TruncatedResponse):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(300)),
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
    ],
    ids=range(9),
)
def test_what_is_not_http_or_not_bounded_is_refused(text):
    with pytest.raises(MalformedAnswer):
        read(text)


@pytest.mark.parametrize(
    ("head", "seconds"),
    [
        (b"HTTP/1.0 200 OK\r\n", 0.0),
        (b"HTTP/1.1 200 OK\r\nConnection: Close\r\n", 0.0),
        (b"HTTP/1.1 200 OK\r\nKeep-Alive: max=5, timeout=20\r\n", 19.0),
        (b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=9000\r\n", IDLE_SECONDS),
    ],
)
def test_how_long_a_connection_may_be_used_again(head, seconds):
    assert read(head + b"Content-Length: 0\r\n\r\n").keep_alive == seconds


def test_an_answer_as_the_sdk_reads_it():
    answer = read("HTTP/1.1 404 No\r\nContent-Length: 6\r\n\r\n\ufeffabc".encode())
    assert answer.text() == "abc"
    assert b"".join(answer.iter_bytes()) == answer.read() == answer.content
    with pytest.raises(HttpResponseError):
        answer.raise_for_status()
    with pytest.raises(ValueError, match="XML"):
        answer.json()


def test_a_request_as_it_travels():
    request = HttpRequest("POST", URL, headers={"X-A": "b", "Content-Length": "99"}, content="ab")
    head, _, body = WireRequest.of(request).data.partition(b"\r\n\r\n")
    first, host, *headers = head.split(b"\r\n")
    assert first == b"POST /shop/q/messages?a=1 HTTP/1.1"
    assert host == b"Host: 127.0.0.1:10001"
    assert b"X-A: b" in headers
    assert [each for each in headers if each.startswith(b"Content-Length")] == [
        b"Content-Length: 2"
    ]
    assert body == b"ab"
    assert WireRequest.of(HttpRequest("GET", "http://a")).data.startswith(
        b"GET / HTTP/1.1\r\nHost: a\r\n"
    )


def test_a_header_with_a_line_break_is_refused():
    with pytest.raises(ServiceRequestError, match="X-A"):
        WireRequest.of(HttpRequest("GET", URL, headers={"X-A": "b\r\nX-C: d"}))


def test_an_address_with_a_line_break_is_refused():
    with pytest.raises(ServiceRequestError, match="the address contains a line break"):
        WireRequest.composed("GET", URL + "\nX-C: d", {"X-A": "b"})


def test_nothing_listens():
    with pytest.raises(OSError):
        Connection("127.0.0.1", 1, None, 2.0)
