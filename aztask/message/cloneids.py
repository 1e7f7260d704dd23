"""The ids of messages that are sent again later: each is derived from the one before."""

from __future__ import annotations

from hashlib import sha256

from aztask.message.envelope import Envelope
from aztask.message.message import MESSAGE_ID_LIMIT


def next_link(envelope: Envelope) -> str:
    """The message id of the envelope's next clone: ``ID~1``, ``ID~2``, ...

    It is derived from the previous id, so a clone that is sent twice counts as one message. A
    message without an id stays without: clones of different messages must not share an id.
    """
    if not envelope.message_id:
        return ""
    base, mark, number = envelope.message_id.rpartition("~")
    if mark and number.isascii() and number.isdigit() and len(number) < 10:
        return f"{base}~{int(number) + 1}"
    if len(envelope.message_id) > MESSAGE_ID_LIMIT - 10:
        digest = sha256(envelope.message_id.encode("utf-8", "surrogatepass")).hexdigest()
        return f"sha256-{digest}~1"
    return f"{envelope.message_id}~1"
