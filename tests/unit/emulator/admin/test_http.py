"""The HTTP server of the administration API."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from aztask.emulator.admin import routes
from aztask.emulator.admin.routes import MAX_CONNECTIONS
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_idle_administration_client_does_not_outlive_the_emulator(tls):
    async def scenario():
        emulator = Emulator(Options(port=0, admin_port=0, tls=tls))
        await emulator.start()
        context = ssl.create_default_context(cafile=emulator.certificate) if tls else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", emulator.admin_port, ssl=context
        )
        writer.write(b"GET /$namespaceinfo HTTP/1.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await emulator.stop()
        served = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        writer.transport.abort()
        return served

    assert asyncio.run(scenario()) == []


def exchange(*parts):
    """Send bytes to a fresh emulator's administration port; return everything that it answers."""

    async def scenario():
        emulator = Emulator(Options(port=0, admin_port=0))
        await emulator.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", emulator.admin_port)
        for part in parts:
            writer.write(part)
            await writer.drain()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
            await emulator.stop()

    return asyncio.run(scenario())


GET = b"GET /$namespaceinfo HTTP/1.1\r\nHost: localhost\r\n"


def test_a_connection_serves_several_requests():
    answer = exchange(GET + b"\r\n", GET + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"Connection: keep-alive" in answer


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 7\r\n\r\ngarbage",
        b"Transfer-Encoding: chunked\r\n\r\n4\r\ngarb\r\n3;x=y\r\nage\r\n0\r\n\r\n",
        b"Content-Length: 7\r\nExpect: 100-continue\r\n\r\ngarbage",
    ],
    ids=["length", "chunks", "continue"],
)
def test_bodies_are_read_in_every_form(body):
    answer = exchange(b"PUT /q HTTP/1.1\r\nConnection: close\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 100" if b"100-continue" in body else b"HTTP/1.1 400")
    assert b"the request is not XML" in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / SPDY/3\r\n\r\n", b"400"),
        (b"PUT / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"413"),
        (b"PUT / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"413"),
        (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", b"400"),
        (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n", b"413"),
    ],
)
def test_bad_requests_end_the_connection(request_, status):
    answer = exchange(request_)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"Connection: close" in answer


def test_slow_clients_lock_no_other_out():
    """More of them than there is room for, each with the beginning of a request."""

    async def scenario():
        emulator = Emulator(Options(port=0, admin_port=0))
        await emulator.start()
        slow = []
        for _ in range(MAX_CONNECTIONS + 100):
            _, writer = await asyncio.open_connection("127.0.0.1", emulator.admin_port)
            writer.write(b"GET /$namespaceinfo HTTP/1.1\r\nHost: loc")
            slow.append(writer)
        reader, writer = await asyncio.open_connection("127.0.0.1", emulator.admin_port)
        try:
            for _ in range(3):  # the connection stays: it is not the one that waits longest
                writer.write(GET + b"\r\n")
                line = await asyncio.wait_for(reader.readline(), 5)
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
            return line
        finally:
            for each in (*slow, writer):
                each.transport.abort()
            await emulator.stop()

    assert asyncio.run(scenario()).startswith(b"HTTP/1.1 200")


def test_a_request_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(routes, "HEAD_SECONDS", 0.1)
    assert exchange(GET) == b""
