"""The daemon that forks Python workers: its imports and its forks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

import aztask
from aztask.spark import session, workers

ROOT = str(Path(aztask.__file__).parents[1])


@pytest.mark.parametrize(
    ("pandas", "alone"),
    [
        ("", False),
        ("raise RuntimeError('broken')", False),
        ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", True),
    ],
    ids=["fine", "broken", "threads"],
)
def test_the_daemon_forks_nothing_that_has_threads(pandas, alone, tmp_path):
    (tmp_path / "pandas.py").write_text(pandas)
    daemon = subprocess.Popen(
        [sys.executable, "-m", session.WORKERS, "pyspark.worker"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with daemon:
        assert len(daemon.stdout.read(4)) == 4  # the port: it is ready
        told = Path(f"/proc/{daemon.pid}/cmdline").read_bytes().split(b"\0")
        threads = list(Path(f"/proc/{daemon.pid}/task").iterdir())
        daemon.stdin.close()  # which ends it
    assert (workers.ALONE.encode() in told) == alone
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("module", "archive"), [(session.WORKERS, False), ("pyspark.daemon", True)]
)
def test_our_daemon_imports_nothing_from_the_archives(module, archive):
    """Beside Spark's own. It ends when its standard input does, as with its Java machine."""
    folder = Path(pyspark.__file__).parent / "python" / "lib"
    path = [*map(str, folder.glob("*.zip")), ROOT]
    ended = subprocess.run(
        [sys.executable, "-v", "-m", module],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,  # Spark's daemon ends with 1 then
    )
    found = re.search(r"^import 'pyspark.serializers' .*$", ended.stderr.decode(), re.MULTILINE)
    assert ("zipimporter" in found[0]) == archive


def test_archives_are_dropped_only_where_pyspark_is_found_without_them():
    archives = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9.9-src.zip"]
    archives += ["/spark/jars/spark-core_2.13-4.3.0.jar"]
    others = ["/here", "/theirs/shop-src.zip", "/theirs/mypyspark.zip"]
    assert workers.without_archives([*others, *archives, *sys.path]) == [*others, *sys.path]
    assert workers.without_archives(["/here", *archives]) == ["/here", *archives]
