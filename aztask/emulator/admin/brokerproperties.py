"""Messages as HTTP has them, with headers, JSON and a body: to and from the encoding of AMQP.

Rules
1. ``BrokerProperties`` is a JSON object. A name in it that is not known is ignored, as on the
   service. A value of a wrong type is refused.
2. Every header that HTTP does not define is an application property. Text is quoted, with a
   backslash before each quote in it; a quoted date of RFC 1123 is a timestamp. Numbers, ``true``
   and ``false`` are not quoted. Anything else is text.
3. In a batch, the JSON of each message has its broker and application properties, with the types of
   JSON. The headers of the request are ignored.
4. The body is one AMQP data section. For a message with another body, a receiver gets its text or
   bytes, or else its value as JSON.
5. A header has no line breaks: in the text of a property they become spaces (RFC 9110, section
   5.5). A property is skipped if its name cannot name a header, or if HTTP defines that header.

Sources: learn.microsoft.com/rest/api/servicebus, pages "Introduction", "Message headers and
properties", "Send message" and "Send message batch". What they leave open is as in the recordings
of the service, from 2016 to 2019, in the tests of Microsoft's Python SDK
(azure-servicebus/tests/recordings of github.com/Azure/azure-sdk-for-python): the forms of rule 2,
content types, a first delivery that counts 1, and the time to live of a message without one.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable, Mapping
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final
from uuid import UUID

from aztask.emulator.amqp import INVALID_FIELD, AmqpError, encode, sections
from aztask.emulator.amqp.encode import Described, Int32, Timestamp, undescribed
from aztask.emulator.broker import stored
from aztask.emulator.broker.filters import TIMESPAN
from aztask.emulator.broker.producer import MAX_BATCH
from aztask.emulator.config import MAX_DURATION

HEADER: Final = "brokerproperties"
BATCH_TYPE: Final = "application/vnd.microsoft.servicebus.json"
PLAIN_TYPE: Final = "application/xml; charset=utf-8"
"""The content type of an answer without a message, and of a message that has none."""

_TEXTS: Final = {
    "CorrelationId": sections.CORRELATION_ID,
    "Label": sections.SUBJECT,
    "MessageId": sections.MESSAGE_ID,
    "ReplyTo": sections.REPLY_TO,
    "ReplyToSessionId": sections.REPLY_TO_GROUP,
    "SessionId": sections.GROUP_ID,
    "To": sections.TO,
}
_ANNOTATED: Final = {
    "PartitionKey": stored.PARTITION_KEY,
    "ViaPartitionKey": stored.VIA_PARTITION_KEY,
}
_STATES: Final = ("Active", "Deferred", "Scheduled")
_TICKS: Final = 10_000_000  # .NET's ticks per second
_UNLIMITED: Final = MAX_DURATION + 0.47754
"""Seconds of .NET's largest TimeSpan, as the service writes them."""

# Fields of requests and responses, of connections and browsers (the registry of RFC 9110, section
# 16.3.1). Not ``Priority`` of RFC 9218: the service's own examples have it as a property.
_OF_HTTP: Final = frozenset(
    (
        *("accept", "accept-charset", "accept-encoding", "accept-language", "accept-ranges", "age"),
        *("allow", "alt-svc", "authorization", "brokerproperties", "cache-control", "connection"),
        *("content-encoding", "content-language", "content-length", "content-location"),
        *("content-md5", "content-range", "content-type", "cookie", "date", "etag", "expect"),
        *("expires", "forwarded", "from", "host", "http2-settings", "if-match", "if-none-match"),
        *("if-modified-since", "if-range", "if-unmodified-since", "keep-alive", "last-modified"),
        *("location", "max-forwards", "origin", "pragma", "proxy-authenticate", "referer"),
        *("proxy-authorization", "proxy-connection", "range", "retry-after", "server"),
        *("set-cookie", "strict-transport-security", "te", "trailer", "transfer-encoding"),
        *("upgrade", "upgrade-insecure-requests", "user-agent", "vary", "via", "warning"),
        *("www-authenticate", "x-ms-retrypolicy"),
    )
)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")  # RFC 9110, section 5.6.2
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,18})\Z")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_TIMESPAN: Final = re.compile(
    r"(?:(?P<days>[0-9]{1,8})\.)?(?P<hours>[0-9]{1,2}):(?P<minutes>[0-9]{2}):"
    r"(?P<seconds>[0-9]{2}(?:\.[0-9]{1,7})?)\Z"
)
_BREAKS: Final = re.compile(r"[\x00-\x1f\x7f]")


def refused(what: str) -> AmqpError:
    """Return the error for a request that cannot be read."""
    return AmqpError(INVALID_FIELD, what)


# -- To AMQP ---------------------------------------------------------------------------------------


def messages_of(
    fields: Iterable[tuple[str, str]], headers: Mapping[str, str], body: bytes
) -> list[bytes]:
    """Return the encoded messages of a request: one, or those of a batch. Raises AmqpError.

    fields: its headers as they were sent. headers: the same by lower-case name.
    """
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() == BATCH_TYPE:
        return _batch(body)
    broker = _object(_decoded(headers[HEADER]), "BrokerProperties") if HEADER in headers else {}
    custom: dict[str, str] = {}
    for name, value in fields:
        if name.lower() not in _OF_HTTP:
            # a header that is sent twice is a list of its values (RFC 9110, section 5.3)
            custom[name] = f"{custom[name]},{value}" if name in custom else value
    typed = {_decoded(name): _from_header(_decoded(value)) for name, value in custom.items()}
    return [_encoded(body, content_type, broker, typed)]


def _batch(body: bytes) -> list[bytes]:
    items = _json(body, "the batch")
    if not isinstance(items, list) or not 0 < len(items) <= MAX_BATCH:
        raise refused(f"a batch is a JSON array of 1 to {MAX_BATCH} messages")
    encoded = []
    for index, item in enumerate(items):
        if not isinstance(item, dict) or not isinstance(item.get("Body"), str):
            raise refused(f'message {index} of the batch: write {{"Body": "text", ...}}')
        parts = {name: item.get(name) or {} for name in ("BrokerProperties", "UserProperties")}
        for name, part in parts.items():
            if not isinstance(part, dict):
                raise refused(f"message {index} of the batch: {name} must be a JSON object")
        broker, user = parts.values()
        custom = {name: _from_json(name, value) for name, value in user.items()}
        encoded.append(_encoded(item["Body"].encode("utf-8", "replace"), "", broker, custom))
    return encoded


def _json(data: str | bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refused(f"{what} must be JSON: {str(error)[:200]}") from None


def _object(text: str, what: str) -> dict[str, Any]:
    found = _json(text, what)
    if not isinstance(found, dict):
        raise refused(f"{what} must be a JSON object")
    return found


def _decoded(text: str) -> str:
    """Return a part of the head, which was read as Latin-1, as UTF-8 if it is that."""
    try:
        return text.encode("latin-1").decode()
    except ValueError:
        return text


def _encoded(
    body: bytes, content_type: str, broker: Mapping[str, Any], custom: Mapping[str, Any]
) -> bytes:
    """Return an encoded message. Raises AmqpError for a broker property of a wrong type."""
    fields = [encode.NULL] * 13
    if content_type:
        fields[sections.CONTENT_TYPE] = encode.symbol(content_type)
    for name, index in _TEXTS.items():
        text = _text(broker, name)
        if text is not None:
            fields[index] = encode.string(text)
    keys = {name: _text(broker, name) for name in ("SessionId", "PartitionKey")}
    if None not in keys.values() and len(set(keys.values())) > 1:
        raise refused("SessionId and PartitionKey must be the same if both are set")
    pairs = [(key, encode.string(_text(broker, name) or "")) for name, key in _ANNOTATED.items()]
    annotations = [(key, value) for key, value in pairs if value != encode.string("")]
    due = _due(broker)
    if due is not None:
        annotations.append((stored.SCHEDULED_TIME, encode.timestamp(due)))
    ttl = _ttl(broker)
    parts = []
    if ttl is not None:
        parts.append(encode.fields(sections.HEADER, [encode.NULL, encode.NULL, encode.uint(ttl)]))
    if annotations:
        named = [(encode.symbol(key), value) for key, value in annotations]
        parts.append(encode.described(sections.MESSAGE_ANNOTATIONS, encode.map_of(named)))
    parts.append(encode.fields(sections.PROPERTIES, fields))
    if custom:
        written = [(encode.string(name), encode.simple(value)) for name, value in custom.items()]
        parts.append(encode.described(sections.APPLICATION_PROPERTIES, encode.map_of(written)))
    parts.append(encode.described(sections.DATA, encode.binary(body)))
    return b"".join(parts)


def _text(broker: Mapping[str, Any], name: str) -> str | None:
    value = broker.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise refused(f"BrokerProperties: {name} must be text")


def _ttl(broker: Mapping[str, Any]) -> int | None:
    """Return the time to live in milliseconds; None for none, or one that AMQP cannot hold."""
    span, seconds = broker.get("TimeToLiveTimeSpan"), broker.get("TimeToLive")
    found = _TIMESPAN.match(span) if isinstance(span, str) else None
    if found is not None:
        parts = {name: float(value) for name, value in found.groupdict("0").items()}
        hours = 24 * parts["days"] + parts["hours"]
        seconds = 3600 * hours + 60 * parts["minutes"] + parts["seconds"]
    elif span is not None:
        raise refused("BrokerProperties: TimeToLiveTimeSpan must be a span such as 0.00:00:40")
    if seconds is None:
        return None
    try:
        number = math.nan if isinstance(seconds, bool) else float(seconds)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise refused("BrokerProperties: TimeToLive must be a number of seconds")
    milliseconds = round(number * 1000)
    return milliseconds if milliseconds < stored.NO_TTL else None


def _due(broker: Mapping[str, Any]) -> int | None:
    """Return the time of a scheduled message, in milliseconds since 1970; None for none."""
    text = broker.get("ScheduledEnqueueTimeUtc")
    if text is None:
        return None
    for parse in (parsedate_to_datetime, datetime.datetime.fromisoformat):
        try:
            moment = parse(text.strip())
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=datetime.UTC)
            return round(moment.timestamp() * 1000)
        except (AttributeError, TypeError, ValueError, OverflowError):
            pass
    raise refused(
        "BrokerProperties: ScheduledEnqueueTimeUtc must be a date such as Sun, 06 Nov 1994 08:49:37"
        " GMT"
    )


def _from_header(text: str) -> Any:
    """Return the value of an application property (rule 2)."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        inner = text[1:-1].replace('\\"', '"')
        moment = _moment(inner)
        return inner if moment is None else moment
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.match(text):
        return _integer(int(text))
    number = float(text) if _NUMBER.match(text) else math.inf
    return number if math.isfinite(number) else text


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return _integer(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise refused(f"UserProperties: {name[:100]} must be text, a number, true or false")


def _integer(value: int) -> Any:
    """Return an int of 32 bits, a long, or a double if it is too large for both, as .NET does."""
    if -(2**31) <= value < 2**31:
        return Int32(value)
    return value if -(2**63) <= value < 2**63 else float(value)


def _moment(text: str) -> Timestamp | None:
    """Return the timestamp of a date of RFC 1123, None for any other text."""
    try:
        seconds = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return Timestamp(round(seconds) * 1000) if _date(seconds) == text else None


# -- From AMQP -------------------------------------------------------------------------------------


def received(delivered: bytes, token: str) -> tuple[bytes, str, dict[str, str]]:
    """Return body, content type and headers of a message that a receiver gets.

    delivered: the message as AMQP delivers it. token: of its lock, as a UUID; "" for none.
    """
    message = sections.cut(delivered)
    broker = _broker(message, token)
    headers = {"BrokerProperties": json.dumps(broker, separators=(",", ":"))}
    for name, value in message.application_properties.items():
        plain = undescribed(value)
        if value is None or not _NAME.match(str(name)) or str(name).lower() in _OF_HTTP:
            continue
        headers[str(name)] = _to_header(value if value != plain and _is_span(value) else plain)
    content_type = _BREAKS.sub(" ", str(message.property(sections.CONTENT_TYPE) or PLAIN_TYPE))
    return _body(message), content_type, headers


def _broker(message: sections.Sections, token: str) -> dict[str, Any]:
    """Return the broker properties, sorted by name as those of the service."""
    header = [*message.header, *[None] * 5]
    seen = message.annotations
    found: dict[str, Any] = {
        "DeliveryCount": (header[4] or 0) + 1,  # it counts this delivery, that of AMQP does not
        "EnqueuedSequenceNumber": seen.get(stored.FIRST_NUMBER, 0),
        "EnqueuedTimeUtc": _date(seen["x-opt-enqueued-time"] / 1000),
        "SequenceNumber": seen["x-opt-sequence-number"],
        "State": _STATES[0],
        "TimeToLive": _UNLIMITED if header[2] is None else _seconds(header[2]),
    }
    for name, index in _TEXTS.items():
        value = message.property(index)
        if value is not None:
            found[name] = value.hex() if isinstance(value, bytes) else str(value)
    for name, key in (*_ANNOTATED.items(), ("DeadLetterSource", stored.DEAD_LETTER_SOURCE)):
        if key in seen:
            found[name] = str(seen[key])
    due = seen.get(stored.SCHEDULED_TIME)
    if isinstance(due, int):
        found["ScheduledEnqueueTimeUtc"] = _date(due / 1000)
    if token:
        found["LockToken"] = token
        found["LockedUntilUtc"] = _date(seen["x-opt-locked-until"] / 1000)
    return dict(sorted(found.items()))


def _seconds(milliseconds: int) -> float:
    whole, rest = divmod(milliseconds, 1000)
    return milliseconds / 1000 if rest else whole


def _date(seconds: float) -> str | None:
    """Return a date of RFC 1123; None beyond the years 1 to 9999."""
    try:
        return formatdate(seconds, usegmt=True)
    except (ValueError, OverflowError, OSError):
        return None


def _is_span(value: Any) -> bool:
    return isinstance(value, Described) and value.descriptor == TIMESPAN


def _to_header(value: Any) -> str:
    """Return an application property as the value of a header (rule 2)."""
    match value:
        case bool():
            return str(value).lower()
        case Timestamp():
            return f'"{_date(value / 1000) or int(value)}"'
        case int() | float():
            return str(int(value) if isinstance(value, int) else value)
        case Described(value=int(ticks)):
            text = _span(ticks)
        case bytes():
            text = value.hex()
        case UUID():
            text = str(value)
        case _:
            text = str(value)
    return '"' + _BREAKS.sub(" ", text).replace('"', '\\"') + '"'


def _span(ticks: int) -> str:
    """Return a TimeSpan in .NET's constant form, ``d.hh:mm:ss.fffffff``."""
    seconds, rest = divmod(abs(ticks), _TICKS)
    days, seconds = divmod(seconds, 86400)
    sign, date = "-" if ticks < 0 else "", f"{days}." if days else ""
    time = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{sign}{date}{time}{f'.{rest:07}' if rest else ''}"


def _body(message: sections.Sections) -> bytes:
    if message.data_items:
        return b"".join(message.raw[start:end] for start, end in message.data_items)
    value = undescribed(message.value)
    if value is None or isinstance(value, bytes):
        return value or b""
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode()
