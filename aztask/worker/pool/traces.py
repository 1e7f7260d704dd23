"""Tracebacks of tasks: they begin at the user's code, not in the machinery that called it."""

from __future__ import annotations

from types import TracebackType
from typing import Final

MACHINERY: Final = ("aztask", "asyncio", "contextlib")
"""Packages whose frames come before the user's first one."""


def trim_traceback(error: BaseException) -> None:
    """Remove the frames before the first one of the user's code.

    A traceback without any such frame stays whole: the error came from the machinery itself.
    """
    trace = error.__traceback__
    while trace is not None and _machinery(trace):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


def shows_user_code(error: BaseException) -> bool:
    """Whether a frame of the traceback is the user's."""
    trace = error.__traceback__
    while trace is not None and _machinery(trace):
        trace = trace.tb_next
    return trace is not None


def _machinery(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in MACHINERY
