"""A result store with a few tasks, for the tests of several commands."""

import pytest
from recordedruns import record_run

from aztask.settlement import Complete, DeadLetter, Resubmit
from aztask.stores.records.base import RunKey, State


@pytest.fixture
def filled(cli, monkeypatch):
    """Three tasks: one succeeded at once, one failed after a retry, one waits."""
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.setenv("AZTASK_RESULTS", cli.address)
    app = cli.app()
    value = app.codec.encode_value([1, "zwei"])
    record_run(app, RunKey("good"), State.SUCCEEDED, Complete(), value=value)
    error = {"error_type": "ValueError", "error": "no\nsum", "traceback": "Trace\n  \x1b[31mline"}
    record_run(app, RunKey("bad"), State.RETRYING, Resubmit(1.0), **error)
    record_run(app, RunKey("bad", 0, 1), State.FAILED, DeadLetter("retries-exhausted"), **error)
    app.send("shop.add", [1, 2], task_id="waits")
    for queue in ("orders", "bulk", "mail"):
        app.broker.declare(queue)
    return app
