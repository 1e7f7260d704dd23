"""What a worker runs, as stores keep it; and the rows of workers that do not tell of it."""

import msgpack

from aztask.queues.engine import Database
from aztask.stores.records.base import RunningTask, WorkerRecord
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.tables.rows import worker_entity, worker_of
from aztask.stores.records.workerrow import MOST_BYTES, NOTHING_RUNS, pack_running, unpack_running

OLD = WorkerRecord("old", 1.0, 9.0, ("a",), 3, 4)


def test_as_much_from_the_front_as_fits():
    tasks = tuple(RunningTask(str(number), "t" * 1000, "q", 1.0) for number in range(100))
    packed = pack_running(tasks)
    assert MOST_BYTES / 3 < len(packed) <= MOST_BYTES
    assert unpack_running(packed) == tasks[:50]
    assert unpack_running(pack_running(())) == unpack_running(NOTHING_RUNS) == ()


def test_the_progress_is_left_out_before_any_task_is():
    tasks = tuple(
        RunningTask(str(number), "t" * 500, "q", 1.0, progress=b"p" * 500) for number in range(80)
    )
    assert unpack_running(pack_running(tasks[:20])) == tasks[:20]
    found = unpack_running(pack_running(tasks))
    assert len(found) == 80
    assert {task.progress for task in found} == {None}


def test_the_tasks_of_an_older_worker_have_no_progress():
    packed = msgpack.packb([("id", "t", "q", 1.0, 2)])
    assert unpack_running(packed) == (RunningTask("id", "t", "q", 1.0, 2),)


def test_the_row_of_an_older_worker_in_a_file():
    database = Database(":memory:")
    results = LocalResults(database)
    with database.transaction() as connection:
        record = msgpack.packb([1.0, ("a",), 3, 4, False])
        connection.execute("INSERT INTO workers VALUES (?, ?, ?)", ("old", 9.0, record))
    assert results.workers() == [OLD]
    database.close()


def test_the_row_of_an_older_worker_in_a_table():
    entity = worker_entity(OLD)
    del entity["leased"], entity["tasks"]
    assert worker_of(entity) == OLD
