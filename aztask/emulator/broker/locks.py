"""Lock tokens: which message each one stands for.

Rules
1. The token is the engine's lease token as a uuid; only this process knows which message it belongs
   to, so tokens do not outlive a restart.
2. Tokens whose lock has lapsed are forgotten in sweeps; the engine alone decides what is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_SWEEP_EVERY = 20_000  # new tokens between two sweeps


class Lock(NamedTuple):
    """queue: the engine's name. dead: whether it lies in the dead letters. until: lease clock."""

    queue: str
    dead: bool
    seq: int
    token: str
    session: str | None
    until: float


class Locks:
    """Locks by token (its hexadecimal digits)."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._locks: dict[str, Lock] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._locks)

    def add(self, lock: Lock) -> None:
        """Remember a token."""
        self._locks[lock.token] = lock
        self._added += 1
        if self._added > _SWEEP_EVERY:
            self._sweep()

    def get(self, token: str) -> Lock | None:
        """What a token stands for, None when it is unknown."""
        return self._locks.get(token)

    def renewed(self, token: str, until: float) -> None:
        """The lock lasts longer now."""
        lock = self._locks.get(token)
        if lock is not None:
            self._locks[token] = lock._replace(until=until)

    def discard(self, token: str) -> None:
        """The message was settled."""
        self._locks.pop(token, None)

    def _sweep(self) -> None:
        """A session's messages are locked as long as the session: kept for an hour."""
        self._added = 0
        now = self._monotonic()
        kept = {
            key: lock
            for key, lock in self._locks.items()
            if lock.until + (3600.0 if lock.session is not None else 0.0) > now
        }
        self._locks = kept
