"""A Kombu transport over every aztask broker, so that Celery and plain Kombu can use it.

::

    from aztask import transport
    transport.register()
    connection = kombu.Connection("aztask://", transport_options={"broker": broker})

Transport options:

* ``broker``: a URL, a connection string, a function that returns a Broker, or a Broker.
* ``lease``: seconds, 60 by default.
* ``declare``: False for credentials that may not create queues.
* ``accept``: content types that consumers receive besides msgpack, json, text and bytes.
* ``limits``: a `aztask.message.bounds.MessageLimits`.

Rules
1. An acknowledgement completes, a reject dead-letters, a requeue abandons. Every delivered message
   is renewed until then; closing the channel gives the rest back.
2. A body that cannot be decoded is dead-lettered here, once, and never reaches a consumer.
3. A message that arrives before its ``eta`` is hidden again, not held.
4. After a fork the child opens its own broker, if the option is a function or a text, and does no
   I/O for its parent's messages. A broker object that was opened before belongs to the parent.
5. Fanout is not advertised, because it does not exist.
"""

from __future__ import annotations

from typing import Final

from kombu.transport import TRANSPORT_ALIASES

from aztask.transport.channel import Channel
from aztask.transport.connection import Transport

__all__ = ["ALIAS", "Channel", "Transport", "register"]

ALIAS: Final = "aztask"


def register() -> None:
    """Register ``aztask://`` with Kombu; idempotent."""
    TRANSPORT_ALIASES[ALIAS] = "aztask.transport:Transport"
