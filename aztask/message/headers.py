"""The headers of a message: Celery's message protocol 2, and our own with the prefix ``aztask-``.

Rules
1. Writing omits values that are None; reading uses the default for an absent header.
2. Every value from outside is checked for type and range. The first wrong one raises a DecodeError
   that names the header and shows a piece of the value, on one line.
3. Texts that are only displayed (argsrepr, kwargsrepr, origin) are cut and cleaned, not refused.
4. Unknown headers are passed on unchanged, as long as they can be written again.

Source of the names: Celery's documentation, "Message Protocol", task messages version 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final

import msgpack

from aztask.errors import DecodeError, EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.message import (
    CONTINUE,
    COUNTER_LIMIT,
    HISTORY,
    MESSAGE_ID_LIMIT,
    RENEWED,
    TaskMessage,
)
from aztask.message.payload import StoredValue

PROTOCOL: Final = 1
"""Version of the ``aztask-`` headers."""

VERSION: Final = "aztask-version"
SIGNATURE: Final = "aztask-signature"
SIGNATURE_2: Final = "aztask-signature-2"
SIGNATURES: Final = frozenset({SIGNATURE, SIGNATURE_2})
COMPRESSION: Final = "compression"
SAVED: Final = "aztask-saved"
PAYLOAD: Final = "aztask-payload"
STORED_ONLY: Final = frozenset({"aztask-schedule-spec", "aztask-node-delay", "aztask-node-expires"})
"""Headers of messages in a result store, which are left away when such a message is sent."""

ID_LIMIT = 1024
TASK_LIMIT = 512
DISPLAY_LIMIT = 512
EXTRA_ITEMS = 256
EXTRA_DEPTH = 8

TIME_LIMIT: Final = 253370764800.0
"""UTC epoch seconds of the year 9999: later dates overflow as soon as a time zone is applied."""

LONGEST_RUN: Final = 10 * 366 * 86400.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


_OPTIONAL: Final = {
    "root_id": "root_id",
    "parent_id": "parent_id",
    "origin": "origin",
    "aztask-lease-seconds": "lease_seconds",
    "traceparent": "traceparent",
}
"""Headers that are written only if the message's field has a value, and those fields."""

_RARE: Final = {
    "group": "group",
    "argsrepr": "argsrepr",
    "kwargsrepr": "kwargsrepr",
    SAVED: "saved",
    "aztask-pointer": "pointer",
    "aztask-unknown-since": "unknown_since",
    "aztask-workflow": "workflow",
    "aztask-node": "node",
    "aztask-slots": "slots",
    PAYLOAD: "payload",
}
"""More of them, of which most messages have none."""

_COUNTS: Final = {
    "aztask-snooze-count": "snooze_count",
    "aztask-put-off-count": "put_off_count",
    "aztask-delivery-base": "delivery_base",
}
"""Counts that are 0 in most messages, and written only if they are not."""

_NONE: Final = (*_RARE.values(), "eta", "expires", "time_limit", "soft_time_limit")
_optional_of = attrgetter(*_OPTIONAL.values())
_rest_of = attrgetter(*_NONE, *_COUNTS.values(), "ordered", "continued")
_USUAL_REST: Final = (*[None] * len(_NONE), *[0] * len(_COUNTS), True, False)
"""One comparison with these saves looking at each field of most messages."""


def write_headers(message: TaskMessage) -> dict[str, Any]:
    """The headers of `message`, ready for an envelope (without a signature)."""
    headers: dict[str, Any] = {
        "lang": "py",
        "task": message.task,
        "id": message.id,
        "retries": message.resubmit_count,
        VERSION: PROTOCOL,
        "aztask-hop": message.hop,
        "aztask-generation": message.generation,
        "aztask-resubmit-count": message.resubmit_count,
    }
    for name, value in zip(_OPTIONAL, _optional_of(message), strict=True):
        if value is not None:
            headers[name] = value
    if _rest_of(message) != _USUAL_REST:
        _write_rest(message, headers)
    if message.extra:
        if not message.continued and "." in str(message.extra.get(HISTORY, "")):
            headers["task"] = message.task + RENEWED
        return {**message.extra, **headers}
    return headers


def _write_rest(message: TaskMessage, headers: dict[str, Any]) -> None:
    """Add the headers that few messages have."""
    for name, field in _RARE.items():
        if (value := getattr(message, field)) is not None:
            headers[name] = value
    if message.eta is not None:
        headers["eta"] = to_iso(message.eta)
    if message.expires is not None:
        headers["expires"] = to_iso(message.expires)
    if message.time_limit is not None or message.soft_time_limit is not None:
        headers["timelimit"] = [message.time_limit, message.soft_time_limit]
    if message.continued:
        headers["task"] = message.task + CONTINUE
    if not message.ordered:
        headers["aztask-ordered"] = 0
    for name, field in _COUNTS.items():
        if value := getattr(message, field):
            headers[name] = value


_AGAIN: Final = (CONTINUE, RENEWED)

_checked_name = [""]
"""The task name that was checked last. Threads may replace it at any time: each name is checked."""


def check_outgoing(message: TaskMessage, limits: MessageLimits) -> None:
    """Refuse values that no reader would accept. Raises EncodeError."""
    try:
        name = message.task
        if name != _checked_name[0]:  # most messages have the name of the message before
            _checked_name[0] = read_text("the task name", name, TASK_LIMIT)
        read_text("the task id", message.id)
        if message.session is not None:
            read_text("session", message.session, MESSAGE_ID_LIMIT)
        if message.group is not None:
            read_text("group", message.group)
        if message.correlation_id is not None:
            read_text("correlation_id", message.correlation_id)
        if message.extra:
            check_extra(message.extra, limits)
    except DecodeError as error:
        raise EncodeError(str(error)) from None


def read_headers(headers: Mapping[str, Any], limits: MessageLimits) -> dict[str, Any]:
    """The fields of a TaskMessage, read from `headers`. Raises DecodeError."""
    if not isinstance(headers, Mapping):
        raise DecodeError(f"the headers are not a map but {type(headers).__name__}")
    version = headers.get(VERSION, PROTOCOL)
    if version != PROTOCOL or isinstance(version, bool):
        raise DecodeError(
            f"{VERSION} {_shown(version)} is not known here (this is {PROTOCOL}); update aztask"
        )
    if headers.get("task") is None or headers.get("id") is None:
        raise DecodeError(
            "there is no task header: neither an aztask message nor Celery's protocol 2;"
            " a Celery producer needs task_protocol = 2"
            if headers.get("task") is None
            else "there is no id header: every message of protocol 2 has one"
        )
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for header, value in headers.items():
        field = _FIELDS.get(header)
        if field is None:
            if header not in _CONSUMED:
                extra[header] = value
        elif value is not None:
            name, read = field
            values[name] = read(header, value)
    if "timelimit" in values:
        values["time_limit"], values["soft_time_limit"] = values.pop("timelimit")
    if values["task"].endswith(_AGAIN):
        name, mark, kind = values["task"].rpartition("#")
        if name:
            values["task"], values["continued"] = name, mark + kind == CONTINUE
    retries = values.pop("retries", 0)
    values.setdefault("resubmit_count", retries)
    _check_saved(values.get("saved"), limits)
    if extra:
        check_extra(extra, limits)
        values["extra"] = extra
    return values


def is_known(header: object) -> bool:
    """Whether the protocol gives this header a meaning."""
    return header in _FIELDS or header in _CONSUMED or header == VERSION


def to_iso(seconds: float) -> str:
    """UTC epoch seconds as ISO 8601 text in UTC, to the microsecond. Raises ValueError."""
    if not 0.0 <= seconds < TIME_LIMIT:
        raise ValueError(f"{seconds!r} is not a time between the years 1970 and 9998")
    return (_EPOCH + timedelta(seconds=seconds)).isoformat()


def read_text(header: str, value: object, limit: int = ID_LIMIT) -> str:
    """Read a name or an id: 1 to `limit` printable characters. Raises DecodeError."""
    if not isinstance(value, str):
        raise DecodeError(f"{header} must be text, not {type(value).__name__}")
    if not value or len(value) > limit:
        raise DecodeError(f"{header} must have 1 to {limit} characters, not {len(value)}")
    # No control character, no lone surrogate, no line break (Unicode categories C and Z).
    if not value.isprintable():
        raise DecodeError(f"{header} {_shown(value)} holds characters that cannot be printed")
    return value


def read_time(header: str, value: object) -> float:
    """Read ISO 8601 text (UTC if it has no offset) or epoch seconds. Raises DecodeError."""
    if isinstance(value, str) and len(value) <= 64:
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise DecodeError(f"{header} {_shown(value)} is not an ISO 8601 date") from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = (moment - _EPOCH).total_seconds()
    else:
        seconds = _number(header, value)
    if not 0.0 <= seconds < TIME_LIMIT:
        raise DecodeError(f"{header} {_shown(value)} is not between the years 1970 and 9998")
    return seconds


def _read_task(header: str, value: object) -> str:
    limit = TASK_LIMIT
    if isinstance(value, str) and value.endswith(_AGAIN):
        limit += len(value) - value.rindex("#")
    return read_text(header, value, limit)


def _read_display(header: str, value: object) -> str:
    """Read a text that is only displayed: cut and cleaned, see rule 3."""
    if not isinstance(value, str):
        raise DecodeError(f"{header} must be text, not {type(value).__name__}")
    text = value[:DISPLAY_LIMIT]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _read_count(header: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecodeError(f"{header} must be an integer, not {type(value).__name__}")
    if not 0 <= value <= COUNTER_LIMIT:
        raise DecodeError(f"{header} {_shown(value)} is not between 0 and {COUNTER_LIMIT}")
    return value


def _read_position(header: str, value: object) -> int:
    """Read a broker's sequence number, which has 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DecodeError(f"{header} must be an integer, not {type(value).__name__}")
    if not 0 <= value < 2**63:
        raise DecodeError(f"{header} {_shown(value)} is not between 0 and 2**63 - 1")
    return value


def _read_flag(header: str, value: object) -> bool:
    """Read 0 or 1 as a bool."""
    if _read_count(header, value) > 1:
        raise DecodeError(f"{header} must be 0 or 1, not {_shown(value)}")
    return bool(value)


def _read_limits(header: str, value: object) -> tuple[float | None, float | None]:
    """Celery's ``timelimit``: [hard, soft], each in seconds or None."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise DecodeError(f"{header} must be a list [hard, soft], not {_shown(value)}")
    hard, soft = (None if part is None else _number(header, part) for part in value)
    for seconds in (hard, soft):
        if seconds is not None and not 0.0 < seconds <= LONGEST_RUN:
            raise DecodeError(f"{header} {_shown(seconds)} is not a number of seconds above 0")
    return hard, soft


def _read_lease(header: str, value: object) -> float:
    """Read seconds above 0; the worker that uses them applies bounds of its own."""
    seconds = _number(header, value)
    if not 0.0 < seconds <= LONGEST_RUN:
        raise DecodeError(f"{header} {_shown(seconds)} is not a number of seconds above 0")
    return seconds


def _read_payload(header: str, value: object) -> str:
    """Read a reference to a payload; it stays text until the payload is fetched."""
    return str(StoredValue.parse(read_text(header, value)))


def _read_bytes(header: str, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise DecodeError(f"{header} must be bytes, not {type(value).__name__}")
    return bytes(value)


def _number(header: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DecodeError(f"{header} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise DecodeError(f"{header} is out of range") from None
    if not math.isfinite(number):
        raise DecodeError(f"{header} must be a finite number, not {number}")
    return number


def check_before_signature(headers: Mapping[Any, Any], limits: MessageLimits) -> None:
    """Raise DecodeError for headers that are too large, too many or too deep to be signed."""
    saved = headers.get(SAVED)
    long = isinstance(saved, bytes | bytearray | memoryview | str)  # it has a limit of its own
    others = {name: value for name, value in headers.items() if name != SAVED or not long}
    check_extra(others, limits, EXTRA_ITEMS + len(_FIELDS) + len(_CONSUMED))
    _check_saved(saved, limits)


def _check_saved(saved: object, limits: MessageLimits) -> None:
    if isinstance(saved, bytes | bytearray | str) and len(saved) > limits.body_bytes:
        raise DecodeError(f"{SAVED} has {len(saved)} bytes; at most {limits.body_bytes}")


def check_extra(
    extra: Mapping[Any, Any], limits: MessageLimits, most_items: int = EXTRA_ITEMS
) -> None:
    """Raise DecodeError unless every broker can pass these headers on."""
    stack: list[tuple[str, Any, int]] = [
        (name, value, 1) for name, value in extra.items() if read_text("a header's name", name)
    ]
    count = 0
    while stack:
        name, value, depth = stack.pop()
        count += 1
        if count > most_items or depth > EXTRA_DEPTH:
            raise DecodeError(
                f"header {name} holds too much: at most {most_items} further values,"
                f" {EXTRA_DEPTH} levels deep"
            )
        if _is_plain(value, limits):
            continue
        if isinstance(value, Mapping):
            stack.extend((read_text(name, key), part, depth + 1) for key, part in value.items())
        elif isinstance(value, list | tuple) and not isinstance(value, msgpack.ExtType):
            stack.extend((name, part, depth + 1) for part in value)
        else:
            raise DecodeError(f"header {name} cannot be carried on: {_shown(value)}")


def _is_plain(value: object, limits: MessageLimits) -> bool:
    if isinstance(value, str):
        return _is_utf8(value, limits)
    if isinstance(value, bytes):
        return len(value) <= limits.header_bytes
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, float)


def _is_utf8(value: str, limits: MessageLimits) -> bool:
    """True if the text can be written as UTF-8: with line breaks, but without lone surrogates."""
    if len(value) > limits.header_bytes:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """A piece of a possibly hostile value, printable and on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "(an integer of more than 20 digits)"
    if isinstance(value, str | bytes):
        return ascii(value[:40])
    if value is None or isinstance(value, int | float):
        return repr(value)
    return type(value).__name__


_FIELDS: dict[str, tuple[str, Callable[[str, object], Any]]] = {
    "task": ("task", _read_task),
    "id": ("id", read_text),
    "root_id": ("root_id", read_text),
    "parent_id": ("parent_id", read_text),
    "group": ("group", read_text),
    "eta": ("eta", read_time),
    "expires": ("expires", read_time),
    "timelimit": ("timelimit", _read_limits),
    "retries": ("retries", _read_count),
    "argsrepr": ("argsrepr", _read_display),
    "kwargsrepr": ("kwargsrepr", _read_display),
    "origin": ("origin", _read_display),
    "traceparent": ("traceparent", read_text),
    "aztask-hop": ("hop", _read_count),
    "aztask-generation": ("generation", _read_count),
    "aztask-resubmit-count": ("resubmit_count", _read_count),
    "aztask-snooze-count": ("snooze_count", _read_count),
    "aztask-put-off-count": ("put_off_count", _read_count),
    "aztask-delivery-base": ("delivery_base", _read_count),
    "aztask-unknown-since": ("unknown_since", read_time),
    SAVED: ("saved", _read_bytes),
    "aztask-pointer": ("pointer", _read_position),
    "aztask-lease-seconds": ("lease_seconds", _read_lease),
    "aztask-workflow": ("workflow", read_text),
    "aztask-node": ("node", read_text),
    PAYLOAD: ("payload", _read_payload),
    "aztask-ordered": ("ordered", _read_flag),
    "aztask-slots": ("slots", read_text),
}

_CONSUMED = frozenset({"lang", VERSION, SIGNATURE, SIGNATURE_2, COMPRESSION})
"""Headers that are not passed on: they are written anew, or describe bytes that are gone."""
