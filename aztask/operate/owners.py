"""Who shares the result store, rows without an owner, and moving rows to another owner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from aztask.address.owner import Owner
from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, did_you_mean
from aztask.leaseadvice.document import adopt as adopt_advice
from aztask.operate.action import Action, Progress, results_of
from aztask.operate.ledger import ledger_of
from aztask.steps.parts import parts_of as streams_of
from aztask.steps.records import steps_of
from aztask.steps.waits import waits_of
from aztask.stores.records.base import ResultStore
from aztask.stores.records.history import history_of
from aztask.stores.records.onceruns import once_runs_of
from aztask.stores.records.owners import UNOWNED_SECONDS, CountsUnowned, OwnedRows, parts_of
from aztask.support.display import plural
from aztask.support.finding import Finding, failed, fine, warning

_ON: Final = " on "
NEWEST: Final = 1_000
"""Outcomes among which one with a signature is looked for."""


def owner_findings(app: App, store: ResultStore) -> Iterator[Finding]:
    """Who owns the rows, and a warning of rows that no owner has adopted for a day."""
    try:
        owners = owners_of(app, store)
        before = time.time() - UNOWNED_SECONDS
        unowned = sum(
            part.unowned(before) for part in parts_of(store) if isinstance(part, CountsUnowned)
        )
    except AztaskError as error:
        yield failed("results", "owners", error)
        return
    mine = app.owner
    others = sorted({str(each) for each in owners if each.broker != mine.broker})
    text = f"rows of this app belong to {mine.of_broker}"
    if others:
        text += f"; the store is shared with {', '.join(others)}"
    yield fine("results", "owners", text)
    if unowned and mine.known:
        yield warning(
            "results",
            "unowned",
            f"{plural(unowned, 'row')} of the result store have had no owner for a day: an older "
            "release wrote them, and no worker has received their messages since",
            "run the workers of all apps of this store once; ended runs without an owner are "
            "deleted 30 days after their retention",
        )


def owners_of(app: App, store: ResultStore) -> set[Owner]:
    return set().union(*(part.owners() for part in owned_parts(app, store)))


def owned_parts(app: App, store: ResultStore) -> Iterator[OwnedRows]:
    """All parts of the store whose rows have owners."""
    codec = app.codec
    own = steps_of(store, codec), waits_of(store, codec), streams_of(store, codec)
    kept = ledger_of(store), once_runs_of(store), history_of(store)
    for part in (*parts_of(store), *own, *kept):
        if isinstance(part, OwnedRows):
            yield part


def adoption(app: App, old: str) -> AdoptRows:
    """Make the rows of another owner those of this app.

    * `old`: a broker's name as `aztask doctor` shows it, or ``APP on BROKER``.

    Raises ConfigurationError if the app has no owner, or no row has that one.
    """
    mine = app.owner
    if not mine.known:
        raise ConfigurationError("this app has no owner: name its broker, or set AZTASK_OWNER")
    name, on, broker = old.rpartition(_ON)
    given = Owner(broker, name) if on else Owner(old)
    known = owners_of(app, results_of(app))
    meant = {each for each in known if each == given or _of_broker(given, each)}
    if not meant:
        texts = sorted({str(each) for each in known})
        raise ConfigurationError(
            f"no row belongs to {old!r}.{did_you_mean(old, texts)} The owners are: "
            f"{', '.join(texts) or 'none'}"
        )
    if given in (mine, mine.of_broker):
        raise ConfigurationError(f"the rows of {old} are this app's already")
    if not app.codec.signs and _is_signed(results_of(app), given.broker):
        raise ConfigurationError(
            f"the rows of {old} are signed, and this program has no signing keys: a worker with "
            "keys would not believe them. Set AZTASK_SIGNING_KEYS, and adopt them again"
        )
    return AdoptRows(app, len(meant), given)


def _is_signed(store: ResultStore, broker: str) -> bool:
    """Whether one of the newest outcomes of a broker is signed; this program has no keys."""
    newest = store.recent(limit=NEWEST, everyone=True)
    return any(run.unverified and run.broker == broker for run in newest)


def _of_broker(given: Owner, each: Owner) -> bool:
    """Whether the owner is of the broker that was given without an app."""
    return not given.app and each.broker == given.broker


@dataclass(slots=True)
class AdoptRows(Action[int]):
    """Moves rows to this app; `act` returns how many. If the process dies, do it again.

    * `count`: of the owners that have rows; the rows themselves are not counted before.
    * `old`: their owner now, without an app if all of its broker are meant.

    Each part of the store moves what belongs to it: runs and workflows by the broker alone, what
    code declares by broker and app. Without an app in `old`, that is this app's own name. A shared
    document of lease advice counts as a part of the store.
    """

    name: ClassVar[str] = "adopt"

    old: Owner

    def __str__(self) -> str:
        return f"make the rows of {self.old} those of {self.app.owner}"

    def _act(self, progress: Progress) -> int:
        moved = adopt(self.app, self.old)
        self.done = self.count
        return moved


def adopt(app: App, given: Owner) -> int:
    """Make the rows of another owner those of this app; returns how many. See `AdoptRows`."""
    old = given if given.app else Owner(given.broker, app.owner.app)
    moved = sum(part.adopt(old) for part in owned_parts(app, results_of(app)))
    return moved + (adopt_advice(app.leases.store, old) if app.leases.enabled else 0)
