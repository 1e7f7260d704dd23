"""A Kombu transport over every aztask broker, so that Celery and plain Kombu can use it.

::

    app = Celery("shop", broker="aztask+servicebus://NAMESPACE")
    connection = kombu.Connection("aztask+local:///var/lib/shop/queues.db")

The URLs are described in `aztask.celery.transport.options`, the transport options in
`aztask.celery.transport.options`. Where aztask is installed, Celery and Kombu know the URLs by
themselves (see ``aztask_kombu.py``); `register` is for a program that runs from a source tree.

Rules
1. An acknowledgement completes, a reject dead-letters, a requeue abandons. Every delivered message
   is renewed until then; closing the channel gives the rest back.
2. A body that cannot be decoded, and a content type that the consumer does not accept, is
   dead-lettered here, once, with a log line, and never reaches a consumer. Every content type that
   it accepts is carried; see `aztask.celery.transport.consumers`.
3. A message that arrives before its ``eta`` is held until then if that is within a few seconds, and
   otherwise hidden again. It is delivered at its time, never before.
4. After a fork the child opens its own broker, if the option is a function or a text, and does no
   I/O for its parent's messages. A broker object that was opened before belongs to the parent.
5. A temporary queue that is bound to an exchange is a mailbox, to which every process can publish;
   so fanout, remote control and events work. See `aztask.celery.transport.boxes`.
6. In an event loop, as Celery's worker has one, a thread receives and the loop delivers. The loop
   never waits for a network. See `aztask.celery.transport.looped`.
"""

from __future__ import annotations

from typing import Final

from kombu.transport import TRANSPORT_ALIASES

from aztask.address.schemes import SCHEMES
from aztask.celery.transport.channel import Channel
from aztask.celery.transport.connection import Transport
from aztask.celery.transport.options import ALIAS

__all__ = ["ALIAS", "Channel", "Transport", "register"]

ALIASES: Final = (ALIAS, *(f"{ALIAS}+{scheme}" for scheme in SCHEMES))
"""The schemes of aztask's URLs in Kombu's table of transports."""


def register() -> None:
    """Add aztask's URLs to Kombu, where aztask runs without being installed; idempotent."""
    for alias in ALIASES:
        TRANSPORT_ALIASES[alias] = "aztask.celery.transport:Transport"
