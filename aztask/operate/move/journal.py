"""How far a move is: one row in the result store, which one process at a time works on.

Rules
1. The row belongs to the new owner, and is named after the old one: a move back has another row.
2. One process holds it, by a lease that every note renews by compare-and-set. If the process dies,
   another one goes on after `LEASE_SECONDS`.
3. The token is a part of the message id of everything that is sent. A process that goes on keeps
   it, so that what is sent twice has one id. A move that begins after one has ended well has a new
   token: a message that went there and back must not look like a copy of itself to duplicate
   detection.
4. `planned` are the runs whose start rows were given back for messages that may be at both
   addresses: those of the last batch, those of which it is not sure that they left the old one
   (`doubt`), and those of the process before. The move leaves these rows alone from then on: a
   worker at the new address may have claimed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, Final, TypeAlias

from aztask.address.owner import Owner
from aztask.errors import AztaskError
from aztask.limits.control import operator_name
from aztask.operate.ledger import Ledger, packed, unpacked
from aztask.stores.rows import Row
from aztask.support import chance, clock

MOVES: Final = "moves"
LEASE_SECONDS: Final = 60.0
NOTED_EVERY: Final = 10.0
"""Seconds between two renewals of the lease, where nothing else is noted."""

RunKeyParts: TypeAlias = tuple[str, int, int]
"""Task id, generation and hop."""


class MoveTaken(AztaskError):
    """Another process works on this move now."""


class MoveJournal:
    """The row of one move, while this process holds it. One thread."""

    def __init__(self, ledger: Ledger, old: Owner) -> None:
        """ledger: of the new owner."""
        self._ledger = ledger
        self._key = f"from-{old.of_broker.mark}"
        self._name = f"{operator_name()} {chance.token()}"
        self._row: Row | None = None
        self._record: dict[str, Any] = {}
        self._doubted: set[RunKeyParts] = set()
        self._noted = 0.0
        self._old = old.broker

    def begin(self) -> None:
        """Take the row. Raises MoveTaken while another process holds it, and BrokerUnavailable."""
        (row,) = self._ledger.get(MOVES, [self._key])
        found = None if row is None else unpacked(row)
        now = self._ledger.now()
        known = dict(found) if found is not None and _readable(found) else {}
        if known.get("holder") and known["until"] > now:
            raise MoveTaken(
                f"{known['holder'].rpartition(' ')[0]} is moving this already; if that process has "
                f"died, try again in {known['until'] - now:.0f} s"
            )
        if not known or known["done"]:
            known = {"old": self._old, "token": chance.token(), "plan": [], "began": now}
        self._row = row
        self._write(known | {"done": False})
        self._doubted = set(self.planned)

    @property
    def token(self) -> str:
        """A part of all message ids of this move: see rule 3."""
        token: str = self._record["token"]
        return token

    @property
    def planned(self) -> Set[RunKeyParts]:
        """The runs whose start rows this move leaves alone from now on: see rule 4."""
        return {(each[0], each[1], each[2]) for each in self._record["plan"]}

    def plan(self, keys: Iterable[RunKeyParts]) -> None:
        """Note the runs whose start rows were given back for what is sent next."""
        self._write({**self._record, "plan": [list(key) for key in self._doubted.union(keys)]})

    def doubt(self, keys: Set[RunKeyParts]) -> None:
        """Note runs whose messages were sent and may still be at the old address."""
        if not keys <= self._doubted:
            self._doubted |= keys
            self.plan(self.planned)

    def noted(self) -> None:
        """Renew the lease, if that is due. Raises MoveTaken."""
        if clock.monotonic() - self._noted >= NOTED_EVERY:
            self._write(self._record)

    def end(self, *, done: bool) -> None:
        """Give the row back. done: nothing that was sent is still at the old address."""
        if self._row is not None:
            self._write({**self._record, "done": done}, held=False)
            self._row = None

    def _write(self, record: dict[str, Any], *, held: bool = True) -> None:
        now = self._ledger.now()
        until = now + LEASE_SECONDS if held else 0.0
        record = {**record, "holder": self._name if held else "", "until": until, "changed": now}
        row = self._ledger.write(MOVES, self._key, packed(record), self._row)
        if row is None:
            raise MoveTaken("another process works on this move now")
        self._row, self._record, self._noted = row, record, clock.monotonic()


_TYPES: Final = {"old": str, "token": str, "plan": list, "done": bool, "holder": str}


def _readable(found: Mapping[str, Any]) -> bool:
    """Whether a row is one that `MoveJournal` wrote; a damaged one is replaced."""
    if not all(isinstance(found.get(name), kind) for name, kind in _TYPES.items()):
        return False
    planned = all(isinstance(each, list) and len(each) == 3 for each in found["plan"])
    return planned and isinstance(found.get("until"), float)
