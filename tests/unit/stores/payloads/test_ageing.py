"""Which payloads are too old to be needed."""

import time

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.payloads.holders import HOUR, PayloadHolders, ended, remove_ended
from aztask.stores.payloads.payloads import Payloads
from aztask.stores.payloads.store import (
    ListedPayload,
    MemoryPayloads,
    PayloadKind,
    broker_in,
    listed,
    may_remove,
    new_name,
)

NOW = 1_800_000_000.0
NOTHING = PayloadHolders(None, None)


@pytest.mark.parametrize(
    ("kind", "hours", "gone"),
    [
        (PayloadKind.RESULT, 12, False),  # as old as a row may get, and an hour for its record
        (PayloadKind.RESULT, 13, True),
        (PayloadKind.ARGUMENTS, 100, False),
        (PayloadKind.ARGUMENTS, 102, True),
        (PayloadKind.CHECKPOINT, 100, False),
        (PayloadKind.CHECKPOINT, 102, True),
        (PayloadKind.VALUE, -1, False),
        (PayloadKind.VALUE, 0, True),
    ],
)
def test_each_kind_has_its_time(kind, hours, gone):
    each = ListedPayload(f"{kind}/2026112314/{'0' * 32}", 1, NOW - hours * HOUR)
    assert ended(each, NOW, 10 * HOUR, 100 * HOUR) is gone


def test_names_say_when_they_were_written():
    each = listed(new_name(PayloadKind.RESULT, NOW), 5)
    assert (each.kind, each.size) == (PayloadKind.RESULT, 5)
    assert each.at <= NOW < each.at + HOUR
    assert listed("results/2026112399/" + "0" * 32, 5) is None
    assert listed("results/2026112314/leases.json", 5) is None


def test_workers_remove_results_and_values_only():
    store = MemoryPayloads()
    payloads = Payloads(lambda: store, threshold=1, checkpoint_threshold=1, result_threshold=1)
    for kind in PayloadKind:
        payloads.keep(kind, b"old", time.time() - 1000 * HOUR)
        payloads.keep(kind, b"new", time.time() + 2 * HOUR)
    assert remove_ended(payloads, 10 * HOUR, PayloadHolders(None, None), time.time()) == 2
    left = sorted((each.kind, store.stored[each.name]) for each in store.list())
    assert left == [
        ("args", b"new"), ("args", b"old"), ("results", b"new"),
        ("saved", b"new"), ("saved", b"old"), ("values", b"new"),
    ]  # fmt: skip


def test_a_name_says_whose_payload_it_is():
    mine, theirs = Owner("local://a").mark, Owner("local://b").mark
    name = new_name(PayloadKind.RESULT, NOW, mark=mine)
    assert listed(name, 5) is not None  # older releases read it
    assert broker_in(name) == mine[:8]
    assert may_remove(name, mine)
    assert may_remove(name, "")
    assert not may_remove(name, theirs)
    assert len({new_name(PayloadKind.RESULT, NOW, mark=mine) for _ in range(1000)}) == 1000


def test_each_owner_removes_its_own_payloads():
    store = MemoryPayloads()
    of = {
        broker: Payloads(
            lambda: store,
            threshold=1,
            checkpoint_threshold=1,
            result_threshold=1,
            owner=lambda broker=broker: Owner(broker) if broker else NO_OWNER,
        )
        for broker in ("local://a", "local://b", "")
    }
    for broker, payloads in of.items():
        payloads.keep(PayloadKind.RESULT, broker.encode(), time.time() - 100 * HOUR)
    assert remove_ended(of["local://a"], 10 * HOUR, NOTHING, time.time()) == 1
    assert sorted(store.stored.values()) == [b"", b"local://b"]
    of[""].keep(PayloadKind.RESULT, b"older", time.time() - 1000 * HOUR)
    assert (
        remove_ended(of["local://a"], 10 * HOUR, NOTHING, time.time()) == 1
    )  # whose it was is not known
    assert sorted(store.stored.values()) == [b"", b"local://b"]
