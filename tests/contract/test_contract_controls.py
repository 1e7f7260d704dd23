"""Every result store that keeps control entries: compare-and-set, its clock, old entries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.limits.control import Controls, Reach, Scope, UnreadableControls, scale_of
from aztask.stores.records.controls import (
    ENTRY_LIMIT,
    ControlStore,
    Entry,
    EntryChange,
    controls_of,
)


@pytest.fixture(params=["", "servicebus://shop.servicebus.windows.net"])
def owner(request: pytest.FixtureRequest) -> Owner:
    """Without an owner, and with one."""
    return Owner(request.param, "shop") if request.param else NO_OWNER


@pytest.fixture
def controls(store: Store, owner: Owner) -> ControlStore:
    found = controls_of(store.of(owner))
    assert found is not None
    return found


@pytest.fixture
def another(store: Store, owner: Owner) -> ControlStore:
    """The same ones, as another process has them."""
    found = controls_of(store.of(owner))
    assert found is not None
    return found


def read_one(controls: ControlStore, name: str) -> bytes | None:
    (found,) = controls.read([name])
    return None if found is None else found.data


@pytest.mark.parametrize("data", [b"", b"short", bytes(range(256)) * (ENTRY_LIMIT // 256)])
def test_an_entry_is_read_as_it_was_written(
    controls: ControlStore, another: ControlStore, data: bytes
) -> None:
    assert controls.read(["a"]) == [None]
    (tag,) = controls.write([EntryChange("a", data)])
    (found,) = another.read(["a"])
    assert found is not None
    assert (found.data, found.tag) == (data, tag)


def test_only_the_current_version_can_be_replaced(
    controls: ControlStore, another: ControlStore
) -> None:
    (first,) = controls.write([EntryChange("a", b"1")])
    assert controls.write([EntryChange("a", b"again")]) == [None], "it exists"
    (second,) = another.write([EntryChange("a", b"2", first)])
    assert second is not None
    assert controls.write([EntryChange("a", b"late", first)]) == [None]
    assert read_one(controls, "a") == b"2"
    assert controls.write([EntryChange("a", b"3", second)]) != [None]


def test_each_change_of_a_call_succeeds_or_fails_alone(controls: ControlStore) -> None:
    (tag,) = controls.write([EntryChange("a", b"1")])
    answers = controls.write(
        [EntryChange("a", b"2"), EntryChange("b", b"1"), EntryChange("a", b"3", tag)]
    )
    assert [answer is None for answer in answers] == [True, False, False]
    found = controls.read(["b", "c", "a"])
    assert [each and each.data for each in found] == [b"1", None, b"3"]


@pytest.mark.parametrize("name", ["limit-a/b c\\d#e?f", "é" * 500, "~x"])
def test_names_are_told_apart(controls: ControlStore, name: str) -> None:
    names = [name, f"{name}x", f"{name}-"]
    controls.write([EntryChange(each, each.encode()) for each in names])
    assert [each and each.data for each in controls.read(names)] == [n.encode() for n in names]


def test_writers_that_race_lose_no_change(controls: ControlStore, another: ControlStore) -> None:
    controls.write([EntryChange("a", b"")])

    def add(number: int) -> None:
        store = (controls, another)[number % 2]
        for _ in range(200):
            (now,) = store.read(["a"])
            assert now is not None
            data = now.data + bytes([number])
            if store.write([EntryChange("a", data, now.tag)]) != [None]:
                return
        raise AssertionError("it never succeeded")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(12)))
    assert sorted(read_one(controls, "a") or b"") == list(range(12))


def test_the_stores_clock_moves_on_and_is_bounded(controls: ControlStore) -> None:
    first = controls.time()
    time.sleep(0.05)
    second = controls.time()
    assert first.earliest <= first.latest <= second.earliest <= second.latest
    passed = second.at - first.at
    assert second.earliest - first.latest - 0.01 <= passed <= second.latest - first.earliest + 0.01
    assert abs(first.at - time.time()) < 60.0, "it runs on this machine"


def test_old_entries_of_a_kind_are_purged(controls: ControlStore) -> None:
    controls.write([EntryChange("limit-a", b"1"), EntryChange("other", b"1")])
    now = controls.time().at
    assert controls.purge("limit-", now - 60.0) == 0
    assert controls.purge("limit-", now + 60.0) == 1
    assert controls.read(["limit-a"]) == [None]
    assert read_one(controls, "other") == b"1"


# -- what is paused -----------------------------------------------------------------------------


def test_a_pause_is_seen_by_others_until_it_is_resumed(
    controls: ControlStore, another: ControlStore
) -> None:
    here, there = Controls(controls), Controls(another)
    assert there.read().listed() == []
    (new,) = here.pause(Scope.QUEUE, ["orders"], 5.0)
    assert str(new) == "queue orders"
    assert "@" in new.by
    assert here.pause(Scope.QUEUE, ["orders"], 9.0) == [], "it is paused already"
    here.pause(Scope.TASK, ["shop.resize"], 6.0)
    state = there.read()
    assert (state.queues, state.tasks) == ({"orders"}, {"shop.resize"})
    assert state.queue_paused("orders")
    assert not state.queue_paused("shop.resize")
    assert state.task_paused("shop.resize")
    assert [each.at for each in state.listed()] == [5.0, 6.0]
    assert there.resume(Scope.QUEUE, ["orders", "other"]) == [new]
    assert here.read().queues == frozenset()
    assert [str(each) for each in here.resume_all()] == ["task shop.resize"]
    assert there.read().listed() == []


def test_a_concurrency_is_seen_by_others_until_it_is_reset(
    controls: ControlStore, another: ControlStore
) -> None:
    here, there = Controls(controls), Controls(another)
    here.pause(Scope.QUEUE, ["orders"], 5.0)
    (every,) = here.scale(Reach.ALL, [""], 4, 6.0, forget=set())
    assert (str(every), every.size) == ("all workers", 4)
    here.scale(Reach.WORKER, ["w1", "gone"], 8, 7.0, forget=set())
    here.scale(Reach.QUEUE, ["orders", "mail"], 2, 8.0, forget={"gone"})
    scales = there.read().scales.values()
    assert {str(each) for each in scales} == {
        *("all workers", "worker w1", "queue orders", "queue mail")
    }

    def size(worker: str, *queues: str) -> int:
        found = scale_of(scales, worker, queues)
        return found.size if found is not None else 0

    assert size("w1", "orders") == 8
    assert size("w2", "orders", "other") == 2
    assert size("w2", "other") == 4
    there.pause(Scope.TASK, ["shop.resize"], 6.0)
    there.resume_all()
    assert here.read().scales.keys() == there.read().scales.keys() != set(), "pauses are apart"
    assert [str(each) for each in there.unscale(Reach.WORKER, ["w1", "w9"])] == ["worker w1"]
    assert len(there.unscale(None, ())) == 3
    assert here.read().scales == {}


def test_a_paused_tenant_is_seen_by_others_until_it_is_resumed(
    controls: ControlStore, another: ControlStore
) -> None:
    here, there = Controls(controls), Controls(another)
    here.pause(Scope.QUEUE, ["orders"], 4.0)
    names = [f"customer=tenant {number}" for number in range(40)]
    assert len(here.pause(Scope.TENANT, names, 5.0)) == 40
    state = there.read()
    found = state.tenant("customer", "tenant 7")
    assert found is not None
    assert (str(found), found.at, "@" in found.by) == ("tenant customer=tenant 7", 5.0, True)
    assert state.tenant("customer", "tenant 40") is None
    assert state.tenant("other", "tenant 7") is None
    assert len(state.listed()) == 41
    assert here.pause(Scope.TENANT, names[:2], 9.0) == [], "they are paused already"
    ended = here.resume(Scope.TENANT, [names[7], "customer=other"])
    assert [each.name for each in ended] == [names[7]]
    assert there.read().tenant("customer", "tenant 7") is None
    assert there.read().tenant("customer", "tenant 8") is not None
    assert len(here.resume(Scope.TENANT, names)) == 39
    assert there.read().versions == {}, "nothing more is read of tenants"
    assert [str(each) for each in there.read().listed()] == ["queue orders"]


def test_resume_all_ends_the_pauses_of_tenants_too_and_replaces_damaged_documents(
    controls: ControlStore, another: ControlStore
) -> None:
    here, there = Controls(controls), Controls(another)
    here.pause(Scope.TENANT, ["customer=a", "customer=b"], 5.0)
    here.pause(Scope.TASK, ["shop.resize"], 6.0)
    assert len(here.resume_all()) == 3
    assert there.read().listed() == []
    here.pause(Scope.TENANT, ["customer=c"], 7.0)
    assert [each.name for each in there.read().listed()] == ["customer=c"], "a and b do not revive"
    (document,) = there.read().versions
    (entry,) = controls.read([document])
    assert entry is not None
    controls.write([EntryChange(document, b"damaged", entry.tag)])
    with pytest.raises(UnreadableControls):
        Controls(another).read()
    here.resume_all()
    assert Controls(another).read().listed() == []


def test_only_documents_of_tenants_that_have_changed_are_read(
    controls: ControlStore, another: ControlStore
) -> None:
    reads: list[list[str]] = []

    class Counting:
        def read(self, names: Sequence[str]) -> list[Entry | None]:
            reads.append(list(names))
            return controls.read(names)

        def __getattr__(self, name: str) -> object:
            return getattr(controls, name)

    watching, changing = Controls(cast("ControlStore", Counting())), Controls(another)
    watching.read()
    assert reads == [["control"]], "no tenant is paused, so nothing more is read"
    changing.pause(Scope.TENANT, [f"customer={number}" for number in range(8)], 5.0)
    watching.read()
    reads.clear()
    watching.read()
    assert reads == [["control"]]
    changing.pause(Scope.TENANT, ["customer=another"], 5.0)
    reads.clear()
    assert watching.read().tenant("customer", "another") is not None
    assert [len(names) for names in reads] == [1, 1]


def test_pauses_that_are_set_at_once_are_all_kept(
    controls: ControlStore, another: ControlStore
) -> None:
    def pause(number: int) -> None:
        Controls((controls, another)[number % 2]).pause(Scope.TASK, [f"t{number}"], 1.0)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(pause, range(6)))
    assert Controls(controls).read().tasks == {f"t{number}" for number in range(6)}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"v":1}',
        b'{"v":1,"pauses":[[1,2,3,4]]}',
        b'{"v":2}',
        b'{"v":1,"pauses":[],"scales":[["all","",0,1.0,""]]}',
    ],
)
def test_a_damaged_document_is_an_error_and_can_be_replaced(
    controls: ControlStore, data: bytes
) -> None:
    controls.write([EntryChange("control", data)])
    here = Controls(controls)
    with pytest.raises(UnreadableControls):
        here.read()
    with pytest.raises(UnreadableControls):
        here.pause(Scope.QUEUE, ["orders"], 5.0)
    assert here.resume_all() == []
    here.pause(Scope.QUEUE, ["orders"], 5.0)
    assert here.read().queues == {"orders"}
