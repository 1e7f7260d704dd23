"""Options of the emulator, and connection strings."""

from __future__ import annotations

import pytest

from aztask.emulator.broker.access import Rule
from aztask.emulator.config import Options, connection_string, is_loopback
from aztask.errors import ConfigurationError


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("10.0.0.1", False), ("example.org", False)),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_ports_are_checked():
    with pytest.raises(ConfigurationError, match="port"):
        Options(port=99999)


def test_connection_strings():
    text = connection_string("0.0.0.0", 5672, "key")
    assert text.startswith("Endpoint=sb://127.0.0.1:5672;")
    assert text.endswith("SharedAccessKey=key;UseDevelopmentEmulator=true")
    assert "Emulator" not in connection_string("127.0.0.1", 5671, None, emulator=False)


def test_further_keys_need_a_main_key():
    with pytest.raises(ConfigurationError, match="need a main key"):
        Options(rules={"name": Rule("small")})
