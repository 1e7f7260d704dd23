"""``submit`` and ``format("aztask")`` on the local broker, on a real Spark."""

from datetime import timedelta
from itertools import count

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from aztask import App
from aztask.errors import (
    ConfigurationError,
    InvalidQueueName,
    SubmitFailed,
    UnknownTask,
)
from aztask.spark import submit, task_id

_names = count(1)


@pytest.fixture
def queue():
    """A queue of the test's own."""
    return f"queue-{next(_names)}"


@pytest.fixture(scope="module")
def files(spark):
    """1,000 rows in 4 partitions; the columns are not in the order of the task's arguments."""
    rows = spark.range(0, 1000, 1, 4)
    return rows.select(
        F.col("id").cast("int").alias("width"), F.concat(F.lit("p"), "id").alias("path")
    ).cache()


def messages(shop, queue):
    """{task id: (args, kwargs)} of what is in a queue, and how many messages there are."""
    found, after, total = {}, None, 0
    while page := shop.app.broker.peek(queue, after=after, limit=500):
        for peeked in page:
            message = shop.app.codec.from_envelope(peeked.envelope, queue)
            found[message.id] = shop.app.codec.decode_arguments(message)
            total += 1
        after = page[-1].position
    return found, total


def write(files, queue, **options):
    given = {
        "app": "spark_shop",
        "task": "shop.resize",
        "key": "path",
        "submission_id": "one",
        "queue": queue,
    }
    return files.write.format("aztask").options(**{**given, **options})


def test_every_row_is_one_task(shop, files, queue):
    report = submit(files, shop.resize, key="path", submission_id="one", queue=queue)
    assert (report.rows, report.sent, report.retried, report.failed) == (1000, 1000, 0, 0)
    assert (report.partitions, report.checked, report.queue) == (4, True, queue)
    found, total = messages(shop, queue)
    assert total == 1000
    assert found == {
        task_id("one", f"p{n}"): ((), {"path": f"p{n}", "width": n}) for n in range(1000)
    }


def test_a_rerun_sends_the_same_ids(shop, files, queue):
    for _ in range(2):
        submit(files, shop.resize, key="path", submission_id="one", queue=queue, check_keys=False)
    found, total = messages(shop, queue)
    assert (len(found), total) == (1000, 2000)


def test_the_data_source_does_the_same(shop, files, queue):
    write(files, queue).mode("append").save()
    found, total = messages(shop, queue)
    assert total == 1000
    assert found[task_id("one", "p7")] == ((), {"path": "p7", "width": 7})


def test_other_names_and_options(shop, files, queue):
    report = submit(
        files,
        "shop.resize",
        app="spark_shop",
        key="width",
        submission_id="two",
        queue=queue,
        columns={"path": "path", "width": "width", "quality": "width"},
        rate=5000.0,
        delay=timedelta(minutes=1),
        expires=timedelta(hours=1),
    )
    assert (report.sent, report.partitions) == (1000, 2)
    assert report.seconds >= 1000 / 5000.0
    assert shop.app.broker.stats(queue).scheduled == 1000
    found, _ = messages(shop, queue)
    assert found[task_id("two", 5)] == ((), {"path": "p5", "width": 5, "quality": 5})


def test_a_name_alone_needs_the_columns(shop_folder, shop, files, queue):
    broker = f"local://{shop_folder}/queues.db"
    about = {"key": "path", "submission_id": "one", "queue": queue, "broker": broker}
    with pytest.raises(ConfigurationError, match="name the columns"):
        submit(files, "far.away", **about)
    assert submit(files, "far.away", columns=["path"], **about).sent == 1000
    found, _ = messages(shop, queue)
    assert found[task_id("one", "p1")] == ((), {"path": "p1"})


def test_a_dry_run_sends_nothing(shop, files, queue):
    report = submit(files, shop.resize, key="path", submission_id="one", queue=queue, dry_run=True)
    assert (report.rows, report.sent, report.dry_run) == (1000, 1000, True)
    assert queue not in shop.app.broker.queues()


def test_an_empty_table_is_no_failure(shop, spark, files, queue):
    report = submit(files.limit(0), shop.resize, key="path", submission_id="one", queue=queue)
    assert (report.rows, report.sent) == (0, 0)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (lambda df: df.withColumnRenamed("width", "widht"), {}, ConfigurationError, "'width'"),
        (lambda df: df.drop("width"), {}, ConfigurationError, "needs 'width'"),
        (lambda df: df, {"key": "pth"}, ConfigurationError, "no key column 'pth'"),
        (lambda df: df.union(df), {}, ConfigurationError, "1,000 different values in 2,000"),
        (
            lambda df: df.withColumn("path", F.when(F.col("width") > 2, F.col("path"))),
            {},
            ConfigurationError,
            "is null in 3 of 1,000 rows",
        ),
        (
            lambda df: df.withColumn("width", F.expr("make_ym_interval(width % 10, 1)")),
            {},
            ConfigurationError,
            "interval year to month",
        ),
        (
            lambda df: df.withColumn("width", F.col("width").cast("string")),
            {},
            ConfigurationError,
            "'width' is of type string, and task 'shop.resize' takes width: int; cast it to bigint",
        ),
        (lambda df: df, {"rate": 0.0}, ConfigurationError, "rate takes a number"),
        (lambda df: df, {"submission_id": ""}, ConfigurationError, "submission_id is empty"),
        (lambda df: df, {"app": "nosuch"}, ConfigurationError, "no module 'nosuch'"),
        (lambda df: df, {"task": "shop.resise"}, UnknownTask, "Did you mean 'shop.resize'"),
        (lambda df: df, {"queue": "NO QUEUE"}, InvalidQueueName, "cannot name a queue"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_said_and_nothing_is_sent(
    shop, files, queue, change, options, error, words
):
    given = {
        "task": "shop.resize",
        "app": "spark_shop",
        "key": "path",
        "submission_id": "one",
        "queue": queue,
        **options,
    }
    with pytest.raises(error, match=words) as caught:
        submit(change(files), **given)
    assert len(str(caught.value).splitlines()) == 1
    assert queue not in shop.app.broker.queues()


@pytest.mark.parametrize(
    ("change", "mode", "options", "words"),
    [
        (lambda df: df, "overwrite", {}, r"aztask\.errors\.ConfigurationError: a queue cannot be"),
        (lambda df: df, None, {}, 'cannot be written in the "ErrorIfExists" mode'),
        (lambda df: df.withColumnRenamed("width", "widht"), "append", {}, "Did you mean 'width'"),
        (
            lambda df: df.withColumn("path", F.lit(None).cast("string")),
            "append",
            {},
            "1,000 of 1,000 rows could not be sent .*'path' is null: a row needs a key",
        ),
    ],
    ids=range(4),
)
def test_the_data_source_says_it_too(shop, files, queue, change, mode, options, words):
    writer = write(change(files), queue, **options)
    with pytest.raises(PySparkException, match=words):
        (writer.mode(mode) if mode else writer).save()
    assert queue not in shop.app.broker.queues()


def test_more_partitions_than_share_the_rate_are_refused(shop, files, queue):
    with pytest.raises(PySparkException, match=r"df\.coalesce\(2\)"):
        write(files, queue, rate="100000", writers="2").mode("append").save()
    write(files.coalesce(2), queue, rate="100000", writers="2").mode("append").save()
    assert len(messages(shop, queue)[0]) == 1000


def test_reading_is_refused(spark, shop):
    with pytest.raises(PySparkException, match="only writes"):
        spark.read.format("aztask").load()


@pytest.fixture(scope="module")
def gaps(files):
    """The files, with a quality that is null in every third row and a width in every tenth."""
    width = F.col("width")
    return files.withColumn("quality", F.when(width % 3 > 0, width)).withColumn(
        "width", F.when(width % 10 > 0, width)
    )


def test_a_null_is_the_default_of_its_argument(shop, gaps, queue):
    table = gaps.where("width IS NOT NULL")
    report = submit(table, shop.resize, key="path", submission_id="one", queue=queue)
    assert (report.rows, report.sent, report.failed) == (900, 900, 0)
    found, _ = messages(shop, queue)
    assert found[task_id("one", "p1")] == ((), {"path": "p1", "width": 1, "quality": 1})
    assert found[task_id("one", "p3")] == ((), {"path": "p3", "width": 3})
    assert sum("quality" in kwargs for _, kwargs in found.values()) == 600


def test_a_null_that_no_default_stands_in_for_is_found_before_anything_is_sent(shop, gaps, queue):
    about = {"key": "path", "submission_id": "one", "queue": queue}
    words = "column 'width' is null in 100 of 1,000 rows, and task 'shop.resize' takes width: int"
    with pytest.raises(ConfigurationError, match=words):
        submit(gaps, shop.resize, **about)
    assert queue not in shop.app.broker.queues()
    with pytest.raises(SubmitFailed, match="'width' is null, and width: int takes no") as caught:
        submit(gaps, shop.resize, check_keys=False, **about)
    assert (caught.value.report.sent, caught.value.report.failed) == (900, 100)
    with pytest.raises(PySparkException, match="'width' is null, and width: int takes no None"):
        write(gaps, queue).mode("append").save()
    assert messages(shop, queue)[1] == 1800


def test_names_that_spark_would_not_find(shop, spark, queue):
    """A dot is a field of a struct to Spark, and it finds names without their case."""
    rows = spark.createDataFrame([(1, "x", True), (2, "y", None)], ["N", "n", "a.b"])
    about = {"submission_id": "one", "queue": queue}
    report = submit(rows, shop.anything, key="N", **about)
    assert (report.sent, report.checked) == (2, True)
    found, _ = messages(shop, queue)
    assert found[task_id("one", 1)] == ((), {"N": 1, "n": "x", "a.b": True})
    submit(rows, shop.anything, key="n", **about)
    assert task_id("one", "y") in messages(shop, queue)[0]
    with pytest.raises(ConfigurationError, match=r"'a\.b' is of type boolean"):
        submit(rows, shop.anything, key="a.b", **about)


def test_a_null_key_fails_its_row_where_keys_are_not_checked(shop, files, queue):
    gap = files.withColumn("path", F.when(F.col("width") != 500, F.col("path")))
    about = {"key": "path", "submission_id": "one", "queue": queue, "check_keys": False}
    with pytest.raises(
        SubmitFailed, match=r"the key column 'path' is null.*submit again"
    ) as caught:
        submit(gap, shop.resize, **about)
    assert (caught.value.report.sent, caught.value.report.failed) == (999, 1)
    assert messages(shop, queue)[1] == 999


def test_each_step_is_told(shop, files, queue):
    steps = []
    submit(files, shop.resize, key="path", submission_id="one", queue=queue, progress=steps.append)
    assert steps == ["checking the keys", "sending"]


def test_a_row_that_cannot_travel_fails_alone_and_loudly(shop, files, queue):
    wide = files.withColumn(
        "path", F.when(F.col("width") == 17, F.repeat("path", 6_000_000)).otherwise(F.col("path"))
    )
    with pytest.raises(SubmitFailed, match=r"1 of 1,000 rows could not be sent.*bytes") as caught:
        submit(wide, shop.resize, key="width", submission_id="one", queue=queue)
    report = caught.value.report
    assert (report.rows, report.sent, report.failed) == (1000, 999, 1)
    assert messages(shop, queue)[1] == 999


def test_a_worker_module_that_is_missing_is_named(spark, files, queue):
    spark.sparkContext.setLogLevel("OFF")
    with pytest.raises(ConfigurationError, match="executors cannot import the app"):
        submit(files, _task_of_this_module(), key="path", submission_id="one", queue=queue)


def _task_of_this_module(**options):
    app = App("elsewhere", broker="local://:memory:", **options)

    def resize(path, width):
        pass

    return app.task(resize)


def test_a_task_of_no_module_goes_with_an_address(shop_folder, shop, files, queue):
    """As in a notebook: the task is known here, and by its name to the workers."""
    about = {"key": "path", "submission_id": "one", "queue": queue}
    broker = f"local://{shop_folder}/queues.db"
    assert submit(files, _task_of_this_module(), broker=broker, **about).sent == 1000
    for options in ({"signing_keys": ["0123456789abcdef" * 2]}, {"serializer": "json"}):
        with pytest.raises(ConfigurationError, match="executors get only by importing it"):
            submit(files, _task_of_this_module(**options), broker=broker, **about)


def test_a_stream_is_sent_elsewhere(spark, shop):
    rows = spark.readStream.format("rate").load()
    with pytest.raises(ConfigurationError, match=r"use aztask\.spark\.stream"):
        submit(rows, shop.resize, key="value", submission_id="one")
