"""``local://`` in a simulated world: the real engine, and nothing in between.

A file is no service: no request can be lost on its way, so there is no `Line`. What can happen to a
program that uses a file is that it dies between two calls, or that its disk refuses a write; broker
and result store of one `Database` commit together (`joined`).

Several programs of one machine share a file: give each a `Database` of its own on the same path, or
let them share one that is in memory, which is a thousand times faster. With one thread, a call
never waits for another program's lock, unless that program died inside a transaction: then close
its `Database`, as the kernel would.

The engine needs two clocks, those of the program: its leases count on ``monotonic``, schedules and
expiry on ``wall``. All programs of one machine must share ``monotonic``; `Time.clock(ahead)` does.

`LocalResults.wait_changed` and a receive with a ``wait`` look at the real time: do not call them.
"""

from __future__ import annotations

from aztask.address.owner import NO_OWNER, Owner
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.stores.records.local.store import LocalResults
from aztask.support.clock import Clock


def local_pair(
    database: Database, clock: Clock, owner: Owner | None = None
) -> tuple[LocalBroker, LocalResults]:
    """A broker and a result store that commit together, of one program.

    owner: whose rows it makes; by default those of everyone.
    """
    broker = LocalBroker(database, clock=clock)
    return broker, LocalResults(database, clock=clock, owner=owner or NO_OWNER)
