"""Streams of tasks: a query is really restarted, and sends a batch again."""

import json
import time

import pytest
from drain import drained, executions

from aztask.errors import ConfigurationError, SubmitFailed
from aztask.spark import stream, task_id
from aztask.spark.session import ended_well
from aztask.spark.submission.submission import read_stream

SCHEMA = "path STRING, width INT"


def put(folder, name, prefix, first, count):
    """A file of rows, which appears at once."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps({"path": f"{prefix}{n}", "width": n}) for n in range(first, first + count))
    hidden = folder / f".{name}"
    hidden.write_text("\n".join(lines) + "\n")
    hidden.rename(folder / name)


def rows(spark, folder):
    return read_stream(spark, str(folder), schema=SCHEMA, kind="json", max_files=1)


def finished(query):
    while not ended_well(query, 60):
        pass


def ids(shop, queue):
    return [each.envelope.correlation_id for each in shop.app.broker.peek(queue, limit=1000)]


def test_a_restarted_query_sends_a_batch_again_under_the_same_ids(
    spark, shop, shop_folder, tmp_path
):
    """What Spark notes of a finished batch is taken away, as if the driver had died before it."""
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    put(source, "a.json", "stream-", 0, 100)
    put(source, "b.json", "stream-", 100, 100)
    about = {"key": "path", "checkpoint": str(checkpoint), "queue": "stream"}
    first = stream(rows(spark, source), shop.resize, available_now=True, **about)
    finished(first)
    assert len(ids(shop, "stream")) == 200
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    put(source, "c.json", "stream-", 200, 100)
    second = stream(rows(spark, source), shop.resize, available_now=True, **about)
    finished(second)
    assert second.id == first.id
    found = ids(shop, "stream")
    assert len(found) == 400  # batch 1 came twice
    assert set(found) == {task_id(first.id, f"stream-{n}") for n in range(300)}
    drained("stream", "-c", "2")
    runs = executions(shop_folder, "stream-")
    assert len(runs) == 300
    assert set(runs.values()) == {1}


def test_a_key_that_comes_in_each_batch(spark, shop, tmp_path):
    source = tmp_path / "in"
    put(source, "a.json", "again-", 0, 3)
    put(source, "b.json", "again-", 0, 3)
    about = {"key": "path", "submission_id": "hourly", "available_now": True}
    for unique in ("batch", "stream"):
        checkpoint = str(tmp_path / unique)
        finished(
            stream(
                rows(spark, source),
                shop.resize,
                checkpoint=checkpoint,
                unique=unique,
                queue=unique,
                **about,
            )
        )
    assert len(set(ids(shop, "batch"))) == 6
    assert task_id("hourly/1", "again-2") in ids(shop, "batch")
    assert len(ids(shop, "stream")) >= 6
    assert task_id("hourly", "again-2") in ids(shop, "stream")


def test_a_rate_holds_for_streams(spark, shop, tmp_path):
    source = tmp_path / "in"
    put(source, "a.json", "paced-", 0, 100)
    began = time.monotonic()
    finished(
        stream(
            rows(spark, source),
            shop.resize,
            key="path",
            checkpoint=str(tmp_path / "checkpoint"),
            queue="paced",
            rate=100.0,
            writers=1,
            available_now=True,
        )
    )
    assert time.monotonic() - began >= 1.0
    assert len(ids(shop, "paced")) == 100


def test_what_goes_wrong_ends_the_query(spark, shop, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.json").write_text('{"path": null, "width": 1}\n')
    query = stream(
        rows(spark, source),
        shop.resize,
        key="path",
        checkpoint=str(tmp_path / "checkpoint"),
        queue="nulls",
        available_now=True,
    )
    with pytest.raises(SubmitFailed, match="key column 'path' is null: a row needs a key"):
        finished(query)
    assert "nulls" not in shop.app.broker.queues()


def test_what_does_not_fit_is_said_before_it_starts(spark, shop, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    table = rows(spark, source)
    about = {"checkpoint": str(tmp_path / "checkpoint"), "key": "path"}
    with pytest.raises(ConfigurationError, match="needs 'width'"):
        stream(table.drop("width"), shop.resize, **about)
    with pytest.raises(ConfigurationError, match="is not a stream"):
        stream(spark.range(1), shop.resize, **about)
    with pytest.raises((ConfigurationError, SubmitFailed), match="Did you mean 'queue'"):
        stream(table, shop.resize, queu="x", **about)
