"""Is this a notebook, or a Python prompt? There, code that declares something runs repeatedly."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from typing import Any


def interactive() -> bool:
    """True in a notebook and at a prompt: what a cell declares twice is meant to be replaced.

    Python sets ``sys.ps1`` at its prompt, and IPython, the kernel of notebooks, marks itself.
    """
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


def replaces(earlier: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """True if `function` is a new version of `earlier`: a cell that was run or reloaded again."""
    return interactive() and _full_name(earlier) == _full_name(function)


def _full_name(function: Callable[..., Any]) -> tuple[Any, Any]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)
