"""Lock tokens."""

from __future__ import annotations

from aztask.emulator.broker.broker import Lock, Locks


def test_expired_locks_are_swept():
    clock = [0.0]
    locks = Locks(lambda: clock[0])
    lock = Lock("q", False, 1, "a", None, 10.0)
    locks.add(lock)
    locks.renewed("a", 20.0)
    locks.renewed("unknown", 20.0)
    assert locks.get("a").until == 20.0
    locks.add(lock._replace(token="s", session="s"))
    clock[0] = 30.0
    for number in range(20_001):
        locks.add(lock._replace(token=str(number), until=25.0 if number else 90.0))
    assert locks.get("a") is None
    assert locks.get("s") is not None
    assert len(locks) < 10
    locks.discard("s")
    assert locks.get("s") is None
