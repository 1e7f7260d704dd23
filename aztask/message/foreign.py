"""Messages that neither aztask nor Celery wrote, as messages of the task that handles their queue.

Rules
1. A message is foreign if it has no ``task`` header and no header of aztask's. So a message that
   claims to be ours is verified as ours.
2. The task id is made of the sender's message id and the message's position: it is the same at
   every delivery, and two messages never share it, even if their sender repeats message ids.
3. The body stays as it was, also in clones for retries: its content type is `RAW`.
"""

from __future__ import annotations

from typing import Any, Final

from aztask.errors import ConfigurationError, ContentRefused, did_you_mean
from aztask.message import serializer as formats
from aztask.message.bounds import MessageLimits, check_size
from aztask.message.envelope import Envelope
from aztask.message.headers import check_extra, is_known
from aztask.message.message import MESSAGE_DEFAULTS, TaskMessage, build
from aztask.message.payload import inner_type
from aztask.support.display import one_line, storable

RAW: Final = "application/x-aztask-raw"
"""The content type of a body that only a handler reads."""

_ID_CHARACTERS: Final = 200
_PREFIX: Final = "foreign-"


def is_foreign(envelope: Envelope) -> bool:
    """Whether another program wrote it (rule 1)."""
    headers = envelope.headers
    return not envelope.problem and not any(
        name == "task" or str(name).startswith("aztask-") for name in headers
    )


def foreign_message(
    envelope: Envelope, queue: str, position: object, task: str, limits: MessageLimits
) -> TaskMessage:
    """The message for the task that handles the queue. Raises ContentRefused, DecodeError.

    Its `extra` has the sender's application properties; those whose names the protocol uses get the
    prefix ``foreign-``. It also has ``message_id``, ``subject`` and ``content_type``.
    """
    check_size(len(envelope.body), limits)
    extra: dict[str, Any] = {
        "message_id": envelope.message_id,
        "subject": envelope.subject,
        "content_type": envelope.content_type,
    }
    extra = {name: value for name, value in extra.items() if value}
    for name, value in envelope.headers.items():
        extra[f"{_PREFIX}{name}" if is_known(name) else name] = value
    check_extra(extra, limits)
    name = storable(envelope.message_id or queue, _ID_CHARACTERS)
    return build(
        TaskMessage,
        {
            **MESSAGE_DEFAULTS,
            "id": f"{name}@{position}",
            "task": task,
            "queue": queue,
            "body": envelope.body,
            "content_type": RAW,
            "content_encoding": "binary",
            "correlation_id": envelope.correlation_id,
            "session": envelope.session,
            "expires": envelope.expires_at,
            "extra": extra,
        },
    )


# -- the content types and encodings of message bodies, and which of them are accepted -----


CONTENT_TYPES: Final = {"msgpack": formats.MSGPACK, "json": formats.JSON}
"""The content type that each serializer writes."""

_ENCODINGS: Final = frozenset({"binary", "utf-8", "utf8", "us-ascii", "ascii"})


def content_type_of(name: object) -> str:
    """The content type of a serializer's name. Raises ConfigurationError for an unknown one."""
    content_type = CONTENT_TYPES.get(name) if isinstance(name, str) else None
    if content_type is None:
        near = did_you_mean(str(name), list(CONTENT_TYPES))
        raise ConfigurationError(
            f"serializer {one_line(repr(name), 60)} is not available;"
            f" there are {' and '.join(CONTENT_TYPES)}.{near}"
        )
    return content_type


def checked_content_type(content_type: object, encoding: object, accept: frozenset[str]) -> str:
    """The content type without its parameters. Raises ContentRefused for what is not accepted."""
    name = content_type.partition(";")[0].strip().lower() if isinstance(content_type, str) else ""
    if name not in accept and name != RAW and inner_type(name) not in accept:
        accepted = ", ".join(sorted(accept))
        raise ContentRefused(
            f"content type {one_line(repr(content_type), 60)} is not accepted; send {accepted}"
        )
    if not isinstance(encoding, str) or encoding.lower() not in _ENCODINGS:
        raise ContentRefused(
            f"content encoding {one_line(repr(encoding), 60)} is not accepted; send binary or utf-8"
        )
    return name
