"""Payloads in memory, for the inline mode of tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aztask.errors import PayloadMissing
from aztask.message.payload import StoredValue
from aztask.payloads.store import Listed, listed


class MemoryPayloads:
    """A store that ends with its process; see `aztask.payloads.store.PayloadStore`."""

    remote = False

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return "<MemoryPayloads>"

    def write(self, name: str, data: bytes) -> None:
        """Store `data` until this process ends."""
        self.stored[name] = data

    def read(self, stored: StoredValue) -> bytes:
        """The bytes that were kept. Raises PayloadMissing, PayloadDamaged."""
        data = self.stored.get(stored.name)
        if data is None:
            raise PayloadMissing(f"the payload {stored.name} is gone")
        stored.verify(data)
        return data

    def remove(self, names: Sequence[str]) -> None:
        """Forget these payloads; missing ones are skipped."""
        for name in names:
            self.stored.pop(name, None)

    def list(self) -> Iterator[Listed]:
        """All payloads that are stored now."""
        found = (listed(name, len(data)) for name, data in list(self.stored.items()))
        return (each for each in found if each is not None)

    def close(self) -> None:
        """Keep everything: the app may be used again."""
