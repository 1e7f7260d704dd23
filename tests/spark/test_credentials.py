"""Secrets appear neither in a plan nor in an option nor in a log."""

import io
import logging
import os
from contextlib import closing, redirect_stdout

import pytest
from azurite import KEY
from letters import bury, errors
from places import BUS_KEY
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from aztask import App
from aztask.errors import ConfigurationError, ContentRefused
from aztask.message.template import Template
from aztask.operate.cli import main
from aztask.operate.deadletters.view import DeadLetters
from aztask.spark import Target, dead_letters, submit
from aztask.spark.deadletters import replay, selections
from aztask.spark.submission.submission import app_at
from aztask.testing import emulator


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


@pytest.fixture
def talkative(spark, monkeypatch):
    """Spark and aztask say all they can."""
    monkeypatch.setenv("AZTASK_DEBUG", "1")
    spark.sparkContext.setLogLevel("DEBUG")
    yield
    spark.sparkContext.setLogLevel("ERROR")


@pytest.mark.usefixtures("shop", "talkative")
def test_no_log_shows_a_key(spark, spark_log, tmp_path, capfd):
    """Of dead letters on Service Bus, and of a command that fails, for no service is there."""
    before = spark_log.stat().st_size
    port = int(os.environ["SPARK_SHOP_BUS_PORT"])
    with emulator(port=port, queues=["default"], shared_access_key=BUS_KEY) as bus:
        app = App("shop", broker=bus.connection_string)
        bury(app, "default", list(errors(30)))
        letters = dead_letters(spark, Target(broker_env="SPARK_SHOP_BUS"), ["default"], slices=2)
        plan = explained(letters)
        assert "MapInArrow" in plan
        selected = selections(letters.where("signature like 'KeyError%'"))
        assert replay(app, selected)["default"].done == 10
        assert len(DeadLetters(app, "default").list()) == 21
        app.close()

    rows = tmp_path / "rows.json"
    rows.write_text('{"path": "a", "width": 1}\n')
    about = ["-A", "busy_shop", "--task", "busy.resize", "--key", "path", "--no-check-keys"]
    about += ["--submission-id", "s", "--patience", "1s", "--input", str(rows)]
    assert main.run(["spark", "submit", *about]) == 3
    with spark_log.open(errors="replace") as file:
        file.seek(before)
        logged = file.read()
    assert " DEBUG " in logged
    out, err = capfd.readouterr()
    assert "no success for 1 s" in err
    for text in (plan, plans(spark), logged, out, err):
        for key in (KEY, BUS_KEY):
            assert key[:20] not in text
        assert "SharedAccessKey" not in text


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


def test_executors_sign_for_the_environment_that_their_variable_names(monkeypatch, tmp_path):
    key, broker = "k" * 32, f"local://{tmp_path}/q.db"
    monkeypatch.setenv("AZTASK_SIGNING_KEYS", key)
    monkeypatch.setenv("AZTASK_ENVIRONMENT", "staging")
    with closing(app_at("", broker, "NO_VARIABLE")) as app:
        sent = Template(app.codec, "shop.resize", "default").envelope("t1", {"path": "a"})
    monkeypatch.delenv("AZTASK_ENVIRONMENT")
    for name in ("staging", "production"):
        with closing(App("shop", broker=broker, signing_keys=[key], environment=name)) as reader:
            if name == "staging":
                assert reader.codec.from_envelope(sent, "default").task == "shop.resize"
            else:
                with pytest.raises(ContentRefused):
                    reader.codec.from_envelope(sent, "default")
