"""The Spark session and its Python workers."""

import gc
import sys

import pytest
from pyspark import SparkConf

from aztask.spark import get_session, session, workers


def test_python_workers_run_this_interpreter(spark):
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert found == [sys.executable]


def test_python_workers_are_forked_by_our_daemon(spark):
    """And from what it has imported, which no task's collection of garbage goes through."""

    def look(_):
        return sys.orig_argv, gc.get_freeze_count(), set(workers.SHARED) <= set(sys.modules)

    (found,) = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert session.WORKERS in found[0]
    assert workers.ALONE not in found[0]
    assert found[1] > 50_000
    assert found[2]


def test_no_worker_reads_an_archive_again(spark):
    """As it would at its first task, each that was ever looked into."""

    def kept(_):
        return [name for name in (*sys.path, *sys.path_importer_cache) if "/pyspark/" in name]

    (found,) = spark.sparkContext.parallelize([0], 1).map(kept).collect()
    assert found
    assert [name for name in found if workers.ARCHIVE.search(name)] == []


@pytest.mark.parametrize("name", ["SPARK_HOME", "PYSPARK_PYTHON"])
def test_what_the_surroundings_choose_is_left_alone(monkeypatch, name):
    module = session.DAEMON_MODULE
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    assert module in session.own_workers(SparkConf(loadDefaults=False))
    assert session.own_workers(SparkConf(loadDefaults=False).set(module, "theirs")) == {}
    monkeypatch.setenv(name, "/opt/other")
    assert session.own_workers(SparkConf(loadDefaults=False)) == {}


def test_the_active_session_is_used_as_it_is(spark):
    assert get_session(master="local[1]") is spark
    assert spark.sparkContext.master == "local[2]"


def test_times_are_utc(spark):
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
