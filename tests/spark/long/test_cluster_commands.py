"""The commands of aztask on a standalone cluster whose executors lack aztask."""

import json
import re

import pytest
from cluster import standalone
from test_cluster import CODE, commands

from aztask import App
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator

ROWS = 200


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(the cluster, a folder with the page's files and what it packs, the broker)."""
    folder = tmp_path_factory.mktemp("cluster")
    for text, name in CODE:
        (folder / name).write_text(text)
    rows = "".join(f"images/{number}.png,{number}\n" for number in range(ROWS))
    (folder / "files.csv").write_text(f"path,width\n{rows}")
    with emulator(queues=["default"]) as bus, pytest.MonkeyPatch.context() as patched:
        patched.setenv(ADMIN_VARIABLE, bus.admin_connection_string)  # for the counts
        app = App("shop", broker=bus.connection_string)
        told = {"SHOP_BROKER": bus.connection_string, "AZTASK_EVENTS": str(folder / "events")}
        with standalone(folder, **told) as cluster:
            packed = cluster.run(commands("spark-submit")[0], folder)
            assert packed.returncode == 0, packed.stderr
            yield cluster, folder, app.broker
        app.close()


def run(site, command):
    cluster, folder, _ = site
    return cluster.run(command, folder)


def test_submit(site):
    broker = site[2]
    (command,) = commands("aztask spark submit --master")
    ended = run(site, f"{command} --json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["rows"], report["sent"], report["failed"]) == (ROWS, ROWS, 0)
    assert broker.stats("default").active == ROWS
    failed = run(site, re.sub(r"--py-files \S+", "", command))
    assert failed.returncode == 1
    assert "executors cannot import 'aztask'" in failed.stderr.splitlines()[-1]


def test_stream(site):
    _, folder, broker = site
    (folder / "in").mkdir()
    (folder / "in" / "a.json").write_text('{"path": "s", "width": 1}\n')
    before = broker.stats("default").active
    ended = run(
        site,
        "aztask spark stream --master spark://HOST:7077 --py-files shop.zip -A shop --input in "
        "--format json --schema 'path STRING, width INT' --task shop.resize --key path "
        "--checkpoint checkpoint --available-now",
    )
    assert ended.returncode == 0, ended.stderr
    assert broker.stats("default").active == before + 1


def test_statistics_of_what_was_sent(site):
    """The executors wrote the events, and read them."""
    ended = run(
        site,
        "aztask spark stats --master spark://HOST:7077 --py-files shop.zip --json events",
    )
    assert ended.returncode == 0, ended.stderr
    (queue,) = json.loads(ended.stdout)["queues"]
    assert queue["enqueued"] == site[2].stats("default").active


def test_a_wheel_of_spark_submit_is_not_imported(site):
    """Why the page says so."""
    _, folder, _ = site
    (folder / "shop.zip").rename(folder / "shop-1-py3-none-any.whl")
    command = commands("spark-submit")[1].replace("shop.zip", "shop-1-py3-none-any.whl")
    ended = run(site, command)
    assert ended.returncode == 1
    # spark-submit writes what its program says, its errors too, to its own output.
    assert "executors cannot import 'aztask'" in ended.stdout
