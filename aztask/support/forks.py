"""What to do around a fork, on the systems that fork.

Rules
1. A lock that another thread holds at a fork stays locked in the child. So locks that a
   child may need, of objects that outlive a fork, are made here: a child gets them unlocked.
2. What such a lock guards must be of use at any moment: it is replaced as a whole, or the child
   notices by its process id that it must start anew.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def in_forked_child(action: Callable[[], None]) -> None:
    """Call `action` in every child that this process forks. Windows never forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


def around_fork(
    before: Callable[[], None], in_parent: Callable[[], None], in_child: Callable[[], None]
) -> None:
    """Call `before` a fork, and afterwards `in_parent` and `in_child`."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def fork_safe_lock() -> threading.Lock:
    """A lock that is unlocked in every forked child."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def fork_safe_rlock() -> Any:
    """A reentrant lock that is unlocked in every forked child."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _unlock_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as `threading` does with its own locks


in_forked_child(_unlock_all)
