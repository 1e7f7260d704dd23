"""Imports are late, and one line says what is missing."""

import importlib.util
import subprocess
import sys

import pytest

import aztask.spark
from aztask.errors import ConfigurationError
from aztask.operate.cli import main
from aztask.spark import needs


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


def test_without_jinja2_one_line_says_what_to_install_before_spark_starts(
    monkeypatch, tmp_path, capsys
):
    find = importlib.util.find_spec
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == "jinja2" else find(name))
    needs.check_installed()  # everything else runs without it
    page = tmp_path / "page.html"
    assert main.run(["spark", "stats", str(tmp_path), "--html", str(page)]) == 4
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == 'aztask: error: jinja2 is not installed: pip install "aztask[spark]"\n'
    assert not page.exists()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'sumbit'"):
        _ = aztask.spark.sumbit


def imported(code, *names):
    """Which of the modules `code` imports."""
    code += f"\nimport sys; print(*[name for name in {names} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ended.stdout.split()


def test_spark_is_not_imported_with_the_package():
    package = "import aztask.app, aztask.spark, aztask.spark.cli"
    assert imported(package, "pyspark", "pyarrow", "pandas", "jinja2") == []


def test_python_workers_that_plan_import_little():
    """Spark starts several for each read; these two would take two thirds of their time."""
    source = "import aztask.spark.events.source, aztask.spark.events.stream"
    assert imported(source, "pyarrow", "pandas", "azure.storage.blob") == ["pyarrow"]
