"""Attributes that other frameworks have; ours have none, and the error says what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class _Elsewhere:
    """An attribute of another framework's class: reading it raises AttributeError with our word.

    A ``__getattr__`` of the class would slow every access to an attribute that exists.
    """

    def __init__(self, name: str, write: str) -> None:
        self._text = f"object has no attribute {name!r}; write {write}"

    def __get__(self, instance: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__!r} {self._text}")


def say_ours(kind: type, words: Mapping[str, str]) -> None:
    """Let `kind` say of each name in `words` what to write instead."""
    for name, write in words.items():
        setattr(kind, name, _Elsewhere(name, write))
