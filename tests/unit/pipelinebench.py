"""A worker's stages on a real queue and a real result store, without its loop and its pool.

What fails is chosen by task id: the store or the broker raises for it, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from still import Still

from aztask import App
from aztask.queues.base import Delivery
from aztask.queues.engine import Database
from aztask.queues.lease.keeper import LeaseKeeper
from aztask.queues.local.broker import LocalBroker
from aztask.queues.local.receiver import LocalReceiver
from aztask.settlement import Settlement
from aztask.stores.records.local.store import LocalResults
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pipeline import Pipeline
from aztask.worker.pipeline.work import WorkItem

LEASE = 60.0


@dataclass
class Faults:
    """What fails: by task id, what is raised for it.

    answers: by task id, what the broker answers to its settlement without carrying it out. commit:
    what the end of a joint transaction raises.
    """

    record: dict[str, Exception] = field(default_factory=dict)
    settle: dict[str, Exception] = field(default_factory=dict)
    start: dict[str, Exception] = field(default_factory=dict)
    bury: dict[str, Exception] = field(default_factory=dict)
    disown: dict[str, Exception] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    commit: list[Exception] = field(default_factory=list)


class BadResults(LocalResults):
    """The local store; some runs make it raise."""

    faults: Faults

    def start(self, starts: Any) -> Any:
        _raise(self.faults.start, [each.key.task_id for each in starts])
        return super().start(starts)

    def record(self, finishes: Any) -> Any:
        _raise(self.faults.record, [each.key.task_id for each in finishes])
        return super().record(finishes)

    def bury(self, runs: Any, read: Any = None) -> Any:
        _raise(self.faults.bury, [each.key.task_id for each in runs])
        return super().bury(runs, read)

    def disown(self, runs: Any) -> Any:
        _raise(self.faults.disown, [key.task_id for key, _ in runs])
        return super().disown(runs)


class BadBroker(LocalBroker):
    """The local broker; the end of its transactions may raise, which takes all back."""

    faults: Faults

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            if self.faults.commit:
                raise self.faults.commit.pop(0)


class BadReceiver:
    """A local receiver; some deliveries make it raise, after half of their batch is settled.

    batches: the settlements that it was asked for, by task id.
    """

    def __init__(self, inner: LocalReceiver, faults: Faults, *, half: bool) -> None:
        self._inner, self._faults, self._half = inner, faults, half
        self.batches: list[list[tuple[str, Settlement]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle(self, pairs: list[tuple[Delivery, Settlement]]) -> Any:
        ids = [str(delivery.envelope.headers["id"]) for delivery, _ in pairs]
        self.batches.append([(each, how) for each, (_, how) in zip(ids, pairs, strict=True)])
        bad = [n for n, task_id in enumerate(ids) if task_id in self._faults.settle]
        if bad:
            if self._half and bad[0]:
                self._inner.settle(pairs[: bad[0]])
            raise self._faults.settle[ids[bad[0]]]
        good = [pair for each, pair in zip(ids, pairs, strict=True) if not self._answer(each)]
        answers = iter(self._inner.settle(good))
        return [self._answer(each) or next(answers) for each in ids]

    def _answer(self, task_id: str) -> Any:
        return self._faults.answers.get(task_id)


def _raise(faults: dict[str, Exception], ids: list[str]) -> None:
    for task_id in ids:
        if task_id in faults:
            raise faults[task_id]


@dataclass
class Bench:
    """A worker's stages, without its loop."""

    app: App
    clock: Still
    keeper: LeaseKeeper
    pipeline: Pipeline
    deliveries: Deliveries
    faults: Faults
    receiver: Any

    def send(self, *ids: str, **options: Any) -> None:
        for task_id in ids:
            self.app.send("shop.count", [[1]], task_id=task_id, **options)

    def receive(self, limit: int = 100) -> list[WorkItem]:
        """What is in the queue, opened; sorted by task id."""
        items = [
            self.deliveries.add("default", self.receiver, delivery)
            for delivery in self.receiver.receive(limit, 0.0)
        ]
        self.keeper.hold(self.receiver, [item.lease for item in items])
        self.pipeline.open(items)
        return sorted(items, key=lambda item: item.delivery.envelope.headers["id"])

    def items(self, *ids: str) -> list[WorkItem]:
        """Deliveries of tasks with these ids, opened."""
        self.send(*ids)
        return self.receive(len(ids))

    def claimed(self, *ids: str) -> list[WorkItem]:
        items = self.items(*ids)
        self.pipeline.claim(items)
        return items

    def again(self) -> list[WorkItem]:
        """What is in the queue, opened and claimed."""
        items = self.receive()
        self.pipeline.claim(items)
        return items

    def succeed(self, items: list[WorkItem]) -> None:
        for item in items:
            self.pipeline.decisions.succeeded(item, b"\x01")

    def states(self, *ids: str) -> list[str]:
        found = [self.app.results.get(task_id) for task_id in ids]
        return [run.state.value if run else "" for run in found]

    def stats(self) -> tuple[int | None, ...]:
        """(active, leased, scheduled, dead) of the queue."""
        stats = self.app.broker.stats("default")
        return stats.active, stats.leased, stats.scheduled, stats.dead

    def dead(self) -> dict[str, str]:
        """{task id: reason} of the dead letters."""
        peeked = self.app.broker.peek("default", dead_letter=True)
        return {
            each.envelope.headers["id"]: f"{each.dead_letter_reason}: "
            f"{each.dead_letter_description}"
            for each in peeked
        }


Make = Callable[..., Bench]


def make_bench(
    databases: set[Database],
    *,
    joint: bool = False,
    half: bool = False,
    results: bool = True,
    kind: type[BadBroker] = BadBroker,
    known: bool = True,
    task: dict[str, Any] | None = None,
    **settings: Any,
) -> Bench:
    """joint: broker and store share a database. half: see `BadReceiver`. known: whether the app has
    the task ``shop.count``, made with the options `task`. databases: gets what is to be closed.
    """
    clock, faults = Still(), Faults()
    first = Database(":memory:")
    second = first if joint else Database(":memory:")
    databases |= {first, second}
    broker, store = kind(first, clock=clock), BadResults(second, clock=clock)
    broker.faults = store.faults = faults
    app = App("shop", broker=broker, results=store if results else None, **settings)
    if known:
        app.task(name="shop.count", **(task or {}))(len)
    keeper = LeaseKeeper(broker, clock=clock)
    pipeline = Pipeline(app, keeper, name="w", clock=clock)
    receiver = BadReceiver(broker.receiver("default", lease=LEASE), faults, half=half)
    return Bench(app, clock, keeper, pipeline, Deliveries("w", clock), faults, receiver)
