"""Values that Python's json module reads and writes although they are not JSON (RFC 8259).

* NaN and the infinities (section 6). A number such as ``1e999`` is valid JSON, but Python reads it
  as infinity, which no JSON can carry on.
* Halves of surrogate pairs, which are not UTF-8 (section 8.2).
"""

from __future__ import annotations

import json
import math
import re
from typing import Final, NoReturn

from aztask.errors import CodecError
from aztask.support.display import one_line

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
