"""Runs as a worker records them, for tests of what shows them."""

from aztask.stores.records.base import Finish, Outcome, Start


def record_run(app, key, state, settlement, **outcome):
    """Record one run, as a worker does."""
    app.results.start([Start(key, "shop.add", "default", 1, f"{key}", "worker-1", 1e9)])
    done = Outcome(state, settlement, at=1e9 + 1, duration=0.25, **outcome)
    assert app.results.record([Finish(key, f"{key}", done)]) == [True]
