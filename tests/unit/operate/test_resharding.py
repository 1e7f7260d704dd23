"""``aztask queues reshard``: what it refuses and says, and what lists and the doctor show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aztask import App
from aztask.address.shards import ShardLayout, ShardRange
from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.operate import resharding
from aztask.operate.cli import queues as commands
from aztask.operate.doctor import _of_shards
from aztask.operate.resharding import layouts, left_shards, look_after, reshard, shard_tools
from aztask.stores import shardlayouts
from aztask.stores.records.controls import ControlStore, EntryChange
from aztask.stores.shardlayouts import StoredLayouts, entry_name

MODULE = """
from aztask import App
app = App("shop", broker="local://{path}/q.db", results="local://{path}/q.db")
app.queue("orders", shards=4)
app.queue("steps", shards=2, sessions=True)
app.queue("plain")
@app.task(queue="orders")
def work(n): ...
"""


def shop(path: Path, **options: Any) -> App:
    results = f"local://{path}/q.db" if options.pop("stored", True) else None
    made = App("shop", broker=f"local://{path}/q.db", results=results)
    made.queue("orders", **{"shards": 4, **options})
    return made


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = shop(tmp_path)
    made.broker.declare("orders")
    yield made
    made.close()


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves that take a moment."""
    monkeypatch.setattr(shardlayouts, "REFRESH_SECONDS", 0.4)
    monkeypatch.setattr(shardlayouts, "FREE_SECONDS", 0.1)
    monkeypatch.setattr(commands, "MOVE_SECONDS", 0.1)


def planned(app: App, *given: Any, **named: Any) -> resharding.Reshard:
    return reshard(app, "orders", *given, **named)


# -- what is refused -------------------------------------------------------------------------


def test_without_a_result_store_the_code_counts(tmp_path: Path) -> None:
    app = shop(tmp_path, stored=False)
    with pytest.raises(ConfigurationError, match="only with a result store"):
        reshard(app, "orders", 16)
    with pytest.raises(ConfigurationError, match="only with a result store"):
        look_after(app, "orders")
    assert layouts(app) == {}
    assert left_shards(app, ShardLayout(), "orders") == []
    app.close()


def test_a_queue_needs_a_number_in_the_code(tmp_path: Path) -> None:
    app = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    app.queue("plain")
    with pytest.raises(ConfigurationError, match=r"app.queue\('plain', shards=1\) in all"):
        reshard(app, "plain", 4)
    app.close()


def test_one_shard_is_a_number_too(tmp_path: Path) -> None:
    app = shop(tmp_path, shards=1)
    app.broker.declare("orders")
    assert app.broker.stats("orders").living == 0
    assert planned(app, 4).moves["orders"].sent == ShardRange(0, 4)
    app.close()


def test_sessions_and_old_shards_do_not_go_together(tmp_path: Path) -> None:
    app = shop(tmp_path, shards=2, old_shards=4, sessions=True)
    with pytest.raises(ConfigurationError, match="old_shards for queue orders"):
        reshard(app, "orders", 8)
    app.close()


def test_a_move_to_another_number_is_refused_in_between(app: App) -> None:
    planned(app, 16).act(by="ann")
    with pytest.raises(ConfigurationError, match=r"from 4 to 16 shards by ann; .*--shards 16"):
        reshard(app, "orders", 8)
    again = planned(app, 16)
    before = again.moves["orders"]
    again.act(by="bob")
    assert again.announced["orders"] == before


def test_a_move_that_ends_while_the_command_comes_back_is_no_error(app: App) -> None:
    planned(app, 16).act()
    again = planned(app, 16)
    tools = shard_tools(app)
    assert tools is not None
    tools.rows.finish("orders", 2, 0)
    again.act()
    assert again.announced["orders"].former is None
    assert look_after(app, "orders").ended


def test_two_operators_who_planned_at_once(app: App) -> None:
    first, second = planned(app, 16), planned(app, 2)
    first.act()
    with pytest.raises(ConfigurationError, match="moved in between"):
        second.act()
    assert second.done == 0


# -- moves -----------------------------------------------------------------------------------


def test_the_number_of_the_code_is_the_default(tmp_path: Path, app: App) -> None:
    nothing = planned(app)
    assert (nothing.count, str(nothing)) == (0, "leave queue orders as it is, with 4 shards")
    later = shop(tmp_path, shards=16)
    action = planned(later)
    assert str(action).startswith("move queue orders from 4 to 16 shards; its 0 messages stay")
    later.close()


def test_priorities_move_with_their_queue(tmp_path: Path) -> None:
    app = shop(tmp_path, priorities={"high": 2, "low": 1})
    for name in app.queue_names():
        app.broker.declare(name)
    action = planned(app, 6)
    assert list(action.moves) == app.priority_queues("orders")
    action.act()
    assert all(each.sent.count == 6 for each in action.announced.values())
    app.close()


def test_old_shards_of_the_code_are_no_move(tmp_path: Path) -> None:
    app = shop(tmp_path, shards=2, old_shards=6)
    app.broker.declare("orders")
    move = planned(app, 4).moves["orders"]
    assert (move.former, move.epoch) == (ShardRange(0, 2), 2)
    planned(app, 4).act()
    broker: Any = app.broker
    assert len(broker.needed("orders")) == 6
    app.close()


def test_a_move_from_beginning_to_end(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    broker: Any = app.broker
    broker.send("orders", [Envelope(b"x", {"id": f"t{n}"}, f"m{n}") for n in range(40)])
    planned(app, 2).act()
    state = look_after(app, "orders")
    assert state.starts_in > 0
    assert not state.ended
    assert state.waiting == sum(each.living for each in broker.shard_stats("orders")[2:])
    waits: list[float] = []

    def take(seconds: float) -> None:
        waits.append(seconds)
        shardlayouts.clock.current().sleep(seconds)
        broker._broker.purge("orders-shard-2")
        broker._broker.purge("orders-shard-3")

    commands._wait_for_move(app, "orders", sleep=take)
    assert waits
    found = layouts(app)["orders"]
    assert isinstance(found, ShardLayout)
    assert (found.sent, found.former, found.kept) == (ShardRange(0, 2), None, 0)
    assert left_shards(app, found, "orders") == [], "the code still reads them"


def test_sessions_move_to_other_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    app = shop(tmp_path, shards=2, sessions=True)
    app.broker.declare("orders", app.queue_options("orders"))
    planned(app, 3).act()
    commands._wait_for_move(app, "orders")
    found: Any = layouts(app)["orders"]
    assert (found.sent, found.ordered) == (ShardRange(2, 3), True)
    assert left_shards(app, found, "orders") == ["orders-shard-1"]
    app.close()


def test_delayed_messages_of_sessions_are_told_before(tmp_path: Path) -> None:
    app = shop(tmp_path, shards=2, sessions=True)
    app.broker.declare("orders", app.queue_options("orders"))
    app.broker.send("orders", [Envelope(b"x", {}, "m1", session="s")])
    assert "new messages wait" not in str(planned(app, 3))
    app.broker.send("orders", [Envelope(b"x", {}, "m2", session="s", delay=600.0)])
    assert "; 1 of them wait for their time, and new messages wait until" in str(planned(app, 3))
    app.close()


def test_an_action_is_reported(app: App) -> None:
    action = planned(app, 16)
    action.act(by="ann")
    assert (action.name, str(action.subject()), action.done, action.exact) == (
        "queue-reshard",
        "orders",
        1,
        True,
    )
    assert action.entry


# -- damage ----------------------------------------------------------------------------------


def damage(app: App) -> None:
    tools = shard_tools(app)
    assert tools is not None
    store: ControlStore = tools.rows._store
    (entry,) = store.read([entry_name("orders")])
    assert entry is not None
    store.write([EntryChange(entry_name("orders"), b"{", entry.tag)])


def test_a_damaged_entry_is_shown_and_replaced(app: App) -> None:
    damage(app)
    (finding,) = _of_shards(app)
    assert "is damaged" in finding.text
    with pytest.raises(resharding.AztaskError, match="--former"):
        reshard(app, "orders", 16)
    action = planned(app, 16, former=5)
    assert action.moves["orders"].former == ShardRange(0, 5)


# -- what is shown ---------------------------------------------------------------------------


def test_the_doctor_tells_of_moves_and_wishes(tmp_path: Path, app: App) -> None:
    assert list(_of_shards(app)) == []
    planned(app, 16).act(by="ann")
    moving, wish = list(_of_shards(app))
    assert moving.text == "it is being moved from 4 to 16 shards by ann"
    assert wish.text == "it has 16 shards, and the code says 4"
    assert "aztask queues reshard orders" in wish.advice


def test_the_doctor_finds_what_came_too_late(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = shard_tools(app)
    assert tools is not None
    layout = ShardLayout(ShardRange(4, 2), epoch=1, ordered=True, kept=4)
    monkeypatch.setattr(StoredLayouts, "layout", lambda *given, **named: layout)
    monkeypatch.setattr(resharding, "layouts", lambda app: {"orders": layout})
    tools.broker._broker.send("orders-shard-3", [Envelope(b"x", {}, "m")])
    first, _ = _of_shards(app)
    assert first.text == "orders-shard-3 holds 1 message, and no worker reads it"
    assert "old_shards=4" in first.advice


@pytest.fixture
def module(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    quick(monkeypatch)
    (tmp_path / "reshardshop.py").write_text(MODULE.format(path=tmp_path))
    app = ["-A", "reshardshop:app"]
    cli("queues", "create", "--all", *app)
    return app


def test_the_command_waits_and_names_what_is_left(module: list[str], cli: Any) -> None:
    shown = cli("queues", "reshard", "steps", "--shards", "3", "--yes", *module)
    lines = shown.out.splitlines()
    assert lines[0].startswith("queue steps: messages go to 3 shards from ")
    assert lines[1] == "queue steps: the move is announced, and has not started"
    assert lines[-2] == "queue steps has 3 shards now"
    assert "steps-shard-1. Delete each with: aztask queues delete NAME" in lines[-1]
    again = cli("queues", "reshard", "steps", "--shards", "3", "--yes", *module)
    assert again.out == "queue steps has these shards already\n"


def test_the_command_asks_before_it_acts(module: list[str], cli: Any) -> None:
    shown = cli("queues", "reshard", "orders", "--shards", "16", "--dry-run", *module)
    assert shown.out.startswith("would move queue orders from 4 to 16 shards; its 0 messages stay")
    shown = cli("queues", "reshard", "orders", "--shards", "16", *module)
    assert "add --yes to do it" in shown.err
    shown = cli("queues", "reshard", "plain", "--shards", "16", "--yes", *module)
    assert "names no number of shards" in shown.err


def test_the_list_shows_a_move(module: list[str], cli: Any) -> None:
    cli("queues", "reshard", "orders", "--shards", "6", "--yes", "--no-wait", *module)
    shown = cli("queues", "list", "--shards", *module)
    assert "orders-shard-5 (new)" in shown.out
    assert "queue orders moves from 4 to 6 shards, which get messages from" in shown.err
    assert "queue orders has 6 shards, and the code says 4" in shown.err
    records = [
        json.loads(line) for line in cli("queues", "list", "--json", *module).out.splitlines()
    ]
    (orders,) = [each for each in records if each["queue"] == "orders"]
    assert orders["layout"]["former"] == {"first": 0, "count": 4}
