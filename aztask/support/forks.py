"""What to do in a forked child, on the systems that fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_child(action: Callable[[], None]) -> None:
    """Call `action` in every child that this process forks. Windows never forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)
