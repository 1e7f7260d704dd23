"""A Python worker is killed, and Spark itself retries its partition."""

import json
import os
import signal
import subprocess
import sys

from drain import drained, executions
from test_submit_kill import busiest, sent

ROWS = 20_000


def test_spark_s_own_retry(shop, shop_folder, tmp_path):
    rows = "".join(f'{{"path": "retried-{n}", "width": {n}}}\n' for n in range(ROWS))
    (tmp_path / "rows.json").write_text(rows)
    command = [
        *(sys.executable, "-m", "aztask", "spark", "submit", "-A", "spark_shop"),
        *("--input", str(tmp_path / "rows.json"), "--task", "shop.resize", "--key", "path"),
        *("--submission-id", "retried", "-q", "retried", "--json", "--no-check-keys"),
        *("--rate", str(ROWS / 4), "--writers", "2", "--master", "local[2,4]"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as job:
        while sent(shop, "retried") < ROWS // 2:
            assert job.poll() is None
        os.kill(busiest(shop_folder), signal.SIGKILL)
        told, _ = job.communicate(timeout=200)
    assert job.returncode == 0
    report = json.loads(told)
    assert (report["rows"], report["sent"], report["failed"]) == (ROWS, ROWS, 0)
    assert sent(shop, "retried") > ROWS
    drained("retried", "-c", "2")
    found = executions(shop_folder, "retried-")
    assert len(found) == ROWS
    assert set(found.values()) == {1}
