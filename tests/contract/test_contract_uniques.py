"""Every result store that keeps unique tasks: one holder for each key, by compare-and-set."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.uniques import UniqueStore, uniques_of

NOW = 1_800_000_000.0


@pytest.fixture(params=["", "servicebus://shop.servicebus.windows.net"])
def owner(request: pytest.FixtureRequest) -> Owner:
    """Without an owner, and with one."""
    return Owner(request.param, "shop") if request.param else NO_OWNER


@pytest.fixture
def uniques(store: Store, owner: Owner) -> UniqueStore:
    found = uniques_of(store.of(owner))
    assert found is not None
    return found


@pytest.fixture
def another(store: Store, owner: Owner) -> UniqueStore:
    """The same ones, as another process has them."""
    found = uniques_of(store.of(owner))
    assert found is not None
    return found


@pytest.mark.parametrize("key", ["shop.add:abc", "a/b?c#d\\e", "ä" * 300])
def test_a_key_has_one_holder(uniques: UniqueStore, another: UniqueStore, key: str) -> None:
    assert uniques.read(key) is None
    holder = uniques.write(key, b"one", NOW, None)
    assert holder is not None
    assert another.write(key, b"two", NOW, None) is None
    assert another.read(key) == holder


def test_only_the_reader_of_the_current_holder_replaces_or_releases_it(
    uniques: UniqueStore, another: UniqueStore
) -> None:
    first = uniques.write("k", b"one", NOW, None)
    assert first is not None
    second = another.write("k", b"two", NOW + 5, first)
    assert second is not None
    assert uniques.write("k", b"late", NOW, first) is None
    assert not uniques.release(first)
    assert uniques.read("k") == second
    assert uniques.release(second)
    assert not uniques.release(second)
    assert another.read("k") is None


def test_a_holder_of_a_former_time_is_not_the_current_one(uniques: UniqueStore) -> None:
    """The key was released and taken again since it was read."""
    first = uniques.write("k", b"one", NOW, None)
    assert first is not None
    assert uniques.release(first)
    second = uniques.write("k", b"two", NOW, None)
    assert second is not None
    assert not uniques.release(first)
    assert uniques.write("k", b"late", NOW, first) is None
    assert uniques.read("k") == second


def test_the_due_ones_come_in_order_and_only_once(
    uniques: UniqueStore, another: UniqueStore
) -> None:
    holders = {}
    for number, key in enumerate(["c", "a", "b", "d"]):
        holders[key] = uniques.write(key, b"x", NOW + number, None)
    assert [each.key for each in another.due(NOW + 2.5, 10)] == ["c", "a", "b"]
    assert [each.key for each in another.due(NOW + 2.5, 1)] == ["c"]
    moved = uniques.write("c", b"y", NOW + 100, holders["c"])
    assert moved is not None
    assert [each.key for each in another.due(NOW + 2.5, 10)] == ["a", "b"]
    assert holders["a"] is not None
    assert uniques.release(holders["a"])
    assert [each.key for each in another.due(NOW + 200, 10)] == ["b", "d", "c"]
    same = uniques.write("c", b"z", NOW + 100, moved)
    assert same is not None
    assert [each.data for each in another.due(NOW + 200, 10)] == [b"x", b"x", b"z"]


def test_of_many_writers_at_once_one_succeeds(uniques: UniqueStore, another: UniqueStore) -> None:
    def write(number: int) -> bool:
        store = (uniques, another)[number % 2]
        return store.write("k", b"%d" % number, NOW, None) is not None

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(write, range(16))) == 1


def test_the_time_is_the_stores(uniques: UniqueStore) -> None:
    before = time.time()
    assert before - 2.0 < uniques.now() <= time.time()
