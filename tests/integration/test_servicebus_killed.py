"""The service itself is killed under its workers, as ``kill -9`` does, and comes back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from azurite import free_port
from emulatorprocess import kill, start, stop
from harness import site_in, wait_until
from ledger_app import flaky

from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.records.base import State

TASKS = 400
KILLS = 3
LEASE = 5.0
ARGUMENTS = ("-Q", "default", "-c", "4", "--lease", f"{LEASE}s", "--max-lease", "60s")


def test_workers_survive_their_service_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other task fails once, so that retries wait in the service when it is killed."""
    command = (
        *("--data", str(tmp_path / "bus.db")),
        *("--port", str(free_port()), "--admin-port", str(free_port())),
    )
    process, ready = start(*command)
    monkeypatch.setenv(ADMIN_VARIABLE, ready["admin_connection_string"])
    site = site_in(tmp_path / "site", joint=False, broker=ready["connection_string"])
    try:
        with site as made:
            app = made.app()
            app.broker.declare("default", QueueOptions(lease=LEASE, max_deliveries=1000))
            ids = [f"t{number}" for number in range(TASKS)]
            for number, each in enumerate(ids):
                app.send(flaky.name, [each, number % 2], task_id=each)
            workers = [made.worker(*ARGUMENTS) for _ in range(2)]
            for strike in range(1, KILLS + 1):
                ended = TASKS * strike // (KILLS + 2)
                wait_until(lambda n=ended: len(made.lines("end")) > n, 90, f"{ended} have ended")
                kill(process)
                time.sleep(1.0)  # workers meet a service that is not there
                process, _ = start(*command)
            for each in ids:
                app.result(each).get(timeout=90)
                (*_, last) = app.results.history(each)
                assert last.state is State.SUCCEEDED
            wait_until(lambda: not app.broker.peek("default"), 90, "all is settled")
            assert not app.broker.peek("default", dead_letter=True)
            assert [worker.stop() for worker in workers] == [0, 0]
    finally:
        stop(process)
