"""Names of queues, translated back: `aztask.celery.transport.names` makes two names never one."""

from __future__ import annotations

import re

from aztask.celery.transport.names import PREFIX

ESCAPES = re.compile(r"(?:x[0-9a-f]{2})+")


def original_name(name: str) -> str:
    """The name that `translated_name` turned into `name`; any other name stays as it is."""
    if not name.startswith(PREFIX):
        return name
    try:
        return ESCAPES.sub(unescaped, name.removeprefix(PREFIX))
    except UnicodeDecodeError:
        return name


def unescaped(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("x", "")).decode("utf-8")
