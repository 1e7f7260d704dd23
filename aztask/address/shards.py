"""Shards: the queues of a service that hold the messages of one queue of an app.

Rules
1. Shard 0 has the name of the queue, shard 3 of ``orders`` is ``orders-shard-3``. All services
   allow such names. So a queue that gets shards keeps its messages, and programs that know of none
   send to shard 0.
2. Senders choose among the first `ShardCount.sent`. Readers go through `ShardCount.read`, which
   are more while the shards of a larger number are emptied.
3. A message belongs to the shard that a hash of its session says, else of its task id, else of its
   message id, else of its body. So all messages of a task, also of different senders, are in one
   shard, where its service recognises copies.
4. With a result store, the numbers of the code are a wish. A row of the store says which shards the
   queue has (`ShardLayout`), and ``aztask queues reshard`` changes the row.
5. An app may have several addresses. Then the row also says at which address each shard lives, and
   a shard never moves: its number no longer gets messages, and another number, at another address,
   takes its place. So a change of addresses is a move as any other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Final

from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.support.checks import shown

MOST_SHARDS: Final = 64
MOST_PAST: Final = 8
"""So many earlier places of sessions are noted."""

_NAME: Final = re.compile(r"(.+)-shard-([1-9][0-9]?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShardCount:
    """How many shards a queue has in the code: for those that send, and for those that read.

    declared: the code names a number, and be it 1: so the queue may get more while programs run.
    """

    sent: int = 1
    read: int = 1
    declared: bool = False

    def __bool__(self) -> bool:
        return self.declared or self.read > 1


UNSHARDED: Final = ShardCount()

ShardCounts = Mapping[str, ShardCount]
"""The queues that have shards."""


@dataclass(frozen=True, slots=True)
class AddressNames:
    """The addresses of an app, by their names without credentials.

    * `names`: in the order of the code; none for a broker that has no name.
    * `home`: where queues live that were used before the app had several: the first of the list
      when it was new, unless that can be told from the owner of the rows.
    * `several`: the code gives a list, and be it of one: all queues have a layout.
    """

    names: tuple[str, ...] = ()
    home: str = ""
    several: bool = False

    def __bool__(self) -> bool:
        return self.several

    def ordered(self) -> tuple[str, ...]:
        """The names, the home of older queues first: shard 0 of a queue is there."""
        first = (self.home,) if self.home in self.names else ()
        return (*first, *(each for each in self.names if each != self.home))


ONE_ADDRESS: Final = AddressNames()


def spread(count: int, addresses: Sequence[str], before: Sequence[str] = ()) -> tuple[str, ...]:
    """The address of each of `count` shards: as many at each, and as few changes as possible.

    before: the addresses of the first shards until now. A hash of the shard would need no memory of
    that, but gives one address up to twice as many shards as another, and the fullest address says
    how much the queue can take.
    """
    had = Counter(each for each in before[:count] if each in addresses)
    least, more = divmod(count, len(addresses))
    fullest = sorted(addresses, key=lambda each: -had[each])
    room = {each: least + (place < more) for place, each in enumerate(fullest)}
    kept = []
    for each in before[:count]:
        stays = room.get(each, 0) > 0
        kept.append(each if stays else "")
        if stays:
            room[each] -= 1
    used = Counter(each for each in kept if each)
    found = []
    for number in range(count):
        each = kept[number] if number < len(kept) else ""
        if not each:
            each = min((name for name in addresses if room[name]), key=lambda name: used[name])
            room[each] -= 1
            used[each] += 1
        found.append(each)
    return tuple(found)


def shard_name(queue: str, number: int) -> str:
    """The name of the queue that is shard `number` of `queue`."""
    return queue if number == 0 else f"{queue}-shard-{number}"


def shard_names(queue: str, count: int) -> tuple[str, ...]:
    """The names of all shards."""
    return tuple(shard_name(queue, number) for number in range(count))


def read_shard_name(name: str) -> tuple[str, int]:
    """The queue and the number of the shard; another queue is shard 0 of itself."""
    found = _NAME.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def shard_of_session(session: str, count: int) -> int:
    """The shard of a session among so many, also for its receiver."""
    return _shard(b"session", session.encode("utf-8", "surrogatepass"), count)


def shard_of(envelope: Envelope, count: int) -> int:
    """The shard among so many that the message belongs to, see rule 3."""
    if envelope.session is not None:
        return shard_of_session(envelope.session, count)
    name = envelope.headers.get("id") or envelope.message_id
    if isinstance(name, str) and name:
        return _shard(b"id", name.encode("utf-8", "surrogatepass"), count)
    return _shard(b"body", envelope.body, count)


def _shard(kind: bytes, value: bytes, count: int) -> int:
    digest = sha256(kind + b"\0" + value).digest()
    return int.from_bytes(digest[:8], "big") % count


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The shards that messages are spread over: `count` that follow each other from `first` on.

    chosen: their numbers, where they do not follow each other: some of them replace shards of
    addresses that got fewer.
    """

    first: int = 0
    count: int = 1
    chosen: tuple[int, ...] = ()

    @classmethod
    def among(cls, numbers: Sequence[int]) -> ShardRange:
        """Those with these numbers, in this order."""
        follow = tuple(numbers) == tuple(range(numbers[0], numbers[0] + len(numbers)))
        return cls(numbers[0], len(numbers), () if follow else tuple(numbers))

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of its shards."""
        return self.chosen or range(self.first, self.first + self.count)

    def of(self, envelope: Envelope) -> int:
        """The shard of a message."""
        return self.numbers[shard_of(envelope, self.count)]

    def of_id(self, task_id: str) -> int:
        """The shard of a task without a session."""
        return self.numbers[_shard(b"id", task_id.encode("utf-8", "surrogatepass"), self.count)]

    def of_session(self, session: str) -> int:
        """The shard of a session."""
        return self.numbers[shard_of_session(session, self.count)]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Which shards a queue has.

    * `sent`: those that senders choose among, from `starts_at` on.
    * `former`: those before, until they are empty; None: no move is under way.
    * `starts_at`: the store's time, UTC epoch seconds.
    * `epoch`: rises with each move; 0 is what the code says, where no row says anything.
    * `ordered`: the queue has sessions: its messages are received from `former` alone while that
      has some, so that no message of a session overtakes an older one.
    * `kept`: shards below this number may hold dead letters.
    * `past`: of a queue with sessions, the shards of earlier epochs, the newest first: the states
      of sessions may still be there.
    * `by`: who began the move.
    * `homes`: of an app with several addresses, the address of each shard, by its number. Shards
      behind the last one, and all of a layout without any, are at `AddressNames.home`.
    """

    sent: ShardRange = ShardRange()
    former: ShardRange | None = None
    starts_at: float = 0.0
    epoch: int = 0
    ordered: bool = False
    kept: int = 0
    past: tuple[ShardRange, ...] = ()
    by: str = ""
    homes: tuple[str, ...] = ()

    @classmethod
    def declared(cls, count: ShardCount, addresses: AddressNames = ONE_ADDRESS) -> ShardLayout:
        """The layout of an app whose code says so."""
        sent, read = ShardRange(0, count.sent), ShardRange(0, count.read)
        homes = spread(count.read, addresses.ordered()) if addresses else ()
        return cls(sent, read if count.read > count.sent else None, homes=homes)

    def home(self, number: int, addresses: AddressNames) -> str:
        """The address of a shard."""
        return self.homes[number] if number < len(self.homes) else addresses.home

    def unknown_homes(self, addresses: AddressNames) -> list[str]:
        """Addresses with shards in use that are not among these."""
        numbers = {*self.sent.numbers, *(self.former.numbers if self.former else ())}
        if not addresses.several:  # without homes, its one address is meant, whatever it is
            numbers = {each for each in numbers if each < len(self.homes)}
        homes = {self.home(each, addresses) for each in numbers}
        return sorted(homes.difference(addresses.names))

    def reading(self, wish: ShardCount) -> tuple[int, ...]:
        """The shards that messages are received from.

        wish: what the code says. Those shards are read, too: a program of the release before sends
        to them. In a queue with sessions they are, if the code names an older and larger number.
        """
        if self.ordered:
            also = wish.read if wish.read > wish.sent else 0
            return tuple(sorted({*(self.former or self.sent).numbers, *range(also)}))
        former = self.former.numbers if self.former else ()
        # No release before knows of homes: it refuses to send where there are some.
        wished = range(wish.read) if not self.homes or wish.read > wish.sent else ()
        return tuple(sorted({*self.sent.numbers, *former, *wished}))

    def leaving(self) -> tuple[int, ...]:
        """The shards that get no messages after the move; they are left once they are empty."""
        if self.former is None:
            return ()
        kept = () if self.ordered else self.sent.numbers
        return tuple(number for number in self.former.numbers if number not in kept)

    @property
    def top(self) -> int:
        """All messages and dead letters are in shards below this number."""
        ends = [max(each.numbers) + 1 for each in (self.sent, self.former) if each]
        return max([self.kept, *ends])

    def moved(
        self,
        count: int,
        *,
        ordered: bool,
        addresses: AddressNames = ONE_ADDRESS,
        without: str = "",
    ) -> ShardLayout:
        """The layout of the next epoch, with `count` shards. Its start is still to be set.

        They are the first ones. In a queue with sessions, they are none that hold messages now: a
        queue of the service then has messages of one epoch only. Of several addresses, each gets as
        many, except `without`. Raises ConfigurationError if there is no room for that.
        """
        if addresses:
            return self._moved_among(count, ordered, addresses, without)
        behind = self.sent.first + self.sent.count
        first = 0 if not ordered or count <= self.sent.first else behind
        if first + count > MOST_SHARDS:
            raise ConfigurationError(
                f"there is no room for {count} shards beside the present ones, which have the "
                f"numbers {self.sent.first} to {behind - 1} of {MOST_SHARDS}: a queue with "
                f"sessions needs others, at most {max(self.sent.first, MOST_SHARDS - behind)}"
            )
        return ShardLayout(
            ShardRange(first, count),
            former=self.sent,
            epoch=self.epoch + 1,
            ordered=ordered,
            kept=self.top,
            past=(self.sent, *self.past)[:MOST_PAST] if ordered else (),
        )

    def spread(self, count: int, addresses: AddressNames, without: str = "") -> tuple[str, ...]:
        """The addresses that `count` shards have after a move that changes as few as possible."""
        before = [self.home(number, addresses) for number in self.sent.numbers]
        return spread(count, [each for each in addresses.ordered() if each != without], before)

    def _moved_among(
        self, count: int, ordered: bool, addresses: AddressNames, without: str
    ) -> ShardLayout:
        """`moved` among several addresses: a shard whose address stays keeps its number."""
        before = list(self.sent.numbers)
        homes = [self.home(number, addresses) for number in range(max(self.top, len(self.homes)))]
        numbers: list[int] = []
        for place, home in enumerate(self.spread(count, addresses, without)):
            stays = not ordered and place < len(before) and homes[before[place]] == home
            number = before[place] if stays else _free(home, homes, {*before, *numbers})
            numbers.append(number)
        return ShardLayout(
            ShardRange.among(numbers),
            former=self.sent,
            epoch=self.epoch + 1,
            ordered=ordered,
            kept=self.top,
            past=(self.sent, *self.past)[:MOST_PAST] if ordered else (),
            homes=tuple(homes),
        )

    def ended(self, kept: int) -> ShardLayout:
        """The layout when the former shards are empty. kept: see there."""
        return replace(self, former=None, kept=kept)

    def follows(self, other: ShardLayout) -> bool:
        """True if `other` is this move, whenever it starts, and whether it has ended."""
        same = self.former == other.former or None in (self.former, other.former)
        return same and (self.epoch, self.sent) == (other.epoch, other.sent)


def _free(home: str, homes: list[str], used: set[int]) -> int:
    """The first number at this address that is not used; a number that is new joins `homes`.

    A number stays at its address for good: what a program knows of an older epoch never names
    another queue of the service.
    """
    for number, known in enumerate(homes):
        if known == home and number not in used:
            return number
    if len(homes) >= MOST_SHARDS:
        raise ConfigurationError(
            f"all {MOST_SHARDS} numbers of shards are taken, and none of them is free at {home}: "
            "move the queue to fewer shards, or the app to a new queue"
        )
    homes.append(home)
    return len(homes) - 1


def check_shards(name: str, value: Any) -> int:
    """The number of shards, 1 to `MOST_SHARDS`: a check of a setting."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SHARDS:
        raise ConfigurationError(
            f"{name} is a whole number from 1 to {MOST_SHARDS}, not {shown(value)}"
        )
    return value
