"""Sockets for a server, bound before it starts: its address is known when it is printed."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from aztask.errors import ConfigurationError

_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""A host name may have an IPv6 address where the system has no IPv6."""


@dataclass(frozen=True, slots=True)
class BoundSockets:
    """Sockets of one host and port; the server listens on them, and closes them.

    `port`: the one that the system chose, if port 0 was asked for.
    """

    sockets: Sequence[socket.socket]
    host: str
    port: int

    @property
    def address(self) -> str:
        """``HOST:PORT`` as it stands in a URL."""
        return f"{url_host(self.host)}:{self.port}"


def url_host(host: str) -> str:
    """A host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int) -> BoundSockets:
    """Bind a socket to each address of a host. port: 0 lets the system choose one.

    Raises ConfigurationError, such as for a port that is taken.
    """
    found: list[socket.socket] = []
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(known):
            try:
                found.append(_bound(family, (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno not in _NOT_HERE or (not found and len(known) == 1):
                    raise
            else:
                port = found[-1].getsockname()[1]
        if not found:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except (OSError, UnicodeError, OverflowError) as error:
        for each in found:
            each.close()
        raise ConfigurationError(
            f"cannot listen on {url_host(host)}:{port}: {error}; choose another address with --http"
        ) from None
    return BoundSockets(found, host, port)


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows, it would let two processes use one port
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made
