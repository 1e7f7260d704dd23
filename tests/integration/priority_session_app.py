"""The tasks of `session_app`, on a queue with sessions and priorities."""

from session_app import app

__all__ = ["app"]

app.queue("orders", sessions=True, lease=5.0, priorities={"normal": 4, "low": 1})
