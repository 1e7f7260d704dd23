"""What a workflow costs in Azure Tables: requests for each member, counted at the client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from azurite import account_of, storing

from aztask import App, chord
from aztask.stores.records.base import Provisioned, State
from aztask.stores.tables.client import TimeBudget
from aztask.workflows.engine import engine_for
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace

MEMBERS = 480
WRITERS = 24


@contextmanager
def counting() -> Iterator[list[str]]:
    """Each request of the block, by the place that it goes to."""
    made: list[str] = []
    request = TimeBudget.request

    def counted(self, make, place, role, **options):
        made.append(place)
        return request(self, make, place, role, **options)

    with mock.patch.object(TimeBudget, "request", counted):
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[App]:
    """Queues in a file, results in Azure Tables: only the latter's requests are counted."""
    with storing(tmp_path / "azurite") as stores:
        app = App("shop", broker=f"local://{tmp_path}/queues.db", results=account_of(*stores))
        assert isinstance(app.results, Provisioned)
        app.results.create()
        yield app
        app.close()


def test_twenty_four_writers_of_one_group_append(shop: App, capsys) -> None:
    """Each is a worker of one slot that does nothing but end members; real workers do more."""
    page, book = (shop.task(name=name)(lambda x: x) for name in ("shop.page", "shop.book"))
    chord([page.s(n) for n in range(MEMBERS)], book.s()).delay(workflow_id="w")
    engine, results = shop.workflows.engine, shop.results
    plan = engine.graphs.plan("w")
    assert plan is not None
    assert results is not None
    members = iter([node for node in plan.nodes if node.task == "shop.page"])

    def work(number: int) -> None:
        own = engine_for(results, shop.workflows, shop.codec)
        assert own is not None
        while (node := next(members, None)) is not None:
            own.joins.ended([TaskEnd("w", NodePlace.of(plan, node), 0, State.SUCCEEDED, b"\x01")])

    with counting() as made, ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(work, range(WRITERS)))
    with capsys.disabled():
        print(f"\n{len(made) / MEMBERS:.2f} requests for each member of {WRITERS} writers")
    assert len(made) <= 2.5 * MEMBERS, "if they only compare and set, it is 5 to 11"
    assert shop.broker.stats("default").active == MEMBERS + 1, "the last one sent the body"


def test_requests_for_each_member(shop: App) -> None:
    page, book = (shop.task(name=name)(lambda x: x) for name in ("shop.page", "shop.book"))
    with counting() as made:
        chord([page.s(n) for n in range(MEMBERS)], book.s()).delay(workflow_id="w")
    assert len(made) <= 0.05 * MEMBERS, "the start"
    engine = shop.workflows.engine
    plan = engine.graphs.plan("w")
    assert plan is not None
    members = [node for node in plan.nodes if node.task == "shop.page"]
    ends = [
        TaskEnd("w", NodePlace.of(plan, node), 0, State.SUCCEEDED, b"\xcd\x12\x34")
        for node in members
    ]
    together, single = ends[: MEMBERS // 2], ends[MEMBERS // 2 :]
    with counting() as made:
        for first in range(0, len(together), 16):
            engine.joins.ended(together[first : first + 16])
    assert len(made) <= 0.15 * len(together), "16 that end together"
    with counting() as made:
        for end in single:
            engine.joins.ended([end])
    assert len(made) <= 1.2 * len(single), "one by one"
    assert shop.broker.stats("default").active == MEMBERS + 1, "the last one sent the body"
    body = next(node for node in plan.nodes if node.task == "shop.book")
    with counting() as made:
        found = engine.inputs.load("w", NodePlace.of(plan, body))
    assert found is not None
    assert shop.codec.decode_value(found.value) == [0x1234] * MEMBERS
    assert len(made) <= 6, "the body reads rows, not members"
