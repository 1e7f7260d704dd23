"""The envelope that a broker carries: bytes, headers and the few properties that services use.

An envelope knows nothing of tasks: the codec converts between messages and envelopes. Brokers map
its fields natively where the service has a place for them (``docs/wire.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

DEAD_REASON: Final = "aztask-dead-reason"
DEAD_DESCRIPTION: Final = "aztask-dead-description"
"""Headers of a dead letter that is moved to another broker: no service takes a dead letter as such,
so it is sent to its queue with its reason, and what receives it there dead-letters it at once."""

DEAD_HEADERS: Final = frozenset({DEAD_REASON, DEAD_DESCRIPTION})


def living(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The headers without those that make a message a dead letter."""
    if DEAD_REASON not in headers:
        return headers
    return {name: value for name, value in headers.items() if name not in DEAD_HEADERS}


@dataclass(frozen=True)
class Envelope:
    """One message on the wire.

    * `body`: the serialized arguments, exactly as they travel.
    * `headers`: text keys; values are None, bool, int, float, str, bytes, or lists and maps of
      those.
    * `delay`: seconds from the send until the message may be received.
    * `expires_at`: UTC epoch seconds after which it must not run.
    * `session`: messages of one session are received in order, by one receiver at a time.
    * `properties`: set by foreign producers and only passed on (priority, reply_to, ...).
    * `problem`: why the service's message could not be read; its bytes are then the body. Such an
      envelope is dead-lettered and never sent.
    """

    body: bytes
    headers: Mapping[str, Any] = field(default_factory=dict)
    message_id: str = ""
    content_type: str = "application/x-msgpack"
    content_encoding: str = "binary"
    subject: str | None = None
    correlation_id: str | None = None
    session: str | None = None
    partition_key: str | None = None
    delay: float = 0.0
    expires_at: float | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


NO_PROPERTIES: Mapping[str, Any] = {}
"""Shared by all envelopes without entries; no code changes an envelope's maps in place."""
