"""Requests to a service that refuses what is too much, in virtual time."""

from __future__ import annotations

import heapq
import logging
import random
from itertools import count

import pytest

from aztask.azure.pace import (
    BACKED_OFF,
    FIRST_SECONDS,
    FORGOTTEN_SECONDS,
    LEAST_RATE,
    LONGEST_WAIT,
    RECOVERY_SECONDS,
    Paces,
    RequestPace,
    resource_of,
)
from aztask.support.clock import Clock, replaced

URL = "https://shop.queue.core.windows.net/orders/messages"


class Time:
    """A clock on which only sleeping takes time."""

    def __init__(self):
        self.now = 1000.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def time():
    made = Time()
    with replaced(Clock(lambda: made.now, lambda: made.now, made.sleep)):
        yield made


def known(rate, now=0.0):
    """A pace that was refused at so many requests a second."""
    made = RequestPace(now)
    for number in range(round(rate * FIRST_SECONDS)):
        made.answered(now + number / rate, refused=False, pause=0.0)
    made.wait(now + FIRST_SECONDS, leased=False)
    return made


@pytest.mark.parametrize(("programs", "most_refused"), [(1, 0.05), (4, 0.1), (20, 0.4)])
def test_programs_share_what_a_service_takes(programs, most_refused):
    """Greedy programs with eight threads each, at a service that takes 150 requests a second."""
    dice, numbers = random.Random(1), count()
    taken, refused = [0] * programs, 0
    tokens, at, seconds = 37.5, 0.0, 60.0
    paces = [None] * programs
    events = [(dice.random() / 10, next(numbers), program, True) for program in range(programs)] * 8
    events = [(at, next(numbers), program, new) for at, _, program, new in events]
    heapq.heapify(events)
    while events and (event := heapq.heappop(events))[0] < seconds:
        now, _, program, new = event
        pace = paces[program]
        if new:
            ahead = 0.0 if pace is None else pace.wait(now, leased=False)
            trip = ahead + 0.005 * dice.uniform(0.5, 1.5)
            heapq.heappush(events, (now + trip, next(numbers), program, False))
            continue
        tokens, at = min(37.5, tokens + (now - at) * 150.0), now
        admitted = tokens >= 1.0
        tokens -= admitted
        if not admitted and pace is None:
            pace = paces[program] = RequestPace(now)
        if pace is not None:
            pace.answered(now, refused=not admitted, pause=0.0)
        if now > seconds / 2:
            taken[program] += admitted
            refused += not admitted
        heapq.heappush(events, (now + 0.0005, next(numbers), program, True))
    assert sum(taken) >= 0.9 * 150.0 * seconds / 2
    assert refused <= most_refused * sum(taken)
    assert min(taken) >= 0.1 * max(taken)


def test_a_rate_goes_down_at_a_refusal_and_comes_back():
    made = known(100)
    since = FIRST_SECONDS
    low = made.rate(since)
    assert low == pytest.approx(100 * BACKED_OFF)
    rates = [made.rate(since + seconds) for seconds in range(20)]
    assert rates == sorted(rates)
    assert made.rate(since + RECOVERY_SECONDS) == pytest.approx(100)
    assert made.rate(since + 3 * RECOVERY_SECONDS) > 200
    assert not made.answered(since + 0.5, refused=True, pause=0.0), "it was on its way"
    assert made.answered(since + RECOVERY_SECONDS, refused=True, pause=0.0)
    assert made.rate(since + RECOVERY_SECONDS) < low
    for second in range(200):
        made.answered(10.0 + 2 * second, refused=True, pause=0.0)
    assert made.rate(410.0) >= LEAST_RATE


def test_a_refusal_after_a_long_growth_begins_from_what_was_taken():
    made = known(100)
    late = 1.0 + 10 * RECOVERY_SECONDS
    for number in range(90):
        made.answered(late + number / 90, refused=False, pause=0.0)
    assert made.answered(late + 1.0, refused=True, pause=0.0)
    assert made.rate(late + 1.0) <= 100


def test_what_holds_a_lease_goes_first():
    made = known(10)
    waits = [made.wait(1.0, leased=False) for _ in range(20)]
    assert waits[-1] > 1.5
    assert made.wait(1.0, leased=True) == 0.0
    leased = [made.wait(1.0, leased=True) for _ in range(200)]
    assert max(leased) <= LONGEST_WAIT
    assert max(made.wait(1.0, leased=False) for _ in range(500)) <= LONGEST_WAIT


def test_a_pause_that_the_service_asks_for_holds_for_all_but_leases():
    made = known(10)
    made.answered(2.5, refused=True, pause=1.5)
    assert made.wait(2.5, leased=False) >= 1.5
    assert made.wait(2.5, leased=True) == 0.0


def test_who_would_have_to_wait_for_long_learns_it_from_the_service():
    """A sender raises then what the service says, with its pause."""
    made = known(10)
    made.answered(2.5, refused=True, pause=3600.0)
    assert made.wait(2.5, leased=False) == LONGEST_WAIT


def test_nothing_waits_before_a_refusal_and_long_after_it(time, caplog):
    caplog.set_level(logging.INFO)
    paces = Paces(leased="/messages/")
    for _ in range(1000):
        paces.wait("POST", URL)
        paces.answered(URL, 201, None)
    assert time.now == 1000.0
    assert not paces
    paces.answered(URL, 503, None)
    assert paces
    for _ in range(200):
        paces.wait("POST", URL)
        paces.answered(URL, 201, None)
        time.sleep(0.01)
    began = time.now
    for _ in range(200):
        paces.wait("POST", URL)
    assert time.now - began > 0.5
    time.sleep(FORGOTTEN_SECONDS + 1)
    began = time.now
    paces.wait("POST", URL)
    assert time.now == began
    assert not paces
    assert "shop.queue.core.windows.net/orders takes all requests again" in caplog.text


def test_it_says_once_a_minute_that_a_resource_is_limited(time, caplog):
    paces = Paces()
    for _ in range(50):
        paces.answered(URL + "?secret=1", 429, None)
        time.sleep(0.5)
    lines = [each.getMessage() for each in caplog.records if "refuses requests" in each.message]
    assert len(lines) == 1
    assert "shop.queue.core.windows.net/orders refuses requests" in lines[0]
    assert "secret" not in caplog.text


def test_resources_are_limited_one_by_one(time):
    paces = Paces()
    paces.answered(URL, 503, "1")
    assert paces.ahead("POST", URL) == pytest.approx(1.0)
    assert paces.ahead("POST", URL.replace("orders", "mail")) == 0.0
    assert Paces().ahead("POST", URL) == 0.0


@pytest.mark.parametrize("text", [None, "", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_pause_that_is_no_number_is_none(time, text):
    paces = Paces()
    paces.answered(URL, 503, text)
    assert paces.ahead("GET", URL) == 0.0


def test_what_is_not_asked_again_is_forgotten_too(time):
    other = URL.replace("orders", "mail")
    paces = Paces()
    paces.answered(URL, 503, None)
    time.sleep(FORGOTTEN_SECONDS / 2)
    paces.answered(other, 503, None)
    time.sleep(FORGOTTEN_SECONDS / 2 + 1)
    paces.wait("POST", other)
    assert list(paces._paces) == [resource_of(other)]
    time.sleep(FORGOTTEN_SECONDS + 1)
    paces.wait("POST", other)
    assert not paces


@pytest.mark.parametrize(
    ("url", "resource"),
    [
        (URL + "/1?popreceipt=x", "shop.queue.core.windows.net/orders"),
        ("http://127.0.0.1:10001/account/orders/messages", "127.0.0.1:10001/account/orders"),
        ("http://localhost:1/account/orders", "localhost:1/account/orders"),
        ("http://[::1]:1/account/orders", "[::1]:1/account/orders"),
        (
            "https://shop.table.core.windows.net/runs(PartitionKey='a/b',RowKey='c')",
            "shop.table.core.windows.net/runs",
        ),
        ("https://shop.table.core.windows.net/$batch", "shop.table.core.windows.net/$batch"),
    ],
)
def test_a_resource_is_a_queue_a_table_or_a_container(url, resource):
    assert resource_of(url) == resource
