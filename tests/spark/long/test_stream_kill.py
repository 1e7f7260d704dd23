"""A streaming command is killed with its JVM, and started again."""

import json
import os
import signal
import subprocess
import sys

from test_stream import SCHEMA, ids, put

from aztask.spark import task_id


def test_a_killed_query_goes_on_where_it_was(shop, tmp_path):
    """The command is killed with its JVM in the midst of its batches, and started again."""
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    for number in range(3):
        put(source, f"{number}.json", "streamkill-", number * 50, 50)
    command = [
        *(sys.executable, "-m", "aztask", "spark", "stream", "-A", "spark_shop"),
        *("--input", str(source), "--format", "json", "--schema", SCHEMA, "--key", "path"),
        *("--task", "shop.resize", "--checkpoint", str(checkpoint), "--queue", "streamkill"),
        *("--max-files", "1", "--available-now", "--json", "--master", "local[1]"),
    ]
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=os.environ
        )
    assert first.stdout is not None
    assert json.loads(first.stdout.readline())["rows"] == 50
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first.stdout.close()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    batches = [json.loads(line) for line in again.stdout.splitlines()]
    assert 1 <= len(batches) <= 3
    found = ids(shop, "streamkill")
    assert len(found) >= 150
    assert set(found) == {task_id(batches[0]["query"], f"streamkill-{n}") for n in range(150)}
