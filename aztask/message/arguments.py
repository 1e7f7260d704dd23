"""What the body of a message may hold beside values: its keywords, and Celery's embedded tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aztask.errors import CodecError, ContentRefused, DecodeError
from aztask.support.display import one_line


def check_keywords(kwargs: Mapping[Any, Any], error: type[CodecError]) -> None:
    """Raise `error` for keywords that no call can have."""
    for name in kwargs:
        if not isinstance(name, str):
            raise error(f"a keyword must be text, not {type(name).__name__}")
    if "self" in kwargs:
        raise error("a keyword argument cannot be called self; rename the task's parameter")


def check_embed(embed: object) -> None:
    """Refuse embedded tasks that would run before or after this one: none is dropped silently."""
    if embed is None:
        return
    if not isinstance(embed, dict):
        raise DecodeError(f"embed must be a map, not {type(embed).__name__}")
    asked = [str(name) for name, value in embed.items() if value]
    if asked:
        raise ContentRefused(
            f"the message embeds {one_line(', '.join(asked), 100)}, which aztask does not run;"
            " send each task by itself"
        )
