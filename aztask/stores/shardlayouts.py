"""Which shards a queue has, kept in the result store, so that they change while programs run.

A control entry for each queue says its `ShardLayout`. The code's number is a wish: the first
program that uses the queue makes the entry from it, and from then on the entry counts.

Rules
1. Senders read the entry again after half of `REFRESH_SECONDS`, when they send. With a session a
   send needs an entry that was read in the last `REFRESH_SECONDS`, and fails without one; so does a
   receive. Other sends go on for `FREE_SECONDS` with what was read last, other receives for as long
   as the program runs.
2. A move is announced twice `REFRESH_SECONDS` before it starts, on the store's clock. By then all
   senders have read it. Before the start they use the former shards, from the start on the new
   ones; a send with a session waits while this machine's clock cannot tell which of the two it is.
3. An announcement counts only if the store has it `REFRESH_SECONDS` before the start, by the
   store's own note of when it was written. One that a standing program wrote too late is as if it
   were not there, for all that read it, and the command makes another one.
4. Workers receive from the former shards, too, until these are empty; of a queue with sessions,
   from the former ones alone. Twice `REFRESH_SECONDS` after the start, these get nothing new, for a
   send takes no longer; sends without a session end `FREE_SECONDS` later. From then on a worker or
   the command that finds them empty ends the move.
5. Every change is compare-and-set. There is one move at a time.
6. With several addresses every queue has an entry, which also says where each shard lives. A
   program that does not know one of these addresses neither sends nor receives. One more entry, the
   pin, tells programs of the same owner that know one address only.

Crash windows
* A sender dies: its message is stored or not, in the shard of its layout. Sent again under its id,
  it may go to another shard. Both are received, and the result store lets one of them run.
* The command dies before the announcement: there are empty queues. After it: the move goes on, and
  workers end it.
* A worker dies: its messages are in their shards. If it dies before it ends a move, another one
  does.
* A sender stands still, for more than twice `REFRESH_SECONDS`, between its look at the layout and
  the send itself. If the move has ended by then, its message is in a shard that no worker receives
  from: ``aztask doctor`` shows it. With a session, it may come after younger ones.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final

from aztask.address.shards import (
    MOST_SHARDS,
    ONE_ADDRESS,
    AddressNames,
    ShardCount,
    ShardCounts,
    ShardLayout,
    ShardRange,
)
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError
from aztask.queues.sharded.layouts import DeclaredLayouts
from aztask.stores.records.controls import ControlStore, Entry, EntryCell, EntryChange
from aztask.stores.rows import Kept, New, StoreTime, change
from aztask.support import chance, clock
from aztask.support.display import visible
from aztask.support.failpoint import hit

logger = logging.getLogger(__name__)

REFRESH_SECONDS: float = 30.0
"""R: a send with a session needs a layout that is at most so old."""
FREE_SECONDS: float = 600.0
"""So old may be the layout of a send without a session, while the store cannot be read."""
LEAD_NUMBER: Final = 2.0
"""A move starts this many times R after its announcement."""
NOTICE_NUMBER: Final = 1.0
"""The store must have the announcement so many times R before the start."""
SEND_NUMBER: Final = 2.0
"""So many times R a send takes at most: 60 s. Adapters give up after about 45 s."""
LOOK_NUMBER: Final = 0.3
"""So many times R are between two checks that former shards are empty."""
RETRY_NUMBER: Final = 0.1
"""So many times R after a failed reading, it is tried again."""
MARGIN_SECONDS: Final = 0.05
"""How far two machines' clocks may drift apart between a reading and the start of a move."""

TRIES: Final = 5
"""How often an announcement that came too late is repeated."""

VERSION: Final = 1
HOMES_VERSION: Final = 2
"""Of a layout with several addresses: a release that knows one only must not go by it."""
PREFIX: Final = "shards-"
PIN: Final = "addresses"
"""The entry that says that an owner's queues are spread over several addresses, and which."""


class UnreadableLayout(AztaskError):
    """The entry that says which shards a queue has is damaged, or a newer release wrote it."""


# -- the entries -----------------------------------------------------------------------------


def entry_name(queue: str) -> str:
    """The name of a queue's entry: of one length, so that none is the beginning of another."""
    digest = sha256(queue.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PREFIX}{digest[:32]}"


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """A layout as it was read. counts: False for an announcement that came too late (rule 3)."""

    layout: ShardLayout
    tag: str
    counts: bool = True


class LayoutRows:
    """Reads and changes the layouts of a broker's queues. Any thread may call.

    All methods raise BrokerUnavailable if the store is unreachable, and UnreadableLayout.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._judged: dict[str, LayoutEntry] = {}

    def read(self, queue: str) -> LayoutEntry | None:
        """The layout; None if no program has used the queue with this store."""
        name = entry_name(queue)
        (entry,) = self._store.read([name])
        if entry is None:
            return None
        layout = _layout_of(queue, entry)
        if layout.former is None or not layout.starts_at:
            return LayoutEntry(layout, entry.tag)
        judged = self._judged.get(queue)
        if judged is None or judged.tag != entry.tag:
            latest = layout.starts_at - NOTICE_NUMBER * REFRESH_SECONDS
            counts = self._store.written_before(name, entry.tag, latest)
            judged = self._judged[queue] = LayoutEntry(layout, entry.tag, counts)
        return judged

    def time(self) -> StoreTime:
        """Read the store's clock, see `ControlStore.time`."""
        return self._store.time()

    def pinned(self) -> AddressNames | None:
        """The addresses that this owner's queues were spread over at first; None: they are not."""
        (entry,) = self._store.read([PIN])
        if entry is None:
            return None
        try:
            record = json.loads(entry.data)
            names = tuple(map(str, record["addresses"]))
            return AddressNames(names, home=str(record["home"]), several=True)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UnreadableLayout(
                "the entry in the result store with the broker addresses of this owner is damaged, "
                "or another program wrote it"
            ) from None

    def pin(self, addresses: AddressNames) -> None:
        """Note that this owner's queues are spread over several addresses, unless that is noted."""
        record = {
            "v": VERSION,
            "write": chance.token(),
            "addresses": addresses.names,
            "home": addresses.home,
        }
        data = json.dumps(record, separators=(",", ":")).encode()
        self._store.write([EntryChange(PIN, data)])

    def make(self, queue: str, layout: ShardLayout) -> None:
        """Store the layout of the code as the first one, if there is none."""
        self._store.write([EntryChange(entry_name(queue), _data_of(queue, layout))])

    def repair(self, queue: str, layout: ShardLayout) -> bool:
        """Replace an entry that cannot be read by this layout; False if it can be read."""
        (entry,) = self._store.read([entry_name(queue)])
        try:
            if entry is None or _layout_of(queue, entry):
                return False
        except UnreadableLayout:
            pass
        tag = None if entry is None else entry.tag
        self._store.write([EntryChange(entry_name(queue), _data_of(queue, layout), tag)])
        return True

    def announce(self, queue: str, move: ShardLayout, *, by: str) -> LayoutEntry:
        """Announce a move that `ShardLayout.moved` gave; returns the layout as it is then.

        If it is under way already, nothing is done. If its announcement came too late, it is
        announced again: no program has followed it (rule 3). Raises ConfigurationError if the
        layout is no longer the one that was moved.

        Crash window: if the process dies in between, the move is announced or not; call it again.
        """
        for _ in range(TRIES):
            now = self._store.time().at
            found = self.read(queue)
            known = found is not None and found.layout.follows(move)
            if found is not None and known and found.counts:
                return found
            if not known and move.epoch != 1 + (0 if found is None else found.layout.epoch):
                raise ConfigurationError(
                    f"the shards of queue {queue!r} have been moved in between; see: aztask queues "
                    "list --shards"
                )
            tag = None if found is None else found.tag
            start = now + LEAD_NUMBER * REFRESH_SECONDS
            data = _data_of(queue, replace(move, starts_at=start, by=by))
            self._store.write([EntryChange(entry_name(queue), data, tag)])
            # It is read again: another operator may be faster, and this write too slow.
        raise BrokerUnavailable(
            f"the result store takes too long to write the shards of queue {queue!r}, or others "
            "keep changing them; try again"
        )

    def finish(self, queue: str, epoch: int, kept: int) -> None:
        """End the move of this epoch, if that has not been done: its former shards are empty.

        kept: shards below this number may hold dead letters.
        """

        def decide(entry: Entry | None) -> New[bytes | None, None] | Kept[None]:
            layout = None if entry is None else _layout_of(queue, entry)
            if layout is None or layout.epoch != epoch or layout.former is None:
                return Kept(None)
            hit("reshard-empty")
            return New(_data_of(queue, layout.ended(kept)), None)

        cell = EntryCell(self._store, entry_name(queue))
        change(cell, decide, f"the shards of queue {queue!r}")


def _data_of(queue: str, layout: ShardLayout) -> bytes:
    homes = {"homes": layout.homes} if layout.homes else {}
    record = {
        "v": HOMES_VERSION if homes else VERSION,
        "write": chance.token(),  # no two writers write the same bytes
        "queue": queue,  # an entry that was copied to the name of another queue is refused
        "epoch": layout.epoch,
        "sent": _packed(layout.sent),
        "former": None if layout.former is None else _packed(layout.former),
        "starts_at": layout.starts_at,
        "ordered": layout.ordered,
        "kept": layout.kept,
        "past": [_packed(each) for each in layout.past],
        "by": layout.by,
        **homes,
    }
    return json.dumps(record, separators=(",", ":")).encode()


def _packed(shards: ShardRange) -> list[Any]:
    chosen = [shards.chosen] if shards.chosen else []
    return [shards.first, shards.count, *chosen]


def _layout_of(queue: str, entry: Entry) -> ShardLayout:
    try:
        record = json.loads(entry.data)
        if record["v"] not in (VERSION, HOMES_VERSION):
            raise UnreadableLayout(
                f"a newer release of aztask wrote which shards queue {queue!r} has; update aztask "
                "here"
            )
        if record["queue"] != queue:
            raise ValueError
        former, starts_at = record["former"], record["starts_at"]
        if isinstance(starts_at, bool) or not math.isfinite(starts_at):
            raise ValueError
        return ShardLayout(
            _range_of(record["sent"]),
            None if former is None else _range_of(former),
            float(starts_at),
            _number(record["epoch"], 2**31),
            record["ordered"] is True,
            _number(record["kept"], MOST_SHARDS),
            tuple(_range_of(each) for each in record["past"]),
            str(record["by"]),
            tuple(map(str, record.get("homes", ()))),
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnreadableLayout(
            f"the entry in the result store with the shards of queue {queue!r} is damaged, or "
            "another program wrote it; say how many it has: aztask queues reshard QUEUE --former "
            "NUMBER"
        ) from None


def _range_of(record: Any) -> ShardRange:
    first, count, *chosen = record
    made = ShardRange(_number(first, MOST_SHARDS - 1), _number(count, MOST_SHARDS))
    if chosen:
        numbers = tuple(_number(each, MOST_SHARDS - 1) for each in chosen[0])
        if len(set(numbers)) != made.count or numbers[0] != made.first:
            raise ValueError
        return replace(made, chosen=numbers)
    if not made.count or made.first + made.count > MOST_SHARDS:
        raise ValueError
    return made


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError
    return value


# -- what one process knows of them ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """A layout that was read.

    * `read_at`: before the request for it was sent. `until`: the former shards are used before
      this; `since`: the new ones after this. All on the clock of the deadlines.
    """

    layout: ShardLayout
    read_at: float
    until: float = 0.0
    since: float = 0.0


@dataclass(slots=True)
class _Queue:
    """What is known of a queue. lock: of the thread that reads its entry anew.

    notes: whether an entry is made if there is none. A queue that the code does not name may be
    that of another program, which is only listed: it gets one when it is sent to.
    """

    notes: bool
    known: _Known | None = None
    error: AztaskError | None = None
    retry_at: float = 0.0
    look_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class StoredLayouts:
    """The layouts of the result store, as this process knows them. Any thread may call.

    It asks when it is asked, so it has no thread: a queue that is not used costs nothing, and one
    that is used costs a read every `REFRESH_SECONDS` / 2 at most. Until `attach`, and where the
    store keeps no entries, the numbers of the code apply.
    """

    def __init__(self, shards: ShardCounts, addresses: AddressNames = ONE_ADDRESS) -> None:
        """shards: those of the code."""
        self._declared = DeclaredLayouts(shards, addresses)
        self.addresses = addresses
        self._rows: LayoutRows | None = None
        self._queues = {name: _Queue(notes=True) for name in shards}

    def attach(self, store: ControlStore | None) -> None:
        """Use the entries of this store."""
        self._rows = None if store is None else LayoutRows(store)

    def settle_home(self, home: str) -> None:
        """Go by the home that all programs of this owner go by, whatever the list here begins with.

        Called before the first layout is asked for.
        """
        self.addresses = self._declared.addresses = replace(self.addresses, home=home)

    @property
    def rows(self) -> LayoutRows | None:
        """The entries themselves; None if there are none."""
        return self._rows

    def has(self, queue: str) -> bool:
        """True if the code names a number of shards; with several addresses, for every queue."""
        return queue in self._queues or self._declared.has(queue)

    def wish(self, queue: str) -> ShardCount:
        """The numbers that the code names."""
        return self._declared.wish(queue)

    def layout(self, queue: str, *, session: bool = False) -> ShardLayout:
        """The layout, however long ago it was read: a receiver that knows an older one goes on.

        Of sessions it does not: two moves later, the shards that it knows may be new ones, which
        wait until others are empty.
        """
        if self._rows is None or not self.has(queue):
            return self._declared.layout(queue)
        known = self._current(queue, REFRESH_SECONDS if session else math.inf)
        layout = known.layout
        return _before(layout) if math.isinf(known.since) else layout

    def sending(self, queue: str, *, session: bool) -> ShardRange:
        """Where messages are sent now: see rules 1 and 2."""
        if self._rows is None or not self.has(queue):
            return self._declared.sending(queue, session=session)
        if not (found := self._state(queue)).notes:
            found.notes, found.known = True, None
        while True:
            known = self._current(queue, REFRESH_SECONDS if session else FREE_SECONDS)
            former, now = known.layout.former, clock.monotonic()
            if former is None or now >= known.since:
                return known.layout.sent
            if now < known.until:
                return former
            if not session:
                return known.layout.sent
            clock.current().sleep(known.since - now)

    def unfinished(self, queue: str) -> ShardLayout | None:
        """The layout, if its former shards may be found empty by now (rule 4)."""
        found = self._queues.get(queue)
        if self._rows is None or found is None or found.known is None:
            return None
        layout, now = found.known.layout, clock.monotonic()
        if layout.former is None or now < found.look_at:
            return None
        if now < found.known.since + last_sends(layout):
            return None
        found.look_at = now + LOOK_NUMBER * REFRESH_SECONDS * chance.uniform(0.5, 1.5)
        return layout

    def finish(self, queue: str, epoch: int, kept: int) -> None:
        """End the move of this epoch. Raises BrokerUnavailable, UnreadableLayout."""
        found = self._queues[queue]
        if self._rows is None or found.known is None:
            return
        self._rows.finish(queue, epoch, kept)
        known = found.known
        if known.layout.epoch == epoch:
            found.known = replace(known, layout=known.layout.ended(kept))

    def _state(self, queue: str) -> _Queue:
        found = self._queues.get(queue)
        return self._queues.setdefault(queue, _Queue(notes=False)) if found is None else found

    def _current(self, queue: str, oldest: float) -> _Known:
        """What was read of the queue in the last `oldest` seconds. Raises BrokerUnavailable."""
        found = self._state(queue)
        known, now = found.known, clock.monotonic()
        if known is not None and now - known.read_at <= REFRESH_SECONDS / 2:
            return known
        usable = known is not None and now - known.read_at <= oldest
        if usable and now < found.retry_at:
            assert known is not None  # noqa: S101  # it is usable
            return known
        # No thread waits for the one that reads: it may wait for a file's lock that this one holds.
        if found.lock.acquire(blocking=False):
            try:
                self._refresh(queue, found)
            finally:
                found.lock.release()
        elif not usable:
            self._refresh(queue, found)
        known = found.known
        if known is None or clock.monotonic() - known.read_at > oldest:
            if isinstance(found.error, ConfigurationError):  # waiting does not help
                raise ConfigurationError(str(found.error)) from found.error
            raise BrokerUnavailable(
                f"nothing was sent or received: it is not known which shards queue {queue!r} has "
                f"now, because the result store cannot be read ({found.error}). Try again when it "
                "answers"
            ) from found.error
        return known

    def _refresh(self, queue: str, found: _Queue) -> None:
        now = clock.monotonic()
        known = found.known
        fresh = known is not None and now - known.read_at <= REFRESH_SECONDS / 2
        if fresh or now < found.retry_at:
            return  # another thread has done it, or failed just now
        try:
            made = self._read(queue, known, found.notes)
        except AztaskError as error:
            if found.error is None:
                logger.warning("the shards of queue %s cannot be read: %s", visible(queue), error)
            found.error = error
            found.retry_at = clock.monotonic() + RETRY_NUMBER * REFRESH_SECONDS
            return
        if found.error is not None:
            logger.info("the shards of queue %s can be read again", visible(queue))
        found.error, found.retry_at = None, 0.0
        if known is None or known.layout.epoch != made.layout.epoch:
            self._say(queue, made.layout)
        if found.known is None or found.known.read_at <= made.read_at:
            found.known = made

    def _read(self, queue: str, before: _Known | None, notes: bool) -> _Known:
        assert self._rows is not None  # noqa: S101  # the caller has looked
        read_at = clock.monotonic()
        entry = self._rows.read(queue)
        if entry is None:
            layout = replace(ShardLayout.declared(self.wish(queue), self.addresses), epoch=1)
            if not notes:
                return _Known(layout, read_at)
            try:
                self._rows.make(queue, layout)
            except BrokerUnavailable:
                raise
            except AztaskError as error:  # it may not write: the code's numbers apply, as before
                if self.addresses:
                    raise  # another program may have its addresses in another order
                logger.debug("the shards of queue %s are not noted: %s", visible(queue), error)
                return _Known(layout, read_at)
            entry = self._rows.read(queue)
        if entry is None:
            raise BrokerUnavailable(f"the entry of queue {queue!r} was removed; try again")
        layout = entry.layout
        if unknown := layout.unknown_homes(self.addresses):
            raise ConfigurationError(
                f"queue {queue!r} also lives at {', '.join(unknown)}, which this program does not "
                "know: name all addresses in broker=[...] or AZTASK_BROKER"
            )
        if not entry.counts:
            return _Known(layout, read_at, math.inf, math.inf)
        if layout.former is None or not layout.starts_at:
            return _Known(layout, read_at)
        if before is not None and before.since < math.inf:
            known = before.layout
            if known.follows(layout) and known.starts_at == layout.starts_at:
                return replace(before, read_at=read_at)
        at = self._rows.time()
        until = layout.starts_at - at.at + at.earliest - MARGIN_SECONDS
        since = layout.starts_at - at.at + at.latest + MARGIN_SECONDS
        return _Known(layout, read_at, until, since)

    def _say(self, queue: str, layout: ShardLayout) -> None:
        """A line for the log if the code wishes for another number."""
        wish = self.wish(queue).sent
        if wish != layout.sent.count:
            logger.info(
                "queue %s has %d shards, and the code says %d: run aztask queues reshard %s, or "
                "change the code",
                visible(queue),
                layout.sent.count,
                wish,
                visible(queue),
            )


def last_sends(layout: ShardLayout) -> float:
    """So many seconds after the start of a move its former shards get messages at most."""
    free = not layout.ordered and layout.leaving()
    return SEND_NUMBER * REFRESH_SECONDS + (FREE_SECONDS if free else 0.0)


def _before(layout: ShardLayout) -> ShardLayout:
    """The layout without a move that does not count."""
    return replace(layout, sent=layout.former, former=None) if layout.former else layout
