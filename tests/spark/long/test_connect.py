"""The page's commands over Spark Connect, from a machine with `pyspark-client` and without Java."""

import json
import re
import shutil
import subprocess
import time

import pyarrow.parquet as pq
import pytest
from cluster import connect_server, thin_client
from letters import bury
from test_cluster import CODE, commands

from aztask import App

ROWS = 200


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The programs of an environment with aztask[spark-connect,delta] alone."""
    return thin_client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def site(tmp_path_factory, client):
    """(the server, a folder with the page's files and what it packs, the app)."""
    folder = tmp_path_factory.mktemp("connect")
    for text, name in CODE:
        (folder / name).write_text(text)
    rows = "".join(f"images/{number}.png,{number}\n" for number in range(ROWS))
    (folder / "files.csv").write_text(f"path,width\n{rows}")
    app = App("shop", broker=f"local://{folder}/queues.db")
    app.broker.declare("default")
    told = told_in(folder)
    with connect_server(folder / "server", client=client, **told) as server:
        packed = server.run(pack(), folder)
        assert packed.returncode == 0, packed.stderr
        yield server, folder, app
    app.close()


def told_in(folder):
    queues = f"local://{folder}/queues.db"
    events = {"AZTASK_EVENTS": str(folder / "events")}
    return {"SHOP_BROKER": queues, "AZTASK_RESULTS": queues, **events}


def pack():
    return commands("export SPARK_REMOTE")[0]


def page(name):
    """The command of the page that has this word in it."""
    (command,) = [
        each for each in commands("export SPARK_REMOTE") if f"aztask spark {name}" in each
    ]
    return command


READ = """
import sys
from aztask.spark import append_events, compact, get_session, place_of, read_table
from aztask.spark.packing import add_py_files

spark = get_session()
add_py_files(spark, ["shop.zip"])
tables = place_of(sys.argv[1])
for name in ("events", "odd", "results", "dead_letters"):
    print(name, read_table(spark, tables, name).rows.count())
read = read_table(spark, tables, "events")
print("since", read_table(spark, tables, "events", since=read.version).rows.count())
log, others = place_of(sys.argv[2]), place_of(sys.argv[3])
report = append_events(spark, log, others)
print("appended", report.rows, report.files, append_events(spark, log, others).files)
"""


def run(site, command):
    """Run a command of the page: its paths are in the test's folder."""
    server, folder, _ = site
    remote = f"export SPARK_REMOTE=sc://{server.host}\n"
    return server.run(remote + command.replace("/data/", f"{folder}/"), folder)


def answer(site, command):
    ended = run(site, f"{command} --json")
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.fixture(scope="module")
def submitted(site):
    """What was submitted, and run by a worker without Spark."""
    server, folder, app = site
    (report,) = answer(site, page("submit"))
    assert (report["rows"], report["sent"], report["failed"]) == (ROWS, ROWS, 0)
    assert app.broker.stats("default").active == ROWS
    worker = server.run("aztask worker -A shop --burst", folder)
    assert worker.returncode == 0, worker.stderr
    return report


def test_the_client_is_as_thin_as_the_page_says(client):
    listed = subprocess.run([client / "pip", "list"], capture_output=True, text=True, check=True)
    spark = re.findall(r"^(?:pyspark|py4j)\S*", listed.stdout, re.MULTILINE)
    assert spark == ["pyspark-client"]


def test_executors_without_the_zip_are_told_as_on_a_cluster(site):
    ended = run(site, re.sub(r"--py-files \S+", "", page("submit")))
    assert ended.returncode == 1
    (line,) = [each for each in ended.stderr.splitlines() if "error" in each]
    assert "executors cannot import 'aztask'" in line


def test_results_are_read_back(site, submitted):
    (counts,) = answer(site, page("results"))
    assert counts == {"succeeded": ROWS}
    rows = pq.read_table(site[1] / "results").to_pylist()
    assert {row["value"] for row in rows} == {f'"images/{n}.png at {n}"' for n in range(ROWS)}


def test_a_rate_is_shared_by_the_servers_cores(site, submitted):
    """Its number of cores is known without a sparkContext."""
    command = page("submit").replace("resize-2026-11-23", "second")
    (report,) = answer(site, f"{command} --rate 1000 --dry-run")
    assert (report["partitions"], report["sent"]) == (2, ROWS)


def test_statistics_and_advice_of_what_ran(site, submitted):
    (found,) = answer(site, page("stats"))
    (queue,) = found["queues"]
    assert (queue["enqueued"], queue["succeeded"]) == (ROWS, ROWS)
    (same,) = answer(site, page("stats").replace("/data/", "file:///data/"))  # the server lists it
    assert same["queues"] == found["queues"]
    (advice,) = answer(site, page("recommend"))
    assert (advice["queue"], advice["advice"]["evidence"]["samples"]) == ("default", ROWS)


def test_compaction(site, submitted):
    """The lines are of an hour that has not ended: a copy of them is of an earlier one."""
    _, folder, _ = site
    (hour,) = {path.parent for path in (folder / "events").rglob("*.jsonl")}
    earlier = folder / "old" / "events" / "date=2026-01-01" / "hour=00"
    shutil.copytree(hour, earlier)
    (report,) = answer(site, page("compact").replace("/data/", "/data/old/"))
    assert (report["hours"], report["open_hours"]) == (1, 0)
    (found,) = answer(site, page("stats").replace("/data/", "/data/old/"))
    assert found["counts"]["compacted_files"] == report["compacted_files"] == 1
    assert found["counts"]["events"] == report["events"]


def test_tables_are_written_and_read(site, submitted):
    """After the test of the compaction, whose compacted file is appended to other tables."""
    _, folder, app = site
    follow, results, letters = commands("aztask spark follow")
    bury(app, "default", [("t1", "x", "rejected", "KeyError: 1")])
    time.sleep(11)  # what a file must have been there for
    (batch,) = answer(site, follow)
    (found,) = answer(site, page("stats"))
    assert batch["rows"] == found["counts"]["events"] > ROWS
    assert answer(site, follow) == []
    assert answer(site, results) == [{"succeeded": ROWS}]
    ended = run(site, letters)
    assert ended.returncode == 0, ended.stderr
    (folder / "read.py").write_text(READ)
    command = "python read.py /data/tables /data/old/events /data/others"
    read = run(site, command)
    assert read.returncode == 0, read.stderr
    told = dict(line.split(maxsplit=1) for line in read.stdout.splitlines())
    compacted = read_lines_of(folder / "old" / "events")
    assert told == {
        "events": str(batch["rows"]),
        "odd": "0",
        "results": str(ROWS),
        "dead_letters": "1",
        "since": "0",
        "appended": f"{compacted} 1 0",
    }
    assert app.broker.purge("default", dead_letter=True) == 1


def read_lines_of(folder):
    """How many events the compacted files of a folder hold."""
    return sum(pq.read_metadata(path).num_rows for path in folder.rglob("*.parquet"))


def test_dead_letters_are_grouped_and_replayed(site, submitted):
    app = site[2]
    buried = [(f"d{n}", "x", "rejected", f"KeyError: {n}") for n in range(20)]
    bury(app, "default", buried)
    (group,) = answer(site, page("dlq groups"))
    assert (group["count"], group["reason"]) == (20, "rejected")
    where = """--where "id IN ('d1', 'd2')" --yes"""
    ended = run(site, f"aztask spark dlq replay --py-files shop.zip -A shop {where}")
    assert ended.returncode == 0, ended.stderr
    stats = app.broker.stats("default")
    assert (stats.dead, stats.active) == (18, 2)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("dlq list --py-files shop.zip -A shop --where 'nosuch = 1'", "Spark refuses the query"),
        (
            "stats --master sc://127.0.0.1:1 events",
            "no Spark Connect server answers at 127.0.0",
        ),
        ("stats --master local events", "SPARK_REMOTE is set, and so is the master"),
        (
            "submit -A shop --input /nosuch.csv --task shop.resize --key path --submission-id x",
            "/nosuch.csv cannot be read as csv",
        ),
    ],
)
def test_errors_are_one_line(site, command, told):
    ended = run(site, f"aztask spark {command}")
    assert ended.returncode not in (0, 70)
    assert told in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


STREAM = (
    "aztask spark stream --master sc://HOST:7077 --py-files shop.zip -A shop --input /data/in "
    "--format json --schema 'path STRING, width INT' --task shop.resize --key path "
    "--checkpoint /data/checkpoint --available-now"
)


def test_a_stream_needs_the_zip_on_the_server(site, client, tmp_path):
    """The day Spark finds it in the session, the page has one condition less."""
    _, folder, app = site
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"path": "s", "width": 1}\n')
    shutil.copy(folder / "shop.zip", tmp_path)
    shutil.copy(folder / "shop.py", tmp_path)
    command = STREAM.replace("/data/", f"{tmp_path}/")
    without = site[0].run(command, tmp_path)
    assert without.returncode == 1
    assert "start the server with --files" in without.stderr.splitlines()[-1]
    told = {**told_in(folder), "AZTASK_EVENTS": str(tmp_path / "events")}
    before = app.broker.stats("default").active
    options = ("--files", str(tmp_path / "shop.zip"))
    with connect_server(tmp_path / "server", client=client, options=options, **told) as server:
        ended = server.run(command, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "batch 0: 1 row sent" in ended.stdout
    assert app.broker.stats("default").active == before + 1
