"""Which payloads are too old to be needed, whatever messages say.

Rules
1. A result outlives its row in the result store, which is deleted ``result_retention`` after the
   run.
2. A value of `App.put` lives until the hour in its name.
3. Arguments and checkpoints have no age of their own: a message may wait for long. Only
   ``aztask doctor --collect``, which reads the messages, removes those that are left over.
"""

from __future__ import annotations

import time
from typing import Final

from aztask.payloads.payloads import Payloads
from aztask.payloads.store import Kind, Listed

HOUR: Final = 3600.0


def ended(each: Listed, now: float, retention: float, lifetime: float) -> bool:
    """True if the payload is older than its kind may be.

    * `retention`: of results, in seconds.
    * `lifetime`: of arguments and checkpoints, in seconds.
    """
    if each.kind == Kind.VALUE:
        return each.at <= now
    age = now - each.at - HOUR  # the name has the beginning of its hour
    return age > (retention + HOUR if each.kind == Kind.RESULT else lifetime)


def remove_ended(payloads: Payloads, retention: float) -> int:
    """Remove results and values whose time has passed; returns how many. Workers do this hourly.

    * `retention`: of results, in seconds.

    Raises BrokerUnavailable.
    """
    now = time.time()
    found = [
        each.name
        for each in payloads.store.list()
        if each.kind in (Kind.RESULT, Kind.VALUE) and ended(each, now, retention, 0.0)
    ]
    payloads.store.remove(found)
    return len(found)
