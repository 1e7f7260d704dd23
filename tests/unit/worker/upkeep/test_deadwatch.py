"""What the broker dead-lettered by itself is recorded once, and told by whoever noticed first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from runtimes import make_runtime
from still import Still

from aztask import App, chord
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Abandon, DeadLetter
from aztask.stores.records.base import State
from aztask.worker.upkeep.housekeeping import (
    DEAD_SECONDS,
    LOOK_SECONDS,
    OLD_PAGES,
    PAGE,
    DeadWatch,
    Housekeeping,
)

NOW = 1_000_000.0


class Watch(DeadWatch):
    """A watch whose looks include the loop's turn after them."""

    def look(self) -> bool:
        more = super().look()
        self._mailbox.run()
        return more


@dataclass
class Bench:
    """An app whose queue ``default`` allows one delivery, and what a watch told."""

    app: App
    clock: Still
    told: list[tuple[str, str, int, str]] = field(default_factory=list)

    def watch(self, *queues: str) -> Watch:
        def tell(event: Any) -> None:
            told = (event.task_id, event.queue, event.delivery_count, event.error_type)
            self.told.append(told)

        queues = queues or ("default",)
        return Watch(make_runtime(self.app, clock=self.clock, emit=tell, queues=queues))

    def use_up(self, *ids: str) -> None:
        """Send and abandon: the only delivery that is allowed is used up."""
        for name in ids:
            self.app.send("shop.resize", ["a.png"], task_id=name)
        self.settle(Abandon(), len(ids))

    def settle(self, how: Any, count: int) -> None:
        receiver = self.app.broker.receiver("default", lease=60.0)
        for delivery in receiver.receive(count, 0.0):
            receiver.settle([(delivery, how)])

    def states(self, *ids: str) -> list[str]:
        return [self.app.result(each).state for each in ids]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    clock = Still()
    database = Database(str(tmp_path / "queues.db"))
    broker = LocalBroker(database, clock=clock)
    broker.declare("default", QueueOptions(max_deliveries=1, time_to_live=3600.0))
    app = App("shop", broker=broker, results=f"local://{tmp_path}/results.db")
    yield Bench(app, clock)
    app.close()
    database.close()


def test_it_is_recorded_and_told_once(bench: Bench) -> None:
    bench.use_up("a", "b")
    assert bench.states("a", "b") == [State.PENDING, State.PENDING]
    first, second = bench.watch(), bench.watch()
    assert first.useful
    first.look()
    second.look()
    first.look()
    assert bench.states("a", "b") == [State.FAILED, State.FAILED]
    assert bench.told == [
        ("a", "default", 1, "MaxDeliveryCountExceeded"),
        ("b", "default", 1, "MaxDeliveryCountExceeded"),
    ]
    assert bench.app.result("a").error is not None


def test_what_the_service_expired_has_expired(bench: Bench) -> None:
    bench.app.send("shop.resize", ["a.png"], task_id="a")
    bench.clock.now += 7200.0
    assert bench.app.broker.receiver("default", lease=60.0).receive(1, 0.0) == []
    bench.watch().look()
    assert bench.states("a") == [State.EXPIRED]


def test_what_is_no_task_or_was_decided_by_a_worker_is_left_alone(bench: Bench) -> None:
    bench.app.broker.send("default", [Envelope(b"junk")])
    bench.settle(Abandon(), 1)
    bench.app.send("shop.resize", ["a.png"], task_id="a")
    bench.settle(DeadLetter("retries-exhausted"), 1)
    bench.watch().look()
    assert bench.told == []
    assert bench.states("a") == [State.PENDING], "its worker has recorded, or will"


def test_one_that_is_older_than_results_are_kept_is_no_news(bench: Bench) -> None:
    bench.use_up("a")
    bench.clock.now += bench.app.settings.result_retention_seconds + 1
    bench.watch().look()
    assert bench.told == []


def test_a_look_reads_on_while_there_is_news_and_the_next_goes_on(bench: Bench) -> None:
    count = (OLD_PAGES + 2) * PAGE + 2
    bench.use_up(*map(str, range(count)))
    watch = bench.watch("missing", "default")
    assert watch.look() is False
    assert len(bench.told) == count
    bench.use_up("later")
    looks = 0
    while bench.told[-1][0] != "later":
        assert watch.look() is False
        looks += 1
    assert looks == 2, "five pages that bring no news end a look"


def test_a_look_ends_after_two_seconds_and_says_that_there_may_be_more_news(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.use_up(*map(str, range(4 * PAGE)))
    peek = bench.app.broker.peek

    def slow(*given: Any, **named: Any) -> Any:
        bench.clock.now += 0.7 * LOOK_SECONDS
        return peek(*given, **named)

    monkeypatch.setattr(bench.app.broker, "peek", slow)
    watch = bench.watch()
    assert watch.look() is True
    assert len(bench.told) == 2 * PAGE
    assert watch.look() is True
    assert len(bench.told) == 4 * PAGE
    assert watch.look() is False, "the next page is empty"
    assert watch.look() is False, "what was read is no news, however long it takes"


def test_the_next_look_comes_at_once_while_there_is_news(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other chores have their turn in between: each look is a chore of its own."""
    runtime = make_runtime(bench.app, clock=bench.clock)
    chores = Housekeeping(runtime, cast(Any, None), cast(Any, None))
    answers = [True, True, False]
    monkeypatch.setattr(DeadWatch, "look", lambda watch: answers.pop(0))
    due = []
    for _ in range(3):
        chores._dead_at = bench.clock.now + DEAD_SECONDS
        chores._look_for_dead()
        due.append(chores._dead_at - bench.clock.now)
    assert due == [0.0, 0.0, DEAD_SECONDS]
    chores.stop()


def test_a_purge_between_two_looks_hides_no_later_one(bench: Bench) -> None:
    """It goes on behind a position that no longer exists, and begins again at the end."""
    bench.use_up(*map(str, range(PAGE)))
    watch = bench.watch()
    watch.look()
    bench.app.broker.purge("default", dead_letter=True)
    bench.use_up("after")
    watch.look()
    watch.look()
    assert [each[0] for each in bench.told[PAGE:]] == ["after"]


def test_without_a_result_store_there_is_no_watch(tmp_path: Path) -> None:
    app = App("shop", broker=f"local://{tmp_path}/queues.db")
    assert not DeadWatch(make_runtime(app)).useful
    app.close()


def test_the_end_of_a_member_is_counted_in_its_workflow(bench: Bench) -> None:
    work = bench.app.task(name="shop.work")(lambda x: x)
    chord([work.s(1), work.s(2)], work.s()).delay(workflow_id="w")
    bench.settle(Abandon(), 1)
    bench.watch().look()
    progress = bench.app.workflows.result("w").progress
    assert (progress.done, progress.failed, progress.total) == (1, 1, 3)
    bench.settle(Abandon(), 1)
    bench.watch().look()
    assert bench.app.workflows.result("w").state == "failed"
    kinds = [each.error_type for each in bench.app.workflows.result("w").failures]
    assert kinds == ["MaxDeliveryCountExceeded"] * 2
