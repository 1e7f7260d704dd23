"""A server's sockets are bound before it starts, so that its address is known."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from aztask.errors import ConfigurationError
from aztask.support.listen import BoundSockets, bind


def close(found: BoundSockets) -> None:
    for each in found.sockets:
        each.close()


def test_port_0_is_the_one_that_the_system_chose() -> None:
    found = bind("127.0.0.1", 0)
    (one,) = found.sockets
    assert found.port == one.getsockname()[1] > 0
    assert found.address == f"127.0.0.1:{found.port}"
    one.listen()
    with closing(socket.create_connection(("127.0.0.1", found.port), 5)):
        close(found)


def test_all_addresses_of_a_name_have_one_port() -> None:
    found = bind("localhost", 0)
    assert {each.getsockname()[1] for each in found.sockets} == {found.port}
    assert found.address == f"localhost:{found.port}"
    close(found)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert BoundSockets((), "::1", 80).address == "[::1]:80"


@pytest.mark.parametrize("host", ["127.0.0.1", "name.invalid", "192.0.2.1", "\ud800"])
def test_what_cannot_be_bound_is_an_error_of_the_configuration(host: str) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="choose another address with --http"):
            bind(host, taken.getsockname()[1])


def test_a_family_that_the_system_lacks_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have an address that this machine has not."""
    plain = socket.getaddrinfo

    def both(host: str, port: int, **options: object) -> list[object]:
        return [*plain("192.0.2.1", port, **options), *plain("127.0.0.1", port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    found = bind("both.example", 0)
    assert [each.getsockname()[0] for each in found.sockets] == ["127.0.0.1"]
    close(found)
