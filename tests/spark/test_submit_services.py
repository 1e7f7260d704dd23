"""Submitting to Storage queues (Azurite) and to Service Bus (the emulator)."""

import os
import threading

import pytest
from busy import Front
from drain import drained, executions
from places import BUS_KEY
from pyspark.sql import functions as F

from aztask import App
from aztask.errors import BrokerUnavailable, QueueNotFound
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.spark import submit
from aztask.testing import emulator

ABOUT = {"key": "path", "submission_id": "s"}


def table(spark, prefix, count, partitions=4):
    return spark.range(0, count, 1, partitions).select(
        F.concat(F.lit(prefix), "id").alias("path"), F.col("id").cast("int").alias("width")
    )


@pytest.fixture
def storage(azurite):
    app = App("shop", broker=azurite.connection_string)
    yield app.broker
    app.close()


def test_2000_rows_with_workers_that_drain_meanwhile(spark, shop, shop_folder, storage):
    storage.declare("drained")
    address = {"SPARK_SHOP_BROKER": os.environ["SPARK_SHOP_AZURITE"]}
    rows = table(spark, "azurite-", 2000)
    about = {**ABOUT, "broker_env": "SPARK_SHOP_AZURITE"}
    half = submit(rows.where("width < 1000"), shop.resize, queue="drained", **about)
    assert (half.rows, half.sent) == (1000, 1000)
    worker = threading.Thread(target=drained, args=("drained", "-c", "2"), kwargs=address)
    worker.start()
    report = submit(rows, shop.resize, queue="drained", **about)
    assert (report.rows, report.sent, report.failed) == (2000, 2000, 0)
    worker.join()
    drained("drained", "-c", "2", **address)
    found = executions(shop_folder, "azurite-")
    assert len(found) == 2000
    assert set(found.values()) == {1}


def test_a_busy_service_is_given_time_and_every_row_arrives(
    spark, shop, shop_folder, storage, azurite
):
    storage.declare("busy")
    front = Front(int(os.environ["SPARK_SHOP_BUSY_PORT"]), azurite.port, nth=7)
    try:
        rows = table(spark, "busy-", 60, partitions=2)
        report = submit(rows, shop.resize, queue="busy", broker_env="SPARK_SHOP_BUSY", **ABOUT)
    finally:
        front.close()
    assert front.refused >= 60 // 7
    assert (report.rows, report.sent, report.failed) == (60, 60, 0)
    assert storage.stats("busy").total == 60


def test_a_service_that_stays_busy_fails_the_job(spark, shop, storage, azurite):
    storage.declare("always")
    front = Front(int(os.environ["SPARK_SHOP_BUSY_PORT"]), azurite.port, nth=1)
    try:
        with pytest.raises(BrokerUnavailable, match=r"no success for 3 s.*same submission id"):
            submit(
                table(spark, "always-", 4, partitions=1),
                shop.resize,
                queue="always",
                broker_env="SPARK_SHOP_BUSY",
                patience=3.0,
                check_keys=False,
                **ABOUT,
            )
    finally:
        front.close()
    assert storage.stats("always").total == 0


def test_a_queue_that_is_missing_is_said(spark, shop, azurite):
    with pytest.raises(QueueNotFound, match="create it with: aztask queues create nosuch"):
        rows = table(spark, "x", 10, partitions=1)
        submit(rows, shop.resize, queue="nosuch", broker_env="SPARK_SHOP_AZURITE", **ABOUT)


def test_service_bus(spark, shop, shop_folder):
    port = int(os.environ["SPARK_SHOP_BUS_PORT"])
    with emulator(port=port, shared_access_key=BUS_KEY, queues=["bus"]) as bus:
        about = {**ABOUT, "broker_env": "SPARK_SHOP_BUS"}
        for _ in range(2):
            report = submit(table(spark, "bus-", 500), shop.resize, queue="bus", **about)
            assert (report.rows, report.sent) == (500, 500)
        addresses = {
            "SPARK_SHOP_BROKER": bus.connection_string,
            ADMIN_VARIABLE: bus.admin_connection_string,
        }
        drained("bus", "-c", "2", **addresses)
    found = executions(shop_folder, "bus-")
    assert len(found) == 500
    assert set(found.values()) == {1}
