"""The dashboard's answers: one for all viewers, and a slow one does not keep them waiting."""

import threading
import time

import pytest

from aztask.dashboard import pages, site
from aztask.dashboard.access import Visitor
from aztask.dashboard.site import Ask, Making, Shown, Site
from aztask.errors import AztaskError, BrokerUnavailable
from aztask.operate.requests import Role

WAITS = 20.0
ANN = Visitor("ann", Role.READ)


def ask(path="/dead"):
    return Ask(path, {}, ANN)


class Slow:
    """A page that is ready when the test says so; `begun` counts how often it was made."""

    def __init__(self):
        self.begun, self.may_end, self.raises = 0, threading.Event(), None

    def __call__(self, site, ask):
        self.begun += 1
        number = self.begun
        assert self.may_end.wait(WAITS)
        if self.raises is not None:
            raise self.raises
        return Shown("dead", "Dead letters", {"number": number})


@pytest.fixture
def slow():
    found = Slow()
    yield found
    found.may_end.set()


@pytest.fixture
def made(shop):
    return Site(shop.app, patience=0.05)


def ready(made, page, question=None, fresh=0.0):
    """Ask until there is an answer."""
    deadline = time.monotonic() + WAITS
    while True:
        try:
            return made.answer(page, question or ask(), fresh)
        except Making:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_asks_for_what_takes_long_is_told_since_when_it_is_made(made, slow):
    for _ in range(3):
        with pytest.raises(Making) as error:
            made.answer(slow, ask())
    assert 0.1 <= error.value.seconds < WAITS
    slow.may_end.set()
    assert ready(made, slow, fresh=WAITS).values == {"number": 1}
    assert slow.begun == 1


def test_the_answer_before_is_shown_with_its_age_while_the_next_one_is_made(
    made, slow, monkeypatch
):
    slow.may_end.set()
    began = time.time()
    first = ready(made, slow)
    assert first.at is None
    slow.may_end.clear()
    monkeypatch.setattr(site, "OLD_SECONDS", 0.0)
    while slow.begun == 1:  # it rests first
        shown = made.answer(slow, ask(), 0.0)
        assert shown.values == {"number": 1}
        assert began - 1 <= shown.at <= time.time()
    assert made.answer(slow, ask(), 0.0).values == {"number": 1}
    slow.may_end.set()
    deadline = time.monotonic() + WAITS
    while made.answer(slow, ask(), WAITS).values == {"number": 1}:
        assert time.monotonic() < deadline


def test_what_waits_long_for_a_service_is_not_asked_again_at_once(made):
    begun = []

    def page(site, ask):
        begun.append(time.monotonic())
        time.sleep(0.2)
        return Shown("dead", "Dead letters", {})

    ready(made, page)
    while len(begun) == 1:
        made.answer(page, ask(), 0.0)
        time.sleep(0.01)
    assert begun[1] - begun[0] >= 0.2 * (1 + site.WAITING_REST)


def test_what_takes_much_cpu_time_rests_for_longer(made):
    begun, spent = [], []

    def page(site, ask):
        begun.append(time.monotonic())
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        spent.append(0.05)
        return Shown("dead", "Dead letters", {})

    ready(made, page)
    while len(begun) == 1:
        made.answer(page, ask(), 0.0)
        time.sleep(0.01)
    assert begun[1] - begun[0] >= 0.05 * site.CPU_REST


def test_an_error_that_comes_late_is_shown_and_tried_again(made, slow):
    with pytest.raises(Making):
        made.answer(slow, ask())
    slow.raises = BrokerUnavailable("the store is away")
    slow.may_end.set()
    with pytest.raises(BrokerUnavailable, match="away"):
        ready(made, slow, fresh=WAITS)
    slow.may_end.clear()
    with pytest.raises(BrokerUnavailable, match="away"):  # and not that it is still made
        made.answer(slow, ask(), 0.0)
    slow.raises = None
    slow.may_end.set()
    deadline = time.monotonic() + WAITS
    while True:
        try:
            assert made.answer(slow, ask(), WAITS).values == {"number": 2}
            break
        except BrokerUnavailable:
            assert time.monotonic() < deadline


def test_an_answer_whose_thread_is_ended_is_made_again(made):
    begun = []

    def page(site, ask):
        begun.append(1)
        if len(begun) == 1:
            raise SystemExit
        return Shown("dead", "Dead letters", {})

    assert ready(made, page).title == "Dead letters"
    assert len(begun) == 2


def test_a_change_makes_an_answer_in_work_worthless(made, slow):
    with pytest.raises(Making):
        made.answer(slow, ask())
    made.forget()
    slow.may_end.set()
    assert ready(made, slow, fresh=WAITS).values == {"number": 2}


def test_there_are_not_more_answers_in_work_than_are_kept(made, slow, monkeypatch):
    monkeypatch.setattr(site, "MOST_ANSWERS", 2)
    for path in ("/a", "/b"):
        with pytest.raises(Making):
            made.answer(slow, ask(path))
    with pytest.raises(AztaskError, match="too many pages are being made"):
        made.answer(slow, ask("/c"))
    slow.may_end.set()
    ready(made, slow, ask("/a"), WAITS)
    ready(made, slow, ask("/b"), WAITS)
    assert ready(made, slow, ask("/c"), WAITS).values == {"number": 3}


def test_a_page_that_is_still_made_says_so_and_asks_again_by_itself(shop, slow, monkeypatch):
    shop.site.patience = 0.05
    monkeypatch.setitem(pages.PAGES, "/dead", slow)
    client = shop.as_("read")
    answer = client.get("/dead")
    assert answer.status_code == 200
    assert "still being made" in answer.text
    assert 'hx-get="/dead"' in answer.text
    assert 'http-equiv="refresh"' in answer.text


def test_the_overview_does_not_wait_for_the_history(shop, slow, monkeypatch):
    monkeypatch.setattr(pages, "history_data", slow)
    shop.site.patience = 4.0
    text = shop.as_("read").get("/").text
    assert "What needs attention" in text
    assert "still being counted" in text
    assert 'id="charts"' in text, "the script looks for its place when the page is loaded"
    assert shop.as_("read").get("/history.json").status_code == 503
    slow.may_end.set()
