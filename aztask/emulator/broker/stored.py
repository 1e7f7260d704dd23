"""The stored form of a message: parts of its header, its annotations, its bare message.

Rules
1. The bare message is stored and delivered byte for byte as the sender wrote it. Only dead letters
   get two more application properties.
2. The broker's own annotations are removed from a sender's message and set at delivery. A delivery
   carries exactly those of the service (the tests of azure-servicebus count them); the message's
   state is only in peeked and deferred messages.
3. A sender's delivery annotations are delivered, together with our lock token.
4. The layout begins with a version, and an unknown version is refused. `ANNOTATED` is the version
   of messages with delivery annotations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from aztask.emulator.amqp import encode, sections
from aztask.emulator.amqp.decode import decode, skip
from aztask.emulator.amqp.link import raw_fields
from aztask.emulator.amqp.sections import Sections
from aztask.queues.engine import NewMessage

VERSION = 1
ANNOTATED = 2
NO_TTL = 0xFFFFFFFF
_HEAD = Struct(">BBBBIII")  # version, durable, priority, hops, ttl, annotation count and bytes
_HEAD_SIZE = _HEAD.size
_EXTRA = Struct(">II")  # count and bytes of delivery annotations, which follow
_DURABLE = {None: 0, True: 1, False: 2}
_DURABLE_CODES = (encode.NULL, encode.TRUE, encode.FALSE)
_NO_PRIORITY = 255
_NO_HEADER = (_DURABLE[None], _NO_PRIORITY, NO_TTL)

_PARTITIONS = 16  # that an entity of the service's Standard tier has
SCHEDULED_TIME = "x-opt-scheduled-enqueue-time"
PARTITION_KEY = "x-opt-partition-key"
VIA_PARTITION_KEY = "x-opt-via-partition-key"
FIRST_NUMBER = "x-opt-enqueue-sequence-number"
DEAD_LETTER_SOURCE = "x-opt-deadletter-source"
REASON = "DeadLetterReason"
DESCRIPTION = "DeadLetterErrorDescription"
MAX_REASON = 4096  # characters that the service keeps of the reason and of the description
_OURS = frozenset(
    (
        *("x-opt-sequence-number", "x-opt-enqueued-time", "x-opt-locked-until"),
        *(FIRST_NUMBER, "x-opt-message-state", DEAD_LETTER_SOURCE),
    )
)

STATE_ACTIVE, STATE_DEFERRED, STATE_SCHEDULED = 0, 1, 2

_ANNOTATIONS = Struct(">24sq22sq")
_SEQUENCE = encode.symbol("x-opt-sequence-number") + b"\x81"
_ENQUEUED = encode.symbol("x-opt-enqueued-time") + b"\x83"
_FIRST_SEQUENCE = encode.symbol(FIRST_NUMBER) + b"\x81"
_STATE = encode.symbol("x-opt-message-state") + b"\x54"
_LOCKED_UNTIL = encode.symbol("x-opt-locked-until") + b"\x83"
_LOCKED_ANNOTATIONS = Struct(_ANNOTATIONS.format + "21sq")
_STATE_ANNOTATIONS = Struct(">32sq22sb")
_LOCK_TOKEN = "x-opt-lock-token"  # noqa: S105  # the name of a field
_TOKEN = encode.symbol(_LOCK_TOKEN) + b"\x98"
_TOKEN_HEAD = b"\x00\x53\x71" + encode.compound(0xC1, 2, _TOKEN + bytes(16))[:-16]
_NO_DELIVERY_ANNOTATIONS = encode.described(sections.DELIVERY_ANNOTATIONS, encode.map_of([]))
_MAP32 = Struct(">3sBII")


class StoredMessage(NamedTuple):
    """One message as it is stored in the engine.

    ttl: milliseconds, or NO_TTL. hops: how often it was forwarded. items: the number of encoded
    keys and values in `annotations`. delivery: the encoded pairs of the delivery annotations.

    This is a tuple because one is made per message: a frozen dataclass takes three times as long.
    """

    durable: int
    priority: int
    ttl: int
    hops: int
    items: int
    annotations: bytes
    bare: bytes
    delivery: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the payload that the engine stores."""
        durable, priority, ttl, hops, items, annotations, bare, delivery = self
        version = ANNOTATED if delivery else VERSION
        head = _HEAD.pack(version, durable, priority, hops, ttl, items, len(annotations))
        if delivery:
            pairs = b"".join(delivery)
            head += _EXTRA.pack(2 * len(delivery), len(pairs)) + pairs
        return head + annotations + bare

    def numbered(self, number: int) -> StoredMessage:
        """Return the message with its sequence number in the entity that it was sent to.

        It keeps the first one: ``EnqueuedSequenceNumber`` is that of the original submission.
        """
        if _FIRST_SEQUENCE in self.annotations:
            return self
        pair = _FIRST_SEQUENCE + number.to_bytes(8, "big")
        return self._replace(items=self.items + 2, annotations=self.annotations + pair)

    def forwarded(self, dead_letter_source: str | None = None) -> StoredMessage:
        """Return the message with one more hop.

        dead_letter_source: the queue in whose dead letters it was; becomes an annotation.
        """
        items, annotations = self.items, self.annotations
        if dead_letter_source:
            pair = encode.symbol(DEAD_LETTER_SOURCE) + encode.string(dead_letter_source)
            items, annotations = items + 2, annotations + pair
        return self._replace(hops=self.hops + 1, items=items, annotations=annotations)


def in_partition(message: NewMessage) -> NewMessage:
    """Return the message in one of the partitions: that of its session, partition key or id."""
    annotations = dict(annotations_of(unpack(message.payload)))
    key = message.session or annotations.get(PARTITION_KEY) or message.message_id
    return message._replace(partition=1 + crc32(str(key).encode()) % _PARTITIONS)


def limited(message: StoredMessage, seconds: float) -> StoredMessage:
    """Return the message with an entity's default time to live, unless its own is shorter.

    Clients are shown the time that counts, as by the service.
    """
    longest = int(seconds * 1000)
    return message._replace(ttl=longest) if longest < message.ttl else message


def to_stored(message: Sections) -> StoredMessage:
    """Return the stored form of a sender's message."""
    annotations, count = message.annotation_items, message.annotation_count
    if count and not _OURS.isdisjoint(message.annotations):
        pairs = sections.pairs_of(annotations)
        kept = [pair for key, pair in pairs if key not in _OURS]
        annotations, count = b"".join(kept), 2 * len(kept)
    header = _header_fields(message.header) if message.header else _NO_HEADER
    delivery: tuple[bytes, ...] = ()
    if message.delivery_items:
        pairs = sections.pairs_of(message.delivery_items)
        delivery = tuple(pair for key, pair in pairs if key != _LOCK_TOKEN)
    return StoredMessage(*header, 0, count, annotations, message.raw[message.bare :], delivery)


def _header_fields(header: list[Any]) -> tuple[int, int, int]:
    """Return durable, priority and ttl in their stored form."""
    durable, priority, ttl = [*header, None, None, None][:3]
    return (
        _DURABLE.get(durable if isinstance(durable, bool) else None, 0),
        priority if isinstance(priority, int) and 0 <= priority < 255 else _NO_PRIORITY,
        ttl if isinstance(ttl, int) and 0 <= ttl < NO_TTL else NO_TTL,
    )


def unpack(payload: bytes) -> StoredMessage:
    """Return the stored message of an engine payload. Raises ValueError for another version."""
    version, durable, priority, hops, ttl, count, size = _HEAD.unpack_from(payload)
    if version not in (VERSION, ANNOTATED):
        raise ValueError(f"a stored message of version {version}; this program writes {ANNOTATED}")
    start = _HEAD_SIZE
    delivery: tuple[bytes, ...] = ()
    if version == ANNOTATED:
        _, pairs, start = _delivery(payload)
        delivery = tuple(pair for _, pair in sections.pairs_of(pairs))
    body = start + size
    annotations, bare = payload[start:body], payload[body:]
    return StoredMessage(durable, priority, ttl, hops, count, annotations, bare, delivery)


def _delivery(payload: bytes) -> tuple[int, bytes, int]:
    """Return count and encoded items of the delivery annotations, and the position after them."""
    count, size = _EXTRA.unpack_from(payload, _HEAD_SIZE)
    start = _HEAD_SIZE + _EXTRA.size
    return count, payload[start : start + size], start + size


def annotations_of(message: StoredMessage) -> list[tuple[Any, Any]]:
    """Return the sender's message annotations, decoded."""
    pairs = sections.pairs_of(message.annotations)
    return [(key, decode(pair, skip(pair, 0))[0]) for key, pair in pairs]


def with_bare(message: StoredMessage, bare: bytes) -> StoredMessage:
    """Return the message with another bare message."""
    return message._replace(bare=bare)


def with_fields(message: StoredMessage, changed: Mapping[int, bytes]) -> StoredMessage:
    """Return the message with these encoded fields, by index, in its properties section."""
    bare = message.bare
    end = _after_properties(bare)
    fields = raw_fields(bare[:end]) if end else []
    fields += [encode.NULL] * (max(changed, default=-1) + 1 - len(fields))
    for index, value in changed.items():
        fields[index] = value
    section = encode.fields(sections.PROPERTIES, fields)
    return message._replace(bare=section + bare[end:])


def with_reasons(message: StoredMessage, reason: str, description: str) -> StoredMessage:
    """Return a dead letter that is forwarded: its reasons become application properties."""
    texts = {REASON: reason, DESCRIPTION: description}
    bare = with_properties(message.bare, {name: text for name, text in texts.items() if text})
    return message._replace(ttl=NO_TTL, bare=bare)


@lru_cache(maxsize=4096)
def _header(durable: int, priority: int, ttl: int, delivery_count: int) -> bytes:
    return encode.fields(
        sections.HEADER,
        [
            _DURABLE_CODES[durable],
            encode.NULL if priority == _NO_PRIORITY else encode.ubyte(priority),
            encode.NULL if ttl == NO_TTL else encode.uint(ttl),
            encode.NULL,
            encode.uint(delivery_count) if delivery_count else b"\x52\x00",
        ],
    )


def deliver(
    payload: bytes,
    *,
    sequence: int,
    enqueued_ms: int,
    delivery_count: int,
    state: int | None = None,
    lock_token: bytes | None = None,
    locked_until_ms: int | None = None,
    dead: tuple[str, str] | None = None,
) -> bytes:
    """Return the message as the service delivers it.

    sequence: the sequence number.
    enqueued_ms, locked_until_ms: milliseconds since 1970-01-01T00:00Z.
    delivery_count: the number of failed deliveries before this one.
    state: for a message that is peeked or was deferred.
    lock_token: 16 bytes in network order; None for a message without a lock.
    dead: reason and description of a dead letter, which no longer expires.
    """
    version, durable, priority, _, ttl, count, size = _HEAD.unpack_from(payload)
    start = _HEAD_SIZE
    if version == VERSION:
        for_delivery = _TOKEN_HEAD + lock_token if lock_token else _NO_DELIVERY_ANNOTATIONS
    else:
        items, pairs, start = _delivery(payload)
        for_delivery = _for_delivery(items, pairs, lock_token)
    body = start + size
    if locked_until_ms is None:
        annotations = _ANNOTATIONS.pack(_SEQUENCE, sequence, _ENQUEUED, enqueued_ms)
        count += 4
    else:
        annotations = _LOCKED_ANNOTATIONS.pack(
            _SEQUENCE, sequence, _ENQUEUED, enqueued_ms, _LOCKED_UNTIL, locked_until_ms
        )
        count += 6
    if state is not None and _FIRST_SEQUENCE in payload[start:body]:
        annotations += _STATE + bytes((state,))
        count += 2
    elif state is not None:
        annotations += _STATE_ANNOTATIONS.pack(_FIRST_SEQUENCE, sequence, _STATE, state)
        count += 4
    bare = payload[body:]
    if dead is not None:
        ttl = NO_TTL
        reasons = {REASON: dead[0], DESCRIPTION: dead[1]}
        bare = with_properties(bare, {name: text for name, text in reasons.items() if text})
    return b"".join(
        (
            _header(durable, priority, ttl, delivery_count),
            for_delivery,
            _MAP32.pack(b"\x00\x53\x72", 0xD1, size + len(annotations) + 4, count),
            payload[start:body],
            annotations,
            bare,
        )
    )


def _for_delivery(count: int, items: bytes, lock_token: bytes | None) -> bytes:
    """Return the delivery annotations: the sender's, and the lock token."""
    if lock_token:
        count, items = count + 2, items + _TOKEN + lock_token
    return encode.described(sections.DELIVERY_ANNOTATIONS, encode.compound(0xC1, count, items))


def with_properties(
    bare: bytes, changed: Mapping[str, object], removed: Collection[str] = ()
) -> bytes:
    """Return the bare message with these application properties set, and without the removed ones.

    A value that is not of a simple type is skipped: part 3.2.5 allows no other.
    """
    encoded = {name: encode.simple(value) for name, value in changed.items()}
    added = [encode.string(name) + value for name, value in encoded.items() if value]
    if not added and not removed:
        return bare
    message = sections.cut(bare)
    start, end = message.application_start, message.application_end
    kept: list[bytes] = []
    if end:
        pairs = sections.pairs_of(sections.map_body(bare, start))
        kept = [pair for key, pair in pairs if key not in changed and key not in removed]
    else:
        if not added:
            return bare
        start = end = _after_properties(bare)
    items = b"".join(kept + added)
    section = encode.described(
        sections.APPLICATION_PROPERTIES,
        encode.compound(0xC1, 2 * (len(kept) + len(added)), items),
    )
    return bare[:start] + section + bare[end:]


def _after_properties(bare: bytes) -> int:
    """Return where the properties section ends, 0 if there is none; any descriptor is allowed."""
    if not bare or decode(bare, 1)[0] not in (sections.PROPERTIES, "amqp:properties:list"):
        return 0
    return skip(bare, 0)
