"""The session, and what is said where Spark cannot be had."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkConf

import aztask.spark
from aztask.errors import ConfigurationError
from aztask.spark import get_session, needs, session, workers


def test_python_workers_run_this_interpreter(spark):
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert found == [sys.executable]


def test_python_workers_are_forked_by_our_daemon(spark):
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.orig_argv).collect()
    assert session.WORKERS in found[0]


@pytest.mark.parametrize(
    ("module", "archive"), [(session.WORKERS, False), ("pyspark.daemon", True)]
)
def test_our_daemon_imports_nothing_from_the_archives(module, archive):
    """Beside Spark's own. It ends when its standard input does, as with its Java machine."""
    folder = Path(pyspark.__file__).parent / "python" / "lib"
    path = [*map(str, folder.glob("*.zip")), str(Path(aztask.__file__).parents[1])]
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


@pytest.mark.parametrize("name", ["SPARK_HOME", "PYSPARK_PYTHON"])
def test_what_the_surroundings_choose_is_left_alone(monkeypatch, name):
    module = session.DAEMON_MODULE
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    assert module in session.own_workers(SparkConf(loadDefaults=False))
    assert session.own_workers(SparkConf(loadDefaults=False).set(module, "theirs")) == {}
    monkeypatch.setenv(name, "/opt/other")
    assert session.own_workers(SparkConf(loadDefaults=False)) == {}


def test_archives_are_dropped_only_where_pyspark_is_found_without_them():
    archives = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9.9-src.zip"]
    assert workers.without_archives(["/here", *archives, *sys.path]) == ["/here", *sys.path]
    assert workers.without_archives(["/here", *archives]) == ["/here", *archives]


def test_the_active_session_is_used_as_it_is(spark):
    assert get_session(master="local[1]") is spark
    assert spark.sparkContext.master == "local[2]"


def test_times_are_utc(spark):
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_without_java_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"Spark needs Java 17 .* apt-get install openjdk"):
        needs.check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="where there is no bin/java"):
        needs.check_java()


def test_without_pyspark_one_line_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == "pyspark" else find(name))
    monkeypatch.delitem(vars(aztask.spark), "get_session", raising=False)
    with pytest.raises(ConfigurationError, match=r"pyspark is not installed: pip install"):
        _ = aztask.spark.get_session


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        _ = aztask.spark.sumbit


def imported(code, *names):
    """Which of the modules `code` imports."""
    code += f"\nimport sys; print(*[name for name in {names} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_spark_is_not_imported_with_the_package():
    package = "import aztask.app, aztask.spark, aztask.cli.spark"
    assert imported(package, "pyspark", "pyarrow", "pandas") == []


def test_python_workers_that_plan_import_little():
    """Spark starts several for each read; these two would take two thirds of their time."""
    source = "import aztask.spark.eventsource, aztask.spark.eventstream"
    assert imported(source, "pyarrow", "pandas", "azure.storage.blob") == ["pyarrow"]
