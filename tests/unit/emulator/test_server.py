"""The servers' bookkeeping of connections."""

import asyncio
import ssl

import pytest

from aztask.emulator.emulator import Emulator
from aztask.emulator.options import Options
from aztask.emulator.server import HANDSHAKE_SECONDS, Endpoint
from aztask.support.clock import Clock


class Socket:
    """Stands for a transport: notes whether it was dropped."""

    def __init__(self):
        self.dropped = False

    def abort(self):
        self.dropped = True


def test_a_handshake_has_its_time_also_when_the_clock_jumped_before_it():
    now = [1000.0]
    emulator = Emulator(Options(), clock=Clock(lambda: now[0], lambda: now[0]))
    now[0] += 10 * HANDSHAKE_SECONDS  # no tick since
    endpoint = Endpoint(emulator.server)
    endpoint._transport = Socket()
    endpoint.check(now[0] + 0.9 * HANDSHAKE_SECONDS)
    assert not endpoint._transport.dropped
    endpoint.check(now[0] + 1.1 * HANDSHAKE_SECONDS)
    assert endpoint._transport.dropped
    emulator.database.close()


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
