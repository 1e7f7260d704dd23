"""Several processes of ``aztask watch``, killed and started again, send each notice once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import azurite
import hooks
import pytest
from waiting import wait_until

from aztask import App

pytestmark = pytest.mark.kills

RULES = """
every = "1s"
[webhooks.oncall]
url = "env:WATCH_TEST_URL"
[[rules]]
name = "late"
when = "backlog"
queue = "default"
above = 0
"""


@pytest.fixture(params=["local", "tables"])
def results(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "tables":
            services = stack.enter_context(azurite.storing(tmp_path / "azurite"))
            yield azurite.account_of(*services)
        else:
            yield f"local://{tmp_path}/queues.db"


@contextmanager
def watching(folder: Path, environment: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three watchers; they are stopped at the end."""
    command = [sys.executable, "-m", "aztask", "watch", "--rule", str(folder / "rules.toml")]
    made = [subprocess.Popen(command, env=environment, cwd=folder) for _ in range(3)]
    try:
        yield made
    finally:
        for each in made:
            each.terminate()
        for each in made:
            each.wait(20)


def test_three_watchers_send_once_over_kills_and_restarts(tmp_path: Path, results: str) -> None:
    broker = f"local://{tmp_path}/queues.db"
    (tmp_path / "rules.toml").write_text(RULES)
    with hooks.serving() as hook:
        environment = {
            **os.environ,
            "AZTASK_BROKER": broker,
            "AZTASK_RESULTS": results,
            "WATCH_TEST_URL": hook.url,
        }
        app = App("aztask", broker=broker, results=results)
        try:
            app.broker.declare("default")
            if results != broker:
                app.results.create()
            app.send("shop.add", [1, 2])
            with watching(tmp_path, environment) as first:
                wait_until(lambda: hook.lines() == [("began", "late")], 40, "the notice")
                time.sleep(2.5)
                for each in first:
                    each.send_signal(signal.SIGKILL)
            with watching(tmp_path, environment) as second:
                time.sleep(5.0)
                assert hook.lines() == [("began", "late")]
                app.broker.purge("default")
                wait_until(lambda: len(hook.lines()) == 2, 40, "its end")
                time.sleep(2.5)
                assert hook.lines() == [("began", "late"), ("ended", "late")]
                for each in second:
                    each.terminate()
                assert [each.wait(20) for each in second] == [0, 0, 0]
        finally:
            app.close()
