"""Every result store that keeps holders, control entries and dead letters: whose they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.limits.breakers import Breakers, OpenBreaker, breakers_of_apps
from aztask.limits.control import Controls, Reach, Scope
from aztask.message.envelope import Envelope
from aztask.stores.records import deadindex
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.deadindex import IndexedDeadLetter

NOW = 1_800_000_000.0
MINE = Owner("servicebus://mine.servicebus.windows.net", "shop")
THEIRS = Owner("servicebus://theirs.servicebus.windows.net", "shop")
OTHER_APP = Owner(MINE.broker, "billing")
OPEN = OpenBreaker("shop.charge", NOW, NOW + 5.0, "worker", "6 of 10 runs failed in 60 s")


def letter(key: str, at: float = 100.0) -> IndexedDeadLetter:
    return IndexedDeadLetter("orders", Envelope(b"x", message_id=key), "why", "what", at, 3)


# -- holders ---------------------------------------------------------------------------------


def test_two_brokers_hold_one_key(store: Store) -> None:
    mine, theirs = store.of(MINE).uniques, store.of(THEIRS).uniques
    first = mine.write("shop.pay:a", b"1", NOW, None)
    assert first is not None
    assert first.owner == MINE.of_broker
    assert theirs.read("shop.pay:a") is None
    second = theirs.write("shop.pay:a", b"2", NOW, None)
    assert second is not None
    assert [each.data for each in mine.due(NOW + 1, 10)] == [b"1"]
    assert theirs.release(second)
    assert mine.read("shop.pay:a") == first
    assert theirs.due(NOW + 1, 10) == []


def test_apps_of_one_broker_share_their_holders(store: Store) -> None:
    mine, other = store.of(MINE).uniques, store.of(OTHER_APP).uniques
    assert mine.write("shop.pay:a", b"1", NOW, None) is not None
    assert other.write("shop.pay:a", b"2", NOW, None) is None
    assert [each.data for each in other.due(NOW + 1, 10)] == [b"1"]


def test_a_holder_without_an_owner_stands_in_the_way_of_all_and_changes_where_it_is(
    store: Store,
) -> None:
    former = store.of(NO_OWNER).uniques
    old = former.write("shop.pay:a", b"old", NOW, None)
    assert old is not None
    mine, theirs = store.of(MINE).uniques, store.of(THEIRS).uniques
    assert mine.write("shop.pay:a", b"new", NOW, None) is None
    assert theirs.write("shop.pay:a", b"new", NOW, None) is None
    found = mine.read("shop.pay:a")
    assert found is not None
    assert (found.data, found.owner) == (b"old", NO_OWNER)
    changed = mine.write("shop.pay:a", b"changed", NOW, found)
    assert changed is not None
    seen = former.read("shop.pay:a")
    assert seen is not None
    assert seen.data == b"changed"
    assert former.release(seen)
    assert mine.write("shop.pay:a", b"new", NOW, None) is not None


def test_only_wanted_holders_without_an_owner_are_repaired(store: Store) -> None:
    former = store.of(NO_OWNER).uniques
    for number in range(3):
        former.write(f"other.work:{number}", b"x", NOW, None)
    former.write("shop.pay:a", b"x", NOW + 1, None)
    mine = store.of(MINE).uniques
    assert mine.due(NOW + 5, 10) == []
    found = mine.due_unowned(NOW + 5, 1, lambda key: key.startswith("shop."))
    assert [each.key for each in found] == ["shop.pay:a"], "the others do not take its place"
    assert mine.unowned(NOW + 5) == 4
    assert former.due_unowned(NOW + 5, 10) == [], "it finds them as due"


def test_a_new_task_takes_the_place_of_a_holder_without_an_owner(store: Store) -> None:
    former, mine = store.of(NO_OWNER).uniques, store.of(MINE).uniques
    old = former.write("shop.pay:a", b"old", NOW, None)
    assert old is not None
    moved = mine.move("shop.pay:a", b"new", NOW, old)
    assert moved is not None
    assert moved.owner == MINE.of_broker
    assert former.read("shop.pay:a") is None
    assert mine.read("shop.pay:a") == moved
    later = former.write("shop.pay:b", b"old", NOW, None)
    assert later is not None
    assert former.write("shop.pay:b", b"newer", NOW, later) is not None
    assert mine.move("shop.pay:b", b"late", NOW, later) is None
    found = mine.read("shop.pay:b")
    assert found is not None
    assert found.data == b"newer"


def test_holders_are_adopted_once(store: Store) -> None:
    mine, theirs = store.of(MINE).uniques, store.of(THEIRS).uniques
    for key in ("a", "b", "c"):
        assert theirs.write(f"shop.pay:{key}", b"theirs", NOW, None) is not None
    assert mine.write("shop.pay:c", b"mine", NOW, None) is not None
    assert mine.owners() == {MINE.of_broker, THEIRS.of_broker}
    assert mine.adopt(THEIRS) == 3
    assert mine.adopt(THEIRS) == 0
    assert theirs.due(NOW + 1, 10) == []
    found = {each.key: each.data for each in mine.due(NOW + 1, 10)}
    assert found == {"shop.pay:a": b"theirs", "shop.pay:b": b"theirs", "shop.pay:c": b"mine"}
    assert mine.owners() == {MINE.of_broker}
    assert store.of(NO_OWNER).uniques.write("shop.pay:d", b"x", NOW, None) is not None
    assert store.of(MINE).uniques.owners() == {MINE.of_broker, NO_OWNER}
    assert store.of(MINE).uniques.adopt(NO_OWNER) == 1
    assert mine.adopt(MINE) == 0


# -- control entries -------------------------------------------------------------------------


def test_pauses_belong_to_the_broker_and_limits_to_the_app(store: Store) -> None:
    mine, other, theirs = (store.of(each).controls for each in (MINE, OTHER_APP, THEIRS))
    mine.write([EntryChange("control", b"1"), EntryChange("limit-held-a", b"1")])
    mine.write([EntryChange("breakers", b"1")])
    names = ["control", "limit-held-a", "breakers"]
    assert [each is not None for each in mine.read(names)] == [True, True, True]
    assert [each is not None for each in other.read(names)] == [True, False, False]
    assert [each is not None for each in theirs.read(names)] == [False, False, False]
    far = mine.time().at + 60.0
    assert (other.purge("limit-", far), theirs.purge("limit-", far)) == (0, 0)
    assert mine.purge("limit-", far) == 1


def test_an_entry_is_removed_only_as_it_was_read(store: Store) -> None:
    controls = store.of(MINE).controls
    (first,) = controls.write([EntryChange("control", b"1")])
    assert first is not None
    (second,) = controls.write([EntryChange("control", b"2", first)])
    assert second is not None
    assert not controls.remove("control", first)
    assert controls.remove("control", second)
    assert controls.read(["control"]) == [None]
    (third,) = controls.write([EntryChange("control", b"3")])
    assert third not in (first, second), "a reader of a removed entry changes no new one"


def test_a_pause_without_an_owner_holds_for_all_until_it_is_changed(store: Store) -> None:
    former = Controls(store.of(NO_OWNER).controls)
    former.pause(Scope.QUEUE, ["orders", "mails"], 5.0)
    former.pause(Scope.TENANT, ["customer=acme"], 5.0)
    former.scale(Reach.ALL, [""], 3, 5.0, forget=set())
    mine, theirs = Controls(store.of(MINE).controls), Controls(store.of(THEIRS).controls)
    for each in (mine, theirs):
        state = each.read()
        assert state.queues == {"orders", "mails"}
        assert state.tenant("customer", "acme") is not None
        assert [scaled.size for scaled in state.scales.values()] == [3]
    assert mine.pause(Scope.QUEUE, ["orders"], 9.0) == [], "it is paused already"
    assert mine.read().pauses[Scope.QUEUE, "orders"].at == 5.0
    assert theirs.read().queues == {"mails"}, "it is mine now"
    assert [each.name for each in theirs.resume(Scope.QUEUE, ["mails"])] == ["mails"]
    assert mine.read().queues == {"orders"}
    mine.scale(Reach.ALL, [""], 7, 9.0, forget=set())
    assert [each.size for each in mine.read().scales.values()] == [7]
    assert theirs.read().scales == {}
    assert [str(each) for each in theirs.resume(Scope.TENANT, ["customer=acme"])]
    assert not former.read()
    assert store.of(MINE).controls.owners() == {MINE.of_broker}, "nothing is left without an owner"


def test_resuming_all_leaves_what_another_broker_paused(store: Store) -> None:
    mine, theirs = Controls(store.of(MINE).controls), Controls(store.of(THEIRS).controls)
    mine.pause(Scope.TASK, ["shop.pay"], 5.0)
    Controls(store.of(NO_OWNER).controls).pause(Scope.TASK, ["shop.mail"], 5.0)
    assert [each.name for each in theirs.resume_all()] == ["shop.mail"]
    assert mine.read().tasks == {"shop.pay"}
    assert theirs.read_both()[1].listed() == []


def test_commands_find_the_breakers_of_all_apps_of_the_broker(store: Store) -> None:
    for owner in (MINE, OTHER_APP, THEIRS):
        Breakers(store.of(owner).controls).open(OPEN)
    nameless = store.of(Owner(MINE.broker, "aztask")).controls
    found = breakers_of_apps(nameless)
    assert [each.app for each in found] == ["billing", "shop"]
    assert all(each.close_all() for each in found)
    assert Breakers(store.of(MINE).controls).read() == {}
    assert Breakers(store.of(THEIRS).controls).read() == {OPEN.task: OPEN}


def test_control_entries_are_adopted_with_their_apps(store: Store) -> None:
    for owner in (THEIRS, replace(THEIRS, app="billing")):
        store.of(owner).controls.write([EntryChange("breakers", owner.app.encode())])
    Controls(store.of(THEIRS).controls).pause(Scope.QUEUE, ["orders"], 5.0)
    mine = store.of(MINE).controls
    assert mine.adopt(THEIRS.of_broker) == 3
    assert mine.adopt(THEIRS.of_broker) == 0
    for owner in (MINE, OTHER_APP):
        (found,) = store.of(owner).controls.read(["breakers"])
        assert found is not None
        assert found.data == owner.app.encode()
    assert Controls(mine).read().queues == {"orders"}
    assert mine.owners() == {MINE, OTHER_APP, MINE.of_broker}
    renamed = Owner(MINE.broker, "store")
    assert store.of(renamed).controls.adopt(MINE) == 1, "the broker's own stay"
    assert store.of(renamed).controls.read(["breakers"]) != [None]


# -- dead letters ----------------------------------------------------------------------------


def keys(store: Store, owner: Owner) -> list[str]:
    return [each.key for each in store.of(owner).dead_index.notes("orders")]


def test_notes_belong_to_the_broker(store: Store) -> None:
    mine, theirs = store.of(MINE).dead_index, store.of(THEIRS).dead_index
    mine.note([letter("a"), letter("b")])
    theirs.note([letter("a"), letter("c")])
    # Notes of one call are stored at the same time, so they may get any order.
    assert sorted(keys(store, MINE)) == sorted(keys(store, OTHER_APP)) == ["a", "b"]
    assert sorted(keys(store, THEIRS)) == ["a", "c"]
    theirs.drop("orders", {"a", "b"})
    assert theirs.keep_only("orders", (), 1e10) == 1
    assert sorted(keys(store, MINE)) == ["a", "b"]
    assert keys(store, THEIRS) == []


def test_notes_without_an_owner_are_listed_until_the_whole_queue_was_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadindex, "PAGE", 2)
    former = store.of(NO_OWNER).dead_index
    former.note([letter(name) for name in "abcde"])
    mine = store.of(MINE).dead_index
    mine.note([letter("f"), letter("b")])
    assert sorted(keys(store, MINE)) == list("abcdef"), "each once, page by page"
    mine.drop("orders", {"a"})
    assert sorted(keys(store, THEIRS)) == list("bcde")
    mine.keep_only("orders", {"b", "c", "f"}, 1e10)
    assert sorted(keys(store, MINE)) == list("bcf")
    assert sorted(keys(store, THEIRS)) == ["d", "e"], "they may be theirs"
    assert store.of(MINE).dead_index.unowned(1e10) == 2


def test_notes_are_adopted_once(store: Store) -> None:
    theirs, mine = store.of(THEIRS).dead_index, store.of(MINE).dead_index
    theirs.note([letter(name) for name in "abc"])
    mine.note([letter("a")])
    assert mine.owners() == {MINE.of_broker, THEIRS.of_broker}
    assert mine.adopt(THEIRS) == 3
    assert mine.adopt(THEIRS) == 0
    assert sorted(keys(store, MINE)) == list("abc")
    assert keys(store, THEIRS) == []
    assert mine.owners() == {MINE.of_broker}


def test_notes_without_an_owner_are_adopted_and_nothing_else(store: Store) -> None:
    former, theirs = store.of(NO_OWNER).dead_index, store.of(THEIRS).dead_index
    former.note([letter("a"), letter("b")])
    theirs.note([letter("c")])
    theirs.keep_only("orders", {"c"}, 1e9)
    assert keys(store, THEIRS) == ["c"]
    assert store.of(MINE).dead_index.adopt(NO_OWNER) == 2
    assert sorted(keys(store, MINE)) == ["a", "b"]
    former.note([letter("d")])
    assert keys(store, THEIRS) == ["c"], "it is older than what they have read"


@pytest.mark.parametrize("part", ["uniques", "controls", "dead_index"])
def test_a_store_without_rows_has_no_owners(store: Store, part: str) -> None:
    assert getattr(store.of(MINE), part).owners() == set()
    assert getattr(store.of(MINE), part).adopt(THEIRS) == 0
