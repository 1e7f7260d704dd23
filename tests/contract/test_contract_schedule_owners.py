"""Every result store that keeps schedules: whose they are, claims, adoption, and older releases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stores import Store

from aztask.address.owner import NO_OWNER, Owner
from aztask.stores.records.schedules import ClaimRow, Occurrence, ScheduleStore, schedules_of

SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")
STAGING = Owner("servicebus://staging.servicebus.windows.net", "shop")
MOVED = Owner("servicebus://moved.servicebus.windows.net", "shop")


def row(number: int, data: bytes = b"x", *, is_open: bool = True) -> Occurrence:
    return Occurrence(f"{number:014d}", data, is_open)


def numbers(found: list[Occurrence] | tuple[Occurrence, ...]) -> list[int]:
    return [int(each.key) for each in found]


@pytest.fixture
def free(store: Store) -> ScheduleStore:
    """The store as a program without a broker has it."""
    found = schedules_of(store.results)
    assert found is not None
    assert found.owner == NO_OWNER
    return found


@pytest.fixture
def shop(free: ScheduleStore) -> ScheduleStore:
    return free.of(SHOP)


@pytest.fixture
def staging(store: Store) -> ScheduleStore:
    """The same store, as another owner's process has it."""
    found = schedules_of(store.another)
    assert found is not None
    return found.of(STAGING)


def test_two_owners_have_schedules_of_one_name(shop: ScheduleStore, staging: ScheduleStore) -> None:
    tag = shop.commit("s", b"shop", None, [row(1)])
    assert tag is not None
    assert staging.read("s") is None
    assert staging.newest("s", 5) == []
    other = staging.commit("s", b"staging", None, [row(2)])
    assert other is not None
    assert shop.commit("s", b"shop 2", tag, [row(3)]) is not None
    assert staging.commit("s", b"staging 2", other) is not None
    assert staging.close_occurrence("s", row(2).key, b"sent")
    assert not staging.close_occurrence("s", row(1).key, b"sent")
    mine, theirs = shop.read("s"), staging.read("s")
    assert mine is not None
    assert theirs is not None
    assert (mine.head.data, numbers(mine.open)) == (b"shop 2", [1, 3])
    assert (theirs.head.data, numbers(theirs.open)) == (b"staging 2", [])
    assert (mine.owner, mine.mark) == (SHOP, "")
    assert (theirs.owner, theirs.mark) == (STAGING, STAGING.mark)
    assert shop.overview() == [mine]
    assert staging.overview() == [theirs]
    assert numbers(staging.newest("s", 5)) == [2]
    assert shop.prune("s", 1) == 0
    assert staging.delete("s")
    assert staging.read("s") is None
    assert shop.read("s") == mine


def test_a_process_that_has_read_nothing_finds_its_place(
    shop: ScheduleStore, staging: ScheduleStore
) -> None:
    shop.commit("s", b"shop", None, [row(1)])
    staging.commit("s", b"staging", None, [row(2)])
    for _ in range(2):
        again = staging.of(STAGING)
        assert numbers(again.newest("s", 5)) == [2]
        found = again.of(STAGING).read("s")
        assert found is not None
        assert found.head.data == b"staging"
    assert staging.of(STAGING).commit("s", b"twice", None) is None
    assert staging.of(STAGING).delete("s")
    assert numbers(shop.newest("s", 5)) == [1]
    found = shop.read("s")
    assert found is not None
    assert found.head.data == b"shop"


def test_what_others_have_is_shown_and_not_changed(
    free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore
) -> None:
    shop.commit("s", b"1", None, [row(1)])
    assert staging.overview() == []
    (shown,) = staging.overview(everyone=True)
    assert (shown.owner, numbers(shown.open)) == (SHOP, [1])
    assert staging.commit("s", b"no", shown.head.tag) is None
    assert free.commit("s", b"no", shown.head.tag) is None
    assert free.commit("s", b"no", None) is None
    assert free.read("s") is None
    for other in (staging, free):
        assert not other.close_occurrence("s", row(1).key, b"no")
        assert not other.delete("s")
    kept = shop.read("s")
    assert kept is not None
    assert kept.head.data == b"1"


def test_one_without_an_owner_is_adopted_by_the_first_commit(
    free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore
) -> None:
    free.commit("s", b"0", None, [row(1)])
    mine, theirs = shop.read("s"), staging.read("s")
    assert mine is not None
    assert theirs is not None
    assert mine.owner == theirs.owner == NO_OWNER
    tag = shop.commit("s", b"1", mine.head.tag)
    assert tag is not None
    assert staging.commit("s", b"2", theirs.head.tag) is None
    assert staging.read("s") is None
    assert free.read("s") is None
    kept = shop.read("s")
    assert kept is not None
    assert (kept.owner, kept.mark, kept.head.tag) == (SHOP, "", tag)
    assert numbers(kept.open) == [1]


def test_a_new_one_beside_one_without_an_owner_that_is_not_ours(
    free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore
) -> None:
    free.commit("s", b"0", None, [row(1)])
    assert staging.commit("s", b"no", None) is None
    tag = staging.commit("s", b"1", None, [row(2)], apart=True)
    assert tag is not None
    assert staging.commit("s", b"twice", None, apart=True) is None
    assert staging.commit("s", b"2", tag, [row(3)]) is not None
    for store in (staging, staging.of(STAGING)):
        mine = store.read("s")
        assert mine is not None
        assert (mine.owner, mine.mark, numbers(mine.open)) == (STAGING, STAGING.mark, [2, 3])
    left = shop.read("s")
    assert left is not None
    assert (left.owner, left.head.data, numbers(left.open)) == (NO_OWNER, b"0", [1])


def test_the_name_is_free_again_after_a_delete(shop: ScheduleStore, staging: ScheduleStore) -> None:
    shop.commit("s", b"1", None)
    assert shop.delete("s")
    assert not shop.delete("s")
    assert staging.commit("s", b"2", None) is not None
    kept = staging.read("s")
    assert kept is not None
    assert kept.mark == ""
    assert shop.read("s") is None


def test_a_claim_is_made_once_and_renewed_by_its_tag(
    shop: ScheduleStore, staging: ScheduleStore
) -> None:
    assert shop.claim("s", ClaimRow("d1", b"1"))  # before the schedule is made
    shop.commit("s", b"head", None)
    staging.commit("s", b"head", None)
    assert not shop.claim("s", ClaimRow("d1", b"again"))
    assert shop.claim("s", ClaimRow("d2", b"2"))
    assert staging.claim("s", ClaimRow("d1", b"theirs"))
    kept = shop.read("s")
    assert kept is not None
    first, second = sorted(kept.claims, key=lambda claim: claim.key)
    assert (first.key, first.data, second.key) == ("d1", b"1", "d2")
    assert shop.claim("s", ClaimRow("d1", b"renewed", first.tag))
    assert not shop.claim("s", ClaimRow("d1", b"late", first.tag))
    assert not shop.unclaim("s", first)
    assert shop.unclaim("s", second)
    (overview,) = shop.overview()
    (found,) = overview.claims
    assert (found.key, found.data) == ("d1", b"renewed")
    assert kept.head.tag == overview.head.tag, "a claim is no conflict"
    theirs = staging.read("s")
    assert theirs is not None
    assert [claim.data for claim in theirs.claims] == [b"theirs"]
    assert shop.delete("s")
    shop.commit("s", b"head", None)
    kept = shop.read("s")
    assert kept is not None
    assert kept.claims == ()


def test_owners(free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore) -> None:
    assert free.owners() == set()
    free.commit("old", b"1", None)
    shop.commit("s", b"1", None)
    staging.commit("s", b"1", None)
    assert free.owners() == shop.owners() == {SHOP, STAGING}


@pytest.mark.parametrize("apart", [False, True], ids=["plain", "apart"])
def test_all_schedules_of_an_owner_move(
    apart: bool, free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore
) -> None:
    old = staging if apart else shop
    shop.commit("s", b"shop", None, [row(7)])
    staging.commit("s", b"staging", None, [row(8), row(9, is_open=False)])
    old.commit("t", b"t", None, [row(1), row(2, is_open=False)])
    kept = old.read("s")
    assert kept is not None
    moved = free.of(MOVED)
    assert moved.adopt(old.owner) == 2
    assert moved.adopt(old.owner) == 0
    assert old.read("s") is None
    assert old.commit("s", b"late", kept.head.tag) is None
    assert old.overview() == []
    found = {each.head.schedule: each for each in moved.overview()}
    assert found["s"].head.data == (b"staging" if apart else b"shop")
    assert numbers(found["s"].open) == ([8] if apart else [7])
    assert numbers(moved.newest("t", 5)) == [2, 1]
    assert moved.owners() == {MOVED, SHOP if apart else STAGING}


def test_a_schedule_that_the_new_owner_has_stays_and_gets_what_is_open(
    free: ScheduleStore, shop: ScheduleStore
) -> None:
    shop.commit("s", b"old", None, [row(1), row(2, is_open=False)])
    moved = free.of(MOVED)
    moved.commit("s", b"new", None, [row(5)])
    assert moved.adopt(SHOP) == 1
    kept = moved.read("s")
    assert kept is not None
    assert (kept.head.data, numbers(kept.open)) == (b"new", [1, 5])
    assert shop.read("s") is None
    assert moved.owners() == {MOVED}


def test_those_without_an_owner_can_be_adopted_by_hand(
    free: ScheduleStore, shop: ScheduleStore
) -> None:
    free.commit("s", b"1", None)
    free.commit("t", b"1", None)
    assert free.adopt(SHOP) == 0
    assert shop.adopt(NO_OWNER) == 2
    assert shop.owners() == {SHOP}


@pytest.mark.parametrize("step", range(1, 5))
def test_a_move_that_dies_on_the_way_goes_on(
    step: int, free: ScheduleStore, shop: ScheduleStore, staging: ScheduleStore
) -> None:
    shop.commit("s", b"shop", None)
    made = [row(number, is_open=number % 20 == 0) for number in range(1, 201)]
    tag = staging.commit("s", b"staging", None, made[:90])
    tag = staging.commit("s", b"staging", tag, made[90:180])
    assert staging.commit("s", b"staging", tag, made[180:]) is not None
    moved = free.of(MOVED)
    dies_after(moved, step)
    with pytest.raises(KeyboardInterrupt):
        moved.adopt(STAGING)
    again = free.of(MOVED)
    assert again.adopt(STAGING) in (0, 1)
    assert again.adopt(STAGING) == 0
    kept = again.read("s")
    assert kept is not None
    assert kept.head.data == b"staging"
    assert numbers(kept.open) == list(range(20, 201, 20))
    assert staging.read("s") is None


def dies_after(store: ScheduleStore, step: int) -> None:
    """Its process dies at the commit with this number, behind all commits, or while it deletes."""
    left = [step]

    def wrapped(inner: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return inner(*arguments)

        return call

    of = store.of

    def dying_of(owner: Owner) -> ScheduleStore:
        other = of(owner)
        other.delete = wrapped(other.delete)  # type: ignore[method-assign, assignment]
        return other

    store.commit = wrapped(store.commit)  # type: ignore[method-assign, assignment]
    store.of = dying_of  # type: ignore[method-assign]
