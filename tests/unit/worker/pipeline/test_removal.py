"""Which deliveries remove a payload: those that end for good, and no copy, clone or dead letter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from aztask.errors import BrokerUnavailable
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.message.payload import StoredValue
from aztask.settlement import Abandon, Complete, DeadLetter, Decision, Resubmit
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import MemoryPayloads, PayloadKind
from aztask.stores.records.base import Outcome, State
from aztask.worker.pipeline.settling import PayloadRemoval


class Store(MemoryPayloads):
    """remote: whether removals run on a thread. error: raised by each."""

    def __init__(self, *, remote: bool = False) -> None:
        super().__init__()
        self.remote = remote
        self.error: Exception | None = None
        self.requests = 0

    def remove(self, names: Any) -> None:
        self.requests += 1
        if self.error is not None:
            raise self.error
        super().remove(names)


def payloads_in(store: Store) -> Payloads:
    return Payloads(lambda: store, threshold=1, checkpoint_threshold=1, result_threshold=1)


def item(
    payloads: Payloads,
    settlement: Decision,
    state: State | None = State.SUCCEEDED,
    *,
    settled: bool = True,
    delivery: str = "at-least-once",
) -> Any:
    """A delivery with stored arguments and a stored checkpoint."""
    kinds = (PayloadKind.ARGUMENTS, PayloadKind.CHECKPOINT)
    stored = [payloads.keep(kind, b"data", owner="a") for kind in kinds]
    message = TaskMessage(
        id="a",
        task="t",
        queue="q",
        body=b"",
        payload=str(stored[0]),
        saved=Codec().encode_value(stored[1]),
    )
    return SimpleNamespace(
        opened=SimpleNamespace(message=message),
        outcome=None if state is None else Outcome(state, settlement),
        settlement=settlement,
        settled=settled,
        at_most_once=delivery == "at-most-once",
    )


@pytest.mark.parametrize(
    ("settlement", "state", "settled", "delivery", "gone"),
    [
        (Complete(), State.SUCCEEDED, True, "at-least-once", True),
        (Complete(), State.EXPIRED, True, "at-least-once", True),
        (Complete(), State.CANCELLED, True, "at-least-once", True),
        # the service has not confirmed it: the message may come again
        (Complete(), State.SUCCEEDED, False, "at-least-once", False),
        # a superfluous copy has no outcome of its own: the other one needs the payload
        (Complete(), None, True, "at-least-once", False),
        (Resubmit(), State.RETRYING, True, "at-least-once", False),
        (Resubmit(), State.SNOOZED, True, "at-least-once", False),
        (Abandon(), State.RETRYING, True, "at-least-once", False),
        (DeadLetter("r", "d"), State.FAILED, True, "at-least-once", False),
        # its message was removed before it ran, so there is no dead letter
        (DeadLetter("r", "d"), State.FAILED, True, "at-most-once", True),
    ],
)
def test_only_the_last_settlement_removes(
    settlement: Decision, state: State | None, settled: bool, delivery: str, gone: bool
) -> None:
    store = Store()
    payloads = payloads_in(store)
    removal = PayloadRemoval(payloads)
    removal.after([item(payloads, settlement, state, settled=settled, delivery=delivery)])
    assert len(store.stored) == (0 if gone else 2)


def test_deliveries_that_cannot_be_read_or_have_no_payload_ask_for_nothing() -> None:
    store = Store()
    message = TaskMessage(id="a", task="t", queue="q", body=b"x", saved=Codec().encode_value(1))
    small = SimpleNamespace(
        opened=SimpleNamespace(message=message),
        outcome=Outcome(State.SUCCEEDED, Complete()),
        settlement=Complete(),
        settled=True,
        at_most_once=False,
    )
    PayloadRemoval(payloads_in(store)).after([SimpleNamespace(opened=None), small])  # type: ignore[list-item]
    assert store.requests == 0


def ended_with(payloads: Payloads, saved: StoredValue, payload: StoredValue | None = None) -> Any:
    """The last settlement of the task ``a``, whose message refers to these."""
    found = item(payloads, Complete())
    message = found.opened.message
    reference = message.payload if payload is None else str(payload)
    found.opened.message = replace(message, saved=Codec().encode_value(saved), payload=reference)
    return found


@pytest.mark.parametrize("kind", [PayloadKind.VALUE, PayloadKind.RESULT])
def test_what_is_shared_stays_when_a_task_used_it_as_its_checkpoint(kind: PayloadKind) -> None:
    payloads = payloads_in(store := Store())
    shared = payloads.keep(kind, b"shared", owner="a")
    PayloadRemoval(payloads).after([ended_with(payloads, shared, shared)])
    assert shared.name in store.stored


def test_what_belongs_to_another_task_stays() -> None:
    payloads = payloads_in(store := Store())
    saved = payloads.keep(PayloadKind.CHECKPOINT, b"1", owner="b")
    arguments = payloads.keep(PayloadKind.ARGUMENTS, b"2", owner="b")
    PayloadRemoval(payloads).after([ended_with(payloads, saved, arguments)])
    assert {saved.name, arguments.name} <= store.stored.keys()


def test_what_an_older_release_has_named_is_removed_as_before() -> None:
    payloads = payloads_in(store := Store())
    names = [f"{kind}/2026112314/{'0' * 31}7" for kind in ("args", "saved")]
    arguments, saved = (StoredValue.of(name, b"data") for name in names)
    store.stored |= dict.fromkeys(names, b"data")
    PayloadRemoval(payloads).after([ended_with(payloads, saved, arguments)])
    assert not store.stored.keys() & set(names)


def test_a_container_is_asked_on_a_thread_and_before_the_end() -> None:
    store = Store(remote=True)
    payloads = payloads_in(store)
    removal = PayloadRemoval(payloads)
    for _ in range(20):
        removal.after([item(payloads, Complete())])
    removal.close()
    assert store.stored == {}
    assert store.requests <= 20


def test_a_store_that_is_away_fails_no_delivery(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    payloads = payloads_in(store)
    store.error = BrokerUnavailable("the container is away")
    PayloadRemoval(payloads).after([item(payloads, Complete())])
    assert "aztask doctor --collect removes them: the container is away" in caplog.text
