"""Secrets: neither in a plan nor in an option nor in a log."""

import io
import logging
import os
from contextlib import redirect_stdout

import pytest
from azurite import KEY
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from aztask import App
from aztask.errors import ConfigurationError
from aztask.spark import submit


@pytest.fixture
def files(spark):
    return spark.range(0, 50, 1, 2).select(
        F.concat(F.lit("secret-"), "id").alias("path"), F.col("id").cast("int").alias("width")
    )


def explained(frame):
    said = io.StringIO()
    with redirect_stdout(said):
        frame.explain(True)
    return said.getvalue()


def plans(spark):
    """Every plan that this session has run, as its own status store tells them."""
    store = spark._jsparkSession.sharedState().statusStore()
    executions = store.executionsList()
    found = []
    for number in range(executions.size()):
        each = executions.apply(number)
        found += [each.physicalPlanDescription(), each.description(), each.details()]
    return "\n".join(map(str, found))


def test_nothing_shows_the_key(spark, shop, files, azurite, caplog, capfd):
    """Submitted through all ways to Azurite, whose key the executors have in their environment."""
    assert KEY in os.environ["SPARK_SHOP_AZURITE"]
    manager = App("shop", broker=azurite.connection_string)
    manager.broker.declare("credentials")
    caplog.set_level(logging.DEBUG)
    about = {
        "key": "path",
        "submission_id": "s",
        "queue": "credentials",
        "broker_env": "SPARK_SHOP_AZURITE",
    }
    submit(files, shop.resize, **about)
    options = {**about, "task": "shop.resize", "columns": "path,width"}
    writer = files.write.format("aztask").options(**options).mode("append")
    writer.save()
    assert manager.broker.stats("credentials").total == 100
    manager.close()
    told = plans(spark)
    assert "broker_env" in str(options)
    assert "aztask" in told.lower()
    out, err = capfd.readouterr()
    shown = [explained(files), told, out, err, caplog.text, str(options)]
    shown += [str(spark.sparkContext.getConf().getAll())]
    for text in shown:
        assert KEY not in text
        assert KEY[:20] not in text


def test_a_key_among_the_options_is_refused(spark, shop, files, azurite):
    with pytest.raises(ConfigurationError, match="environment variable") as caught:
        submit(
            files,
            shop.resize,
            key="path",
            submission_id="s",
            columns=["path"],
            broker=azurite.connection_string,
        )
    assert KEY not in str(caught.value)
    given = {"task": "t", "key": "path", "submission_id": "s", "columns": "path"}
    writer = files.write.format("aztask").options(broker=azurite.connection_string, **given)
    with pytest.raises(PySparkException, match="environment variable") as refused:
        writer.mode("append").save()
    assert KEY not in str(refused.value)
