"""A Python worker is killed half-way and the job repeated: each key runs once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from drain import drained, executions
from pyspark.sql import functions as F

from aztask.errors import QueueNotFound, SubmitFailed
from aztask.spark import submit

ROWS = int(os.environ.get("SPARK_KILL_ROWS", "20000"))
HALF_WAY = ROWS // 2
SECONDS = 3.0  # that the first run would take, so that half-way can be met
QUEUE = "killed"


def busiest(folder):
    """The Python worker that has worked most in the last moments: one that is sending."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    before = {pid: processor_time(pid) for pid in pids if pid != os.getpid()}
    worked = {}
    while not any(worked.values()):
        time.sleep(0.02)
        worked = {pid: processor_time(pid) - spent for pid, spent in before.items()}
    return max(worked, key=worked.__getitem__)


def processor_time(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def sent(shop, queue=QUEUE):
    try:
        return shop.app.broker.stats(queue).active
    except QueueNotFound:
        return 0


def test_a_killed_partition_and_a_rerun(spark, shop, shop_folder):
    rows = spark.range(0, ROWS, 1, 4).select(
        F.concat(F.lit("killed-"), "id").alias("path"), F.col("id").cast("int").alias("width")
    )
    killed = []

    def kill():
        give_up_at = time.monotonic() + 120
        while sent(shop) < HALF_WAY and time.monotonic() < give_up_at:
            time.sleep(0.005)
        killed.append(busiest(shop_folder))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    about = {"key": "path", "submission_id": "nightly", "queue": QUEUE, "check_keys": False}
    with pytest.raises(SubmitFailed, match=r"a Python worker of Spark died.*same submission id"):
        submit(rows, shop.resize, rate=ROWS / SECONDS, **about)
    killer.join()
    first = sent(shop)
    assert killed
    assert HALF_WAY <= first < ROWS

    report = submit(rows, shop.resize, **about)
    assert (report.rows, report.sent, report.failed) == (ROWS, ROWS, 0)
    assert sent(shop) > ROWS  # the rerun sent every row again
    drained(QUEUE, "-c", "2")
    found = executions(shop_folder, "killed-")
    assert len(found) == ROWS
    assert set(found.values()) == {1}
    assert shop.app.broker.stats(QUEUE).dead == 0
