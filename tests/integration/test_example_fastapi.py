"""The example `fastapi/`: over HTTP and in Chromium, on `local://` and on Service Bus."""

import json

import httpx
import pytest
from browser import opened
from waiting import wait_until
from webexample import web_example


@pytest.fixture(params=["local", "servicebus"])
def reports(request, tmp_path):
    """The service and its worker."""
    with web_example("fastapi", tmp_path, request.param) as example:
        server = ["-m", "uvicorn", "web:api", "--port", str(example.port)]
        worker = ["-m", "aztask", "-A", "reports:app", "worker", "--pool", "asyncio", "-c", "4"]
        with example.running(server, worker):
            yield example


def events_of(client, report):
    with client.stream("GET", f"/reports/{report}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_over_http(reports):
    with httpx.Client(base_url=reports.url, timeout=30) as client:
        started = client.post("/reports", json={"title": "Sales", "pages": 8})
        assert started.status_code == 202
        report = started.json()["id"]
        assert client.get(f"/reports/{report}").json()["total"] == 9
        seen = events_of(client, report)
        assert seen[-1] == {
            "state": "succeeded",
            "done": 9,
            "total": 9,
            "text": "8 pages, from 'Sales, page 1' to 'Sales, page 8'",
        }
        done = [each["done"] for each in seen]
        assert done == sorted(done)
        assert len(set(done)) > 1, "progress arrives while the report is made"
        assert client.get(f"/reports/{report}").json() == seen[-1], "as a client polls"

        failing = client.post("/reports", json={"title": "", "pages": 1}).json()["id"]
        wait_until(
            lambda: client.get(f"/reports/{failing}").json()["state"] == "failed", 20, "it failed"
        )
        assert "a report needs a title" in events_of(client, failing)[-1]["text"]

        assert client.post("/reports", json={"title": "x", "pages": 0}).status_code == 422
        nothing = "00000000-0000-4000-8000-000000000000"
        assert client.get(f"/reports/{nothing}").status_code == 404


def test_in_the_browser(reports):
    with opened(reports.url, height=900) as page:
        page.fill("input[name=title]", "Stock")
        page.fill("input[name=pages]", "6")
        page.click("button")
        page.wait_for_selector("#state:has-text('succeeded')", timeout=20_000)
        assert page.inner_text("#done") == "7 of 7"
        assert page.inner_text("#text") == "6 pages, from 'Stock, page 1' to 'Stock, page 6'"
        assert page.evaluate("document.getElementById('bar').position") == 1


def test_another_process_reads_the_same_report(reports):
    """Everything about a report is in the queue and the result store."""
    with httpx.Client(base_url=reports.url, timeout=30) as client:
        report = client.post("/reports", json={"title": "Sales", "pages": 2}).json()["id"]
    text = reports.run(
        "-c",
        "import sys, web; "
        "web.app.workflows.result(sys.argv[1]).get(timeout=20); "
        "print(web.look(web.app, sys.argv[1]))",
        report,
    )
    assert "'state': 'succeeded'" in text
