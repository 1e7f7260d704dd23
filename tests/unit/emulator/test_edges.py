"""Durations, options, the view, the trace: the small parts around the protocol."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from aztask.emulator.amqp import encode, outgoing
from aztask.emulator.amqp.errors import AmqpError
from aztask.emulator.amqp.performatives import Attach
from aztask.emulator.amqp.types import Described
from aztask.emulator.broker.consumer import PendingSession
from aztask.emulator.broker.entities import (
    Entity,
    Kind,
    SubscriptionRule,
    check,
    from_json,
    to_json,
)
from aztask.emulator.broker.filters import CorrelationFilter, SqlFilter
from aztask.emulator.broker.locks import Lock, Locks
from aztask.emulator.durations import MAX_DURATION, format_duration, parse_duration
from aztask.emulator.emulator import Emulator
from aztask.emulator.options import Options, connection_string, is_loopback
from aztask.emulator.trace import shown, tracer
from aztask.emulator.view import take_view
from aztask.engine import NewMessage
from aztask.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PT1M", 60.0),
        ("P14D", 1209600.0),
        ("PT1H30M5.5S", 5405.5),
        ("P1W", 604800.0),
        ("PT0.1S", 0.1),
        ("P10675199DT2H48M5.4775807S", MAX_DURATION),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "P", "PT", "1M", "PT1", "-PT1M", "P1Y", "PT1M5"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigurationError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("10.0.0.1", False), ("example.org", False)),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_ports_are_checked():
    with pytest.raises(ConfigurationError, match="port"):
        Options(port=99999)


def test_connection_strings():
    text = connection_string("0.0.0.0", 5672, "key")
    assert text.startswith("Endpoint=sb://127.0.0.1:5672;")
    assert text.endswith("SharedAccessKey=key;UseDevelopmentEmulator=true")
    assert "Emulator" not in connection_string("127.0.0.1", 5671, None, emulator=False)


@pytest.mark.parametrize(
    "entity",
    [
        Entity(""),
        Entity("a" * 261),
        Entity("/a"),
        Entity("a//b"),
        Entity("a b"),
        Entity("a\n"),
        Entity("$cbs"),
        Entity("a/$management"),
        Entity("t/Subscriptions/a b", Kind.SUBSCRIPTION),
        Entity("t/Subscriptions/" + "a" * 51, Kind.SUBSCRIPTION),
        Entity("q", lock_seconds=301),
        Entity("q", lock_seconds=0),
        Entity("q", max_deliveries=0),
        Entity("q", time_to_live=0),
    ],
)
def test_what_is_no_entity(entity):
    with pytest.raises(ConfigurationError):
        check(entity)


def test_entities_are_kept_as_text():
    rules = (
        SubscriptionRule("a", SqlFilter("x = 1")),
        SubscriptionRule("b", CorrelationFilter({"Label": "l"})),
    )
    entity = Entity(
        "t/Subscriptions/s", Kind.SUBSCRIPTION, time_to_live=5.0, rules=rules, kept={"A": "b"}
    )
    assert from_json(to_json(entity)) == entity


def test_locks_that_lapsed_are_swept():
    clock = [0.0]
    locks = Locks(lambda: clock[0])
    lock = Lock("q", False, 1, "a", None, 10.0)
    locks.add(lock)
    locks.renewed("a", 20.0)
    locks.renewed("unknown", 20.0)
    assert locks.get("a").until == 20.0
    locks.add(lock._replace(token="s", session="s"))
    clock[0] = 30.0
    for number in range(20_001):
        locks.add(lock._replace(token=str(number), until=25.0 if number else 90.0))
    assert locks.get("a") is None
    assert locks.get("s") is not None
    assert len(locks) < 10
    locks.discard("s")
    assert locks.get("s") is None


def test_the_view_counts_and_fits_its_terminal():
    async def run():
        emulator = Emulator(Options(port=0, admin_port=0, queues=("one", "two", "three")))
        await emulator.start()
        emulator.broker.engine.send("two", [NewMessage(b"x")] * 3)
        view = take_view(emulator)
        await emulator.stop()
        return view

    view = asyncio.run(run())
    assert [entity.name for entity in view.entities] == ["one", "three", "two"]
    assert view.entities[2].active == 3
    assert view.record()["connections"] == 0
    assert any("two" in line and "3" in line for line in view.lines(20))
    assert "2 more" in "\n".join(view.lines(5))


def test_frames_in_words():
    lines = []
    trace = tracer(lines.append)
    source = Described(0x28, ["queue", None])
    trace("client", "->", 1, Attach("name", 0, True, source=source))
    trace("client", "<-", 1, outgoing.detach(0, True, AmqpError("amqp:not-found", "gone")))
    trace("client", "<-", 0, b"\x00garbage")
    assert "attach name='name' handle=0 role=True source=source('queue', -)" in lines[0]
    assert "detach 0 True error('amqp:not-found', 'gone', -)" in lines[1]
    assert "amqp:decode-error" in lines[2]
    assert shown("\x1b[31m") == "'\\x1b[31m'"
    assert len(shown("x" * 1000)) == 200
    assert shown({"k": b"\x01"}) == "{k: 01}"
    assert encode.NULL == b"\x40"


def test_a_link_that_waits_for_a_session_tries_once_a_turn():
    """Tried twice in one transaction it would accept two sessions, and lose one of them."""
    works = []
    broker = SimpleNamespace(
        clock=SimpleNamespace(monotonic=lambda: 0.0),
        committer=SimpleNamespace(submit=works.append),
        engine=SimpleNamespace(accept_session=lambda queue, wanted: None),
    )
    link = SimpleNamespace(source=None, properties={}, state=SimpleNamespace(value="pending"))
    accepting = PendingSession(broker, link, Entity("orders", sessions=True), lambda consumer: None)
    accepting.submit()
    accepting.submit()
    assert works == [accepting]
    accepting.execute()
    accepting.succeed()
    accepting.submit()
    assert works == [accepting] * 2
