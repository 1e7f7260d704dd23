"""``aztask worker --burst`` on Service Bus ends although queues that it names do not exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

from aztask.testing import emulator

SHOP = """
from aztask import App

app = App("shop", results="local://", lease=20)


@app.task(queue="orders")
def ship(order: int) -> int:
    return order
"""


@pytest.mark.parametrize("queues", [(), ("-Q", "orders,gone")])
def test_a_burst_ends_without_the_queues_that_do_not_exist(
    queues: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with emulator() as bus:
        bus.create_queue("orders", lock_seconds=20)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AZTASK_APP": "shop:app",
            "AZTASK_BROKER": bus.connection_string,
            "AZTASK_SERVICEBUS_ADMIN": bus.admin_connection_string,
        }

        def run(*arguments: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "aztask", *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stderr

        run("send", "shop.ship", "--args", "[1]")
        log = run("worker", "-c", "1", "--burst", *queues)
    assert "1 succeeded" in log
    assert "queue default" not in log
    assert ("queue gone: cannot receive" in log) == bool(queues)
