"""The settler: one batch for each receiver, what is stored first, and what the answers mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pipelinebench import BadReceiver, Bench, Make

from aztask.errors import AlreadySettled, BrokerUnavailable
from aztask.hooks import Hook, Settling
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.lease.state import LeaseEvent, LeaseState
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Defer
from aztask.worker.pipeline.settling import RefusedSettlement, Settler
from aztask.worker.pipeline.work import Stage, WorkItem


class Index:
    """Notes dead letters. error: raised for each note."""

    def __init__(self) -> None:
        self.noted: list[list[tuple[str, str, str, float, int]]] = []
        self.error: Exception | None = None

    def note(self, letters: Any) -> None:
        if self.error is not None:
            raise self.error
        self.noted.append(
            [
                (
                    each.envelope.headers["id"],
                    each.reason,
                    each.description,
                    each.at,
                    each.delivery_count,
                )
                for each in letters
            ]
        )


def settler(bench: Bench, *, joint: bool = False, index: Any = None) -> Settler:
    pipeline = bench.pipeline
    return Settler(
        bench.keeper, pipeline._redelivery, pipeline._pointers, index, clock=bench.clock,
        joint=joint,
    )  # fmt: skip


def decided(bench: Bench, *hows: Decision) -> list[WorkItem]:
    items = bench.claimed(*"abcdefghijkl"[: len(hows)])
    for item, how in zip(items, hows, strict=True):
        item.decide(how)
    return items


def states(items: list[WorkItem]) -> list[LeaseState]:
    return [item.lease.state for item in items]


def test_a_receiver_gets_one_batch_with_each_ones_own_settlement(make: Make) -> None:
    bench = make()
    hows = [Complete(), DeadLetter("a", "1"), DeadLetter("b", "2"), Abandon(), DeadLetter("a", "3")]
    items = decided(bench, *hows)
    settler(bench).settle(items)
    assert bench.receiver.batches == [list(zip("abcde", hows, strict=True))]
    assert bench.dead() == {"b": "a: 1", "c": "b: 2", "e": "a: 3"}
    assert [(item.settled, item.stage) for item in items] == [(True, Stage.ENDED)] * 5
    assert states(items) == [LeaseState.SETTLED] * 5
    assert len(bench.keeper) == 0


def test_each_receiver_gets_its_own_batch_and_one_that_is_down_harms_no_other(make: Make) -> None:
    bench = make()
    items = decided(bench, *[Complete()] * 4)
    other = BadReceiver(bench.receiver._inner, bench.faults, half=False)
    items[1].receiver = items[3].receiver = other
    other.settle = lambda pairs: (_ for _ in ()).throw(BrokerUnavailable("down"))
    settler(bench).settle(items)
    assert [[each for each, _ in batch] for batch in bench.receiver.batches] == [["a", "c"]]
    assert [item.settled for item in items] == [True, False, True, False]
    assert [item.tries for item in items] == [0, 1, 0, 1]
    assert states(items)[1::2] == [LeaseState.HELD] * 2
    assert items[1].stage is Stage.DECIDED


def test_a_batch_of_twenty_thousand(make: Make) -> None:
    bench = make()
    bench.app.broker.send(
        "default",
        [bench.app.codec.to_envelope(message) for message in _messages(bench, 20_000)],
    )
    items = bench.receive(20_000)
    assert len(items) == 20_000
    for n, item in enumerate(items):
        item.decide(DeadLetter(f"reason {n}") if n % 1000 == 0 else Complete())
    bench.keeper.begin(items[777].lease)
    bench.keeper.lapse(items[777].lease, "gone")
    settler(bench).settle(items)
    assert sum(item.settled for item in items) == 19_999
    assert [n for n, item in enumerate(items) if not item.settled] == [777]
    assert sorted(bench.dead().values()) == sorted(f"reason {n}: " for n in range(0, 20_000, 1000))
    assert bench.stats() == (0, 1, 0, 20)


def _messages(bench: Bench, count: int) -> list[Any]:
    bench.send("one")
    (first,) = bench.receive()
    message = first.opened.message  # type: ignore[union-attr]
    bench.receiver._inner.settle([(first.delivery, Complete())])
    bench.keeper.drop([first.lease])
    return [replace(message, id=f"{n:05}") for n in range(count)]


# -- whose lease cannot be settled now ---------------------------------------------------------


def test_while_it_is_renewed_it_is_not_settled_and_waits(make: Make) -> None:
    bench = make()
    items = decided(bench, Complete(), Complete())
    items[0].lease.change(LeaseEvent.RENEW)
    settler(bench).settle(items)
    assert [item.settled for item in items] == [False, True]
    assert (items[0].stage, items[0].tries) == (Stage.DECIDED, 0), "it is tried again at once"


@pytest.mark.parametrize("state", [LeaseState.UNKNOWN, LeaseState.LOST, LeaseState.SETTLED])
def test_what_cannot_be_settled_any_more_ends(make: Make, state: LeaseState) -> None:
    """What is recorded is recorded; the redelivery settles from the record."""
    bench = make()
    items = decided(bench, Complete(), Complete())
    items[0].lease.state = state
    assert [item for item, _ in settler(bench).carry_out(items)] == [items[1]]
    assert (items[0].stage, items[0].settled) == (Stage.ENDED, False)
    assert items[1].stage is Stage.DECIDED, "it is not booked yet"


def test_what_was_settled_before_ends_even_while_it_is_renewed(make: Make) -> None:
    bench = make()
    (item,) = decided(bench, Complete())
    item.settled = True
    item.lease.state = LeaseState.RENEWING
    settler(bench).settle([item])
    assert item.stage is Stage.ENDED
    assert bench.receiver.batches == []


# -- what the broker answered ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "settled", "stage", "lease", "tries", "notes"),
    [
        (Unknown("no answer"), False, Stage.DECIDED, LeaseState.HELD, 1, []),
        (Lost("taken over"), False, Stage.ENDED, LeaseState.LOST, 0, ["settle_failed"]),
        (Settled(), True, Stage.ENDED, LeaseState.SETTLED, 0, []),
    ],
)
def test_an_answer_is_booked_on_its_own_item(
    make: Make, answer: Any, settled: bool, stage: Stage, lease: LeaseState, tries: int, notes: Any
) -> None:
    bench = make()
    items = decided(bench, Complete(), Complete())
    bench.faults.answers["a"] = answer
    settler(bench).settle(items)
    item = items[0]
    assert (item.settled, item.stage, item.lease.state, item.tries) == (
        settled, stage, lease, tries,
    )  # fmt: skip
    assert [kind for kind, _ in item.notes] == notes
    assert (items[1].settled, items[1].stage) == (True, Stage.ENDED)


def test_a_lost_one_says_why(make: Make) -> None:
    bench = make()
    items = decided(bench, Complete())
    bench.faults.answers["a"] = Lost("taken over")
    settler(bench).settle(items)
    assert items[0].notes == [("settle_failed", "taken over")]


def test_what_is_about_to_run_at_most_once_goes_on(make: Make) -> None:
    bench = make()
    (item,) = bench.claimed("a")
    settler(bench).settle([item])
    assert (item.settled, item.stage) == (True, Stage.READY)


def test_a_refused_settlement_is_told_and_its_lease_is_held_again(make: Make) -> None:
    bench = make()
    items = decided(bench, *[Complete()] * 4)
    error = bench.faults.settle["b"] = ValueError("this one")
    one = settler(bench)
    answers = one.carry_out(items)
    assert {item.key.task_id: type(answer) for item, answer in answers} == {
        "a": Settled, "b": RefusedSettlement, "c": Settled, "d": Settled,
    }  # fmt: skip
    assert states(items) == [LeaseState.SETTLING] * 4
    assert one.book(answers) == [(items[1], error)]
    assert states(items) == [LeaseState.SETTLED, LeaseState.HELD] + [LeaseState.SETTLED] * 2
    assert (items[1].tries, items[1].stage) == (0, Stage.DECIDED), "the caller counts the try"


def test_what_its_batch_settled_before_it_raised_is_settled(make: Make) -> None:
    bench = make(half=True)
    items = decided(bench, *[Complete()] * 4)
    bench.faults.settle["d"] = ValueError("this one")
    settler(bench).settle(items)
    assert [item.settled for item in items] == [True, True, True, False]


def test_what_was_settled_already_is_settled(make: Make) -> None:
    bench = make()
    (item,) = decided(bench, Complete())
    bench.faults.settle["a"] = AlreadySettled()
    assert settler(bench).carry_out([item]) == [(item, Settled())]


@pytest.mark.parametrize("error", [ValueError("bad"), BrokerUnavailable("down")])
def test_in_a_joint_transaction_an_error_takes_all_back(make: Make, error: Exception) -> None:
    bench = make(joint=True)
    items = decided(bench, *[Complete()] * 3)
    bench.faults.settle["b"] = error
    with pytest.raises(type(error)):
        settler(bench, joint=True).carry_out(items)
    assert states(items) == [LeaseState.HELD] * 3
    assert [item.stage for item in items] == [Stage.DECIDED] * 3
    assert len(bench.receiver.batches) == 1, "the caller splits the batch"


def test_nothing_is_taken_back_of_what_was_not_begun(make: Make) -> None:
    bench = make()
    items = decided(bench, *[Complete()] * 3)
    items[0].lease.state = LeaseState.LOST
    items[1].lease.change(LeaseEvent.SETTLE)
    settler(bench).undo(items)
    assert states(items) == [LeaseState.LOST, LeaseState.HELD, LeaseState.HELD]


# -- what is stored first ----------------------------------------------------------------------


def test_a_dead_letter_is_noted_before_it_is_stored(make: Make) -> None:
    bench, index = make(), Index()
    items = decided(bench, DeadLetter("a", "1"), Complete(), DeadLetter("b"))
    settler(bench, index=index).settle(items)
    now = bench.clock.wall()
    assert index.noted == [[("a", "a", "1", now, 1), ("c", "b", "", now, 1)]]
    assert sorted(map(len, bench.receiver.batches)) == [1, 2]
    assert all(item.settled for item in items)


@pytest.mark.parametrize("error", [BrokerUnavailable("down"), ValueError("a bad one")])
def test_a_note_that_fails_harms_no_other_settlement(make: Make, error: Exception) -> None:
    bench, index = make(), Index()
    index.error = error
    items = decided(bench, DeadLetter("a"), Complete(), Defer(), DeadLetter("b"))
    settler(bench, index=index).settle(items)
    assert [item.settled for item in items] == [False, True, True, False]
    assert bench.dead() == {}, "what could not be noted is not dead-lettered"
    assert states(items)[0] is LeaseState.HELD


def test_a_pointer_that_cannot_be_sent_harms_no_other_settlement(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    items = decided(bench, Complete(), Defer(), DeadLetter("why"))

    def send(*_: Any) -> None:
        raise BrokerUnavailable("down")

    monkeypatch.setattr(bench.app.broker, "send", send)
    settler(bench).settle(items)
    assert [item.settled for item in items] == [True, False, True]
    assert bench.app.broker.stats("default").deferred == 0


def test_without_an_index_dead_letters_go_with_the_others(make: Make) -> None:
    bench = make()
    settler(bench).settle(decided(bench, DeadLetter("a"), Complete()))
    assert len(bench.receiver.batches) == 1


def test_pointers_follow_their_messages_with_the_answer(make: Make) -> None:
    bench = make()
    items = decided(bench, Complete(), Complete())
    followed: list[Any] = []
    one = settler(bench)
    one._pointers = SimpleNamespace(
        send=lambda items: followed.append(("send", list(items))),
        follow=lambda items, answers: followed.append(("follow", list(items), list(answers))),
    )
    one.settle(items)
    assert followed == [("send", items), ("follow", items, [Settled()] * 2)]


def test_the_hook_sees_the_settlements_and_the_broker_s_answers(make: Make) -> None:
    bench = make()
    hows = [Complete(), DeadLetter("a", "1")]
    items = decided(bench, *hows)
    bench.faults.answers["b"] = Lost("gone")
    seen: list[Any] = []
    hook: Hook[Settling] = Hook("settle", harmless=True)

    @hook
    def around(settling: Settling) -> Iterator[None]:
        assert settling.answers == ()
        yield
        seen.append(settling)

    made = settler(bench)
    made._hook = hook
    made.settle(items)
    (settling,) = seen
    assert settling.queue == "default"
    assert [message.id for message in settling.messages] == ["a", "b"]
    assert settling.deliveries == [item.delivery for item in items]
    assert settling.settlements == hows
    assert settling.answers == [Settled(), Lost("gone")]


def test_a_batch_that_is_split_is_seen_by_the_hook_in_its_parts(make: Make) -> None:
    bench = make()
    items = decided(bench, *[Complete()] * 2)
    bench.faults.settle["b"] = ValueError("odd")
    sizes: list[int] = []
    hook: Hook[Settling] = Hook("settle", harmless=True)

    @hook
    def around(settling: Settling) -> Iterator[None]:
        sizes.append(len(settling.settlements))
        yield

    made = settler(bench)
    made._hook = hook
    made.settle(items)
    assert sizes == [2, 1, 1]
    assert [item.settled for item in items] == [True, False]
