"""Results are stored while their store is away: a task waits, other programs give up."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from aztask.celery import backend
from aztask.errors import BrokerUnavailable

NOWHERE = (
    "DefaultEndpointsProtocol=http;AccountName=none;AccountKey=bm9uZQ==;"
    "TableEndpoint=http://127.0.0.1:9/none"
)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "_FIRST_PAUSE", 0.05)
    found = Celery("shop", backend="aztask://", set_as_current=False)
    found.conf.result_backend_transport_options = {"results": NOWHERE}
    return found


def test_outside_of_a_task_it_gives_up_after_some_seconds(
    app: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A web process that reports progress would stand still for as long as the table is away."""
    assert backend.OUTSIDE_SECONDS == 10.0
    monkeypatch.setattr(backend, "OUTSIDE_SECONDS", 0.4)

    @app.task(name="shop.add", shared=False)
    def task() -> None: ...

    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
        task.update_state(task_id="one", state="PROGRESS", meta={})
    assert time.monotonic() - began >= 0.4
    assert not [each for each in caplog.messages if "waiting" in each]


def test_a_task_waits_until_its_worker_stops(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "OUTSIDE_SECONDS", 0.0)
    asked = count(1)
    monkeypatch.setattr(backend, "_stops", lambda: next(asked) == 4)
    with pytest.raises(BrokerUnavailable):
        app.backend.store_result("one", 5, "SUCCESS", request=Context(id="one"))
    assert next(asked) == 5, "it has tried again three times"
