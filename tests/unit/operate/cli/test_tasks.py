"""``aztask tasks``."""

import json

import pytest

APP = '''
from aztask import App, RetryPolicy

app = App("shop", broker="local://", retry=RetryPolicy(max_retries=7))


@app.task(queue="images", time_limit=30.0)
def resize(path: str, width: int = 100) -> str:
    """Resize one picture.

    Much more text.
    """
    return path


@app.task
def add(a, b):
    return a + b
'''


@pytest.fixture
def shop(cli):
    return cli.module("tasks_shop", APP)


def test_a_table_with_signatures(cli, shop):
    header, first, second = cli("-A", shop, "tasks").out.splitlines()
    assert header.split() == ["TASK", "QUEUE", "RETRIES", "TIME", "LIMIT", "ABOUT"]
    assert first.split() == ["shop.add(a,", "b)", "default", "7", "-", "-"]
    assert "shop.resize(path: str, width: int = 100)" in second
    assert second.endswith("30 s        Resize one picture.")


def test_json_has_the_limits(cli, shop):
    _, resize = map(json.loads, cli("-A", shop, "tasks", "--json").out.splitlines())
    assert resize["task"] == "shop.resize"
    assert resize["queue"] == "images"
    assert resize["time_limit_seconds"] == 30.0
    assert resize["about"] == "Resize one picture."


def test_an_app_is_needed(cli):
    ended = cli("tasks")
    assert ended.code == 2
    assert "aztask tasks needs an app: name it with -A module:app or in AZTASK_APP" in ended.error
