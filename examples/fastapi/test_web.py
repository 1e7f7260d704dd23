"""Tests of the service without a worker: tasks run inline, in the test's own process."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from reports import NewReport, Page, app, count_visit, page
from web import api

from aztask.testing import Inline


@pytest.fixture
def inline() -> Iterator[Inline]:
    """Run tasks where they are sent."""
    with app.inline() as running:
        yield running  # type: ignore[misc]


@pytest.fixture
def client(inline: Inline) -> Iterator[TestClient]:
    """A client of the service, whose lifespan is open."""
    with TestClient(api) as made:
        yield made


def test_a_report(client: TestClient) -> None:
    started = client.post("/reports", json={"title": "Sales", "pages": 2})
    assert started.status_code == 202
    answer = client.get(f"/reports/{started.json()['id']}").json()
    assert answer["state"] == "succeeded"
    assert answer["text"] == "2 pages, from 'Sales, page 1' to 'Sales, page 2'"


def test_each_page_gets_the_model_and_is_one(client: TestClient, inline: Inline) -> None:
    client.post("/reports", json={"title": "Sales", "pages": 1})
    sent = inline.assert_sent(page, NewReport(title="Sales", pages=1), 1)
    assert app.result(sent.id).get(timeout=0) == Page(number=1, text="Sales, page 1")


def test_the_events_of_a_report_that_fails(client: TestClient) -> None:
    started = client.post("/reports", json={"title": "", "pages": 1}).json()
    text = client.get(f"/reports/{started['id']}/events").text
    assert '"state": "failed"' in text
    assert "a report needs a title" in text


def test_a_visit_is_counted_after_the_answer(client: TestClient, inline: Inline) -> None:
    assert client.get("/").status_code == 200
    inline.assert_sent(count_visit, "/")


def test_no_such_report(client: TestClient) -> None:
    assert client.get("/reports/00000000-0000-4000-8000-000000000000").status_code == 404
