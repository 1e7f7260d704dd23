"""Open circuit breakers: one small document in the result store, which workers of such tasks read.

A task without a row is closed. An open row has a time before which no worker probes, and the lease
of the worker that does.

Rules
1. A change is a compare-and-set of the whole document, so of many workers one opens a breaker and
   one probes it.
2. Only the worker that holds the probe closes the breaker or makes the pause longer. If that worker
   dies, its lease ends after `PROBE_SECONDS`, and another one may probe.
3. Times are the store's, in UTC epoch seconds.
4. Each app has a document of its own, since code declares breakers. Commands show and close those
   of all apps of the broker (`breakers_of_apps`), so that they work without the app.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from aztask.errors import ConfigurationError
from aztask.limits.control import UnreadableControls
from aztask.stores.records.controls import ENTRY_LIMIT, ControlStore, Entry, EntryCell
from aztask.stores.rows import Kept, New, change
from aztask.support import chance

NAME: Final = "breakers"
WHAT: Final = "the circuit breakers"
VERSION: Final = 1
PROBE_SECONDS: Final = 15.0
"""The lease of a probe; the worker renews it while the probe runs."""


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """An open breaker.

    * `task`: its registered name.
    * `at`: since when it is open. `until`: no worker probes before.
    * `by`: the worker that opened it. `why`: such as "6 of 10 runs failed in 60 s".
    * `failures`: of probes, in a row.
    * `probe_by`: the worker that probes, as `aztask.limits.holders.holder_of` gives it, or "".
      `probe_until`: when its lease ends.
    """

    task: str
    at: float
    until: float
    by: str
    why: str
    failures: int = 0
    probe_by: str = ""
    probe_until: float = 0.0

    def probed(self, now: float) -> bool:
        """Whether a worker holds the probe now."""
        return bool(self.probe_by) and now < self.probe_until


Open: TypeAlias = Mapping[str, OpenBreaker]
"""Open breakers by task."""

Edit: TypeAlias = Callable[[OpenBreaker | None], OpenBreaker | None]


class Breakers:
    """Reads and changes the document. Any thread may call.

    All methods raise BrokerUnavailable if the store is unreachable, and UnreadableControls. The
    changes return all open breakers as they are then.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store

    @property
    def app(self) -> str:
        """The name of the app whose breakers these are; "" if it is not known."""
        return self._store.owner.app

    def read(self) -> Open:
        """The breakers that are open now."""
        return _open_of(EntryCell(self._store, NAME).read())

    def open(self, new: OpenBreaker) -> Open:
        """Open a breaker; one that is open already stays as it is."""
        return self._change(new.task, lambda row: row or new)

    def probe(self, task: str, worker: str, now: float) -> Open:
        """Take the probe, or renew it; nothing changes if another worker has it, or before `until`.

        The caller has it if `probe_by` is its name afterwards.
        """

        def taken(row: OpenBreaker | None) -> OpenBreaker | None:
            if row is None or now < row.until or (row.probe_by != worker and row.probed(now)):
                return row
            return replace(row, probe_by=worker, probe_until=now + PROBE_SECONDS)

        return self._change(task, taken)

    def succeeded(self, task: str, worker: str) -> Open:
        """Close the breaker after a probe of this worker."""
        return self._change(task, lambda row: None if row and row.probe_by == worker else row)

    def failed(self, task: str, worker: str, until: float) -> Open:
        """Keep the breaker open after a probe of this worker, which has failed."""
        return self._after_probe(task, worker, lambda row: (row.failures + 1, until))

    def released(self, task: str, worker: str) -> Open:
        """Give the probe back: its run ended without an outcome that counts."""
        return self._after_probe(task, worker, lambda row: (row.failures, row.until))

    def close(self, tasks: Iterable[str]) -> list[OpenBreaker]:
        """Close these whatever their probes do; returns those that were open."""
        ended = []
        for task in tasks:
            if (row := self.read().get(task)) is not None:
                self._change(task, lambda row: None)
                ended.append(row)
        return ended

    def close_all(self) -> list[OpenBreaker]:
        """Close all. This also replaces a document that cannot be read."""

        def closed(entry: Entry | None) -> New[bytes, list[OpenBreaker]] | Kept[list[OpenBreaker]]:
            try:
                ended = list(_open_of(entry).values())
            except UnreadableControls:
                return New(_data_of({}), [])
            return New(_data_of({}), ended) if ended else Kept([])

        return change(EntryCell(self._store, NAME), closed, WHAT)

    def _after_probe(
        self, task: str, worker: str, after: Callable[[OpenBreaker], tuple[int, float]]
    ) -> Open:
        def ended(row: OpenBreaker | None) -> OpenBreaker | None:
            if row is None or row.probe_by != worker:
                return row
            failures, until = after(row)
            return replace(row, failures=failures, until=until, probe_by="", probe_until=0.0)

        return self._change(task, ended)

    def _change(self, task: str, edit: Edit) -> Open:
        """Edit one row, again if another program changed the document in between."""

        def edited(entry: Entry | None) -> New[bytes, Open] | Kept[Open]:
            rows = dict(_open_of(entry))
            before = rows.pop(task, None)
            after = edit(before)
            if after is not None:
                rows[task] = after
            return Kept(rows) if after == before else New(_data_of(rows), rows)

        return change(EntryCell(self._store, NAME), edited, WHAT)


def breakers_of_apps(store: ControlStore) -> list[Breakers]:
    """The breakers of each app of the store's broker. Raises BrokerUnavailable."""
    mine = store.owner
    if not mine.known:
        return [Breakers(store)]
    apps = {each for each in store.owners() if each.broker == mine.broker and each.app}
    return [Breakers(store.of(each)) for each in sorted(apps, key=str)]


def _data_of(rows: Open) -> bytes:
    """The document's bytes. Raises ConfigurationError if it became too long."""
    record = {
        "v": VERSION,
        "write": chance.token(),  # no two writers write the same bytes
        "open": [
            [
                each.task, each.at, each.until, each.by, each.why, each.failures, each.probe_by,
                each.probe_until,
            ]
            for each in rows.values()
        ],
    }  # fmt: skip
    data = json.dumps(record, separators=(",", ":")).encode()
    if len(data) > ENTRY_LIMIT:
        raise ConfigurationError("too many circuit breakers are open: pause their queues instead")
    return data


def _open_of(entry: Entry | None) -> Open:
    if entry is None:
        return {}
    try:
        record = json.loads(entry.data)
        if record["v"] != VERSION:
            raise UnreadableControls(
                "a newer release of aztask wrote which circuit breakers are open; update aztask "
                "here"
            )
        rows = [_row_of(each) for each in record["open"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnreadableControls(
            "the entry in the result store that says which circuit breakers are open is damaged; "
            "run aztask control resume --all to replace it"
        ) from None
    return {row.task: row for row in rows}


def _row_of(record: Any) -> OpenBreaker:
    task, at, until, by, why, failures, probe_by, probe_until = record
    for text in (task, by, why, probe_by):
        if not isinstance(text, str):
            raise TypeError
    for number in (at, until, probe_until, failures):
        if isinstance(number, bool) or not math.isfinite(number):
            raise TypeError
    times = (float(at), float(until))
    return OpenBreaker(task, *times, by, why, int(failures), probe_by, float(probe_until))
