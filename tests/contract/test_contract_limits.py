"""Every result store with control entries: slots with weights, of one limit and of several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import Store

from aztask.address.owner import Owner
from aztask.limits.claiming import Claims, Wanted
from aztask.limits.declaration import Rate
from aztask.limits.rates import spacing
from aztask.limits.storeclock import StoreClock
from aztask.stores.records.controls import controls_of
from aztask.support.clock import SYSTEM_CLOCK

OWNER = Owner("servicebus://shop.servicebus.windows.net", "shop")
TOKENS = Rate(600, 3600.0, burst=600)
GAP = spacing(TOKENS)
LATER = 100.0
"""Seconds from now at which all claims begin, so that no test depends on how long it takes."""


def claimer(store: Store) -> tuple[Claims, float]:
    """The claims of one worker, and the time from which it claims."""
    controls = controls_of(store.of(OWNER))
    assert controls is not None
    clock = StoreClock(controls, SYSTEM_CLOCK)
    clock.refresh()
    return Claims(controls, clock), clock.now() + LATER


def free(claims: Claims, entry: str, at: float) -> int:
    """How much of a limit's burst is free at a time."""
    (known,) = claims.read([entry])
    cost = 600
    while cost and known.state.opens(TOKENS, cost, at) > at + GAP / 2:
        cost -= 1
    return cost


def test_workers_at_once_take_what_there_is_and_no_more(store: Store) -> None:
    workers = [claimer(store) for _ in range(4)]
    at = workers[0][1]

    def claim(number: int) -> list[float]:
        claims, _ = workers[number]
        return [
            slot.at for _ in range(3) for slot in claims.claim(Wanted("limit-a", TOKENS, [60]), at)
        ]

    with ThreadPoolExecutor(len(workers)) as pool:
        times = sorted(each for some in pool.map(claim, range(4)) for each in some)
    assert times[:10] == pytest.approx([at] * 10), "ten of 60 are the burst"
    assert times[10:] == pytest.approx([at + 60 * GAP, at + 120 * GAP])


def test_several_limits_are_taken_together_by_workers_at_once(store: Store) -> None:
    """Whatever one worker has to give back, the sum of what is taken is right in the end."""
    workers = [claimer(store) for _ in range(4)]
    at = workers[0][1]
    entries = ["limit-a", "limit-b", "limit-c"]

    def claim(number: int) -> None:
        claims, _ = workers[number]
        mine = entries[number % 3 :] + entries[: number % 3]  # in an order of its own
        for _ in range(3):
            slots = claims.claim_together([Wanted(each, TOKENS, (40,)) for each in mine], at)
            assert len({slot.at for slot in slots}) == 1
            assert len(slots) == 3
        claims.settle()

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(claim, range(4)))
    for entry in entries:
        assert free(workers[0][0], entry, at) == 600 - 4 * 3 * 40


def test_another_worker_sees_what_is_credited_and_charged(store: Store) -> None:
    (mine, at), (other, _) = claimer(store), claimer(store)
    (slot,) = mine.claim(Wanted("limit-a", TOKENS, [500]), at)
    assert free(other, "limit-a", at) == 100
    mine.correct(slot, 200)
    mine.settle()
    assert free(other, "limit-a", at) == 300
    mine.correct(slot, -50)
    mine.claim(Wanted("limit-a", TOKENS, [50]), at)
    assert free(other, "limit-a", at) == 200
