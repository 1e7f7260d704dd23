"""Damaged rows in a file: listed, logged once, purged."""

from aztask.queues.engine import Database
from aztask.stores.records.base import RunKey, Start, State, Unreadable
from aztask.stores.records.local.store import LocalResults


def test_a_damaged_row_is_kept_logged_once_and_purged(caplog):
    database = Database(":memory:")
    results = LocalResults(database)
    start = Start(RunKey("a"), "shop.add", "default", 1, "owner", "w", 1.0)
    results.start([start])
    with database.transaction() as connection:
        connection.execute("UPDATE runs SET state = 'odd'")
    for _ in range(2):
        (answer,) = results.start([start])
        assert isinstance(answer, Unreadable)
    assert sum("row of task a" in record.getMessage() for record in caplog.records) == 1
    (run,) = results.recent(state=State.UNREADABLE)
    assert (run.key, "state 'odd' is unknown" in run.damage) == (RunKey("a"), True)
    with database.transaction() as connection:
        connection.execute("UPDATE runs SET state = 'started'")
    assert results.get("a").state is State.UNREADABLE, "repairing the row does not free it"
    results.purge(1e12)
    assert results.recent(state=State.UNREADABLE) == []
    with database.read() as connection:
        assert connection.execute("SELECT count(*) FROM damaged_runs").fetchone() == (0,)
    database.close()
