"""Queue names that a service does not allow, translated so that they can be translated back.

Celery and Kombu allow any text as a queue's name; the services allow few characters. With the
transport option ``translate_names`` a name that the service refuses is sent to another one:

    Invoices.EU  ->  enc-x49nvoicesx2ex45x55

Rules
1. A name that the service allows stays as it is, unless it looks like a translated one.
2. A translated name begins with `PREFIX`. Lower-case letters and digits stay, except ``x``; every
   other character becomes ``x`` and two hexadecimal digits for each of its UTF-8 bytes. So two
   names never become one, and `original_name` is exact.
3. A name that is too long when it is translated is refused. It is never cut or hashed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from aztask.errors import InvalidQueueName

PREFIX: Final = "enc-"

_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwyz0123456789")
_ESCAPES: Final = re.compile(r"(?:x[0-9a-f]{2})+")


def translated_name(queue: str, check: Callable[[str], None]) -> str:
    """The name to use at the service for `queue`.

    * `check`: raises InvalidQueueName for a name that the service does not allow.

    Raises InvalidQueueName if the translated name is not allowed either: it is too long.
    """
    if not queue.startswith(PREFIX):
        try:
            check(queue)
        except InvalidQueueName:
            pass
        else:
            return queue
    try:
        encoded = "".join(each if each in _PLAIN else _escaped(each) for each in queue)
    except UnicodeEncodeError:
        raise InvalidQueueName(f"{queue!a} cannot name a queue: it is not valid text") from None
    check(PREFIX + encoded)
    return PREFIX + encoded


def original_name(name: str) -> str:
    """The name that `translated_name` turned into `name`; any other name stays as it is."""
    if not name.startswith(PREFIX):
        return name
    try:
        return _ESCAPES.sub(_unescaped, name.removeprefix(PREFIX))
    except UnicodeDecodeError:
        return name


def _escaped(character: str) -> str:
    return "".join(f"x{byte:02x}" for byte in character.encode("utf-8"))


def _unescaped(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("x", "")).decode("utf-8")
