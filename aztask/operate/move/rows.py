"""The rows of a result store, from the old owner to the new one; and the payloads.

Rules
1. Rows become the new owner's before any message is sent there: a worker that gets a message finds
   its run, with whatever was recorded.
2. Pauses of the operators move like all rows. The pauses that a move leaves at the old address do
   not: they hold workers there that were forgotten, and would hold those of the new one.
3. Several apps may use one broker. What each declares under a name stays that app's.
"""

from __future__ import annotations

import time
from typing import Final

from aztask.address.owner import Owner
from aztask.app import App
from aztask.limits.control import Controls, Scope
from aztask.operate.action import control_store, results_of
from aztask.operate.move.journal import MoveJournal
from aztask.operate.owners import adopt, owners_of
from aztask.operate.resharding import keep_layouts, layouts
from aztask.stores.payloads.store import PayloadStore
from aztask.support.failpoint import hit

PAUSED_BY: Final = "aztask move to "
"""How the pauses begin that a move leaves at the old address."""


def move_rows(old: App, new: App) -> int:
    """Make the old broker's rows the new one's, of every app that uses it; returns how many.

    If the process dies in between, the next one goes on. The old broker keeps its notes of shards,
    by which its messages are read. If the process dies after the rows have moved and before these
    are back, messages in shards beyond the number in the code stay: give their number as
    ``old_shards`` in the code then.
    """
    mine = old.owner
    if mine.broker == new.owner.broker:
        return 0
    release(old, mine)
    shards = layouts(old)
    moved = 0
    known = {each for each in owners_of(new, results_of(new)) if each.broker == mine.broker}
    for name in sorted({each.app for each in known if each.app} | {mine.app}):
        if name == new.owner.app:
            moved += adopt(new, Owner(mine.broker, name))
            continue
        beside = new.at(name=name)
        try:
            moved += adopt(beside, Owner(mine.broker, name))
        finally:
            beside.close()
    keep_layouts(old, shards)
    hit("move-rows")
    return moved


def hold(app: App, owner: Owner, queues: list[str], target: str) -> None:
    """Pause the queues of the old owner: a worker that starts there receives nothing."""
    controls = Controls(control_store(app).of(owner))
    controls.pause(Scope.QUEUE, queues, time.time(), by=f"{PAUSED_BY}{target}")


def release(app: App, owner: Owner) -> None:
    """End the pauses that a move left at this address."""
    controls = Controls(control_store(app).of(owner))
    ours = [
        each.name
        for each in controls.read().listed()
        if each.scope is Scope.QUEUE and each.by.startswith(PAUSED_BY)
    ]
    if ours:
        controls.resume(Scope.QUEUE, ours)


def stores_of(old: App, new: App) -> tuple[PayloadStore, PayloadStore] | None:
    """Where payloads are, and where they have to be; None if they stay where they are."""
    if old.payloads is None or new.payloads is None:
        return None
    here, there = old.payloads.store, new.payloads.store
    return None if str(here) == str(there) else (here, there)


def copy_payloads(old: App, new: App, journal: MoveJournal) -> int:
    """Copy the payloads that the new store lacks; returns how many. The old ones stay.

    A payload is written once under its name, so a second copy is the same.
    """
    places = stores_of(old, new)
    if places is None:
        return 0
    here, there = places
    known = {each.name for each in there.list()}
    copied = 0
    for each in here.list():
        if each.name in known or each.name.endswith(".part"):
            continue
        data = here.copy(each)
        if data is not None:
            there.write(each.name, data)
            copied += 1
        journal.noted()
    return copied
