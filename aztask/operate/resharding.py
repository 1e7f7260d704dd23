"""Moves a queue to another number of shards while its programs run: ``aztask queues reshard``.

Rules
1. The command creates the new shards and announces the move; the rest is done by those that send
   and receive (`aztask.stores.shardlayouts`), whether the command lives or not.
2. Run again with the same number, it goes on where it was. While a move to one number is under way,
   another one is refused.
3. A queue with priorities is several queues. They move one after the other, each by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Final

from aztask.address.shards import (
    MOST_SHARDS,
    ShardLayout,
    ShardRange,
    check_shards,
    read_shard_name,
    shard_name,
)
from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, QueueNotFound, did_you_mean
from aztask.operate.action import Action, Progress, Subject
from aztask.operate.findings import minute
from aztask.queues.sharded.addresses import AddressBroker
from aztask.queues.sharded.broker import ShardedBroker
from aztask.stores.shardlayouts import LayoutRows, StoredLayouts
from aztask.support.display import mask, plural, visible
from aztask.support.failpoint import hit
from aztask.support.finding import Finding, failed, fine, warning

NO_STORE: Final = (
    "the shards of a queue change while programs run only with a result store, which tells all of "
    "them: set AZTASK_RESULTS, or change the number in the code as docs/how-to/advanced/shards.md "
    "says"
)

MOST: Final = MOST_SHARDS
"""For the command, which knows the operations alone."""


@dataclass(frozen=True, slots=True)
class ShardTools:
    """What knows and changes the shards of an app's queues."""

    broker: ShardedBroker
    layouts: StoredLayouts
    rows: LayoutRows


def shard_tools(app: App) -> ShardTools | None:
    """None for an app without shards, or without a result store that knows them."""
    broker = app.broker
    if not isinstance(broker, ShardedBroker) or not isinstance(broker.layouts, StoredLayouts):
        return None
    rows = broker.layouts.rows
    return None if rows is None else ShardTools(broker, broker.layouts, rows)


def addresses_of(app: App) -> AddressBroker | None:
    """What knows the addresses of an app with a list of them; None for another app."""
    broker = app.broker
    return broker.addresses if isinstance(broker, ShardedBroker) else None


def refuse_several(app: App, what: str) -> None:
    """Raise ConfigurationError for an app with a list of addresses. Opens nothing."""
    if isinstance(app.broker_target, tuple):
        raise ConfigurationError(
            f"{what} works with one broker address, and this app has a list: {app.address}; see "
            "docs/how-to/advanced/addresses.md"
        )


def reshard(
    app: App,
    queue: str,
    shards: int | None = None,
    *,
    former: int | None = None,
    without: str = "",
) -> Reshard:
    """Plan the move of a queue, and of its priorities, to `shards` shards.

    If it has as many, and each address its part, there is nothing to do: the count is 0.

    * `shards`: by default what the code says.
    * `former`: how many it has now, if the entry that says so cannot be read.
    * `without`: an address that is to get no more messages, because it is to leave the app.

    Raises ConfigurationError without a result store, for a queue without a number in the code, and
    while another move is under way; BrokerUnavailable; UnreadableLayout.
    """
    tools = shard_tools(app)
    names = app.priority_queues(queue)
    if tools is None or not all(map(tools.layouts.has, names)):
        if app.results is None:
            raise ConfigurationError(NO_STORE)
        raise ConfigurationError(
            f"the code names no number of shards for queue {visible(queue)}: declare it with "
            f"app.queue({queue!r}, shards=1) in all its programs, deploy them, and come back"
        )
    without = _leaving_address(tools, without)
    wish = tools.layouts.wish(queue)
    count = wish.sent if shards is None else check_shards("--shards", shards)
    ordered = app.queues.has_sessions(queue)
    if ordered and wish.read > wish.sent:
        raise ConfigurationError(
            f"the code names old_shards for queue {visible(queue)}, which has sessions: remove that"
        )
    if former is not None and tools.layouts.addresses:
        raise ConfigurationError(
            "--former is for an app with one address: no number says at which address a shard is"
        )
    if former is not None:
        given = ShardLayout(ShardRange(0, check_shards("--former", former)), epoch=1)
        for name in names:
            tools.rows.repair(name, given)
    moves = {name: _planned(tools, name, count, without, ordered=ordered) for name in names}
    wanted = {name: move for name, move in moves.items() if move is not None}
    held = delayed = 0
    for name in wanted:
        with suppress(QueueNotFound):
            stats = app.broker.stats(name)
            held += stats.living
            delayed += (stats.scheduled or 0) + (stats.deferred or 0) if ordered else 0
    return Reshard(app, len(wanted), queue, count, wanted, held, delayed)


def _leaving_address(tools: ShardTools, given: str) -> str:
    """The name of the address that is to leave. Raises ConfigurationError unless the app has it."""
    names = tools.layouts.addresses.names if tools.layouts.addresses.several else ()
    if not given or (given in names and len(names) > 1):
        return given
    if given in names:
        raise ConfigurationError(f"{given} is the only address of the app: add another one first")
    raise ConfigurationError(
        f"{visible(mask(given))} is not an address of the app.{did_you_mean(given, names)} It has: "
        f"{', '.join(names) or 'one address only'}"
    )


def _planned(
    tools: ShardTools, name: str, count: int, without: str, *, ordered: bool
) -> ShardLayout | None:
    """The move to make, or to go on with; None if the queue has so many shards."""
    entry = tools.rows.read(name)
    places = tools.layouts.addresses
    layout = (
        ShardLayout.declared(tools.layouts.wish(name), places) if entry is None else entry.layout
    )
    if layout.former is not None and not layout.starts_at:
        # Made from `old_shards` of the code: these go on being read as the code says.
        layout = layout.ended(layout.top)
        if entry is not None:
            tools.rows.finish(name, layout.epoch, layout.top)
    homes = tuple(layout.home(number, places) for number in layout.sent.numbers)
    wanted = layout.spread(count, places, without) if places else homes
    if layout.former is None:
        if layout.sent.count == count and homes == wanted:
            return None
        return layout.moved(count, ordered=ordered, addresses=places, without=without)
    if layout.sent.count == count and homes == wanted:
        return layout
    raise ConfigurationError(
        f"queue {visible(name)} is being moved from {layout.former.count} to {layout.sent.count} "
        f"shards by {visible(layout.by) or 'another program'}; wait for the end of that: aztask "
        f"queues reshard {visible(name)} --shards {layout.sent.count}"
    )


@dataclass(slots=True)
class Reshard(Action[None]):
    """Announces a move. count: how many queues are moved, one for each priority.

    * `moves`: by queue, the layout that it gets; `announced`: as it is in the store, afterwards.
    * `held`: how many messages the queue holds; they stay where they are.
    * `delayed`: how many of these are delayed or deferred, in a queue with sessions: they keep the
      new shards waiting.
    """

    name: ClassVar[str] = "queue-reshard"

    queue: str
    shards: int
    moves: Mapping[str, ShardLayout]
    held: int
    delayed: int = 0
    announced: dict[str, ShardLayout] = field(default_factory=dict, init=False)

    def __str__(self) -> str:
        if not self.moves:
            return f"leave queue {visible(self.queue)} as it is, with {self.shards} shards"
        layout = self.moves.get(self.queue) or next(iter(self.moves.values()))
        before = layout.former.count if layout.former else self.shards
        to = ""
        if layout.homes:
            homes = Counter(layout.homes[number] for number in layout.sent.numbers)
            to = " at " + ", ".join(f"{visible(home)} ({homes[home]})" for home in sorted(homes))
        others = "" if self.count == 1 else f", with {plural(self.count - 1, 'other priority')}"
        return (
            f"move queue {visible(self.queue)} from {before} to {plural(self.shards, 'shard')}"
            f"{to}{others}; its {plural(self.held, 'message')} stay where they are until workers "
            f"take them{self._waits()}"
        )

    def _waits(self) -> str:
        """What keeps new messages of a queue with sessions waiting; "" if nothing is known."""
        if not self.delayed:
            return ""
        return (
            f"; {self.delayed} of them wait for their time, and new messages wait until these have "
            "ended"
        )

    def subject(self) -> Subject:
        """The queue that it acts on."""
        return Subject(queue=self.queue)

    def _act(self, progress: Progress) -> None:
        tools = shard_tools(self.app)
        assert tools is not None  # noqa: S101  # it was planned with these
        for name, move in self.moves.items():
            tools.broker.moves.declare(name, move, self.app.queue_options(name))
            hit("reshard-created")
            self.announced[name] = tools.rows.announce(name, move, by=self.by).layout
            hit("reshard-announced")
            self.done += 1
            progress(self.done)


@dataclass(frozen=True, slots=True)
class MoveState:
    """How far the move of a queue is.

    * `starts_in`: seconds until messages go to the new shards; 0 once they do.
    * `waiting`: how many messages the former shards hold.
    * `ended`: whether the move has ended.
    """

    queue: str
    layout: ShardLayout
    starts_in: float
    waiting: int
    ended: bool


def look_after(app: App, queue: str) -> MoveState:
    """Look how far a move is, and end it if its former shards are empty. Raises BrokerUnavailable.

    Raises ConfigurationError for a queue without shards.
    """
    tools = shard_tools(app)
    if tools is None:
        raise ConfigurationError(NO_STORE)
    tools.layouts.layout(queue)
    tools.broker.moves.end(queue)
    entry = tools.rows.read(queue)
    layout = tools.layouts.layout(queue) if entry is None else entry.layout
    if layout.former is None:
        return MoveState(queue, layout, 0.0, 0, ended=True)
    starts_in = max(0.0, layout.starts_at - tools.rows.time().at)
    waiting = tools.broker.moves.messages(queue, layout.leaving())
    return MoveState(queue, layout, starts_in, waiting, ended=False)


def left_shards(app: App, layout: ShardLayout, queue: str) -> list[str]:
    """Queues of the service that were shards, and are read and used no longer."""
    tools = shard_tools(app)
    if tools is None:
        return []
    used = {*layout.sent.numbers, *layout.reading(tools.layouts.wish(queue))}
    numbers = [each for each in range(layout.kept, MOST_SHARDS) if each not in used]
    with suppress(ConfigurationError):  # some may use their queues, but not list all
        return tools.broker.moves.existing(queue, numbers)
    return []


# -- what the commands show ------------------------------------------------------------------


def layouts(app: App) -> dict[str, ShardLayout | AztaskError]:
    """By queue, the layout that the store has of it, or why it cannot be read.

    Queues without shards have none, and neither have those that no program has used.
    """
    tools = shard_tools(app)
    found: dict[str, ShardLayout | AztaskError] = {}
    if tools is None:
        return found
    for queue in filter(tools.layouts.has, app.queue_names()):
        try:
            entry = tools.rows.read(queue)
        except AztaskError as error:
            found[queue] = error
        else:
            if entry is not None:
                found[queue] = entry.layout
    return found


def part_in_move(shard: str, layout: ShardLayout | AztaskError | None) -> str:
    """Which part a shard has while a queue is moved, or after that; "" for an ordinary one."""
    if not isinstance(layout, ShardLayout):
        return ""
    number = read_shard_name(shard)[1]
    if layout.former is None:
        return "" if number in layout.sent.numbers else "left"
    if number not in layout.former.numbers:
        return "new" if number in layout.sent.numbers else "left"
    return "" if number in layout.sent.numbers else "former"


def shard_notes(app: App, known: Mapping[str, ShardLayout | AztaskError]) -> Iterator[str]:
    """Which queues are being moved, have other shards than the code says, or are damaged."""
    for queue, layout in known.items():
        name = visible(queue)
        if isinstance(layout, AztaskError):
            yield str(layout)
            continue
        if layout.former is not None:
            yield (
                f"queue {name} moves from {layout.former.count} to "
                f"{plural(layout.sent.count, 'shard')}, which get messages from "
                f"{minute(layout.starts_at)} on"
            )
        if layout.sent.count != (wish := app.queues.wish(queue)):
            yield (
                f"queue {name} has {plural(layout.sent.count, 'shard')}, and the code says {wish}; "
                "see: aztask queues reshard --help"
            )


def keep_layouts(app: App, known: Mapping[str, ShardLayout | AztaskError]) -> None:
    """Store these layouts again where there is none, as after a move of all rows to another owner.

    The queues of the old owner's broker have their shards still.
    """
    tools = shard_tools(app)
    if tools is None:
        return
    for queue, layout in known.items():
        if isinstance(layout, ShardLayout):
            tools.rows.make(queue, layout)


def layout_findings(app: App) -> Iterator[Finding]:
    """Queues whose shards are not those of the code, or are being changed, or not readable."""
    if (places := addresses_of(app)) is not None:
        for home, held in places.strays(app.queue_names()):
            if held.living:
                yield warning(
                    f"queue {read_shard_name(held.queue)[0]}",
                    "addresses",
                    f"{home} holds {plural(held.living, 'message')} in {held.queue}, which lives "
                    "at another address, so no worker reads them",
                    "find the program that sends there; a worker with that address alone, and "
                    "without a result store, runs them",
                )
    for queue, layout in layouts(app).items():
        subject, wish = f"queue {queue}", app.queues.wish(queue)
        if isinstance(layout, AztaskError):
            yield failed(subject, "shards", layout)
            continue
        yield from _unread(app, queue, layout)
        if layout.former is not None:
            text = (
                f"it is being moved from {layout.former.count} to {layout.sent.count} shards by "
                f"{layout.by or 'a program'}"
            )
            yield fine(subject, "reshard", text)
        if places is not None and layout.former is None:
            names = places.layouts.addresses
            homes = tuple(layout.home(number, names) for number in layout.sent.numbers)
            if homes != layout.spread(layout.sent.count, names):
                yield warning(
                    subject,
                    "addresses",
                    "its shards are not spread over all addresses of the app",
                    f"move them: aztask queues reshard {queue}; an address that is to leave may "
                    "get none",
                )
        if layout.sent.count != wish:
            yield warning(
                subject,
                "shards",
                f"it has {plural(layout.sent.count, 'shard')}, and the code says {wish}",
                f"move it: aztask queues reshard {queue}; or write {layout.sent.count} in the code",
            )


def _unread(app: App, queue: str, layout: ShardLayout) -> Iterator[Finding]:
    """Shards with messages that no worker reads, as of a sender that stood still for long."""
    tools = shard_tools(app)
    assert tools is not None  # noqa: S101  # it has a layout
    read = {*layout.sent.numbers, *layout.reading(tools.layouts.wish(queue))}
    for number in range(max(layout.kept, len(layout.homes))):
        name = shard_name(queue, number)
        if number not in read and (held := tools.broker.moves.messages(queue, [number])):
            yield warning(
                f"queue {queue}",
                "shards",
                f"{name} holds {plural(held, 'message')}, and no worker reads it",
                f"declare app.queue({queue!r}, ..., old_shards={number + 1}) until it is empty",
            )
