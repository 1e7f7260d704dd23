"""A Kombu transport over every aztask broker, so that Celery and plain Kombu run on it.

::

    from aztask import transport
    transport.register()
    connection = kombu.Connection("aztask://", transport_options={"broker": broker})

Transport options: ``broker``, a URL, a connection string, a function that returns a Broker, or a
Broker; ``lease``, seconds, default 60;
``declare``, False for credentials that may not create queues; ``accept``, content types that are
handed to consumers besides msgpack, json, text and bytes; ``limits``,
`aztask.message.bounds.MessageLimits`.

Rules
1. An acknowledgement completes, a reject dead-letters, a requeue abandons. Everything handed out
   is renewed until then; closing the channel gives the rest back.
2. A body that cannot be decoded is dead-lettered here, once, and never reaches a consumer.
3. A message that comes before its ``eta`` is hidden again, not held.
4. After a fork the child opens its own broker, where the option is a function or a text, and does
   no I/O for what its parent holds. A broker object that was opened before belongs to the parent.
5. No fanout is advertised, because there is none.
"""

from __future__ import annotations

from typing import Final

from kombu.transport import TRANSPORT_ALIASES

from aztask.transport.channel import Channel
from aztask.transport.connection import Transport

__all__ = ["ALIAS", "Channel", "Transport", "register"]

ALIAS: Final = "aztask"


def register() -> None:
    """Make ``aztask://`` known to Kombu; doing so again changes nothing."""
    TRANSPORT_ALIASES[ALIAS] = "aztask.transport:Transport"
