"""The servers' bookkeeping of connections."""

from aztask.emulator.config import Options
from aztask.emulator.emulator import Emulator
from aztask.emulator.server import HANDSHAKE_SECONDS, Endpoint
from aztask.support.clock import Clock


class Socket:
    """Stands for a transport: notes whether it was dropped."""

    def __init__(self):
        self.dropped = False

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
