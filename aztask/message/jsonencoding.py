"""The json encoding of values: Kombu's, without what would come back as something else.

Kombu writes a date as ``{"__type__": "date", "__value__": "2026-11-25"}``, and bytes, times,
Decimals and UUIDs likewise. The format stays; only what reading would change is refused:

Rules
1. Values that lose a part of themselves: see `aztask.message.exact`.
2. Two keys of one dict that become the same text, such as 1 and "1": a reader keeps one of them.
3. A dict whose only keys are ``__type__`` and ``__value__``: a reader makes another type of it.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from kombu.utils.json import JSONEncoder

from aztask.errors import CodecError
from aztask.message.exact import exact
from aztask.support.display import one_line

_MARKER: Final = '"__type__":'
_MARKED: Final = {"__type__", "__value__"}
_find_key: Final = re.compile(r'"(?:-?[0-9][^"\\]*|true|false|null|NaN|-?Infinity)":').search
"""It finds a key that json.dumps may have made of a number, a bool or None."""


class _Encoder(JSONEncoder):  # type: ignore[misc]
    """Kombu's encoder; `marked` counts the values that it wrote with their type."""

    def __init__(self) -> None:
        super().__init__()
        self.marked = 0

    def default(self, o: Any) -> Any:
        """What is written in the place of `o`. Raises TypeError or ValueError."""
        found = super().default(exact(o))
        if isinstance(found, dict) and found.keys() == _MARKED:
            self.marked += 1
        return found


def dumps(value: Any) -> bytes:
    """`value` as JSON, in ASCII. Raises what encoders raise: TypeError, ValueError and others."""
    encoder = _Encoder()
    text: str = encoder.encode(value)
    if _find_key(text) is not None or (_MARKER in text and text.count(_MARKER) != encoder.marked):
        _check_maps(text, encoder.marked)
    return text.encode("ascii")  # all other characters are escaped


def _check_maps(text: str, marked: int) -> None:
    """Refuse keys that are the same, and more dicts that look like marked values than `marked`."""
    found = 0

    def check(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal found
        made = dict(pairs)
        if len(made) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(
                f'two keys of a dict are both written as "{twice[:60]}"; use text as keys'
            )
        found += made.keys() == _MARKED
        return made

    json.loads(text, object_pairs_hook=check)
    if found != marked:
        raise ValueError(
            "a dict with only the keys __type__ and __value__ would come back as another type;"
            ' add a key, or use serializer="msgpack"'
        )


# Values that Python's json module reads and writes although they are not JSON (RFC 8259).
#
# * NaN and the infinities (section 6). A number such as ``1e999`` is valid JSON, but Python reads
#   it as infinity, which no JSON can carry on.
# * Halves of surrogate pairs, which are not UTF-8 (section 8.2).


_SUSPICIOUS: Final = re.compile(rb"NaN|Infinity|\\u[dD]|[0-9][eE]\+?[0-9]{3}|[0-9]{100}")
"""Bytes without a match hold none of these values: a number below 1e100 times 1e99 is finite."""


def check_json_values(body: bytes, error: type[CodecError], what: str) -> None:
    """Raise `error` if `body` holds one of these values. what: names the body in the text."""
    if _SUSPICIOUS.search(body) is None:
        return
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{what} hold half of a surrogate pair, which is not text") from None
    except (ValueError, RecursionError) as problem:
        reason = one_line(str(problem) or type(problem).__name__, 200)
        raise error(f"{what} are not JSON: {reason}") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large for a float; send it as text")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; use None, or the msgpack serializer")
