"""One Spark session for all tests of the pipeline.

A test file has the name of its module in `aztask.spark`, with its package where two modules share a
name (`test_event_lines.py`: events/lines.py). Files named after a promise test several modules.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from azurite import KEY, free_port, running
from places import BUS_KEY, blobs_at, bus_at, queues_at
from programs import need_java
from realrun import made_once
from xdist.scheduler import LoadScopeScheduling

import aztask.spark

HERE = Path(__file__).parent
# A session takes long to start. One process needs none: it runs the files that start sessions of
# their own, and those without Spark.
OWN = (
    *("test_recording.py", "test_cluster.py", "test_example.py", "test_compaction.py"),
    *("test_datasource.py", "test_event_lines.py", "test_packing.py", "test_sent_events.py"),
    *("test_charts.py", "test_failures.py", "test_ids.py", "test_kind.py", "test_matching.py"),
    *("test_needs.py", "test_pace.py", "test_queries.py"),
    *("test_recommendation.py", "test_report.py", "test_report_page.py", "test_submission.py"),
    *("test_values.py", "test_workers.py"),
)
# Files that mostly wait run while all processes have work; then those that take long.
WAITING = (
    *("test_submit_services.py", "test_deadletters.py", "test_recommending.py"),
    *("test_real_run.py", "test_credentials.py", "test_submit_kill.py"),
)
ORDER = (*OWN, *WAITING, "test_submit.py", "test_event_frames.py", "test_event_streams.py")


class Scheduler(LoadScopeScheduling):
    """Each file runs in one process; the files of OWN share one that runs nothing else."""

    def _split_scope(self, nodeid):
        path = nodeid.split("::", 1)[0]
        return "own" if path.rpartition("/")[2] in OWN else path

    def _assign_work_unit(self, node):
        if len(self.nodes) == 1 or "own" not in self.assigned_work.get(node, {}):
            super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The scheduler of several processes, whatever ``--dist`` says."""
    return Scheduler(config, log)


def pytest_collection_modifyitems(items):
    """Sort the files so that no process is left alone with a long file at the end."""
    last = len(ORDER)
    items.sort(key=lambda item: ORDER.index(name) if (name := item.path.name) in ORDER else last)


@pytest.fixture(scope="session", autouse=True)
def java():
    """What Spark runs on, before anything looks for it."""
    need_java()


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory):
    """The folder with the queues, results and ledger of `spark_shop`.

    The environment is set before Spark starts, because Python workers inherit it at that moment.
    """
    folder = tmp_path_factory.mktemp("shop")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(HERE), *(str(Path(each).resolve()) for each in known if each)])
    names = ("AZURITE", "BLOB", "BUSY", "BUS")
    ports = {name: free_port() for name in names}
    variables = {
        "PYTHONPATH": path,
        "SPARK_SHOP_FOLDER": str(folder),
        "SPARK_SHOP_BROKER": f"local://{folder}/queues.db",
        "SPARK_SHOP_AZURITE_PORT": str(ports["AZURITE"]),
        "SPARK_SHOP_AZURITE": queues_at(ports["AZURITE"]),
        "SPARK_SHOP_BUSY_PORT": str(ports["BUSY"]),
        "SPARK_SHOP_BUSY": queues_at(ports["BUSY"]),
        "SPARK_SHOP_BLOB_PORT": str(ports["BLOB"]),
        "SPARK_SHOP_BLOB": blobs_at(ports["BLOB"]),
        "SPARK_SHOP_BUS_PORT": str(ports["BUS"]),
        "SPARK_SHOP_BUS": bus_at(ports["BUS"]),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield folder
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@contextmanager
def errors_to(path):
    """Redirect the stderr of processes that start in the block to a file."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.fixture(scope="session")
def spark_log(shop_folder):
    """The log of Spark and its Python workers. At the end no key may be in it."""
    path = shop_folder / "spark.log"
    yield path
    logged = path.read_text(errors="replace")
    assert KEY not in logged
    assert BUS_KEY not in logged


@pytest.fixture(scope="session")
def spark(shop_folder, spark_log):
    """A local Spark session with two cores."""
    with errors_to(spark_log):
        session = aztask.spark.get_session(
            name="aztask-tests",
            master="local[2]",
            conf={"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1"},
        )
    aztask.spark.register(session)
    yield session
    session.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A failure shows the end of Spark's log."""
    report = yield
    log = item.funcargs.get("spark_log") if hasattr(item, "funcargs") else None
    if report.failed and log is not None and log.exists():
        report.sections.append(("Spark", log.read_text(errors="replace")[-5000:]))
    return report


@pytest.fixture(scope="session")
def real_run(tmp_path_factory):
    """(the directory of a real run's events, the number of its tasks).

    The first process that asks makes it: with several, that is the one without a Spark session.
    """
    base = tmp_path_factory.getbasetemp()
    return made_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "real-run")


@pytest.fixture(scope="session")
def shop(shop_folder):
    """The module `spark_shop`, imported in this process."""
    sys.path.insert(0, str(HERE))
    import spark_shop  # noqa: PLC0415  # it reads the environment that `shop_folder` makes

    yield spark_shop
    spark_shop.app.close()
    sys.path.remove(str(HERE))


@pytest.fixture(scope="session")
def azurite(shop_folder):
    """Azurite at the address in the executors' environment variable SPARK_SHOP_AZURITE."""
    port = int(os.environ["SPARK_SHOP_AZURITE_PORT"])
    with running(shop_folder / "azurite", port=port) as server:
        yield server


@pytest.fixture(scope="session")
def blobs(spark, shop_folder):
    """The variable with the connection string of Azurite's blobs, which executors have too."""
    port = int(os.environ["SPARK_SHOP_BLOB_PORT"])
    with running(shop_folder / "azurite-blob", port=port, service="blob"):
        yield "SPARK_SHOP_BLOB"
