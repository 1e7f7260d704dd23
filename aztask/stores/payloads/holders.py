"""What still needs a payload. Everything that removes payloads by itself asks here.

Holders
========  ==========================================================================================
queues    messages (active, leased, scheduled, deferred), and dead letters: arguments, checkpoints
rows      everything in the result store: debounced calls and unsent unique tasks, with arguments;
          the checkpoints of runs; recorded steps; nodes of workflows; schedules;
          notes of dead letters
members   workflows, open ones and those that are kept after their end: their members' results
========  ==========================================================================================

Rules
1. References are found in the bytes of messages and rows, which are not decoded: a damaged or newer
   row holds its payload, too. Each store shows all its rows, of every kind (`Scannable`).
2. The rows are read first, then the queues: a debounced call moves from its row into a queue, and
   no message moves the other way.
3. Results of tasks outside of workflows have no holder but their row, which is deleted
   ``result_retention`` after the run. Values of `App.put` have none: only their lifetime counts.
4. Whatever cannot be read in full is said (`Needed.hidden`), and nothing is called unneeded then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from aztask.errors import AztaskError, BrokerUnavailable, QueueNotFound
from aztask.message.headers import PAYLOAD, SAVED
from aztask.message.payload import names_in
from aztask.queues.base import Broker, Peeked
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import (
    ListedPayload,
    PayloadKind,
    belongs,
    broker_in,
    may_remove,
    owner_digits,
)
from aztask.stores.records.base import ResultStore, Scannable
from aztask.stores.records.workflows import workflow_of, workflows_of

PAGE: Final = 500
ALL: Final = 1_000_000
"""More workflows than a store keeps."""

QUEUES: Final = "queues"
ROWS: Final = "rows"
MEMBERS: Final = "members"
HOLDERS: Final = {
    PayloadKind.ARGUMENTS: (ROWS, QUEUES),
    PayloadKind.CHECKPOINT: (ROWS, QUEUES),
    PayloadKind.RESULT: (MEMBERS,),
    PayloadKind.VALUE: (),
}
"""Which holders a payload of each kind may have, in the order in which they are asked."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What was found.

    * `names`: the payloads that something needs.
    * `hidden`: why a holder may have been missed, "" if all were seen.
    """

    names: frozenset[str]
    hidden: str = ""


def result_owner(task_id: str) -> str:
    """Whose end ends a result: the workflow's for one of its members, or else the task's row's."""
    return workflow_of(task_id) or task_id


def replaced_names(before: bytes, after: bytes, task_id: str) -> list[str]:
    """The payloads of a row of this task that its next version, which has replaced it, dropped."""
    kept = frozenset(names_in(after))
    return [name for name in names_in(before) if name not in kept and belongs(name, task_id)]


class PayloadHolders:
    """All holders of one app's broker and result store. Asking changes nothing."""

    def __init__(
        self, broker: Broker | None, results: ResultStore | None, named: Sequence[str] = ()
    ) -> None:
        """
        * `broker`: None if no arguments or checkpoints will be asked about.
        * `named`: the queues that the app names, for brokers that do not list their queues.
        """
        self._broker = broker
        self._results = results
        self._named = named

    def needed(self, payloads: Collection[ListedPayload]) -> Needed:
        """Which of these payloads something needs. Raises BrokerUnavailable.

        Costs nothing if none of them can have a holder. Arguments and checkpoints cost a look at
        every row of the result store and every message of the broker, results the index of
        workflows.
        """
        kinds = {each.kind for each in payloads}
        asked = {holder for kind in kinds for holder in HOLDERS.get(PayloadKind(kind), ())}
        names: set[str] = set()
        hidden = ""
        if ROWS in asked:
            hidden = self._rows(names)
        if QUEUES in asked:
            hidden = self._queues(names) or hidden
        if MEMBERS in asked:
            names.update(self._members(payloads))
        return Needed(frozenset(names), hidden)

    # -- rows --------------------------------------------------------------------------------

    def _rows(self, names: set[str]) -> str:
        if self._results is None:
            return ""
        if not isinstance(self._results, Scannable):
            return "the result store does not show its rows"
        for row in self._results.scan():
            names.update(names_in(row))
        return ""

    # -- workflows ---------------------------------------------------------------------------

    def _members(self, payloads: Iterable[ListedPayload]) -> Iterator[str]:
        """The results of workflows that are still kept.

        A result that an older release named does not say whose it is: it stays as long as a
        workflow that is older than it is kept.
        """
        store = workflows_of(self._results)
        if store is None:
            return
        kept = [*store.open_workflows(ALL), *store.ended_workflows(ALL)]
        oldest = min((each.at for each in kept), default=None)
        if oldest is None:
            return
        owners = {owner_digits(each.workflow) for each in kept}
        for each in payloads:
            if each.kind != PayloadKind.RESULT:
                continue
            if each.owner in owners or (not each.owner and oldest < each.at + 3600.0):
                yield each.name

    # -- queues ------------------------------------------------------------------------------

    def _queues(self, names: set[str]) -> str:
        """Add what messages and dead letters refer to, in all queues; returns what is hidden.

        A message moves while this reads: a dead letter that is replayed becomes a message of the
        queue. So each queue is read, then its dead letters, then the queue again.
        """
        broker, hidden = self._broker, ""
        if broker is None:
            return "the queues were not read"
        try:
            queues: Sequence[str] = broker.queues()
        except BrokerUnavailable:
            raise
        except AztaskError as error:
            queues, hidden = self._named, f"the queues cannot be listed ({error})"
        for queue in queues:
            try:
                for dead in (False, True, False):
                    if not _read(broker, queue, names, dead=dead):
                        hidden = hidden or f"the service does not show all messages of {queue}"
            except QueueNotFound:
                continue
        return hidden


def _read(broker: Broker, queue: str, names: set[str], *, dead: bool) -> bool:
    """Add the payloads of a queue's messages to `names`; False if some could not be seen."""
    found = broker.peek(queue, dead_letter=dead, limit=PAGE)
    count = 0
    while found:
        count += len(found)
        for each in found:
            names.update(_names_in(each))
        if not broker.capabilities.paged_peek:
            break
        found = broker.peek(queue, dead_letter=dead, after=found[-1].position, limit=PAGE)
    if broker.capabilities.paged_peek:
        return True
    stats = broker.stats(queue)  # these counts are never too low
    return count >= ((stats.dead if dead else stats.living) or 0)


def _names_in(peeked: Peeked) -> Iterator[str]:
    """The payloads that a message refers to. The message is not decoded, so it may be damaged."""
    headers = peeked.envelope.headers
    for value in (headers.get(PAYLOAD), headers.get(SAVED)):
        if isinstance(value, str):
            yield from names_in(value.encode("utf-8", "replace"))
        elif isinstance(value, bytes):
            yield from names_in(value)


# -- which payloads are too old to be needed, whatever messages say ------------------------
#
# Rules
# 1. A result outlives its row in the result store, which is deleted ``result_retention`` after the
#    run. Rows of a workflow's members are kept as long as their workflow, and so are their results.
# 2. A value of `App.put` lives until the hour in its name.
# 3. Arguments and checkpoints have no age of their own: a message may wait for long. Only
#    ``aztask doctor --collect``, which reads the messages, removes those that are left over.
# 4. Payloads of another owner stay. Results whose name does not say whose they are, which older
#    releases wrote, are kept `UNOWNED_SECONDS` longer: the retention of their owner is not known.


UNOWNED_SECONDS: Final = 30 * 86400.0
HOUR: Final = 3600.0


def ended(each: ListedPayload, now: float, retention: float, lifetime: float) -> bool:
    """True if the payload is older than its kind may be.

    * `retention`: of results, in seconds.
    * `lifetime`: of arguments and checkpoints, in seconds.
    """
    if each.kind == PayloadKind.VALUE:
        return each.at <= now
    age = now - each.at - HOUR  # the name has the beginning of its hour
    return age > (retention + HOUR if each.kind == PayloadKind.RESULT else lifetime)


def remove_ended(payloads: Payloads, retention: float, holders: PayloadHolders, now: float) -> int:
    """Remove results and values whose time has passed; returns how many. Workers do this hourly.

    What is old is known from the names; only if there are old results, the index of workflows is
    read.

    * `retention`: of results, in seconds; `now`: UTC epoch seconds.

    Raises BrokerUnavailable.
    """
    mark = payloads.mark
    unowned = retention + UNOWNED_SECONDS if mark else retention
    old = [
        each
        for each in payloads.store.list()
        if each.kind in (PayloadKind.RESULT, PayloadKind.VALUE)
        and may_remove(each.name, mark)
        and ended(each, now, retention if broker_in(each.name) else unowned, 0.0)
    ]
    needed = holders.needed(old).names
    found = [each.name for each in old if each.name not in needed]
    payloads.store.remove(found)
    return len(found)
