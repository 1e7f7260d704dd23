"""Declared limits: what a rate may be, and the entry of a key."""

from __future__ import annotations

import pytest

from aztask import App
from aztask.errors import ConfigurationError
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
