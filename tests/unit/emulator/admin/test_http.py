"""The HTTP server of the administration API."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from aztask.emulator.emulator import Emulator
from aztask.emulator.options import Options


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
