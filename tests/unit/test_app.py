"""Which lease a queue gets, when nobody, the app or the queue says one."""

from __future__ import annotations

import pytest

from aztask import App

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
