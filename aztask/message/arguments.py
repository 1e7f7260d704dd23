"""The keywords that the body of a message may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aztask.errors import CodecError


def check_keywords(kwargs: Mapping[Any, Any], error: type[CodecError]) -> None:
    """Raise `error` for keywords that no call can have."""
    for name in kwargs:
        if not isinstance(name, str):
            raise error(f"a keyword must be text, not {type(name).__name__}")
    if "self" in kwargs:
        raise error("a keyword argument cannot be called self; rename the task's parameter")
