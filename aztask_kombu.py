"""Adds aztask's addresses to Kombu, without an import or a call in your code.

Kombu loads the entry points of the group ``kombu.serializers`` when its module
``kombu.serialization`` is imported, as every Celery app and every ``kombu.Producer`` does. One of
them is `SERIALIZER` here: loading it imports this module, and so adds the addresses.

Rules
1. This module is not part of the package ``aztask`` and imports nothing but Kombu's table of
   transports. It is loaded while Kombu itself is being imported, so importing aztask here, which
   uses Kombu, would fail. Every program that uses Kombu on this machine loads it, so it must be
   cheap and may not fail.
2. An alias names a class by text. Kombu imports ``aztask.celery.transport`` when you open such an
   address.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

ALIASES = ("aztask", "aztask+local", "aztask+servicebus", "aztask+storagequeue")
"""The schemes of aztask's addresses. Kombu itself reads ``aztask+KIND://...`` as the transport
``aztask`` with the address ``KIND://...``, except after a failover, when it looks up the whole."""

TRANSPORT = "aztask.celery.transport:Transport"


def register() -> None:
    """Add the aliases to Kombu's table; idempotent."""
    for alias in ALIASES:
        TRANSPORT_ALIASES[alias] = TRANSPORT


def _refuse(_data: object) -> object:
    raise ValueError(
        "the serializer aztask-addresses only announces aztask's addresses to Kombu; use json or"
        " msgpack"
    )


SERIALIZER = (_refuse, _refuse, "application/x-aztask-addresses", "utf-8")
"""What an entry point of ``kombu.serializers`` is: encoder, decoder, content type, encoding."""

register()
