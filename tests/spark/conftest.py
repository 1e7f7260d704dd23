"""One Spark session for all tests of the pipeline. Without Java they fail, and say why."""

import os
import sys
from pathlib import Path

import pytest
from azurite import ACCOUNT, KEY, free_port, running

from aztask.spark import get_session, register

HERE = Path(__file__).parent
LONGEST = (
    *("test_deadletters.py", "test_example.py", "test_submit.py", "test_real_run.py"),
    *("test_submit_services.py", "test_cli_submit.py", "test_event_frames.py"),
)


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no process is alone with one at the end."""
    last = len(LONGEST)
    items.sort(
        key=lambda item: LONGEST.index(name) if (name := item.path.name) in LONGEST else last
    )


def storage_at(port):
    """The connection string of Azurite, or of what stands in front of it."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"QueueEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory):
    """Where `spark_shop` has its queues, results and ledger: told before Spark starts, for its
    Python workers inherit the environment of that moment.
    """
    folder = tmp_path_factory.mktemp("shop")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(HERE), *(str(Path(each).resolve()) for each in known if each)])
    names = ("AZURITE", "BLOB", "BUSY", "BUS")
    ports = {name: free_port() for name in names}
    told = {
        "PYTHONPATH": path,
        "SPARK_SHOP_FOLDER": str(folder),
        "SPARK_SHOP_BROKER": f"local://{folder}/queues.db",
        "SPARK_SHOP_AZURITE_PORT": str(ports["AZURITE"]),
        "SPARK_SHOP_AZURITE": storage_at(ports["AZURITE"]),
        "SPARK_SHOP_BUSY_PORT": str(ports["BUSY"]),
        "SPARK_SHOP_BUSY": storage_at(ports["BUSY"]),
        "SPARK_SHOP_BLOB_PORT": str(ports["BLOB"]),
        "SPARK_SHOP_BLOB": (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint=http://127.0.0.1:{ports['BLOB']}/{ACCOUNT};"
        ),
        "SPARK_SHOP_BUS_PORT": str(ports["BUS"]),
        "SPARK_SHOP_BUS": (
            f"Endpoint=sb://127.0.0.1:{ports['BUS']};SharedAccessKeyName=RootManageSharedAccessKey;"
            "SharedAccessKey=c3BhcmstdGVzdC1rZXktMDEyMzQ1Njc4OQ==;UseDevelopmentEmulator=true"
        ),
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    yield folder
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def spark(shop_folder):
    """A local session with two cores."""
    session = get_session(
        name="aztask-tests",
        master="local[2]",
        conf={"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1"},
    )
    register(session)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shop(shop_folder):
    """The module `spark_shop` in this process."""
    sys.path.insert(0, str(HERE))
    import spark_shop  # noqa: PLC0415  # it reads the environment that `shop_folder` makes

    yield spark_shop
    spark_shop.app.close()
    sys.path.remove(str(HERE))


@pytest.fixture(scope="session")
def azurite(shop_folder):
    """Azurite, where the executors' environment variable SPARK_SHOP_AZURITE says."""
    port = int(os.environ["SPARK_SHOP_AZURITE_PORT"])
    with running(shop_folder / "azurite", port=port) as server:
        yield server


@pytest.fixture(scope="session")
def blobs(spark, shop_folder):
    """Azurite's blobs: the variable with its connection string, which executors have too."""
    port = int(os.environ["SPARK_SHOP_BLOB_PORT"])
    with running(shop_folder / "azurite-blob", port=port, service="blob"):
        yield "SPARK_SHOP_BLOB"
