"""Values that Python's json reads and writes although JSON (RFC 8259) does not have them."""

from __future__ import annotations

import json
from typing import NoReturn

from aztask.errors import CodecError
from aztask.support.display import one_line


def check_json_values(body: bytes, error: type[CodecError], what: str) -> None:
    """Refuse values that Python's json accepts although JSON (RFC 8259) does not.

    NaN and the infinities (section 6), and halves of surrogate pairs, which are not UTF-8.
    """
    suspicious = b"NaN" in body or b"Infinity" in body or b"\\ud" in body or b"\\uD" in body
    if not suspicious:
        return
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise error(f"{what} hold half of a surrogate pair, which is not text") from None
    except (ValueError, RecursionError) as problem:
        raise error(
            f"{what} are not JSON: {one_line(str(problem) or type(problem).__name__, 200)}"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; use None, or the msgpack serializer")
