"""The broker and the result store of one actor, which tell the book what happened.

Rules
1. They change nothing: what they are asked, they ask the real one.
2. A dead actor reaches neither: each request of it raises Death once more.
3. What happens inside a transaction is told when that is committed, and not if it is rolled back.
4. Each request has two points, before and after it, see `points`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from aztask.errors import BrokerUnavailable
from aztask.message.envelope import Envelope
from aztask.message.message import plain_name
from aztask.queues.base import Position, Receiver
from aztask.queues.delivery import Delivery, Lost, Renewed, Settled, Unknown
from aztask.settlement import Settlement
from aztask.stores.records.base import Finish, ReadRuns, RunKey, RunRecord, Start, StartAnswer
from aztask.stores.rows import Kind, Rows, RowStore

from .releases import FORMER

if TYPE_CHECKING:
    from .actors import Actor

LOOK: Final = 1.0
"""Seconds between two looks of a program that waits for messages."""


class WatchedReceiver:
    """A receiver of one actor."""

    def __init__(self, inner: Receiver, actor: Actor, queue: str, dead: bool) -> None:
        self._inner = inner
        self._actor = actor
        self._queue = queue
        self._dead = dead
        self._came: list[Delivery] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, limit: int, wait: float) -> list[Delivery]:
        """Receive; the actor may die before it has seen what came.

        It waits on the world's clock: an adapter's own wait, on a thread's, never ends there.
        """
        world = self._actor.world
        until = world.time.now + wait
        while True:
            self._actor.ask("broker")
            asked_at = world.time.now
            found = self._received(self._inner.receive(limit, 0.0), asked_at)
            if found or world.time.now >= until:
                return found
            world.sleep(LOOK)

    def receive_deferred(self, positions: Sequence[Position]) -> list[Delivery]:
        """Receive deferred messages."""
        self._actor.ask("broker")
        asked_at = self._actor.world.time.now
        return self._received(self._inner.receive_deferred(positions), asked_at)

    def _received(self, found: list[Delivery], asked_at: float) -> list[Delivery]:
        if found:
            book, actor = self._actor.world.book, self._actor
            for delivery in found:
                book.received(actor, delivery, self._dead, asked_at)
            actor.world.point("receive>")
        return found

    def renew(
        self, deliveries: Sequence[Delivery], seconds: float | None = None
    ) -> list[Renewed | Lost | Unknown]:
        """Renew."""
        actor = self._actor
        actor.world.point("renew<")
        actor.ask("broker")
        answers = self._inner.renew(deliveries, seconds)
        now = actor.world.time.now  # an answer may belong to an earlier request, never to a later
        for delivery, answer in zip(deliveries, answers, strict=True):
            if isinstance(answer, Renewed):
                granted = delivery.lease_seconds if seconds is None else seconds
                granted = max(granted, delivery.lease_seconds)
                actor.world.book.renewed(actor, delivery, now + granted, answer.deadline)
        actor.world.point("renew>")
        return answers

    def update(self, delivery: Delivery, envelope: Envelope) -> Renewed | Lost | Unknown:
        """Replace the content, which renews too."""
        actor = self._actor
        actor.ask("broker")
        answer = self._inner.update(delivery, envelope)
        if isinstance(answer, Renewed):
            until = actor.world.time.now + delivery.lease_seconds
            actor.world.book.renewed(actor, delivery, until, answer.deadline)
        return answer

    def settle(
        self, pairs: Sequence[tuple[Delivery, Settlement]]
    ) -> list[Settled | Lost | Unknown]:
        """Settle."""
        actor = self._actor
        actor.world.point("settle<")
        actor.ask("broker")
        book = actor.world.book
        if actor.site.remote:  # what it gives back may come to others before it has the answer
            for delivery, _ in pairs:
                book.until.pop(delivery, None)
        answers = self._inner.settle(pairs)
        for (delivery, settlement), answer in zip(pairs, answers, strict=True):
            if isinstance(answer, Lost):
                book.refused(actor, delivery, settlement)
            if isinstance(answer, Unknown) and actor.site.remote:
                book.unanswered(delivery)
            if isinstance(answer, Settled):
                actor.site.tell(
                    lambda delivery=delivery, settlement=settlement: book.settled(  # type: ignore[misc]
                        actor, delivery, settlement, self._dead
                    )
                )
        actor.world.point("settle>")
        return answers


class WatchedSession(WatchedReceiver):
    """A receiver of sessions of one actor."""

    def let_go(self) -> None:
        """Release the session, and with it what was received from it."""
        self._actor.ask("broker")
        cast("Any", self._inner).let_go()
        self._actor.world.book.given_back(self._actor, self._queue, self._came)
        self._came.clear()

    def session_state(self, session: str) -> bytes | None:
        """Read its state."""
        self._actor.ask("broker")
        return cast("bytes | None", cast("Any", self._inner).session_state(session))

    def set_session_state(self, session: str, state: bytes | None) -> None:
        """Write its state."""
        self._actor.ask("broker")
        cast("Any", self._inner).set_session_state(session, state)

    def _received(self, found: list[Delivery], asked_at: float) -> list[Delivery]:
        self._came.extend(found)
        return super()._received(found, asked_at)


class WatchedSends:
    """What a broker of whatever kind does besides. Its receivers are watched, too."""

    def __init__(self, actor: Actor, real: Any) -> None:
        self.actor = actor
        self._send, self._receiver = real.send, real.receiver

    def send(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Send."""
        actor = self.actor
        actor.world.point("send<")
        actor.ask("broker")
        self._send(queue, envelopes)
        book = actor.world.book
        actor.site.tell(lambda: book.accepted(actor, queue, envelopes))
        actor.world.point("send>")

    def receiver(self, queue: str, **options: Any) -> Receiver:
        """A receiver that tells what it does."""
        self.actor.ask("broker")
        inner = self._receiver(queue, **options)
        kind = WatchedReceiver if options.get("session") is None else WatchedSession
        return cast(
            "Receiver", kind(inner, self.actor, queue, bool(options.get("dead_letter", False)))
        )


class WatchedRuns:
    """What a result store of whatever kind does besides."""

    def __init__(self, actor: Actor, real: Any) -> None:
        self.actor = actor
        self._start, self._record, self._bury = real.start, real.record, real.bury
        self._disown, self._expect, self._cancel = real.disown, real.expect, real.cancel
        self._purge, self._heartbeat = real.purge, real.heartbeat

    def start(self, starts: Sequence[Start]) -> list[StartAnswer]:
        """Own runs."""
        actor = self.actor
        actor.world.point("start<")
        actor.ask("results")
        asked_at = actor.world.time.now
        if actor.version == FORMER:  # it did not compare the names of tasks
            starts = [replace(each, task=plain_name(each.task)) for each in starts]
        answers: list[StartAnswer] = self._start(starts)
        book = actor.world.book
        actor.site.tell(lambda: book.claimed(actor, starts, answers, asked_at))
        actor.world.point("start>")
        return answers

    def record(self, finishes: Sequence[Finish]) -> list[bool]:
        """Record outcomes."""
        actor = self.actor
        actor.world.point("record<")
        actor.ask("results")
        answers: list[bool] = self._record(finishes)
        book = actor.world.book
        actor.site.tell(lambda: book.recorded(actor, finishes, answers))
        actor.world.point("record>")
        return answers

    def bury(self, runs: Sequence[RunRecord], read: ReadRuns = None) -> list[bool]:
        """Record what the broker, or a repair, has ended."""
        self.actor.ask("results")
        answers: list[bool] = self._bury(runs, read)
        book, actor = self.actor.world.book, self.actor
        actor.site.tell(lambda: book.buried(actor, runs, answers))
        return answers

    def disown(self, runs: Sequence[tuple[RunKey, str]]) -> None:
        """Give runs back."""
        self.actor.ask("results")
        self._disown(runs)
        book, actor = self.actor.world.book, self.actor
        actor.site.tell(lambda: book.disowned(actor, runs))

    def expect(self, runs: Iterable[RunRecord]) -> None:
        """Note runs that are sent."""
        self.actor.ask("results")
        self._expect(runs)

    def cancel(self, task_id: str, at: float, *, running: bool = False) -> bool:
        """Cancel a task."""
        self.actor.ask("results")
        done: bool = self._cancel(task_id, at, running=running)
        if done:
            book = self.actor.world.book
            self.actor.site.tell(lambda: book.cancelled(task_id, running))
        return done

    def purge(self, before: float) -> int:
        """Purge; the book looks whether anything went that should have stayed."""
        self.actor.ask("results")
        deleted: int = self._purge(before)
        if deleted:
            self.actor.world.book.purged(self.actor)
        return deleted

    def heartbeat(self, worker: Any) -> None:
        """Write a heartbeat."""
        self.actor.ask("results")
        self._heartbeat(worker)


class WatchedRows:
    """The port of rows of one actor: steps, waits, signals and parts are kept there."""

    def __init__(self, actor: Actor, inner: RowStore) -> None:
        self._actor = actor
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def of(self, kind: Kind) -> WatchedKind:
        """The rows of one kind."""
        return WatchedKind(self._actor, self._inner.of(kind))


class WatchedKind:
    """Rows that are away where the store is."""

    def __init__(self, actor: Actor, inner: Rows) -> None:
        self._actor = actor
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        self._actor.ask("results")
        return getattr(self._inner, name)


SENDS: Final = ("send", "receiver")
RUNS: Final = ("start", "record", "bury", "disown", "expect", "cancel", "purge", "heartbeat")


def watch(actor: Actor, broker: Any, results: Any) -> tuple[Any, Any]:
    """Have the two tell what this actor does with them; what they are stays the same."""
    sends, runs = WatchedSends(actor, broker), WatchedRuns(actor, results)
    for name in SENDS:
        setattr(broker, name, getattr(sends, name))
    for name in RUNS:
        setattr(results, name, getattr(runs, name))
    results.rows = WatchedRows(actor, results.rows)
    return broker, results


def unavailable(what: str) -> BrokerUnavailable:
    """What an outage raises."""
    return BrokerUnavailable(f"the {what} cannot be reached in this world for a while")
