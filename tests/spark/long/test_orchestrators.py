"""The examples for Airflow and Dagster, each in an environment without aztask and Spark."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[3]
OWN = Path(sys.executable).parent
PATHS = {"a.png at 200", "b.png at 640", "c.png at 80", "d.png at 320", "e.png at 100"}


def environment(folder, package):
    """The programs of a new environment with this package alone."""
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, package], check=True)
    listed = subprocess.run([*pip[:3], "list"], capture_output=True, text=True, check=True).stdout
    assert package in listed
    assert "aztask" not in listed
    assert "pyspark" not in listed
    return folder / "bin"


@pytest.fixture
def shop(tmp_path):
    """The example's folder, with a worker."""
    folder = tmp_path / "shop"
    shutil.copytree(ROOT / "examples" / "orchestration", folder)
    command = [sys.executable, "-m", "aztask", "worker", "-A", "shop"]
    with (tmp_path / "worker.log").open("w") as log:
        worker = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    yield folder
    worker.terminate()
    assert worker.wait(60) == 0


def run(shop, programs, *command, **variables):
    told = {
        **os.environ,
        "SHOP": str(shop),
        "AZTASK": str(OWN / "aztask"),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }
    ended = subprocess.run(command, cwd=shop, env=told, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout + ended.stderr


def collected(shop):
    """The values of the one table that was written."""
    (done,) = shop.glob("thumbnails/*/*/_SUCCESS")
    rows = pq.read_table(done.parent).to_pylist()
    assert {row["state"] for row in rows} == {"succeeded"}
    return {row["value"].strip('"') for row in rows}


def test_a_dag_of_airflow(shop, tmp_path):
    programs = environment(tmp_path / "airflow", "apache-airflow")
    told = {
        "AIRFLOW_HOME": str(tmp_path / "home"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(shop),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    run(shop, programs, "airflow", "db", "migrate", **told)
    run(shop, programs, "airflow", "dags", "test", "thumbnails", **told)
    assert collected(shop) == PATHS


def test_assets_of_dagster(shop, tmp_path):
    programs = environment(tmp_path / "dagster", "dagster")
    home = tmp_path / "home"
    home.mkdir()
    command = ("dagster", "asset", "materialize", "--select", "*", "-f", "dagster_assets.py")
    run(shop, programs, *command, DAGSTER_HOME=str(home))
    assert collected(shop) == PATHS
