"""The gate: gives deliveries of limited tasks their slots, or puts them off.

Rules
1. A delivery whose slot comes within `AHEAD` stays in hand, under its lease and outside of the
   pool. The others are put off once, and carry their slots, so that they come back in order. A
   message of an at-most-once task that was completed already stays in hand in any case.
2. A slot that was missed is forfeited: the delivery claims another one.
3. A task with several limits starts when all of them allow it: their slots are claimed together,
   at one time, or none of them.
4. A delivery that finds no permit waits in hand for a while, then it is put off for longer and
   longer. It carries its ticket, the time of its first refusal: the oldest ticket comes first.
5. A delivery whose key is paused is put off as the deliveries of a paused task are.
6. A key or a cost that cannot be made affects its delivery alone, which is dead-lettered.
7. A start that did not happen, or that says what it used, corrects the rates that have a cost.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from aztask.app import App
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.limits.claiming import Claims, Wanted
from aztask.limits.control import ControlState
from aztask.limits.declaration import Limit
from aztask.limits.permits import Permits
from aztask.limits.rates import AHEAD, HORIZON, SLACK, WEIGHED_AHEAD
from aztask.limits.slots import Slot, slots_of, slots_text
from aztask.limits.storeclock import StoreClock
from aztask.settlement import DeadLetter
from aztask.stores.records.controls import controls_of
from aztask.support import chance
from aztask.support.floodlog import FloodLog
from aztask.task import Task
from aztask.worker.pausing import Pausing, put_off_seconds
from aztask.worker.pipeline.redelivery import PutOffs
from aztask.worker.pipeline.settling import text_of
from aztask.worker.pipeline.work import (
    ALWAYS,
    AwaitsPermit,
    Stage,
    Weighed,
    Window,
    WorkItem,
    message_of,
)
from aztask.worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

LIMIT_KEY: Final = "limit-key"
LIMIT_COST: Final = "limit-cost"
RETURN_SECONDS: Final = 0.9
"""How long before its slot a put-off message comes back."""

LOCAL_LEAD: Final = 0.03
REMOTE_LEAD: Final = 0.2
"""Seconds from a claim until the task can start at the earliest."""

ENTRY_GUARD: Final = 0.01
"""Seconds before the end of a slot after which a pool process begins no start."""

FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 30.0
"""Seconds for which a delivery without a permit is put off, at first and at most."""

REMEMBERED: Final = 10_000

TICKET: Final = "ticket"
"""Stands for a slot's entry where a message carries its ticket."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A limit that applies to a delivery, its key, and how much of the rate it uses."""

    limit: Limit
    key: str
    weight: int = 1

    def __str__(self) -> str:
        name = self.limit.name
        return name if self.limit.cost is None else f"{name} (cost {self.weight:,})"

    @property
    def entry(self) -> str:
        """The entry of the rate."""
        return self.limit.entry(self.key)

    def wanted(self, *, alone: bool = True) -> Wanted:
        """The slot that the delivery needs. alone: of no other rate at the same time."""
        rate = self.limit.rate
        assert rate is not None  # noqa: S101  # only those with a rate need one
        weighed = self.limit.cost is not None
        ahead = WEIGHED_AHEAD if weighed or not alone else HORIZON
        return Wanted(self.entry, rate, (self.weight,), ahead, self.limit.changed_at, weighed)


class Slots:
    """Decides which deliveries may start; one thread calls `admit`."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        put_offs: PutOffs,
        floods: FloodLog,
        pauses: Pausing,
        parking: Parking,
    ) -> None:
        """pauses: knows the paused keys. parking: the deliveries that wait in hand for a permit.

        Raises ConfigurationError for an unknown limit, or without a store that keeps slots.
        """
        app, clock = runtime.app, runtime.clock
        self._app = app
        self._put_offs = put_offs
        self._floods = floods
        self._limits = self._declared = _limits_by_task(app)
        self._kept: OrderedDict[tuple[str, object], str] = OrderedDict()
        self._lead = REMOTE_LEAD if app.remote else LOCAL_LEAD
        self._pauses = pauses
        self._parking = parking
        self._clock = clock
        if self.on:
            store = controls_of(app.results)
            if store is None:
                raise ConfigurationError(
                    "limits need a result store, such as local:// or tables://; set AZTASK_RESULTS"
                )
            self._time = StoreClock(store, clock)
            self._claims = Claims(store, self._time)
            self.permits = Permits(store, self._time, runtime.holder, clock)

    @property
    def on(self) -> bool:
        """Whether any task has limits."""
        return bool(self._limits)

    def obey(self, state: ControlState) -> None:
        """Use the numbers that operators gave these limits from now on; any thread may call."""
        name = self._app.name
        self._limits = {
            task: tuple(state.limit(name, each) for each in limits)
            for task, limits in self._declared.items()
        }

    def applies(self, item: WorkItem) -> bool:
        """Whether the delivery needs slots that it does not have.

        A pointer has no arguments, so its deferred message is received first.
        """
        return (
            item.window is None
            and item.waits is None
            and item.task is not None
            and item.task.name in self._limits
            and (item.pointer is not None or message_of(item).pointer is None)
        )

    def far_tasks(self) -> set[str]:
        """The tasks whose next slot is so far away that their deliveries will be put off."""
        soon = self._time.now() + AHEAD
        return {
            task
            for task, limits in self._limits.items()
            if not any(each.key is not None or each.concurrency is not None for each in limits)
            and max(self._claims.free_at(each.entry("")) for each in limits) > max(soon, 0.0)
        }

    def is_far(self, item: WorkItem, far_tasks: Collection[str]) -> bool:
        """Whether the delivery will be put off. far_tasks: of `far_tasks`."""
        return (
            item.task is not None
            and item.task.name in far_tasks
            and self.applies(item)
            and not message_of(item).slots
            and not item.permits
        )

    def admit(self, items: Sequence[WorkItem]) -> None:
        """Give each delivery a window, or put it off.

        If the store is unreachable, the deliveries stay as they are, and it is tried again. What it
        refuses for one delivery, or for one entry, is tried again for these alone.
        """
        simple: dict[str, list[tuple[WorkItem, Demand]]] = {}
        with self._trying(items):
            self._time.refresh()
            for left, item in zip(range(len(items), 0, -1), items, strict=True):
                with self._trying([item], outage=False):
                    self._sort(item, simple, left)
            for entry, group in simple.items():
                with self._trying([item for item, _ in group], outage=False):
                    self._claim_together(entry, group)

    @contextmanager
    def _trying(self, items: Sequence[WorkItem], *, outage: bool = True) -> Iterator[None]:
        """What fails here is tried again with these. outage: an unreachable store, too."""
        try:
            yield
        except Exception as error:  # no error of a store may end the worker
            if isinstance(error, BrokerUnavailable) and not outage:
                raise
            waiting = [item for item in items if self.applies(item) and item.decided is None]
            line = "limits cannot be applied, %d deliveries are tried again: %s"
            self._floods.warning(logger, "limits", line, len(waiting), text_of(error))
            for item in waiting:
                item.tries += 1

    def maintain(self) -> list[str]:
        """Renew permits and write corrections; returns the entries of renewed permits.

        None of them waits for another one: a permit that is not renewed ends the tasks under it.
        What the store refuses, or does not answer, is tried again.
        """
        self._try(self._time.refresh)
        if not self._time.known:
            return []
        renewed = self.permits.maintain()
        if self.permits.error is not None:
            self._unmaintained(self.permits.error)
        self._try(self._claims.settle)
        return renewed

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # no error of a store may end the worker
            self._unmaintained(error)

    def _unmaintained(self, error: Exception) -> None:
        line = "permits and rates cannot be maintained, it is tried again: %s"
        self._floods.warning(logger, "permits", line, text_of(error))

    def missed(self, item: WorkItem) -> None:
        """Credit the slots of a delivery that did not start in them; any thread may call.

        Those that its message carries may be used by another delivery of it.
        """
        for each in item.weighed.values():
            if each.claimed:
                self._claims.correct(each.slot, each.slot.weight)
        item.weighed = {}

    def ended(self, item: WorkItem) -> None:
        """Correct the rates by what a run has used; any thread may call."""
        if item.run is None:
            self.missed(item)
        for name, each in item.weighed.items():
            if name in item.spent:
                self._claims.correct(each.slot, each.slot.weight - item.spent[name])
        item.weighed, item.spent = {}, {}

    def settle(self) -> None:
        """Write the corrections at the worker's end. Raises BrokerUnavailable."""
        self._claims.settle()

    def put_off_parked(self, item: WorkItem, parked: AwaitsPermit) -> None:
        """Put off a delivery that waited in hand; it keeps its ticket. Raises BrokerUnavailable."""
        delay = self._longest_wait(item) * chance.uniform(0.5, 1.0)
        ticket = slots_text([Slot(TICKET, 0, parked.ticket)])
        self._put_offs.wait(item, delay, parked.reason, ticket)

    def _sort(
        self, item: WorkItem, simple: dict[str, list[tuple[WorkItem, Demand]]], left: int
    ) -> None:
        """Admit the delivery, or add it to those that need one slot of one limit.

        left: how many deliveries are in the gate.
        """
        if item.stage is Stage.ENDED:  # its lease was lost
            return
        if self._put_offs.expired(item):
            item.window = ALWAYS
            return
        try:
            demands = self._demands(item)
        except Exception as error:  # noqa: BLE001  # the functions are the user's
            text, what, reason = text_of(error), "key", LIMIT_KEY
            if isinstance(error, _CostError):
                text, what, reason = str(error), "cost", LIMIT_COST
            line = "%s: the %s of its limit cannot be made, it is dead-lettered: %s"
            self._floods.warning(logger, reason, line, item.label, what, text)
            self._put_offs.give_back([item])
            item.decide(DeadLetter(reason, text))
            return
        if self._is_paused(item, demands) or not self._has_permits(item, demands, left):
            return
        demands = [each for each in demands if each.limit.rate is not None and each.weight]
        if not demands:
            item.window = ALWAYS
        elif (carried := self._carried(item, demands)) is not None:
            self._grant(item, carried, demands, claimed=False)
        elif len(demands) == 1:
            simple.setdefault(demands[0].entry, []).append((item, demands[0]))
        else:
            self._claim_several(item, demands)

    def _is_paused(self, item: WorkItem, demands: Sequence[Demand]) -> bool:
        """Put the delivery off if one of its keys is paused."""
        keyed = [(each.limit.name, each.key) for each in demands if each.limit.key is not None]
        found = (self._pauses.tenant(limit, key) for limit, key in keyed)
        pause = next((each for each in found if each is not None), None)
        if pause is None:
            return False
        if item.settled:  # an at-most-once message cannot go back
            item.tries += 1
        else:
            delay = put_off_seconds(message_of(item), pause, self._clock)
            self._put_offs.wait(item, delay, f"{pause} is paused")
        return True

    def _has_permits(self, item: WorkItem, demands: Sequence[Demand], left: int) -> bool:
        """Take the permits that the delivery needs, all or none; without them it is parked.

        Those that were taken are free again, too, if the store fails before all are.
        """
        item.parked = None
        if item.permits:
            return True
        carried = slots_of(message_of(item).slots).get(TICKET)
        ticket = self._time.now() if carried is None else carried.at
        taken: list[str] = []
        with ExitStack() as undo:
            for limit, key in ((demand.limit, demand.key) for demand in demands):
                if limit.concurrency is None:
                    continue
                entry = limit.permits_entry(key)
                wanted = (left if limit.key is None else 1) + self._parking.count(entry)
                if not self.permits.take(entry, limit.concurrency, ticket, wanted):
                    item.parked = AwaitsPermit(entry, ticket, f"limit {limit.name}")
                    return False
                undo.callback(self.permits.free, entry)
                taken.append(entry)
            undo.pop_all()
        item.permits = tuple(taken)
        item.permits_until = min(map(self.permits.deadline, taken), default=math.inf)
        return True

    def _demands(self, item: WorkItem) -> list[Demand]:
        """The limits that apply to the delivery. Raises whatever the function for the key does."""
        task, message = item.task, message_of(item)
        assert task is not None  # noqa: S101  # `applies` has checked that
        limits = self._limits[task.name]
        args: tuple[object, ...] = ()
        kwargs: dict[str, object] = {}
        taken = int(item.place is not None and item.place.takes is not None)
        if any(limit.key is not None or limit.cost is not None for limit in limits):
            plain = task.arguments(self._app.codec, message)
            args, kwargs = task.conversion.peek(*plain, given=taken)
        keys = [(limit, limit.key_of(args, kwargs)) for limit in limits]
        args = (None,) * taken + args  # the value before it is read with the claim
        return [
            Demand(limit, key, 1 if limit.cost is None else _cost(limit, task, args, kwargs))
            for limit, key in keys
            if key is not None
        ]

    def _carried(self, item: WorkItem, demands: Sequence[Demand]) -> list[Slot] | None:
        """The slots that the message carries, if they are all valid and none was missed."""
        if item.stage is Stage.READY:  # it has missed them
            return None
        kept = self._kept.pop((item.queue, item.delivery.position), None)
        carried = slots_of(kept or message_of(item).slots)
        found = [carried[each.entry] for each in demands if each.entry in carried]
        if len(found) < len(demands):
            return None
        start = max(slot.at for slot in found)
        latest = min(slot.at for slot in found) + SLACK - ENTRY_GUARD
        if start > latest or self._time.now() > latest:
            return None
        return found if all(self._claims.valid(slot) for slot in found) else None

    def _claim_together(self, entry: str, group: list[tuple[WorkItem, Demand]]) -> None:
        """Claim a slot of the same limit for each of these deliveries, in their order."""
        earliest = self._time.now() + self._lead
        weights = [demand.weight for _, demand in group]
        wanted = replace(group[0][1].wanted(), weights=weights)
        slots = self._claims.claim(wanted, earliest)
        for (item, demand), slot in zip(group, slots, strict=False):
            self._grant(item, [slot], [demand])
        for item, demand in group[len(slots) :]:
            self._wait_long(item, [demand])

    def _claim_several(self, item: WorkItem, demands: Sequence[Demand]) -> None:
        """Claim slots of several limits that come at the same time (rule 3)."""
        wanted = [demand.wanted(alone=False) for demand in demands]
        slots = self._claims.claim_together(wanted, self._time.now() + self._lead)
        if slots:
            self._grant(item, slots, demands)
        else:
            self._wait_long(item, demands)

    def _wait_long(self, item: WorkItem, demands: Sequence[Demand]) -> None:
        """Put the delivery off without a slot, because the next ones are too far ahead.

        With a cost, or with several rates, no slot is far ahead: it comes back when the slots
        before it end, or sooner.
        """
        if len(demands) == 1 and demands[0].limit.cost is None:
            self._wait(item, 3600.0, demands, "")
            return
        free_at = max(self._claims.free_at(demand.entry) for demand in demands)
        longest = min(free_at - self._time.now(), self._longest_wait(item))
        self._wait(item, max(FIRST_WAIT, longest) * chance.uniform(0.5, 1.0), demands, "")

    @staticmethod
    def _longest_wait(item: WorkItem) -> float:
        return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(message_of(item).times_put_off, 16))

    def _grant(
        self,
        item: WorkItem,
        slots: Sequence[Slot],
        demands: Sequence[Demand],
        *,
        claimed: bool = True,
    ) -> None:
        """Keep the delivery in hand until its slot comes, or put it off with its slot.

        claimed: now; otherwise the message carries them.
        """
        opens = max(slot.at for slot in slots)
        delay = opens - self._time.now()
        if delay > AHEAD and not item.settled:
            self._wait(item, delay - RETURN_SECONDS, demands, slots_text(slots))
            return
        item.weighed = {
            each.limit.name: Weighed(slot, claimed)
            for each, slot in zip(demands, slots, strict=True)
            if each.limit.cost is not None
        }
        error = self._time.error
        closes = min(slot.at for slot in slots) + SLACK - ENTRY_GUARD
        first = self._time.deadline(opens) + error
        item.window = Window(first, max(self._time.deadline(closes) - error, first + ENTRY_GUARD))

    def _wait(self, item: WorkItem, delay: float, demands: Iterable[Demand], slots: str) -> None:
        if item.settled:  # an at-most-once message cannot go back
            item.tries += 1
            return
        reason = f"limit {', '.join(map(str, demands))}"
        if slots and item.in_order:  # the message itself does not change
            self._kept[item.queue, item.delivery.position] = slots
            if len(self._kept) > REMEMBERED:
                self._kept.popitem(last=False)
        self._put_offs.wait(item, delay, reason, slots)


class _CostError(Exception):
    """The cost of a delivery cannot be made, or is too large. `__cause__`: why."""


def _cost(limit: Limit, task: Task[..., Any], args: Any, kwargs: Any) -> int:
    try:
        return limit.cost_of(task.named_arguments(args, kwargs))
    except Exception as error:
        raise _CostError(text_of(error)) from error


def _limits_by_task(app: App) -> dict[str, tuple[Limit, ...]]:
    """The limits of each task that has any. Raises ConfigurationError for an unknown name."""
    return {task.name: app.limits_of(task) for task in app.tasks.values() if task.limits}


# -- Deliveries that wait in hand ------------------------------------------------------------------
#
# They wait for a permit: by entry, the oldest ticket first.


MOST_PARKED: Final = 8
"""Deliveries of one entry that wait in hand, each under its lease."""

LONGEST_PARKED: Final = 15.0
"""Seconds after which a delivery that waits in hand is put off."""


class Parking:
    """Only the supervisor's loop uses it."""

    def __init__(self) -> None:
        self._parked: dict[str, list[tuple[float, int, float, WorkItem]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def add(self, item: WorkItem, now: float) -> WorkItem | None:
        """Park an item; returns the youngest one, no longer parked, if there are too many."""
        if item.parked is None:
            return None
        group = self._parked.setdefault(item.parked.entry, [])
        if item.parked_at is None:
            item.parked_at = now
        group.append((item.parked.ticket, item.number, item.parked_at, item))
        group.sort(key=lambda entry: entry[:2])
        group[:] = [entry for entry in group if _waits(entry[3])]
        return group.pop()[3] if len(group) > MOST_PARKED else None

    def next(self, entry: str) -> WorkItem | None:
        """Take out the item with the oldest ticket."""
        group = self._parked.get(entry, [])
        while group:
            item = group.pop(0)[3]
            if _waits(item):
                return item
        self._parked.pop(entry, None)
        return None

    def count(self, entry: str) -> int:
        """How many deliveries wait for a permit of this entry; any thread may call."""
        return len(self._parked.get(entry, ()))

    def ticket(self, entry: str) -> float | None:
        """The oldest ticket of an entry; None if nothing waits."""
        group = self._parked.get(entry)
        return group[0][0] if group else None

    def oldest(self) -> list[WorkItem]:
        """Take out the item with the oldest ticket of each entry."""
        found = [self.next(entry) for entry in list(self._parked)]
        return [item for item in found if item is not None]

    def too_long(self, now: float) -> list[WorkItem]:
        """Take out the items that have waited for `LONGEST_PARKED`, except in sessions."""
        found = []
        for entry, group in list(self._parked.items()):
            late = [
                each for each in group if now - each[2] >= LONGEST_PARKED and not each[3].in_order
            ]
            found += [each[3] for each in late if _waits(each[3])]
            self._parked[entry] = [each for each in group if each not in late]
            if not self._parked[entry]:
                del self._parked[entry]
        return found

    def clear(self) -> list[WorkItem]:
        """Take out whatever still waits."""
        found = [each[3] for group in self._parked.values() for each in group]
        self._parked.clear()
        return [item for item in found if _waits(item)]


def _waits(item: WorkItem) -> bool:
    """Whether it still waits: its lease may have been lost in between."""
    return item.stage in (Stage.RECEIVED, Stage.READY) and item.decided is None
