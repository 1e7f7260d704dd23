"""The stages of a delivery's life, on a real queue and a real result store, without a pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from still import Still

from aztask import App
from aztask.brokers.base import Delivery
from aztask.brokers.local.broker import LocalBroker
from aztask.brokers.local.receiver import LocalReceiver
from aztask.engine import Database
from aztask.errors import AlreadySettled, BrokerUnavailable
from aztask.lease.keeper import LeaseKeeper
from aztask.lease.state import LeaseState
from aztask.results.base import Finish, Outcome, State
from aztask.results.local.store import LocalResults
from aztask.settlement import DeadLetter, Resubmit, Settlement
from aztask.worker.pipeline.deliveries import Deliveries
from aztask.worker.pipeline.pipeline import Executor
from aztask.worker.pipeline.refusals import TRIES
from aztask.worker.pipeline.work import Job, Stage

LEASE = 60.0


@dataclass
class Faults:
    """What fails: by task id, what the store or the broker raises for it, each time."""

    record: dict[str, Exception] = field(default_factory=dict)
    settle: dict[str, Exception] = field(default_factory=dict)
    start: dict[str, Exception] = field(default_factory=dict)


class BadResults(LocalResults):
    """The local store; some runs make it raise."""

    faults: Faults

    def start(self, starts: Any) -> Any:
        _raise(self.faults.start, [each.key.task_id for each in starts])
        return super().start(starts)

    def record(self, finishes: Any) -> Any:
        _raise(self.faults.record, [each.key.task_id for each in finishes])
        return super().record(finishes)


class BadReceiver:
    """A local receiver; some deliveries make it raise, after half of their batch is settled."""

    def __init__(self, inner: LocalReceiver, faults: Faults, *, half: bool) -> None:
        self._inner, self._faults, self._half = inner, faults, half

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle(self, pairs: list[tuple[Delivery, Settlement]]) -> Any:
        ids = [delivery.envelope.headers["id"] for delivery, _ in pairs]
        bad = [n for n, task_id in enumerate(ids) if task_id in self._faults.settle]
        if bad:
            if self._half and bad[0]:
                self._inner.settle(pairs[: bad[0]])
            raise self._faults.settle[ids[bad[0]]]
        return self._inner.settle(pairs)


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
    executor: Executor
    deliveries: Deliveries
    faults: Faults
    receiver: Any

    def jobs(self, *ids: str) -> list[Job]:
        """Deliveries of tasks with these ids, opened and claimed."""
        for task_id in ids:
            self.app.send("shop.count", [[1]], task_id=task_id)
        jobs = []
        for delivery in self.receiver.receive(len(ids), 0.0):
            jobs.append(self.deliveries.add("default", self.receiver, delivery))
        self.keeper.hold(self.receiver, [job.lease for job in jobs])
        self.executor.open(jobs)
        return sorted(jobs, key=lambda job: job.key.task_id)

    def claimed(self, *ids: str) -> list[Job]:
        jobs = self.jobs(*ids)
        self.executor.claim(jobs)
        return jobs

    def succeed(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.executor.succeeded(job, b"\x01")
            job.stage = Stage.FINISHING

    def states(self, *ids: str) -> list[str]:
        found = [self.app.results.get(task_id) for task_id in ids]
        return [run.state.value if run else "" for run in found]

    def dead(self) -> dict[str, str]:
        """{task id: reason} of the dead letters."""
        peeked = self.app.broker.peek("default", dead_letter=True)
        return {
            each.envelope.headers["id"]: f"{each.dead_letter_reason}: "
            f"{each.dead_letter_description}"
            for each in peeked
        }


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    databases = []

    def make(*, joint: bool = False, half: bool = False, results: bool = True) -> Bench:
        clock, faults = Still(), Faults()
        first = Database(str(tmp_path / "queues.db"))
        second = first if joint else Database(str(tmp_path / "results.db"))
        databases.extend({first, second})
        broker, store = LocalBroker(first, clock=clock), BadResults(second, clock=clock)
        store.faults = faults
        app = App("shop", broker=broker, results=store if results else None)
        app.task(name="shop.count")(len)
        keeper = LeaseKeeper(broker, clock=clock)
        executor = Executor(app, keeper, name="w", clock=clock)
        inner = broker.receiver("default", lease=LEASE)
        receiver = BadReceiver(inner, faults, half=half)
        deliveries = Deliveries("w", clock)
        return Bench(app, clock, keeper, executor, deliveries, faults, receiver)

    yield make
    for database in databases:
        database.close()


@pytest.fixture(params=[True, False], ids=["one file", "two files"])
def joint(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# -- one bad delivery in a batch ----------------------------------------------------------------


def test_a_record_that_cannot_be_written_fails_that_task_alone(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    jobs = bench.claimed(*"abcdefg")
    bench.succeed(jobs)
    bench.faults.record["c"] = TypeError("no such value")
    bench.executor.finish(jobs)
    assert [job.key.task_id for job in jobs if job.stage is not Stage.DONE] == ["c"]
    assert bench.states(*"abdefg") == ["succeeded"] * 6
    assert bench.app.broker.stats("default").leased == 1, "the others are completed"
    assert (jobs[2].stage, jobs[2].failures) == (Stage.FINISHING, 1), "it is tried again slowly"
    assert jobs[2].lease.state is LeaseState.HELD
    del bench.faults.record["c"]
    bench.executor.finish([jobs[2]])
    assert bench.states("c") == ["succeeded"], "the cause is gone: so it is recorded after all"


def test_after_three_tries_it_is_dead_lettered_with_the_error(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    jobs = bench.claimed(*"abc")
    bench.succeed(jobs)
    error = bench.faults.record["b"] = TypeError("no such value")
    bench.executor.finish(jobs)
    for _ in range(TRIES - 1):
        assert bench.dead() == {}
        bench.executor.finish([jobs[1]])
    del bench.faults.record["b"]  # it was the value, which is left out now
    assert jobs[1].failures == 0, "the dead letter itself is tried at once"
    bench.executor.finish([jobs[1]])
    assert bench.dead() == {"b": f"unprocessable: TypeError: {error}"}
    assert jobs[1].stage is Stage.DONE
    run = bench.app.results.get("b")
    assert (run.state, run.outcome.error) == (State.FAILED, "TypeError: no such value")
    assert run.outcome.settlement == DeadLetter("unprocessable", "TypeError: no such value")


def test_what_cannot_even_be_dead_lettered_is_left_to_its_lease(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    (job,) = bench.claimed("a")
    bench.succeed([job])
    bench.faults.record["a"] = TypeError("never")
    for _ in range(2 * TRIES):
        assert job.stage is Stage.FINISHING
        bench.executor.finish([job])
    assert job.stage is Stage.DONE
    assert not job.settled
    assert job.lease.state is LeaseState.HELD, "nothing settles it: it ends by itself"
    run = bench.app.results.get("a")
    assert (run.state, run.starts) == (State.STARTED, 1), "its start counts"
    assert [kind for kind, _ in job.notes] == ["settle_failed"]


@pytest.mark.parametrize("half", [False, True], ids=["nothing settled", "some settled"])
def test_a_settlement_that_raises_harms_no_neighbour(make: Make, half: bool) -> None:
    bench = make(half=half)
    jobs = bench.claimed(*"abcdefgh")
    bench.succeed(jobs)
    bench.faults.settle["f"] = ValueError("this one")
    bench.executor.finish(jobs)
    assert [job.settled for job in jobs] == [job.key.task_id != "f" for job in jobs]
    assert bench.states(*"abcdefgh") == ["succeeded"] * 8, "all is recorded, once"
    bad = jobs[5]
    assert (bad.stage, bad.lease.state) == (Stage.FINISHING, LeaseState.HELD)
    del bench.faults.settle["f"]
    bench.executor.finish([bad])
    assert bad.settled
    assert bench.app.broker.stats("default").leased == 0


def test_in_one_transaction_a_settlement_that_raises_takes_only_its_own_record_back(
    make: Make,
) -> None:
    bench = make(joint=True)
    jobs = bench.claimed(*"abcde")
    bench.succeed(jobs)
    bench.faults.settle["e"] = ValueError("this one")
    bench.executor.finish(jobs)
    assert bench.states(*"abcde") == ["succeeded"] * 4 + ["started"]
    assert [job.settled for job in jobs] == [True] * 4 + [False]


def test_a_broker_that_is_away_is_not_asked_for_each_delivery(make: Make) -> None:
    bench = make()
    jobs = bench.claimed(*"abc")
    bench.succeed(jobs)
    bench.faults.settle.update(dict.fromkeys("abc", BrokerUnavailable("away")))
    asked = []
    settle = bench.receiver._inner.settle
    bench.receiver._inner.settle = lambda pairs: asked.append(len(pairs)) or settle(pairs)
    bench.executor.finish(jobs)
    assert asked == []
    assert [job.failures for job in jobs] == [1, 1, 1]
    assert all(job.lease.state is LeaseState.HELD for job in jobs)
    assert all(job.recorded for job in jobs)
    bench.faults.settle.clear()
    bench.executor.finish(jobs)
    assert asked == [3]
    assert all(job.settled for job in jobs)


def test_a_settled_one_that_is_asked_for_again_counts_as_settled(make: Make) -> None:
    bench = make()
    (job,) = bench.claimed("a")
    bench.succeed([job])
    bench.faults.settle["a"] = AlreadySettled()
    bench.executor.finish([job])
    assert job.settled


def test_a_start_that_raises_harms_no_neighbour_and_ends_in_the_dead_letters(
    make: Make, joint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(joint=joint)
    bench.faults.start["b"] = KeyError("row")
    jobs = bench.claimed(*"abcd")
    assert [job.stage for job in jobs] == [
        Stage.READY, Stage.RECEIVED, Stage.READY, Stage.READY
    ]  # fmt: skip
    assert bench.app.results.get("a").starts == 1, "a second call for the same start counts once"
    bad = jobs[1]
    for _ in range(TRIES - 1):
        assert bad.settlement is None
        bench.executor.claim([bad])
    assert bad.settlement == DeadLetter("unprocessable", "KeyError: 'row'")
    bench.executor.finish([bad])
    assert bench.dead() == {"b": "unprocessable: KeyError: 'row'"}


def test_a_store_that_is_away_counts_no_try_of_a_single_delivery(make: Make) -> None:
    bench = make()
    bench.faults.start.update(dict.fromkeys("ab", BrokerUnavailable("away")))
    jobs = bench.claimed(*"ab")
    for _ in range(3 * TRIES):
        bench.executor.claim(jobs)
    assert [job.settlement for job in jobs] == [None, None]
    bench.faults.start.clear()
    bench.executor.claim(jobs)
    assert [job.stage for job in jobs] == [Stage.READY] * 2


def test_a_message_that_no_codec_survives_is_dead_lettered(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    real = bench.app.codec.from_envelope

    def broken(envelope: Any, queue: str) -> Any:
        if envelope.headers["id"] == "a":
            raise RecursionError("too deep")
        return real(envelope, queue)

    monkeypatch.setattr(bench.app.codec, "from_envelope", broken)
    for task_id in "ab":
        bench.app.send("shop.count", [[1]], task_id=task_id)
    jobs = [
        bench.deliveries.add("default", bench.receiver, each)
        for each in bench.receiver.receive(2, 0.0)
    ]
    with caplog.at_level(logging.CRITICAL):
        bench.executor.open(jobs)
    bad, good = sorted(jobs, key=lambda job: job.message is not None)
    assert bad.settlement == DeadLetter("undecodable", "RecursionError: too deep")
    assert good.settlement is None


def test_giving_back_one_that_raises_gives_the_others_back(make: Make, joint: bool) -> None:
    bench = make(joint=joint)
    jobs = bench.claimed(*"abcd")
    bench.faults.settle["b"] = ValueError("this one")
    bench.executor.release(jobs)
    assert [job.stage for job in jobs] == [Stage.DONE] * 4
    assert bench.app.broker.stats("default").active == 3
    assert [bench.app.results.get(each).starts for each in "acd"] == [0, 0, 0]


# -- retries that cannot be sent ----------------------------------------------------------------


def test_a_retry_that_is_too_large_is_a_dead_letter_before_it_is_recorded(
    make: Make, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aztask.brokers.local.broker.MESSAGE_LIMIT", 2_000)
    bench = make(joint=joint)
    jobs = bench.claimed(*"ab")
    for job in jobs:
        job.stage = Stage.FINISHING
        bench.executor.failed(job, Resubmit(1.0), "ValueError", "no luck", "the trace")
    jobs[0].saved = b"x" * 3_000
    bench.executor.finish(jobs)
    assert bench.states(*"ab") == ["failed", "retrying"]
    ((task_id, why),) = bench.dead().items()
    assert task_id == "a"
    assert why.startswith("retry-too-large: the retry cannot be sent: message 'a:0:1' has 3")
    outcome = bench.app.results.get("a").outcome
    assert (outcome.error_type, outcome.error) == ("ValueError", "no luck"), "the task's own error"


def test_a_recorded_retry_that_cannot_be_sent_is_recorded_as_the_failure_of_that_retry(
    make: Make, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version recorded it, or a larger limit allowed it."""
    bench = make(joint=joint)
    (job,) = bench.claimed("a")
    settlement = Resubmit(1.0, due=bench.clock.wall() + 1.0)
    job.outcome = Outcome(State.RETRYING, settlement, None, "ValueError", "no luck")
    bench.app.results.record([_finish(job)])
    job.recorded = job.repeated = True
    job.settlement, job.stage, job.saved = settlement, Stage.FINISHING, b"x" * 3_000
    monkeypatch.setattr("aztask.brokers.local.broker.MESSAGE_LIMIT", 2_000)
    bench.executor.finish([job])
    assert job.settled
    assert [run.state.value for run in bench.app.results.history("a")] == ["retrying", "failed"]
    assert bench.states("a") == ["failed"], "whoever waits for the result gets an answer"
    assert list(bench.dead()) == ["a"]


def _finish(job: Job) -> Any:
    assert job.outcome is not None
    return Finish(job.key, job.owner, job.outcome)


# -- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a\udc80b", "a\0b", "\ud83d\ude00", "\udfff" * 5000])
def test_no_text_is_too_strange_to_be_recorded(make: Make, joint: bool, text: str) -> None:
    bench = make(joint=joint)
    jobs = bench.claimed(*"ab")
    for job in jobs:
        job.stage = Stage.FINISHING
    bench.executor.failed(jobs[0], DeadLetter(text, text), text, text, text)
    bench.executor.failed(jobs[1], DeadLetter("plain"), "ValueError", "plain", "")
    bench.executor.finish(jobs)
    assert all(job.settled for job in jobs)
    outcome = bench.app.results.get("a").outcome
    for stored in (outcome.error_type, outcome.error, outcome.traceback):
        stored.encode("utf-8")
        assert "\0" not in stored
    assert outcome.settlement == replace(jobs[0].settlement)


def test_an_error_that_ends_the_worker_counts_as_a_start(make: Make, joint: bool) -> None:
    """Otherwise a delivery that ends its worker would end all workers, one after the other."""
    bench = make(joint=joint)
    jobs = bench.claimed(*"ab")
    bench.executor.abandon(jobs)
    assert [job.settled for job in jobs] == [True, True]
    assert [bench.app.results.get(each).starts for each in "ab"] == [1, 1]
    jobs = [
        bench.deliveries.add("default", bench.receiver, each)
        for each in bench.receiver.receive(5, 0.0)
    ]
    bench.executor.open(jobs)
    bench.executor.claim(jobs)
    assert [job.starts for job in jobs] == [2, 2]
    assert [job.settlement for job in jobs] == [None, None]
