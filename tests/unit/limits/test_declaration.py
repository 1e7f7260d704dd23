"""Declared limits: what a rate may be, and the entry of a key."""

from __future__ import annotations

import asyncio

import pytest

from aztask import App, Context
from aztask.errors import ConfigurationError, CostTooLarge, QueueNotFound
from aztask.limits.declaration import KEY_LIMIT, Rate, limit_of


@pytest.mark.parametrize(
    ("text", "count", "period"),
    [
        ("10/s", 10, 1.0),
        ("600/m", 600, 60.0),
        ("5/10s", 5, 10.0),
        ("1/2h", 1, 7200.0),
        ("3/d", 3, 86400.0),
    ],
)
def test_a_rate_is_starts_per_time(text: str, count: int, period: float) -> None:
    assert limit_of("api", rate=text).rate == Rate(count, period)


@pytest.mark.parametrize(
    "rate", [10, "10", "0/s", "10/0s", "-1/s", "1.5/s", "10/y", "1/8d", "٣/s", "9999999/s"]
)
def test_other_rates_are_refused(rate: object) -> None:
    with pytest.raises(ConfigurationError, match=r"10/s.*units s, m, h, d"):
        limit_of("api", rate=rate)


@pytest.mark.parametrize("burst", [0, -1, True, 1.5, "2"])
def test_other_bursts_are_refused(burst: object) -> None:
    with pytest.raises(ConfigurationError, match="burst takes a whole number"):
        limit_of("api", rate="1/s", burst=burst)


@pytest.mark.parametrize("concurrency", [0, -1, True, 1.5, "2"])
def test_other_concurrencies_are_refused(concurrency: object) -> None:
    with pytest.raises(ConfigurationError, match="concurrency takes a whole number"):
        limit_of("api", concurrency=concurrency)


def test_a_limit_limits_something() -> None:
    assert limit_of("api", concurrency=5).concurrency == 5
    with pytest.raises(ConfigurationError, match="a rate, a concurrency, or both"):
        limit_of("api")
    with pytest.raises(ConfigurationError, match="burst belongs to a rate"):
        limit_of("api", concurrency=5, burst=2)


def test_a_key_is_made_of_the_arguments() -> None:
    limit = limit_of("tenant", rate="1/s", key=lambda tenant, *_, **__: tenant)
    assert limit.key_of(("acme", 1), {"x": 2}) == "acme"
    assert limit.key_of((7,), {}) == "7"
    assert limit.key_of((None,), {}) is None, "it does not apply"
    assert limit_of("api", rate="1/s").key_of((1,), {}) == ""
    with pytest.raises(ConfigurationError, match="a key has 1 to"):
        limit.key_of(("x" * (KEY_LIMIT + 1),), {})


def test_entries_of_different_limits_and_keys_differ() -> None:
    first, second = limit_of("a", rate="1/s"), limit_of("ab", rate="1/s")
    assert len({first.entry(""), first.entry("b"), second.entry(""), first.entry("\ud800")}) == 4


def test_an_app_declares_limits_and_tasks_name_them() -> None:
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    app.limit("api", rate="10/s", burst=20)
    assert app.limits["api"].rate == Rate(10, 1.0, 20)
    with pytest.raises(ConfigurationError, match="there is a limit 'api' already"):
        app.limit("api", rate="1/s")

    @app.task(limits=["api", "api"])
    def call() -> None: ...

    assert call.limits == ("api",)
    with pytest.raises(ConfigurationError, match="limits takes a list of at most 8 names"):
        app.task(name="other", limits="api")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"app\.limit"):
        app.task(name="third", rate_limit="10/s")(lambda: None)  # type: ignore[call-arg]


# -- costs -----------------------------------------------------------------------------------


def test_with_a_cost_the_burst_is_one_periods_count() -> None:
    limit = limit_of("tokens", rate="90000/m", cost=len)
    assert limit.rate == Rate(90_000, 60.0, burst=90_000)
    assert limit_of("tokens", rate="90000/m", cost=len, burst=5).rate == Rate(90_000, 60.0, 5)
    assert limit_of("tokens", rate="30000000/m", cost=len).rate is not None
    with pytest.raises(ConfigurationError, match="at most 1,000,000 in"):
        limit_of("starts", rate="30000000/m")


def test_a_cost_belongs_to_a_rate_and_is_a_function() -> None:
    with pytest.raises(ConfigurationError, match="cost belongs to a rate"):
        limit_of("tokens", concurrency=1, cost=len)
    with pytest.raises(ConfigurationError, match="cost takes a function"):
        limit_of("tokens", rate="1/s", cost=5)  # type: ignore[arg-type]


def test_what_a_call_costs() -> None:
    limit = limit_of("tokens", rate="100/m", cost=lambda prompt, **_: len(prompt) / 4)
    assert limit.cost_of({"prompt": "12345", "model": "x"}) == 2, "rounded up"
    assert limit.cost_of({"prompt": ""}) == 0, "it does not apply"
    assert limit_of("api", rate="1/s").cost_of({}) == 1
    with pytest.raises(CostTooLarge, match="costs 101, but at most 100 may come at once"):
        limit.cost_of({"prompt": "x" * 404})
    for wrong in (-1, True, None, float("nan"), float("inf"), "5"):
        with pytest.raises(ConfigurationError, match="a cost is a number from 0"):
            limit_of("t", rate="1/s", cost=lambda wrong=wrong: wrong).cost_of({})


def test_a_call_that_costs_too_much_is_refused_at_every_kind_of_send() -> None:
    app = App("shop", broker="local://:memory:", results="local://:memory:")
    app.limit("tokens", rate="100/m", cost=lambda prompt, **_: len(prompt))

    @app.task(name="ask", limits=["tokens"])
    def ask(prompt: str, *more: int, model: str = "small", **options: int) -> None: ...

    @app.task_with_context(name="chat", limits=["tokens"])
    def chat(context: Context, prompt: str) -> None: ...

    long = "x" * 101
    for send in (
        lambda: ask.delay(long, 1, 2, model="large", temperature=0),
        lambda: ask.map([("short",), (long,)]),
        lambda: ask.with_options(delay=5).delay(prompt=long),
        lambda: app.send("ask", [long]),
        lambda: asyncio.run(ask.adelay(long)),
        lambda: chat.delay(long),
    ):
        with pytest.raises(CostTooLarge, match="limit 'tokens': the call costs 101"):
            send()
    with pytest.raises(QueueNotFound):  # nothing was ever sent
        app.broker.stats("default")
    ask.delay("short", 1, model="large")
    chat.delay("short")
    assert app.broker.stats("default").living == 2


def test_arguments_by_name() -> None:
    app = App("shop", broker="local://:memory:", results="local://:memory:")

    @app.task_with_context(name="chat")
    def chat(
        context: Context, prompt: str, *rest: int, tone: str = "kind", **more: int
    ) -> None: ...

    found = chat.named_arguments(("hello", 1, 2), {"length": 5})
    assert found == {"prompt": "hello", "rest": (1, 2), "tone": "kind", "length": 5}
