"""The third part of a body of message protocol 2, ``embed``, as a value.

Rules
1. A body that embeds nothing costs one comparison of its end: `may_embed`.
2. A part that aztask does not know is refused, never dropped silently.

Source: Celery's documentation, "Message Protocol", version 2; ``celery.app.amqp.as_task_v2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aztask.errors import ContentRefused, DecodeError
from aztask.message.codec import Codec
from aztask.message.foreign import RAW
from aztask.message.message import TaskMessage
from aztask.support.display import one_line

_NOTHING: Final = (b"\x80", b"{}]")
"""How the bodies end that aztask writes, in msgpack and in json: with an empty map."""

Signature = dict[str, Any]
"""A signature as Celery serializes it: task, args, kwargs, options, subtask_type, immutable."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """What follows a task. Each signature is a map, as Celery writes it.

    * `callbacks`: called with the value. `errbacks`: called after a final failure.
    * `chain`: the rest of the chain; the last element comes next.
    * `chord`: the body of the chord that the task is a member of.
    """

    callbacks: tuple[Signature, ...] = ()
    errbacks: tuple[Signature, ...] = ()
    chain: tuple[Signature, ...] = ()
    chord: Signature | None = None


def may_embed(message: TaskMessage) -> bool:
    """Whether the body has to be decoded to know what it embeds (rule 1)."""
    body = message.body
    return not body.endswith(_NOTHING) and bool(body) and message.content_type != RAW


def read_embedded(codec: Codec, message: TaskMessage) -> Embedded | None:
    """What the message embeds, None if nothing. Raises DecodeError and ContentRefused."""
    embed = codec.decode_embed(message)
    parts = {name: value for name, value in embed.items() if value}
    if not parts:
        return None
    chord = parts.pop("chord", None)
    lists = {name: _signatures(parts.pop(name, ()), name) for name in _LISTS}
    if parts:
        names = one_line(", ".join(map(str, parts)), 100)
        raise ContentRefused(f"the message embeds {names}, which aztask does not know")
    return Embedded(**lists, chord=None if chord is None else signature(chord, "chord"))


_LISTS: Final = ("callbacks", "errbacks", "chain")


_PARTS: Final[tuple[tuple[str, type], ...]] = (("args", list), ("kwargs", dict), ("options", dict))


def _signatures(value: object, name: str) -> tuple[Signature, ...]:
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise DecodeError(f"{name} must be a list of signatures, not {type(value).__name__}")
    return tuple(signature(each, name) for each in value)


def signature(value: object, name: str) -> Signature:
    """Check that `value` has the parts of a signature. Raises DecodeError."""
    if not isinstance(value, dict) or not isinstance(value.get("task"), str):
        raise DecodeError(f"{name} holds something that is not a signature")
    for part, kind in _PARTS:
        if not isinstance(value.get(part) or kind(), kind):
            raise DecodeError(f"{name}: {part} of a signature must be a {kind.__name__}")
    return value
