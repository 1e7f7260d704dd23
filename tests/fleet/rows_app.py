"""Steps on the rows of a result store, written so that two revisions of aztask run them.

Usage: ``python rows_app.py RESULTS BROKER`` with a JSON list of steps as standard input; prints the
list of their answers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import aztask
from aztask.address.addresses import LocalAddress
from aztask.address.owner import Owner
from aztask.address.urls import parse_results
from aztask.message.envelope import Envelope
from aztask.queues.engine import Database
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.store import TablesResults

if not (aztask.__file__ or "").startswith(os.environ["FLEET_PACKAGE"]):
    raise ImportError(f"{aztask.__file__} is not the release that this process was meant to use")


def opened(results: str, broker: str) -> Any:
    """The result store at an address, for the app ``shop`` of a broker."""
    address, owner = parse_results(results), Owner(broker, "shop")
    if isinstance(address, LocalAddress):
        return LocalResults(Database(address.path), owner=owner)
    return TablesResults(address, owner=owner)


class Steps:
    """What a step's name means."""

    def __init__(self, store: Any) -> None:
        self.uniques, self.controls, self.index = store.uniques, store.controls, store.dead_index

    def hold(self, key: str, data: str, due: float) -> bool:
        return self.uniques.write(key, data.encode(), due, None) is not None

    def replace(self, key: str, data: str, due: float) -> bool:
        return self.uniques.write(key, data.encode(), due, self.uniques.read(key)) is not None

    def release(self, key: str) -> bool:
        return bool(self.uniques.release(self.uniques.read(key)))

    def holder(self, key: str) -> list[Any] | None:
        found = self.uniques.read(key)
        return found and [found.data.decode(), found.due, found.owner.broker]

    def due(self, before: float) -> list[str]:
        return [each.key for each in self.uniques.due(before, 100)]

    def enter(self, name: str, data: str) -> bool:
        return self.controls.write([EntryChange(name, data.encode())]) != [None]

    def change(self, name: str, data: str) -> bool:
        (found,) = self.controls.read([name])
        return self.controls.write([EntryChange(name, data.encode(), found.tag)]) != [None]

    def drop(self, name: str) -> bool:
        (found,) = self.controls.read([name])
        return bool(self.controls.remove(name, found.tag))

    def entry(self, name: str) -> str | None:
        (found,) = self.controls.read([name])
        return found and found.data.decode()

    def purge(self, prefix: str, before: float) -> int:
        return int(self.controls.purge(prefix, before))

    def owners(self) -> list[str]:
        return sorted(map(str, self.uniques.owners() | self.controls.owners()))

    def note(self, *keys: str) -> None:
        for key in keys:
            envelope = Envelope(b"x" * 70_000, {"n": 1}, message_id=key)
            self.index.note([IndexedDeadLetter("a/b", envelope, f"why {key}", "what", 5.0, 2)])

    def notes(self) -> list[list[Any]]:
        former = hasattr(self.index, "page")
        found = self.index.page("a/b", 0, 100) if former else self.index.notes("a/b")
        return [
            [each.key, each.reason, each.description, each.at, len(each.envelope.body), each.damage]
            for each in found
        ]

    def unnote(self, *keys: str) -> None:
        self.index.drop("a/b", keys)

    def keep(self, keys: list[str], before: float) -> int:
        return int(self.index.keep_only("a/b", keys, before))


if __name__ == "__main__":
    steps = Steps(opened(*sys.argv[1:]))
    json.dump([getattr(steps, name)(*given) for name, *given in json.load(sys.stdin)], sys.stdout)
