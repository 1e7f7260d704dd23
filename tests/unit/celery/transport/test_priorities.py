"""Priorities of Celery: which queue a task goes to, and how a worker's consumers share."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from aztask import App
from aztask.celery.transport.connection import Transport
from aztask.celery.transport.options import TransportOptions
from aztask.errors import ConfigurationError

WEIGHTS = {"high": 4, "low": 1}


def levels(order: str, weights: dict[str, int] = WEIGHTS) -> str:
    """The queue of each level from 0 to 9, by the last part of its name."""
    options = TransportOptions.read({"priorities": weights, "order": order})
    names = [options.queue_for("q", level) for level in range(10)]
    return " ".join(name.partition("-")[2] or "." for name in names)


def test_ten_levels_are_spread_over_the_priorities() -> None:
    assert levels("rabbitmq") == "low low low . . . high high high high"
    assert levels("redis") == "high high high high . . . low low low"
    eight = {"normal": 2, **{f"p{weight}": weight for weight in range(3, 10)}}
    assert len(set(levels("redis", eight).split())) == 8


@pytest.mark.parametrize("level", [None, -5, "9", 0])
def test_a_task_without_a_level_has_0(level: object) -> None:
    options = TransportOptions.read({"priorities": WEIGHTS, "order": "redis"})
    assert options.queue_for("q", level) == "q-high"
    assert options.queue_for("q", 1_000) == "q-low"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priorities": WEIGHTS}, "belong together"),
        ({"order": "redis"}, "belong together"),
        ({"priorities": WEIGHTS, "order": "amqp"}, "belong together"),
        ({"priorities": {}, "order": "redis"}, "takes priorities"),
        ({"priorities": {"high": 0}, "order": "redis"}, "whole number"),
        ({"priorities": {f"p{n}": 2 for n in range(8)}, "order": "redis"}, "at most 8"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        TransportOptions.read(options)


@pytest.fixture(params=[True, False], ids=["on", "off"])
def site(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    app = App("shop", broker="local://:memory:")
    more = {"priorities": WEIGHTS, "order": "rabbitmq"} if request.param else {}
    options = {"broker": app.broker, **more}
    connection = Connection(transport=Transport, transport_options=options)
    channel = connection.channel()
    channel.queue_declare("celery")
    celery = Celery("shop", set_as_current=False)
    yield SimpleNamespace(
        on=request.param, broker=app.broker, channel=channel, connection=connection, celery=celery
    )
    connection.release()
    app.close()


def publish(site: SimpleNamespace, name: str, level: int | None, *, task: bool = True) -> None:
    headers = {"task": "t", "id": name} if task else {}
    message = site.channel.prepare_message(name, level, "text/plain", headers=headers)
    site.channel.basic_publish(message, "", "celery")


def counts(site: SimpleNamespace) -> dict[str, int]:
    return {name: site.broker.stats(name).living for name in site.broker.listing().queues}


def test_a_task_goes_to_the_queue_of_its_level(site: SimpleNamespace) -> None:
    for level in (None, 0, 3, 9):
        publish(site, f"m{level}", level)
    publish(site, "no task", 9, task=False)
    expected = {"celery": 2, "celery-high": 1, "celery-low": 2} if site.on else {"celery": 5}
    assert counts(site) == expected


def test_queues_are_counted_emptied_and_deleted_together(site: SimpleNamespace) -> None:
    for level in (0, 3, 9):
        publish(site, f"m{level}", level)
    assert site.channel.queue_declare("celery", passive=True).message_count == 3
    assert site.channel.queue_purge("celery") == 3
    site.channel.queue_delete("celery")
    assert counts(site) == {}


def test_the_most_urgent_is_fetched_first(site: SimpleNamespace) -> None:
    for level in (0, 3, 9):
        publish(site, f"m{level}", level)
    got = [site.channel.basic_get("celery", no_ack=True).body.decode() for _ in range(3)]
    assert got == (["m9", "m3", "m0"] if site.on else ["m0", "m3", "m9"])
    assert site.channel.basic_get("celery") is None


def drain(site: SimpleNamespace, number: int) -> list[str]:
    """The first so many messages as a worker that does one at a time gets them."""
    got: list[str] = []

    def take(message: Any) -> None:
        got.append(message.body.decode())
        message.ack()

    site.channel.basic_qos(prefetch_count=1)
    site.channel.basic_consume("celery", False, take, "tag")
    while len(got) < number:
        site.connection.drain_events(timeout=5)
    return got


def test_consumers_share_by_weight(site: SimpleNamespace) -> None:
    for number in range(30):
        publish(site, f"low {number}", 0)
    for number in range(30):
        publish(site, f"high {number}", 9)
    got = [each.split()[0] for each in drain(site, 30)]
    assert got.count("high") == (24 if site.on else 0)


def test_an_empty_priority_does_not_save_up(site: SimpleNamespace) -> None:
    if not site.on:
        pytest.skip("it is about priorities")
    for number in range(20):
        publish(site, f"low {number}", 0)
    drain(site, 20)
    for number in range(10):
        publish(site, f"low {number}", 0)
        publish(site, f"high {number}", 9)
    site.channel.basic_cancel("tag")
    got = [each.split()[0] for each in drain(site, 10)]
    assert got.count("high") == 8


def test_a_further_consumer_takes_its_share_and_not_all_turns(site: SimpleNamespace) -> None:
    """The others have run for long: it need not have had as much as they before they go on."""
    got: list[str] = []

    def take(message: Any) -> None:
        got.append(message.body.decode().split()[0])
        message.ack()

    for number in range(50):
        publish(site, f"old {number}", 0)
    site.channel.basic_qos(prefetch_count=1)
    site.channel.basic_consume("celery", False, take, "tag")
    while len(got) < 30:
        site.connection.drain_events(timeout=5)
    site.channel.queue_declare("other")
    for number in range(20):
        message = site.channel.prepare_message(f"new {number}", 0, "text/plain", headers={})
        site.channel.basic_publish(message, "", "other")
    site.channel.basic_consume("other", False, take, "another")
    while len(got) < 50:
        site.connection.drain_events(timeout=5)
    assert got[30:].count("new") == 10


def test_a_consumer_is_cancelled_with_all_its_queues(site: SimpleNamespace) -> None:
    drain(site, 0)
    site.channel.basic_cancel("tag")
    publish(site, "m", 9)
    assert not list(site.channel.open_sources())
    assert sum(counts(site).values()) == 1


def test_a_message_says_the_queue_and_the_tag_that_the_program_knows(site: SimpleNamespace) -> None:
    seen = []
    site.channel.basic_consume("celery", False, seen.append, "tag")
    publish(site, "m", 0)
    site.connection.drain_events(timeout=5)
    info = seen[0].delivery_info
    assert (info["routing_key"], info["consumer_tag"]) == ("celery", "tag")
    assert seen[0].properties["priority"] == 0
