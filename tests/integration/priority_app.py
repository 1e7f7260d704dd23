"""The tasks of `ledger_app`, on a queue with priorities."""

from ledger_app import app

__all__ = ["app"]

PRIORITIES = {"high": 4, "low": 1}

app.queue("default", priorities=PRIORITIES)
