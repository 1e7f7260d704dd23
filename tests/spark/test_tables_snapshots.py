"""Results and dead letters as Delta tables: of several snapshots the one begun last counts."""

import json
import random
import subprocess
import sys

import pytest
from azurite import KEY
from deltalake import DeltaTable
from events_site import random_event, write_log
from letters import bury, errors

from aztask import App
from aztask.azure.container import container_client
from aztask.errors import ConfigurationError
from aztask.operate.cli import main
from aztask.spark import (
    Target,
    append_events,
    compact,
    place_of,
    read_table,
    results,
    store_dead_letters,
    store_results,
    submit,
)
from aztask.spark.deadletters import dead_letters, groups
from aztask.spark.tables import tables as tables_module
from aztask.spark.tables.tables import DEAD_LETTERS, KINDS, RESULTS
from aztask.support.clock import wall

TARGET = Target(app="spark_shop:app")


@pytest.fixture
def tables(tmp_path):
    return place_of(tmp_path / "tables")


@pytest.fixture
def manifest(spark, shop, tmp_path):
    """Five tasks that wait in their queue."""
    rows = spark.range(5).withColumnRenamed("id", "number")
    folder = str(tmp_path / "m")
    about = {"key": "number", "queue": "tables", "manifest": folder}
    submit(rows, shop.squared, submission_id=ODDLY_NAMED, **about)
    return folder


ODDLY_NAMED = "a b/c:%41é'"


def rows_of(spark, tables, name, **where):
    frame = read_table(spark, tables, name).rows
    for column, value in where.items():
        frame = frame.where(frame[column] == value)
    return frame.collect()


def test_results_of_a_submission_replace_its_earlier_ones_and_no_others(spark, manifest, tables):
    other = spark.createDataFrame([(7,), (8,)], "number INT")
    store_results(
        results(spark, "other", frame=other, key="number", target=TARGET), tables, "other"
    )
    found = results(spark, ODDLY_NAMED, manifest=manifest, target=TARGET)
    first = store_results(found, tables, ODDLY_NAMED)
    assert (first.files, first.there, first.rows) == (1, 0, 5)
    second = store_results(found, tables, ODDLY_NAMED)
    assert (second.rows, second.version) == (5, first.version + 1)
    rows = rows_of(spark, tables, "results", submission_id=ODDLY_NAMED)
    assert sorted(row["key"] for row in rows) == list("01234")
    assert {row["state"] for row in rows} == {"unaccounted"}
    assert [row["key"] for row in rows_of(spark, tables, "results", submission_id="other")] == (
        ["7", "8"]
    )
    plain = DeltaTable(f"{tables}/results").to_pyarrow_table()
    assert plain.num_rows == 7
    assert plain.column_names == RESULTS.schema.names
    new = read_table(spark, tables, "results", since=first.version)
    assert sorted(row["key"] for row in new.rows.collect()) == list("01234")
    everything = read_table(spark, tables, "results", since=0)  # the first snapshot is no more
    assert everything.rows.count() == 7


def test_an_earlier_snapshot_that_comes_late_is_dropped(spark, tables, monkeypatch):
    """Its rows were looked up before those that are there."""
    early = spark.createDataFrame([(1,)], "number INT")
    late = spark.createDataFrame([(1,), (2,)], "number INT")
    begun = wall()

    def found(frame):
        return results(spark, "s", frame=frame, key="number", target=TARGET)

    assert store_results(found(late), tables, "s").files == 1
    monkeypatch.setattr(tables_module, "wall", lambda: begun)
    report = store_results(found(early), tables, "s")
    assert (report.files, report.there, report.rows) == (0, 1, 0)
    assert sorted(row["key"] for row in rows_of(spark, tables, "results")) == ["1", "2"]


def test_values_of_a_type_are_refused(spark, tables):
    frame = spark.createDataFrame([(1,)], "number INT")
    found = results(spark, "s", frame=frame, key="number", schema="INT", target=TARGET)
    with pytest.raises(ConfigurationError, match="values as JSON"):
        store_results(found, tables, "s")


@pytest.fixture
def post(tmp_path, monkeypatch):
    """An app with dead letters in two queues."""
    monkeypatch.setenv("AZTASK_BROKER", f"local://{tmp_path}/queues.db")
    app = App("post")
    bury(app, "mail", list(errors(30)))
    bury(app, "fax", [(f"fax-{task_id}", *rest) for task_id, *rest in errors(4)])
    app.close()


def test_dead_letters_of_a_queue_replace_its_earlier_ones(spark, post, tables):
    target = Target.of_environment()
    both = dead_letters(spark, target, ["mail", "fax"])
    report = store_dead_letters(both, tables, ["mail", "fax"])
    assert (report.files, report.rows) == (2, 36)
    again = store_dead_letters(dead_letters(spark, target, ["fax"]), tables, ["fax"])
    assert (again.files, again.rows) == (1, 5)
    stored = read_table(spark, tables, "dead_letters").rows
    assert stored.count() == 36
    assert stored.columns == DEAD_LETTERS.schema.names
    drop = ["taken_at"]
    assert sorted(stored.drop(*drop).collect()) == sorted(both.collect())
    assert groups(stored).collect() == groups(both).collect()
    none = both.where("false")
    assert store_dead_letters(none, tables, ["mail"]).rows == 0
    assert {row["queue"] for row in rows_of(spark, tables, "dead_letters")} == {"fax"}
    with pytest.raises(ConfigurationError, match="rows of mail, which is not replaced"):
        store_dead_letters(both, tables, ["fax"])


def test_the_commands_write_tables(spark, shop, manifest, tables, tmp_path, capsys, monkeypatch):
    """compact, results and dlq list with --tables."""
    command = ["spark", "results", "-A", "spark_shop:app", "--submission-id", ODDLY_NAMED]
    command += ["--manifest", manifest, "--tables", str(tables)]
    assert main.run([*command, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"unaccounted": 5}
    assert f"wrote 5 results to {tables}" in shown.err
    assert main.run([*command, "-o", str(tmp_path / "out")]) == 2
    assert "give -o, or --tables" in capsys.readouterr().err


def test_the_command_compacts_into_tables(spark, tmp_path, tables, capsys):
    folder = tmp_path / "log" / "date=2026-09-21" / "hour=10"
    folder.mkdir(parents=True)
    event = {"v": 1, "id": "a", "event": "succeeded", "ts": 1.79e9, "task_id": "i", "task": "t"}
    line = json.dumps({**event, "queue": "q", "worker": "w"})
    (folder / "w-1.jsonl").write_text(f"{line}\n[1]\n")
    command = ["spark", "compact", str(tmp_path / "log"), "--tables", str(tables)]
    assert main.run(command) == 0
    assert "1 compacted file added to the tables (1 event, 1 odd row, " in capsys.readouterr().out
    assert main.run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tables"]["files"], told["tables"]["there"]) == (0, 1)
    assert [row["id"] for row in rows_of(spark, tables, "events")] == ["a"]
    assert [row["odd"] for row in rows_of(spark, tables, "odd")] == ["not an event"]


def test_the_command_stores_dead_letters(spark, post, tables, capsys):
    command = ["spark", "dlq", "list", "--tables", str(tables)]
    assert main.run(command) == 0
    assert f"wrote 36 dead letters of 2 queues to {tables}" in capsys.readouterr().err
    assert main.run([*command, "--where", "true"]) == 2
    assert "--tables writes all dead letters" in capsys.readouterr().err
    assert read_table(spark, tables, "dead_letters").rows.count() == 36


def test_without_the_library_one_line_says_what_to_install(tmp_path):
    """Before Spark starts; and nothing else of the pipeline needs it."""
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'deltalake':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from aztask.spark import compact, place_of\n"
        "from aztask.spark.tables.tablefiles import ReadFile, WritePortion, WriteRows\n"
        "from aztask.operate.cli.main import run\n"
        "sys.exit(run(['spark', 'compact', sys.argv[1], '--tables', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 4
    assert "deltalake is not installed: pip install" in ended.stderr
    assert "aztask[delta]" in ended.stderr


def test_tables_in_a_container(spark, blobs, tmp_path, capfd):
    """Written by executors through azure-storage-blob, committed by the driver; no key shows."""

    draw = random.Random(3)
    write_log(tmp_path / "log", [random_event(draw, number) for number in range(500)])
    log = place_of(tmp_path / "log")
    compact(None, log, now=2e9)
    tables = place_of("tables/one", blobs)
    with container_client(tables.address()) as client:
        client.create_container()
    report = append_events(spark, log, tables)
    assert (report.rows, report.files) == (500, 3)
    assert append_events(spark, log, tables).files == 0
    read = read_table(spark, tables, "events")
    assert sorted(row["id"] for row in read.rows.collect()) == sorted(f"e-{n}" for n in range(500))
    since = read_table(spark, tables, "events", since=0)
    assert since.rows.count() == 500
    assert read.rows.schema == since.rows.schema
    assert KEY not in "".join(capfd.readouterr())
    assert KINDS.keys() == {"events", "odd", "results", "dead_letters"}
