"""Which lease a queue gets, when nobody, the app or the queue says one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aztask import App, ConfigurationError, DuplicateTask, EncodeError

STORAGE = "UseDevelopmentStorage=true"


@pytest.mark.parametrize(("broker", "seconds"), [("local://:memory:", 60.0), (STORAGE, 300.0)])
def test_what_suits_the_service_where_nobody_says_otherwise(broker: str, seconds: float) -> None:
    assert App("x", broker=broker).lease_seconds("q") == seconds


@pytest.mark.parametrize("broker", ["local://:memory:", STORAGE])
def test_the_app_and_before_it_the_queue_decide(broker: str) -> None:
    app = App("x", broker=broker, lease=30.0)
    app.queue("slow", lease=120.0)
    assert app.lease_seconds("q") == 30.0
    assert app.lease_seconds("slow") == 120.0


def test_the_default_stays_below_the_limit_of_all_renewals() -> None:
    assert App("x", broker=STORAGE, max_lease=200.0).lease_seconds("q") == 100.0


def test_making_an_app_does_no_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = App("x", events="events")
    app.task(len)
    assert list(tmp_path.iterdir()) == []
    assert app.queue_names() == ["default"]


def test_the_default_queue_is_left_out_if_nothing_names_it() -> None:
    def app_with(**options: Any) -> App:
        app = App("x", **options)
        app.task(queue="own")(len)
        return app

    assert app_with().queue_names() == ["own"]
    assert App("x").queue_names() == ["default"], "an app without tasks"
    assert app_with(default_queue="home").queue_names() == ["home", "own"]
    several = app_with()
    several.task(repr)
    assert several.queue_names() == ["default", "own"]
    configured = app_with()
    configured.queue("default", lease=20)
    assert configured.queue_names() == ["default", "own"]
    scheduled = app_with()
    (task,) = scheduled.tasks.values()
    call = task.s("a").with_options(queue="default")
    scheduled.schedule("often", call, every=30)
    assert scheduled.queue_names() == ["default", "own"]


def test_a_name_is_taken_once() -> None:
    app = App("x", broker="local://:memory:")
    app.task(len)
    with pytest.raises(DuplicateTask, match=r"name='x.builtins.len'"):
        app.task(len)
    assert repr(app) == "<App x: 1 tasks>"


def test_unknown_options_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'lease'"):
        App("x", leas=3.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="Did you mean 'sessions'"):
        App("x").queue("q", session=True)  # type: ignore[call-arg]


def test_sending_by_name_needs_no_registered_task() -> None:
    app = App("x", broker="local://:memory:")
    result = app.send("other.task", [1], {"b": 2}, queue="q", task_id="mine")
    assert result.id == "mine"
    assert app.broker.stats("q").active == 1
    with pytest.raises(EncodeError, match="args must be a list or a tuple"):
        app.send("other.task", "ab")
    app.close()


def test_a_variable_that_the_code_overrules_is_named(monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", "servicebus://shop-prod")
    monkeypatch.setenv("AZTASK_RESULTS", "local://:memory:")
    monkeypatch.setenv("AZTASK_EVENTS", "/var/events")
    monkeypatch.setenv("AZTASK_SIGNING_KEYS", "a-key-of-sixteen-bytes")
    key = "SharedAccessKeyName=a;SharedAccessKey=c2VjcmV0"
    app = App(
        "shop",
        broker=f"Endpoint=sb://shop.servicebus.windows.net/;{key}",
        results="local://:memory:",
        events="/srv/events",
        signing_keys=["another key of 16 bytes"],
    )
    assert app.overruled == [
        "AZTASK_BROKER has no effect, because the code wins: it says App(..., broker='Endpoint="
        "sb://shop.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey=****'); remove "
        "one of the two",
        "AZTASK_EVENTS has no effect, because the code wins: it says App(..., events=...); remove "
        "one of the two",
        "AZTASK_SIGNING_KEYS has no effect, because the code wins: it says App(..., "
        "signing_keys=...); remove one of the two",
    ]
    assert App("shop", results="local://:memory:").overruled == []
