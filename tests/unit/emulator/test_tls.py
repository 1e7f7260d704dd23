"""The self-signed certificate."""

from __future__ import annotations

import ssl
import stat

import pytest

from aztask.emulator import emulator
from aztask.emulator.emulator import CERTIFICATE_FILE, KEY_FILE, server_context
from aztask.errors import ConfigurationError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "bus.example"])
def test_clients_that_trust_the_file_connect(tmp_path, host):
    server, certificate = server_context(tmp_path / "new", host)
    client = ssl.create_default_context(cafile=str(certificate))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].version() is not None


def test_files_are_made_once_and_the_key_is_private(tmp_path):
    _, certificate = server_context(tmp_path, "127.0.0.1")
    before = certificate.read_bytes()
    assert server_context(tmp_path, "127.0.0.1")[1] == certificate
    assert certificate.read_bytes() == before
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_without_the_package_the_error_says_what_to_install(tmp_path, monkeypatch):
    server_context(tmp_path, "127.0.0.1")
    monkeypatch.setattr(emulator, "AVAILABLE", False)
    assert server_context(tmp_path, "127.0.0.1")[1].name == CERTIFICATE_FILE
    with pytest.raises(ConfigurationError, match="pip install cryptography"):
        server_context(tmp_path / "empty", "127.0.0.1")
