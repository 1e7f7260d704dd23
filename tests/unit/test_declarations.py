"""What can be checked where it is declared is refused there: each option with wrong values.

The options are found by code, in the types that list them, so a new one must be put into a table.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import typing
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from aztask import App, CircuitBreaker, RetryPolicy, chain
from aztask.app.options import AppOptions, QueueOptionNames
from aztask.errors import ConfigurationError, InvalidQueueName
from aztask.schedules.schedules import ScheduleOptions
from aztask.task import SendOptions, TaskOptions
from aztask.taskoptions import NodeOptions

PARTS = (
    *(TaskOptions, SendOptions, NodeOptions, ScheduleOptions, QueueOptionNames, AppOptions),
    *(RetryPolicy, CircuitBreaker),
)
BAD_SECONDS: dict[str, object] = {
    "negative": -1,
    "negative timedelta": timedelta(seconds=-1),
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "a flag": True,
    "a text": "5",
    "a huge number": 10**400,
    "centuries": timedelta.max,
    "a list": [5],
    "an object": object(),
}
BAD_NAMES: dict[str, object] = {
    "a number": 5,
    "empty": "",
    "bytes": b"orders",
    "upper case": "Orders",
    "a slash": "a/b",
    "a space": "a b",
    "two lines": "a\nb",
    "too long": "q" * 300,
}
"""Names that local:// does not allow; Storage queues refuse them, too."""

BAD_OTHERS: dict[str, list[object]] = {
    "priority": [5, ""],
    "session": [5, "", "s" * 129, "a\nb"],
    "ordered": [1, "yes", None],
    "task_id": [5, "", "i" * 1025, "a\nb"],
    "force": [1, "yes", None],
    "eta": [5.0, "tomorrow", datetime(2026, 1, 1), timedelta(5)],
    "at": [5.0, "tomorrow", datetime(2026, 1, 1), timedelta(5)],
    "cron": [5, "", "@reboot", "@dayly", "@every 5m", "61 * * * *", "* * * *", "0 0 31 2 *"],
    "tz": [5, "", "Mars/Base", "../etc/passwd"],
    "missed": ["newest", 5],
    "overlap": ["never", 5],
    "max_missed": [0, -1, 10**9, 1.5, True, "5"],
    "release": [-1, 1.5, True, "5", 10**9],
    "name": [5, [5], "", "n" * 1025, "a\nb"],
    "retry": [5.5, "3", object()],
    "retry_strategy": ["never", 5],
    "delivery": ["once", 5],
    "limits": ["api", [5], ["a"] * 2 + [*"bcdefghij"], 5],
    "breaker": [5, True],
    "strict": [1, "yes"],
    "unique": [5, "args"],
    "on_conflict": ["ignore", 5],
}
"""Wrong values of the options that are neither durations nor queues."""

NEEDED: dict[str, dict[str, Any]] = {
    "until": {"unique": "arguments"},
    "on_conflict": {"unique": "arguments"},
    "unique_life": {"unique": "arguments"},
    "debounce": {"unique": "arguments"},
    "grace": {"every": 60},
    "jitter": {"every": 60},
    "overlap_limit": {"every": 60},
    "missed": {"every": 60},
    "overlap": {"every": 60},
    "max_missed": {"every": 60},
    "release": {"every": 60},
}
"""What has to be given together with an option."""


def durations(part: type) -> list[str]:
    """The options of a part that take seconds or a timedelta, read from its types."""
    if typing.is_typeddict(part):
        types = typing.get_type_hints(part)
    else:
        types = {
            name: parameter.annotation
            for name, parameter in inspect.signature(part.__init__).parameters.items()
        }
    return [name for name, kind in types.items() if _takes_time(kind)]


def _takes_time(kind: object) -> bool:
    return "timedelta" in str(kind) and "tuple" not in str(kind)


def options_of(part: type) -> list[str]:
    return list(part.__annotations__)


def new_app() -> App:
    return App("shop", broker="local://:memory:", results="local://:memory:")


def _declare(part: type, options: dict[str, Any]) -> Callable[[], object]:
    """Make one declaration with these options."""
    app = new_app()

    def add(a: int = 0) -> int:
        return a

    task = app.task(name="shop.first")(add)
    declare: dict[type, Callable[[], object]] = {
        AppOptions: lambda: App("shop", broker="local://:memory:", **options),
        RetryPolicy: lambda: RetryPolicy(**options),
        CircuitBreaker: lambda: CircuitBreaker(**options),
        QueueOptionNames: lambda: app.queue("orders", **options),
        TaskOptions: lambda: app.task(**options)(add),
        SendOptions: lambda: task.with_options(**options),
        NodeOptions: lambda: task.s(1).with_options(**options),
        ScheduleOptions: lambda: app.schedule("nightly", task.s(1), **options),
    }
    return declare[part]


def assert_refused(part: type, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _declare(part, options)()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600


WRONG_DURATIONS = [
    pytest.param(part, name, value, id=f"{part.__name__}-{name}-{kind}")
    for part in PARTS
    for name in durations(part)
    for kind, value in BAD_SECONDS.items()
]


@pytest.mark.parametrize(("part", "name", "value"), WRONG_DURATIONS)
def test_a_wrong_duration_is_refused_where_it_is_declared(part, name, value) -> None:
    assert_refused(part, {**NEEDED.get(name, {}), name: value})


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in PARTS for name in durations(part)]
)
def test_a_timedelta_is_the_same_as_its_seconds(part, name) -> None:
    least = {"max_lease": 7200.0, "longest": 3600.0, "lease": 20.0, "payload_lifetime": 86400.0}
    seconds = least.get(name, 90.0)
    more = {"unique_life": 3600.0} if name == "debounce" else {}
    for value in (seconds, timedelta(seconds=seconds)):
        _declare(part, {**NEEDED.get(name, {}), **more, name: value})()


QUEUES = [
    (TaskOptions, "queue"),
    (SendOptions, "queue"),
    (NodeOptions, "queue"),
    (AppOptions, "default_queue"),
]


@pytest.mark.parametrize(("part", "name"), QUEUES)
@pytest.mark.parametrize("value", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_wrong_queue_is_refused_where_it_is_declared(part, name, value) -> None:
    assert_refused(part, {name: value})


WRONG_OTHERS = [
    (part, name, value)
    for part in (TaskOptions, SendOptions, NodeOptions, ScheduleOptions)
    for name, values in BAD_OTHERS.items()
    if name in options_of(part)
    for value in values
]


@pytest.mark.parametrize(("part", "name", "value"), WRONG_OTHERS)
def test_any_other_wrong_value_is_refused_where_it_is_declared(part, name, value) -> None:
    more = {"every": 60} if name == "tz" else NEEDED.get(name, {})
    assert_refused(part, {**more, name: value})


def test_every_option_has_wrong_values_in_these_tables() -> None:
    """A new option of a task, a send, a signature or a schedule is put into a table."""
    for part in (TaskOptions, SendOptions, NodeOptions, ScheduleOptions):
        known = {*durations(part), *BAD_OTHERS, *(name for _, name in QUEUES)}
        assert set(options_of(part)) <= known, part


# -- queue names, by the rules of the broker ------------------------------------------------------

BUS = "Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=a2V5"
ACCOUNT = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=a2V5"
RULES = {
    "local": ("local://:memory:", "orders_1", "Orders"),
    "servicebus": (BUS, "Orders/eu", "-orders"),
    "storage": (ACCOUNT, "orders-1", "orders_1"),
    "a poison queue": (ACCOUNT, "poison-orders", "orders-poison"),
}


def queue_declarations(app: App, queue: str) -> dict[str, Callable[[], object]]:
    """Every place where code names a queue."""

    def add(a: int) -> int:
        return a

    task = app.task(add)
    signature = task.s(1)
    return {
        "queue": lambda: app.queue(queue),
        "task": lambda: app.task(queue=queue, name="shop.second")(add),
        "handler": lambda: app.handler(queue=queue, name="shop.third")(add),
        "send option": lambda: task.with_options(queue=queue),
        "bound": lambda: task.with_options(queue=queue).s(1),
        "signature": lambda: signature.with_options(queue=queue),
        "chain": lambda: chain(task.s(1), task.s().with_options(queue=queue)),
        "schedule": lambda: app.schedule("s", signature.with_options(queue=queue), every=60),
        "default": lambda: App("other", broker=app._connections.broker_text, default_queue=queue),
    }


PLACES = list(queue_declarations(App("shop"), "orders"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("broker", "good", "bad"), RULES.values(), ids=RULES)
def test_a_queues_name_is_checked_by_the_brokers_rules(place, broker, good, bad) -> None:
    """No connection is needed for it, nor the SDK."""
    queue_declarations(App("shop", broker=broker), good)[place]()
    with pytest.raises(InvalidQueueName) as caught:
        queue_declarations(App("shop", broker=broker), bad)[place]()
    assert isinstance(caught.value, ConfigurationError)
    assert bad in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_without_a_broker_any_name_may_be_declared(place, monkeypatch) -> None:
    """A module is imported before it is known where its tasks are sent to."""
    monkeypatch.delenv("AZTASK_BROKER", raising=False)
    queue_declarations(App("shop"), "Any Name/at-all")[place]()


def test_the_queue_of_each_priority_is_checked_as_well() -> None:
    app = App("shop", broker=ACCOUNT)
    app.queue("q" * 50)
    with pytest.raises(InvalidQueueName, match="3 to 56"):
        app.queue("q" * 53, priorities={"high": 2, "normal": 1})


# -- limits ---------------------------------------------------------------------------------------


def limited(names: list[str]) -> tuple[App, Any]:
    app = new_app()

    @app.task(limits=names)
    def call(a: int = 0) -> int:
        return a

    return app, call


def test_a_limit_may_be_declared_after_its_task() -> None:
    app, call = limited(["api"])
    app.limit("api", rate="10/s")
    call.delay(1)
    app.close()


def test_the_first_send_finds_a_limit_that_is_not_declared() -> None:
    app, call = limited(["apj"])
    app.limit("api", rate="10/s")
    for send in (
        lambda: call.delay(1),
        lambda: call.map([(1,), (2,)]),
        lambda: call.with_options(delay=5).delay(1),
        lambda: app.send(call.name, [1]),
        lambda: chain(call.s(1), call.s()).delay(),
        lambda: app.schedules.create("s", call.s(1), every=60),
    ):
        with pytest.raises(ConfigurationError, match=r"no limit 'apj'.* Did you mean 'api'\?$"):
            send()
    assert app.broker.queues() == [] or not app.broker.peek("default")
    app.close()


def test_a_coroutines_first_send_finds_it_too() -> None:
    app, call = limited(["apj"])
    with pytest.raises(ConfigurationError, match="no limit 'apj'"):
        asyncio.run(call.adelay(1))
    app.close()


# -- signatures of schedules ----------------------------------------------------------------------


def test_the_delay_of_a_schedules_signature_may_be_a_timedelta() -> None:
    """It is seconds from the signature on, so that no thread of a worker meets another type."""
    app = new_app()

    @app.task(expires=timedelta(hours=1))
    def report(region: str) -> str:
        return region

    call = report.s("eu").with_options(delay=timedelta(minutes=2), expires=timedelta(minutes=5))
    assert dict(call.options) == {"delay": 120.0, "expires": 300.0}
    app.schedule("minutely", call, every=60)
    runner = app.schedules.runner("worker")
    for _ in range(2):
        runner._look_at = 0.0
        runner.turn()
    app.schedules.trigger("minutely")
    (peeked,) = app.broker.peek("default")
    assert peeked.due is not None
    assert 100.0 < peeked.due - peeked.enqueued_at < 140.0
    app.close()


def test_a_member_of_a_workflow_may_have_a_timedelta() -> None:
    app = new_app()

    @app.task
    def add(a: int, b: int = 0) -> int:
        return a + b

    chain(add.s(1).with_options(delay=timedelta(seconds=100)), add.s(2)).delay()
    (peeked,) = app.broker.peek("default")
    assert peeked.due is not None
    app.close()
