"""Raises at one function call after the other inside what a test calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Struck(Exception):
    """The error that is raised at a call."""


def strike_each(take: Callable[[], Any], source: str) -> list[tuple[Any, int]]:
    """Call `take` until it gives None; each value, and how many calls had raised before.

    source: the file whose functions raise as they are called, except that of `take` itself: first
    the first one, after that the second, and so on, until none is left.
    """
    found = []
    while True:
        number = 0
        while True:
            value, struck = _struck(take, source, number)
            if not struck:
                break
            number += 1
        if value is None:
            return found
        found.append((value, number))


def _struck(take: Callable[[], Any], source: str, number: int) -> tuple[Any, bool]:
    left = number

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename == source:
            if not left:
                raise Struck
            left -= 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return take(), False
    except Struck:
        return None, True
    finally:
        sys.settrace(before)
