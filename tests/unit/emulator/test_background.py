"""An emulator on its own thread."""

from __future__ import annotations

import socket

import pytest

from aztask.emulator.config import Options
from aztask.errors import ConfigurationError
from aztask.testing.servicebus import BackgroundEmulator


def test_it_listens_inside_the_block_only():
    with BackgroundEmulator(Options(port=0, admin_port=0)) as background:
        address = ("127.0.0.1", background.emulator.port)
        socket.create_connection(address, timeout=10).close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address, timeout=10)


def test_a_failed_start_is_raised_where_the_block_begins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), BackgroundEmulator(Options(port=port)):
            pass
    config = tmp_path / "config.json"
    config.write_text("{")
    options = Options(port=0, admin_port=0, config=config)
    with pytest.raises(ConfigurationError, match="JSON"), BackgroundEmulator(options):
        pass
