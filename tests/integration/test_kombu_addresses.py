"""Celery and Kombu find aztask's URLs by themselves, where aztask is installed."""

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CELERY = """
import sys
from celery import Celery

app = Celery("shop", broker={url!r})
app.conf.task_ignore_result = True

@app.task(name="shop.add")
def add(left, right):
    pass

add.delay(1, 2)
with app.connection() as connection:
    print(connection.as_uri(), connection.SimpleQueue("celery").qsize())
"""

KOMBU = """
import kombu
with kombu.Connection({url!r}) as connection:
    queue = connection.SimpleQueue("orders")
    queue.put("x")
    print(queue.get(timeout=5).payload)
"""


@pytest.fixture
def run(tmp_path):
    """Run a script in a process whose only knowledge of aztask is that it is installed."""
    metadata = tmp_path / "site" / "aztask-0.dist-info"
    metadata.mkdir(parents=True)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = setup["options.entry_points"]["kombu.serializers"]
    (metadata / "entry_points.txt").write_text(f"[kombu.serializers]{points}\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: aztask\nVersion: 0\n")

    def run(script, **environment):
        path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_a_celery_app_needs_nothing_but_the_url(run, tmp_path):
    url = f"aztask+local://{tmp_path}/queues.db"
    assert run(CELERY.format(url=url)) == f"{url} 1"


def test_the_address_may_be_in_the_environment(run, tmp_path):
    address = f"local://{tmp_path}/queues.db"
    assert run(CELERY.format(url="aztask://"), AZTASK_BROKER=address) == "aztask:// 1"


def test_plain_kombu_needs_nothing_but_the_url(run, tmp_path):
    assert run(KOMBU.format(url=f"aztask+local://{tmp_path}/queues.db")) == "x"


def test_importing_kombu_does_not_import_aztask(run):
    script = "import kombu.serialization, sys; print('aztask' in sys.modules)"
    assert run(script) == "False"
