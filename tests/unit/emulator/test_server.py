"""The servers' bookkeeping of connections."""

import asyncio

from aztask.emulator import server
from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.faults import Faults
from aztask.emulator.server import HANDSHAKE_SECONDS, Endpoint
from aztask.support.clock import Clock


class Socket:
    """Stands for a transport: notes whether it was dropped."""

    def __init__(self):
        self.dropped, self.log = False, []

    def is_closing(self):
        return self.dropped

    def pause_reading(self):
        self.log.append("pause")

    def resume_reading(self):
        self.log.append("resume")

    def write(self, data):
        self.log.append(len(data))

    def abort(self):
        self.dropped = True


def test_a_handshake_gets_its_full_time_after_a_clock_jump():
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


def test_a_bug_that_one_client_meets_in_a_tick_ends_its_connection_alone(bench, caplog):
    held = bench.emulator.server
    endpoints = [Endpoint(held) for _ in range(3)]
    held.endpoints.update(endpoints)
    ticked = []
    for endpoint in endpoints:
        endpoint.client.tick = lambda endpoint=endpoint: ticked.append(endpoint)
    endpoints[1].client.tick = lambda: {}["a bug"]
    held._pass_time()
    assert len(ticked) == 2
    states = [endpoint.connection.state.name for endpoint in endpoints]
    assert states == ["START", "CLOSED", "START"]
    assert len(caplog.records) == 1


def test_late_output_is_limited(monkeypatch):
    """Else a client that asks for much fills the memory while the fault latency holds it."""

    async def scenario():
        emulator = Emulator(Options(faults=Faults(latency=0.01)))
        endpoint = Endpoint(emulator.server)
        endpoint._transport = socket = Socket()
        monkeypatch.setattr(server, "WRITE_HIGH_WATER", 1000)
        for _ in range(3):
            endpoint._write_with_faults(bytes(600), emulator.broker.faults)
        assert socket.log == ["pause"]
        await asyncio.sleep(0.1)
        emulator.database.close()
        return socket.log

    assert asyncio.run(scenario()) == ["pause", 600, "resume", 600, 600]
