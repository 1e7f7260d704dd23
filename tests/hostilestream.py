"""A stream of hostile messages: wrong types in every place, every codec, damaged bytes. Seeded.

`HostileStream.next` returns the fields of an envelope, most of them changed in one to three places.
They need not fit an `Envelope`: `packed_local` and `packed_storage` write whatever they hold, as an
attacker would, and `hostileamqp` does so for Service Bus. `garbled` then damages the bytes.

The task of every message raises `Reject`, so each of them ends as a dead letter whatever was
changed, with two exceptions that `Hostile` names.
"""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import blake2b
from typing import Any

import msgpack

from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.headers import _CONSUMED, _FIELDS
from aztask.message.message import TaskMessage
from aztask.message.signatures import NOT_SIGNED
from aztask.queues.local import payload
from aztask.queues.storagequeue import wire

HEADERS = sorted({*_FIELDS, *_CONSUMED, *NOT_SIGNED, "x-unknown"})
PROPERTIES = ("reply_to", "body_encoding", "priority", "delivery_info", "x-unknown")
TEXTS = (
    *("", " ", "x", "\x00", "\x1b[2J\x07", "\u202e", "\ud800", "a\r\nb", "\N{GRINNING FACE}"),
    *("'; DROP TABLE messages; --", "../../etc/passwd", "%s%n{0.__class__}", "<!DOCTYPE x>"),
    *("1969-12-31", "9999-12-31T23:59:59+00:00", "0001-01-01", "2024-01-01T00:00:00-99:99"),
    *("x" * 129, "é" * 600, "x" * 40_000),
)
NUMBERS = (
    *(0, 1, -1, 2, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1),
    *(0.0, -0.0, 0.5, -1.0, 5e-324, 1e308, math.nan, math.inf, -math.inf, 253370764800.0),
)
BYTES = (b"", b"\x00", b"\xff" * 9, b"\xc1", b"\xdd\xff\xff\xff\xff", bytes(range(256)))
CONTENT_TYPES = (
    *("application/json", "application/x-msgpack", "APPLICATION/JSON; charset=utf-8", "text/plain"),
    *("application/x-python-serialize", "application/x-yaml", "application/data", "", "\x00"),
)
ENCODINGS = ("binary", "utf-8", "us-ascii", "utf-16", "base64", "gzip", "rot13", "")
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "application/x-gzip": zlib.compress,
    "application/x-bz2": bz2.compress,
    "application/x-lzma": lzma.compress,
    "application/x-brotli": zlib.compress,
    "application/zstd": zlib.compress,
    "zlib": zlib.compress,
}
MODULES = ("os.system", "builtins.eval", "../x", "celery.backend_cleanup", "\x00", "x" * 600)
JSONS = (
    *('[["x", 1e999], {}, {}]', "[[NaN], {}, {}]", '[["\\ud800"], {}, {}]', "[[], {}, {}] junk"),
    *("[" * 90_000, "[" * 99 + "]" * 99, '{"a":' * 5_000, '"' + "\\" * 9_999, "", "\ufeff[]"),
    *(f"[[{'9' * 5_000}], {{}}, {{}}]", '[[], {"self": 1}, {}]', '[[], {}, {"chord": [1]}]'),
    *('[[], {"a": 1, "a": 2}, null]', "[[], [], []]", "[1, 2, 3]", "[[], {}]"),
)
KOMBU_TYPES = ("datetime", "date", "time", "decimal", "uuid", "bytes", "base64", "x")
_A_MARK = re.compile(r"h[0-9a-f]{10}-[0-9]{4}")
BOMB_BYTES = 40 * 1024 * 1024


@dataclass(frozen=True)
class Hostile:
    """One hostile message.

    * `name`: what is wrong with it, for the error of a test.
    * `fields`: of the envelope.
    * `waits`: it may wait in the queue for its eta, instead of ending.
    * `signed`: what the signature of the original covers.
    * `mark`: a text in the original's id, message id, arguments and a header. No change is aimed at
      all of these, so `mark_of` recognises nearly every one by what became of it.
    """

    name: str
    fields: dict[str, Any]
    waits: bool = False
    signed: bytes = b""
    mark: str = ""

    @property
    def id(self) -> Any:
        """The task's id, if there is one."""
        headers = self.fields["headers"]
        return headers.get("id") if isinstance(headers, dict) else None

    def forged_in(self, payload: bytes) -> bool:
        """Whether the signature of the original does not fit this payload of the embedded queue.

        Only the bytes that were sent can tell: damage sometimes undoes a change, as when it turns
        ``reply_to`` into ``repny_to``, which no signature covers because nothing reads it.
        """
        return _covered_in(payload) != self.signed


def mark_of(*values: object) -> str:
    """The mark that is most often in these texts, bytes, lists and maps; "" if there is none.

    A damaged message may have a mark of which a bit was changed; the others outvote it.
    """
    found = Counter[str]()
    for value in values:
        _count_marks(value, found)
    (best, most), *others = found.most_common(2) or [("", 0)]
    return "" if others and others[0][1] == most else best


def sent_mark(mark: str, sent: Collection[str]) -> str:
    """The mark that was sent, of one in which a character may have been damaged; else itself."""
    if mark in sent:
        return mark
    near = [each for each in sent if sum(a != b for a, b in zip(each, mark, strict=False)) == 1]
    return near[0] if len(near) == 1 else mark


def _count_marks(value: object, found: Counter[str]) -> None:
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            _count_marks(each, found)
    elif isinstance(value, str):
        found.update(_A_MARK.findall(value))
    elif isinstance(value, bytes):
        for data in (value, *_unpacked(value)):
            found.update(_A_MARK.findall(data.decode("latin-1")))


def _unpacked(data: bytes) -> Iterator[bytes]:
    """What may be inside: as base64, of which some may be missing, and compressed."""
    for start in range(4):
        end = start + (len(data) - start) // 4 * 4
        with suppress(ValueError):
            yield base64.b64decode(data[start:end])
    with suppress(zlib.error):
        yield zlib.decompressobj().decompress(data, 65_536)


@dataclass
class _Changes:
    """What one message became so far."""

    fields: dict[str, Any]
    names: list[str] = field(default_factory=list)
    waits: bool = False

    @property
    def headers(self) -> dict[Any, Any]:
        """The headers; changes to it are lost if another value stands in their place."""
        headers = self.fields["headers"]
        return headers if isinstance(headers, dict) else {}


class HostileStream:
    """Makes hostile messages. Two streams of one seed are equal.

    * `codec`: encodes the originals; with signing keys, it signs them.
    * `room`: the most bytes of one body.
    """

    def __init__(self, codec: Codec, task: str, seed: object, *, room: int = 40_000) -> None:
        self.dice = random.Random(f"hostile {seed}")
        self._codec = codec
        self._task = task
        self._prefix = f"{self.dice.getrandbits(40):010x}"
        self._room = room
        self._number = 0

    @property
    def _mark(self) -> str:
        """No damage makes it that of another message: they have one length, for what is cut off,
        and no two are alike, for a bit that is changed."""
        digest = blake2b(f"{self._prefix}-{self._number}".encode(), digest_size=5)
        return f"h{digest.hexdigest()}-{self._number:04}"

    def original(self) -> Envelope:
        """The next message before it is changed, under an id of its own."""
        self._number += 1
        name = self._mark
        encoded = self._codec.encode_arguments([name, 1], {"a": [2.5, None]})
        message = TaskMessage(name, self._task, "default", *encoded, extra={"x-mark": name})
        return self._codec.to_envelope(message)

    def next(self) -> Hostile:
        """The next hostile message."""
        original = self.original()
        plain = {each.name: getattr(original, each.name) for each in fields(Envelope)}
        changed = _Changes({**plain, "headers": dict(original.headers), "properties": {}})
        for _ in range(self.dice.choice((1, 1, 1, 2, 3))):
            self.dice.choice(_CHANGES)(self, changed)
        names = ", ".join(changed.names)
        return Hostile(names, changed.fields, changed.waits, _covered(plain), self._mark)

    # -- values ------------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Any:
        """Any value that msgpack can write."""
        dice = self.dice
        kinds: list[Callable[[], Any]] = [
            lambda: dice.choice((None, True, False)),
            lambda: dice.choice(NUMBERS),
            lambda: dice.choice(NUMBERS),
            lambda: dice.choice(TEXTS),
            lambda: dice.choice(TEXTS),
            lambda: dice.choice((*BYTES, dice.randbytes(dice.randrange(40)))),
            lambda: msgpack.ExtType(dice.randrange(128), dice.randbytes(dice.randrange(20))),
            lambda: [self.value(depth + 1) for _ in range(dice.choice((0, 1, 2, 3, 40)))],
            lambda: {self.key(): self.value(depth + 1) for _ in range(dice.randrange(4))},
            lambda: nested(dice.choice((3, 9, 17, 101, 400)), dice.random() < 0.5),
        ]
        return dice.choice(kinds if depth < 4 else kinds[:7])()

    def key(self) -> Any:
        """A key of a map: mostly text."""
        dice = self.dice
        return dice.choice((dice.choice(TEXTS), "x", "task", b"x", 7, None, 1.5))

    # -- changes -----------------------------------------------------------------------------

    def _header(self, changed: _Changes) -> None:
        name = self.dice.choice(HEADERS)
        value = self.value()
        changed.headers[name] = value
        changed.names.append(f"header {name} {short(value)}")
        changed.waits |= name == "eta"

    def _likely_header(self, changed: _Changes) -> None:
        """A value of the right type, which is accepted and must do no harm."""
        dice = self.dice
        name = dice.choice(HEADERS)
        numbers = (0, 1, 5, 2**31 - 1, 0.001, 2.5, 1e6, 4e9, 253370764799.0)
        value = {
            "eta": dice.choice(("2024-01-01", "9998-01-01T00:00:00+00:00", "2100-02-03T04:05:06")),
            "expires": dice.choice(("2024-01-01", "9998-01-01T00:00:00+00:00")),
            "timelimit": [dice.choice((None, *numbers)), dice.choice((None, *numbers))],
            "task": dice.choice(MODULES),
            "aztask-saved": dice.choice((*BYTES, msgpack.packb([1, 2]))),
        }.get(name, dice.choice(numbers))
        changed.headers[name] = value
        changed.names.append(f"header {name} {short(value)}")
        changed.waits |= name == "eta"

    def _without_header(self, changed: _Changes) -> None:
        name = self.dice.choice(sorted(changed.headers, key=str) or ["any"])
        changed.headers.pop(name, None)
        changed.names.append(f"no header {short(name)}")

    def _odd_name(self, changed: _Changes) -> None:
        name = self.key()
        changed.headers[name] = self.value()
        changed.names.append(f"a header called {short(name)}")

    def _id(self, changed: _Changes) -> None:
        text = self.dice.choice((*TEXTS, "a/b", "a\\b", "a#b?c", "x" * 1_020))
        changed.headers["id"] = f"{text}{self._mark}"
        changed.names.append(f"id {short(text)}...")

    def _many_headers(self, changed: _Changes) -> None:
        number = self.dice.choice((100, 257, 900))
        changed.headers.update({f"x-{n}": n for n in range(number)})
        changed.names.append(f"{number} headers")

    def _field(self, changed: _Changes) -> None:
        names = [each for each in payload._ORDER if each not in ("body", "session")]
        name = self.dice.choice(names)
        changed.fields[name] = self.value()
        changed.names.append(f"{name} {short(changed.fields[name])}")

    def _property(self, changed: _Changes) -> None:
        properties = changed.fields["properties"]
        if isinstance(properties, dict):
            name = self.dice.choice(PROPERTIES)
            value = self.dice.choice((self.value(), "base64", "x"))
            changed.fields["properties"] = {**properties, name: value}
            changed.names.append(f"property {name} {short(value)}")

    def _content(self, changed: _Changes) -> None:
        changed.fields["content_type"] = self.dice.choice(CONTENT_TYPES)
        changed.fields["content_encoding"] = self.dice.choice(ENCODINGS)
        changed.names.append(f"{changed.fields['content_type']!r}")

    def _msgpack(self, changed: _Changes) -> None:
        dice = self.dice
        parts = [dice.choice(([], ["x"], {}, self.value())), {}, {}]
        parts[dice.randrange(3)] = self.value()
        body = packed(parts[: dice.choice((0, 1, 2, 3, 3, 3, 3))])
        special = (
            *BYTES,
            packed(nested(101, True)),
            b"\x91" * 100_000,
            b"\x81\xa1a" * 600,
            b"\x93\xdc\xff\xff\x80\x80",
            packed([[msgpack.ExtType(dice.randrange(1, 8), dice.randbytes(5))], {}, {}]),
            packed([[msgpack.ExtType(7, b"\x7f" * 4_097)], {}, {}]),
            b"\x93\x91\xd7\xff" + b"\xff" * 8 + b"\x80\x80",
            b"\x93\x90\x82\xa1a\x01\xa1a\x02\x80",
            b"\x93\x90\x81\x90\x01\x80",
            b"\x93\x91\xa2\xc3\x28\x80\x80",
        )
        body = dice.choice((body, body, dice.choice(special)))
        self._body(changed, body, "a msgpack body")

    def _json(self, changed: _Changes) -> None:
        dice = self.dice
        marked = {"__type__": dice.choice(KOMBU_TYPES), "__value__": jsonable(self.value())}
        text = dice.choice((*JSONS, json.dumps([[marked], {}, {}])))
        changed.fields["content_type"] = "application/json"
        encoding = dice.choice(("utf-8", "utf-8", "utf-16"))
        self._body(changed, text.encode(encoding, "surrogatepass"), "a JSON body")

    def _compressed(self, changed: _Changes) -> None:
        dice = self.dice
        kind = dice.choice(sorted(COMPRESSIONS))
        body = bytes_of(changed.fields["body"])
        stream = COMPRESSIONS[kind](body)
        how = dice.choice(("whole", "junk", "twice", "cut", "flipped", "empty", "bomb", "claim"))
        stream = {
            "junk": stream + b"junk",
            "twice": stream * 2,
            "cut": stream[: dice.randrange(len(stream))],
            "flipped": flipped(dice, stream),
            "empty": b"",
            "bomb": bomb(kind),
            "claim": body,
        }.get(how, stream)
        changed.headers["compression"] = kind
        self._body(changed, stream, f"{kind} {how}")

    def _damaged_body(self, changed: _Changes) -> None:
        body = garbled(self.dice, bytes_of(changed.fields["body"]))
        self._body(changed, body, "a damaged body")

    def _base64(self, changed: _Changes) -> None:
        coded = base64.b64encode(bytes_of(changed.fields["body"]))
        properties = changed.fields["properties"]
        if isinstance(properties, dict):
            changed.fields["properties"] = {**properties, "body_encoding": "base64"}
        body = self.dice.choice((coded[:-1], coded + b"=", b"%%%%", coded + b"junk", coded))
        self._body(changed, body, "base64")

    def _body(self, changed: _Changes, body: bytes, name: str) -> None:
        changed.fields["body"] = body[: self._room]
        changed.names.append(f"{name} {short(body)}")


_CHANGES = (
    *(HostileStream._header,) * 6,
    *(HostileStream._likely_header,) * 4,
    *(HostileStream._msgpack,) * 3,
    *(HostileStream._json,) * 3,
    *(HostileStream._compressed,) * 3,
    *(HostileStream._field,) * 2,
    HostileStream._without_header,
    HostileStream._odd_name,
    HostileStream._id,
    HostileStream._many_headers,
    HostileStream._property,
    HostileStream._content,
    HostileStream._damaged_body,
    HostileStream._base64,
)


def _covered(of: dict[str, Any]) -> bytes:
    """What a signature covers, as bytes that can be compared."""
    properties = of["properties"] if isinstance(of["properties"], dict) else {}
    headers = of["headers"]
    if isinstance(headers, dict):
        kept = [pair for pair in headers.items() if pair[0] not in NOT_SIGNED]
        headers = sorted(kept, key=repr)
    names = ("body", "content_type", "content_encoding", "correlation_id", "session")
    others = [properties.get("reply_to") or None, properties.get("body_encoding") or None]
    return packed([*(of[name] for name in names), *others, headers])


def _covered_in(local: bytes) -> bytes | None:
    """What a signature covers of a payload of the embedded queue; None if it cannot be read."""
    try:
        version, *values = msgpack.unpackb(local, strict_map_key=False)
        named = dict(zip(payload._ORDER, values, strict=True))
        return _covered(named) if version == payload._VERSION else None
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException):
        return None


def nested(depth: int, lists: bool) -> Any:
    """Lists or maps, `depth` deep."""
    value: Any = None
    for _ in range(depth):
        value = [value] if lists else {"k": value}
    return value


def bytes_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


def jsonable(value: Any) -> Any:
    """The value if JSON has it, else its repr."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def packed(value: Any) -> bytes:
    """The value as msgpack, with halves of surrogate pairs."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def short(value: object) -> str:
    return ascii(value)[:40]


@cache
def bomb(kind: str) -> bytes:
    """A short stream of many zeros."""
    return COMPRESSIONS[kind](bytes(BOMB_BYTES))


def flipped(dice: random.Random, data: bytes) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data or b"\x00")
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def garbled(dice: random.Random, data: bytes) -> bytes:
    """The bytes cut off, with a bit changed, with junk, doubled, or replaced."""
    at = dice.randrange(len(data) + 1)
    ways = (
        data[:at],
        data[at:],
        data[:at] + dice.randbytes(dice.randint(1, 9)) + data[at:],
        data + dice.randbytes(dice.randint(1, 40)),
        data[:at] + data,
        dice.randbytes(dice.choice((0, 1, 2, 50, 3_000))),
        flipped(dice, data),
    )
    return dice.choice(ways)


def packed_local(of: dict[str, Any]) -> bytes:
    """The payload of the embedded queue, whatever the types of the fields."""
    return packed([payload._VERSION, *(of[name] for name in payload._ORDER)])


def packed_storage(of: dict[str, Any]) -> str:
    """The text of a Storage queue's message, whatever the types of the fields."""
    properties = {name: of[name] for name in wire._NAMES if of[name] != wire._DEFAULTS[name]}
    if of["properties"]:
        properties["properties"] = of["properties"]
    more = {"v": wire._VERSION, "headers": of["headers"], "properties": properties}
    return base64.b64encode(packed({**more, "body": of["body"]})).decode()
