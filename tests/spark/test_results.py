"""``results``: one row for each key of a submission, after real workers."""

import json
import time
from dataclasses import replace
from itertools import count

import pyarrow as pa
import pytest
from drain import drained
from pyspark.sql import functions as F

from aztask.errors import ConfigurationError, ResultTimeout, SubmitFailed
from aztask.operate.cli import main
from aztask.spark import Target, results, submit, task_id, wait
from aztask.spark.submission.results import _with_pairs, manifest_path
from aztask.stores.records.base import RunKey, Start

TARGET = Target(app="spark_shop:app")
_names = count(1)


@pytest.fixture
def queue():
    """A queue of the test's own, which names its submission, too."""
    return f"results-{next(_names)}"


def states(frame):
    return {row["key"]: row["state"] for row in frame.collect()}


@pytest.fixture(scope="module")
def done(spark, shop, tmp_path_factory):
    """The manifest of twenty tasks that have ended; number 0 has failed."""
    manifest = str(tmp_path_factory.mktemp("manifest") / "m")
    rows = spark.range(20).withColumnRenamed("id", "number")
    about = {"key": "number", "submission_id": "done", "queue": "results-done"}
    submit(rows, shop.squared, manifest=manifest, **about)
    before = results(spark, "done", manifest=manifest, target=TARGET)
    assert states(before) == dict.fromkeys(range(20), "unaccounted")
    drained("results-done", "-c", "2")
    return manifest


def test_keys_are_looked_up_in_ranges_of_ids_where_the_store_is_far(spark, done, monkeypatch):
    """Each once, and one without a value, too; every Spark task has its ids in order."""
    monkeypatch.setattr(Target, "has_remote_results", lambda self: True)
    asked = spark.createDataFrame([(n,) for n in [*range(25), None]], "number BIGINT")
    found = results(spark, "done", frame=asked, key="number", target=TARGET)
    rows = found.withColumn("part", F.spark_partition_id()).collect()
    assert sorted(str(row["key"]) for row in rows) == sorted(map(str, [*range(25), None]))
    assert sum(row["state"] == "succeeded" for row in rows) == 19
    parts = [[row["task_id"] for row in rows if row["part"] == part] for part in range(2)]
    ids = [[each for each in part if each is not None] for part in parts]
    assert all(part == sorted(part) and part for part in ids)
    assert max(ids[0]) < min(ids[1])


def test_where_results_are_decides_how_they_are_looked_up(monkeypatch, tmp_path):
    here = f"local://{tmp_path}/queues.db"
    assert not Target(broker=here, results=here).has_remote_results()
    account = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=aGVsbG8=;"
    monkeypatch.setenv("FAR", f"{account}TableEndpoint=https://a.table.core.windows.net/;")
    assert Target(broker=here, results_env="FAR").has_remote_results()
    assert Target(broker_env="NOT_HERE").has_remote_results(), "it cannot tell"


def test_parquet_tasks_parquet(spark, done, tmp_path):
    found = results(spark, "done", manifest=done, schema="INT", target=TARGET)
    found.write.parquet(str(tmp_path / "out"))
    rows = {row["key"]: row for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert rows.keys() == set(range(20))
    assert {key: row["value"] for key, row in rows.items() if key} == {
        number: number * number for number in range(1, 20)
    }
    for key, row in rows.items():
        assert row["task_id"] == task_id("done", key)
        assert row["state"] == ("succeeded" if key else "failed")
        assert (row["attempts"], row["detail"], row["problem"]) == (1, None, None)
        assert row["worker"]
        assert row["started_at"] <= row["ended_at"]
    failed = rows[0]
    assert (failed["value"], failed["error_type"]) == (None, "ValueError")
    assert failed["error"] == "no number"


def test_the_frame_that_came_in_stands_for_the_manifest(spark, done):
    frame = spark.range(18, 22).withColumnRenamed("id", "a.b")
    found = results(spark, "done", frame=frame, key="a.b", target=TARGET)
    assert found.schema["key"].dataType == frame.schema["a.b"].dataType
    assert states(found) == {
        18: "succeeded",
        19: "succeeded",
        20: "unaccounted",
        21: "unaccounted",
    }
    assert {row["value"] for row in found.collect()} == {"324", "361", None}  # JSON


def test_the_results_stand_beside_the_table_that_was_submitted(spark, shop, queue):
    rows = [(1, "a", 0.5), (2, "b", None), (0, "c", 1.5)]
    frame = spark.createDataFrame(rows, "`a.b` INT, N STRING, n DOUBLE")
    columns = {"number": "a.b"}
    report = submit(
        frame, shop.squared, key="a.b", columns=columns, submission_id=queue, queue=queue
    )
    assert "plan" not in report.as_dict()
    assert {row["result"]["state"] for row in report.join(frame).collect()} == {"unaccounted"}
    drained(queue)
    twice = frame.union(frame).union(spark.createDataFrame([(None, "d", 2.0)], frame.schema))
    joined = report.join(twice, schema="INT", column="of the task")
    assert joined.columns == ["a.b", "N", "n", "of the task"]
    assert [each.dataType for each in joined.schema][:3] == [each.dataType for each in frame.schema]
    found = sorted(joined.collect(), key=lambda row: row[1])
    assert [row[0:3] for row in found] == [
        *sorted(rows * 2, key=lambda row: row[1]),
        (None, "d", 2.0),
    ]
    assert [row[3] and (row[3]["state"], row[3]["value"]) for row in found] == [
        *[("succeeded", 1)] * 2,
        *[("succeeded", 4)] * 2,
        *[("failed", None)] * 2,
        None,
    ]


def test_a_join_that_cannot_be_made_says_why(spark, shop, queue):
    frame = spark.createDataFrame([(1, "x")], "number INT, Result STRING")
    report = submit(
        frame, shop.squared, key="number", columns=["number"], submission_id=queue, queue=queue
    )
    with pytest.raises(ConfigurationError, match="the table has a column 'result': name another"):
        report.join(frame)
    with pytest.raises(ConfigurationError, match="there is no key column 'number'"):
        report.join(frame.select("Result"))
    with pytest.raises(ConfigurationError, match="of no submission of this program"):
        replace(report, plan=None).join(frame)


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ("BIGINT", 324, None),
        ("DOUBLE", 324.0, None),
        ("STRING", None, "the value is not of the type string"),
        ("DATE", None, "the value is not of the type date32[day]"),
        ("TINYINT", None, "the value is not of the type int8"),
        ("STRUCT<a: INT>", None, "the value is not of the type struct<a: int32>"),
    ],
)
def test_a_value_of_another_type_is_a_problem_of_its_row(spark, done, schema, value, problem):
    frame = spark.range(18, 19)
    found = results(spark, "done", frame=frame, key="id", schema=schema, target=TARGET)
    (row,) = found.collect()
    assert (row["state"], row["value"], row["problem"]) == ("succeeded", value, problem)


def test_maps_are_pairs_to_arrow():
    kind = pa.struct([("a", pa.list_(pa.map_(pa.string(), pa.map_(pa.string(), pa.int32()))))])
    value = {"a": [{"x": {"y": 1}}, None], "more": 2}
    (made,) = pa.array([_with_pairs(value, kind)], kind).to_pylist(maps_as_pydicts="strict")
    assert made == {"a": [{"x": {"y": 1}}, None]}


def test_what_has_not_ended_has_a_state_of_its_own(spark, shop, queue, tmp_path):
    rows = spark.range(1, 5).withColumnRenamed("id", "number")
    about = {"key": "number", "submission_id": queue, "queue": queue}
    submit(rows, shop.squared, expires=0.2, manifest=str(tmp_path), **about)
    store = shop.app.results
    start = Start(RunKey(task_id(queue, 1)), "shop.squared", queue, 1, "me#1", "w", time.time())
    store.start([start])
    assert shop.app.result(task_id(queue, 2)).cancel()
    found = results(spark, queue, manifest=str(tmp_path), target=TARGET)
    assert states(found) == {1: "open", 2: "cancelled", 3: "unaccounted", 4: "unaccounted"}
    (row,) = found.where("key = 1").collect()
    assert (row["detail"], row["attempts"], row["worker"]) == ("started", 1, "w")
    assert (row["ended_at"], row["value"]) == (None, None)
    seen = []
    with pytest.raises(ResultTimeout, match=r"3 of 4 tasks .*1 cancelled, 1 open, 2 unaccounted"):
        wait(found, timeout=0, every=0.1, progress=seen.append)
    assert seen == [{"open": 1, "cancelled": 1, "unaccounted": 2}]
    time.sleep(0.3)
    drained(queue)
    ended = states(found)
    assert (ended[3], ended[4]) == ("expired", "expired")


def test_the_manifest_is_there_before_anything_is_sent_and_a_rerun_adds_to_it(
    spark, shop, queue, tmp_path
):
    name, folder = f"{queue}/a b", str(tmp_path / "m")
    rows = spark.range(4).select(F.concat(F.lit("k"), "id").alias("path"), F.lit(1).alias("width"))
    about = {"key": "path", "submission_id": name, "queue": queue, "manifest": folder}
    without = rows.where("path < 'k2'").withColumn("width", F.lit(None).cast("int"))
    with pytest.raises(SubmitFailed, match="2 of 2 rows could not be sent"):
        submit(without, shop.resize, check_keys=False, **about)
    found = results(spark, name, manifest=folder, target=TARGET)
    assert states(found) == {"k0": "unaccounted", "k1": "unaccounted"}
    submit(rows, shop.resize, dry_run=True, **about)
    assert found.count() == 2
    submit(rows, shop.resize, **about)
    written = spark.read.parquet(manifest_path(folder, name))
    assert {row["key"]: row["id"] for row in written.collect()} == {
        f"k{n}": task_id(name, f"k{n}") for n in range(4)
    }
    assert results(spark, name, manifest=folder, target=TARGET).count() == 4


def test_a_null_key_is_unaccounted(spark, shop):
    frame = spark.createDataFrame([(None,)], "path STRING")
    (row,) = results(spark, "one", frame=frame, key="path", target=TARGET).collect()
    assert (row["state"], row["task_id"], row["problem"]) == (
        "unaccounted",
        None,
        "the key is null",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "in exactly one way"),
        ({"manifest": "/nosuch"}, "there is no manifest of submission 'one' in /nosuch"),
        ({"frame": None, "key": "pth"}, "no key column 'pth'"),
        ({"frame": None, "key": "path", "schema": "NUMBER OF"}, "schema is a type as in SQL"),
    ],
)
def test_what_is_wrong_is_said_before_a_job(spark, shop, options, words):
    if "frame" in options:
        options = {**options, "frame": spark.createDataFrame([("a",)], "path STRING")}
    with pytest.raises(ConfigurationError, match=words):
        results(spark, "one", target=TARGET, **options)


def test_the_command(spark, done, shop, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("AZTASK_APP", raising=False)
    about = ["spark", "results", "-A", "spark_shop", "--submission-id", "done"]
    out = str(tmp_path / "out")
    given = ["--manifest", done, "--schema", "INT", "--wait", "10s", "-o", out, "--json"]
    assert main.run([*about, *given]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"failed": 1, "succeeded": 19}
    assert "1 failed, 19 succeeded" in shown.err
    assert spark.read.parquet(out).count() == 20
    assert main.run([*about, *given]) == 4
    assert "already exists" in capsys.readouterr().err
    assert main.run([*about, "-o", out]) == 2
    assert "give --manifest, or --input and --key" in capsys.readouterr().err
