"""What a worker writes into the history: the loop counts, and chores write, look and merge.

Rules
1. The loop only adds numbers. `HistoryWriter.write` packs and writes them on a lane, so that no
   store, however slow, holds a task up.
2. There is at most one write in `LOCAL_SECONDS` or `REMOTE_SECONDS`, and none for a worker that did
   nothing.
3. What could not be written is written with the next one, for `LATE_HOURS` at most.
4. How much waits in a queue is asked for once a minute, by one of its workers: the others see the
   sample, and look less and less often, `MOST_LOOK_SECONDS` apart at most. So a queue whose worker
   died has a gap of that length at most, and a large fleet asks little.

Crash window: what a killed worker did since its last write is missing in the history. Runs and
events do not depend on it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from aztask.errors import AztaskError
from aztask.queues.base import Broker
from aztask.stores.records.backlogs import Backlogs
from aztask.stores.records.base import ResultStore, State
from aztask.stores.records.history import GRACE, LATE_HOURS, HistoryStore, digest, history_of
from aztask.stores.records.tallies import (
    HOUR,
    LONGEST_NAME,
    MOST_SERIES,
    OTHERS,
    SLOT,
    Author,
    Hour,
    Tally,
    bucket_of,
)
from aztask.support.clock import Clock

logger = logging.getLogger(__name__)

LOCAL_SECONDS: Final = 10.0
REMOTE_SECONDS: Final = 30.0
"""Over Tables, a busy worker makes 86,000 requests a month with this."""

LOOK_SECONDS: Final = 60.0
MOST_LOOK_SECONDS: Final = 480.0

SPREAD_SECONDS: Final = 120
"""Within so many seconds workers check for an hour to merge, each at a time of its own."""

Counted: TypeAlias = dict[tuple[int, str, str], Tally]
"""By the slot's number since 1970, the queue and the task."""

_FIELDS: Final = {
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.RETRYING: "retried",
}


class Recorder:
    """Counts what the worker does; only the supervisor's loop uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counted: Counted = {}

    def __bool__(self) -> bool:
        """Whether something was counted since the last `take`."""
        return bool(self._counted)

    def waited(self, queue: str, task: str, seconds: float) -> None:
        """Count the wait of a first run."""
        waits, bucket = self._tally(queue, task).waits, bucket_of(seconds)
        waits[bucket] = waits.get(bucket, 0) + 1

    def ended(self, queue: str, task: str, state: State, seconds: float | None = None) -> None:
        """Count the end of a run. seconds: that it took; None if it did not run."""
        tally, field = self._tally(queue, task), _FIELDS.get(state, "other")
        setattr(tally, field, getattr(tally, field) + 1)
        if seconds is not None:
            bucket = bucket_of(seconds)
            tally.runs[bucket] = tally.runs.get(bucket, 0) + 1

    def lost(self, queue: str, task: str) -> None:
        """Count a lease that ended before its message was settled."""
        self._tally(queue, task).lost += 1

    def take(self) -> Counted:
        """What was counted since the last call."""
        found, self._counted = self._counted, {}
        return found

    def _tally(self, queue: str, task: str) -> Tally:
        key = int(self._clock.wall() // SLOT), queue, task
        found = self._counted.get(key)
        if found is None:
            found = self._counted[key] = Tally()
        return found


class HistoryWriter:
    """Writes what was counted. The loop calls `give`; `gather` and `write` run on a lane."""

    def __init__(self, author: Author, holder: str, clock: Clock) -> None:
        self._holder = holder
        self._clock = clock
        self._author = author
        self._given: deque[Counted] = deque()
        self._hours: dict[int, Hour] = {}
        self._changed: set[int] = set()

    def give(self, counted: Counted) -> None:
        """Hand over what the loop has counted."""
        self._given.append(counted)

    def gather(self) -> None:
        """Add up what was given, by hour; so it stays small while the store is unreachable."""
        while self._given:
            self._add(self._given.popleft())
        now = self._clock.wall()
        self._changed = {each for each in self._changed if now < each + LATE_HOURS * HOUR}
        # An hour that has passed may still get what a slow loop hands over.
        for begins in [each for each in self._hours if each + 2 * HOUR < now]:
            if begins not in self._changed:
                del self._hours[begins]

    def write(self, history: HistoryStore) -> None:
        """Write the hours in which something was counted. Raises BrokerUnavailable."""
        self.gather()
        now = self._clock.wall()
        for begins in sorted(self._changed):
            history.write(self._holder, begins, self._hours[begins], now)
            self._changed.discard(begins)

    def _add(self, counted: Counted) -> None:
        for (slot, queue, task), tally in counted.items():
            at = slot * SLOT
            begins = at - at % HOUR
            hour = self._hours.setdefault(begins, Hour(self._author))
            name = queue[:LONGEST_NAME], task[:LONGEST_NAME]
            # Names that a stranger makes up must not fill the memory.
            if name not in hour.series and len(hour.series) >= 2 * MOST_SERIES:
                name = name[0], OTHERS
            tallies = hour.series.setdefault(name, {})
            tallies.setdefault(at - at % hour.step, Tally()).add(tally)
            self._changed.add(begins)


class BacklogLooks:
    """Asks how much waits in the worker's queues (rule 4). A chore calls it, and reads `pause`."""

    def __init__(self, broker: Broker, queues: Sequence[str], clock: Clock) -> None:
        self._broker = broker
        self._queues = queues
        self._clock = clock
        self.pause = LOOK_SECONDS
        """Seconds until the next look."""

    def look(self, history: HistoryStore) -> None:
        """Look at the queues at which no worker has looked. Raises BrokerUnavailable for the store.

        A queue whose service does not tell, or does not answer, has a gap.
        """
        backlogs, now = Backlogs(history), self._clock.wall()
        newest = backlogs.newest(now)
        # Half of the pause: what this worker itself added a pause ago is old, though barely.
        due = [each for each in self._queues if newest.get(each, 0) <= now - LOOK_SECONDS / 2]
        for queue in due:
            try:
                stats = self._broker.stats(queue)
            except AztaskError as error:
                logger.debug("queue %s: how much waits is not known: %s", queue, error)
                continue
            backlogs.add(queue, now, stats.waiting)
        self.pause = LOOK_SECONDS if due else min(2 * self.pause, MOST_LOOK_SECONDS)


class Recording:
    """When a worker writes, looks and merges; only the supervisor's loop uses it.

    The chores open the history: the first one makes its tables, and so waits for the store.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        author: Author,
        holder: str,
        looks: BacklogLooks,
        clock: Clock,
        first_at: float,
    ) -> None:
        """recorder: None without history. first_at: of looks and merges, as `Clock.monotonic`."""
        self._recorder = recorder
        self._holder = holder
        self._clock = clock
        self._writer = HistoryWriter(author, holder, clock)
        self._looks = looks
        self._history: HistoryStore | None = None
        self._write_at = 0.0
        self._look_at = self._merge_at = first_at

    def write_due(self, results: ResultStore, now: float) -> Callable[[], None] | None:
        """The chore that writes what was counted; None if it is not due or there is nothing."""
        if not self._recorder or now < self._write_at:
            return None
        self._write_at = now + (REMOTE_SECONDS if results.remote else LOCAL_SECONDS)
        self._writer.give(self._recorder.take())
        return partial(self._write, results)

    def _write(self, results: ResultStore) -> None:
        self._writer.gather()
        if (history := self._opened(results)) is not None:
            self._writer.write(history)

    def look_due(self, results: ResultStore, now: float) -> Callable[[], None] | None:
        """The chore that looks at how much waits; None if it is not due."""
        if self._recorder is None or now < self._look_at:
            return None
        self._look_at = now + self._looks.pause
        return partial(self._look, results)

    def _look(self, results: ResultStore) -> None:
        if (history := self._opened(results)) is not None:
            self._looks.look(history)

    def _opened(self, results: ResultStore) -> HistoryStore | None:
        self._history = self._history or history_of(results)
        return self._history

    def merge_due(self, results: ResultStore, now: float) -> Callable[[], None] | None:
        """The chore that merges the hours that have ended; None if it is not due."""
        if self._recorder is None or now < self._merge_at:
            return None
        spread = int(digest(self._holder)[:8], 16) % SPREAD_SECONDS
        self._merge_at = now + HOUR - (self._clock.wall() - GRACE) % HOUR + spread
        return partial(self._merge, results)

    def _merge(self, results: ResultStore) -> None:
        history = history_of(results)
        if history is not None:
            history.merge(self._holder, self._clock.wall())
            history.purge(self._clock.wall())
