"""Watchers on every store of rows: what they send is sent once, also when answers are lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import hooks
import pytest
from rowstores import FACTORIES, Make

from aztask import App
from aztask.address.owner import Owner
from aztask.operate.ledger import WATCH, Ledger
from aztask.operate.watch.rules import RuleFile, WatchRule, Webhook
from aztask.operate.watch.watcher import Watcher
from aztask.support.display import Secret

RULE = WatchRule("late", "backlog", ("default",), 0.0, 0.0, ("oncall",))


@pytest.fixture(scope="module", params=sorted(FACTORIES))
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    """One service for the whole module: servers are slow to start."""
    with FACTORIES[request.param](tmp_path_factory.mktemp("watch")) as made:
        yield made


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App("shop", broker=f"local://{tmp_path}/queues.db")
    made.broker.declare("default")
    yield made
    made.close()


def file(hook: hooks.Hook) -> RuleFile:
    webhooks = {"oncall": Webhook("oncall", "json", Secret(hook.url))}
    return RuleFile([RULE], webhooks, 1.0, "", None)


def test_two_watchers_send_once_and_once_at_the_end(make: Make, app: App) -> None:
    subject = make()
    owner = Owner("broker", "shop")
    try:
        with hooks.serving() as hook:
            ledgers = [Ledger(each, owner) for each in (subject.store, subject.another)]
            watchers = [Watcher(app, file(hook), each) for each in ledgers]
            app.send("shop.add", [1, 2])
            for _ in range(2):
                assert [each.turn().problems for each in watchers] == [[], []]
            assert hook.lines() == [("began", "late")]
            app.broker.purge("default")
            for _ in range(2):
                assert [each.turn().problems for each in watchers] == [[], []]
            assert hook.lines() == [("began", "late"), ("ended", "late")]
            assert len(ledgers[0].page(WATCH, 10)) == 1, "that it ended is kept for an hour"
    finally:
        for end in subject.at_end:
            end()


def test_watchers_that_look_at_the_same_moment_send_once(make: Make, app: App) -> None:
    subject = make()
    owner = Owner("broker", "shop")
    try:
        with hooks.serving() as hook:
            app.send("shop.add", [1, 2])
            barrier = threading.Barrier(6)

            def watch(number: int) -> None:
                store = subject.store if number % 2 else subject.another
                watcher = Watcher(app, file(hook), Ledger(store, owner))
                barrier.wait(30)
                watcher.turn()

            threads = [threading.Thread(target=watch, args=(each,)) for each in range(6)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert hook.lines() == [("began", "late")]
    finally:
        for end in subject.at_end:
            end()


def test_a_lost_answer_of_the_store_sends_nothing_twice(make: Make, app: App) -> None:
    subject = make()
    owner = Owner("broker", "shop")
    try:
        with hooks.serving() as hook:
            ledger = Ledger(subject.store, owner)
            app.send("shop.add", [1, 2])
            subject.lose()
            Watcher(app, file(hook), ledger).turn()
            Watcher(app, file(hook), Ledger(subject.another, owner)).turn()
            assert hook.lines() == [("began", "late")]
    finally:
        for end in subject.at_end:
            end()
