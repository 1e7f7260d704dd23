"""The options and values of a submission."""

import pickle

import pytest

from aztask.errors import ConfigurationError
from aztask.spark.submission.submission import Submission, pairs_of

GIVEN = {"task": "shop.resize", "key": "path", "submission_id": "one", "app": "shop:app"}
SECRET = "U0VDUkVULXNlY3JldC1TRUNSRVQ="
STORAGE = f"DefaultEndpointsProtocol=https;AccountName=abc;AccountKey={SECRET}"
BUS = f"Endpoint=sb://n.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey={SECRET}"


def test_options_are_texts():
    made = Submission.from_options(
        GIVEN
        | {
            "Columns": "path,width=w",
            "rate": "400",
            "writers": "8",
            "delay": "1m",
            "expires": "2h",
            "checkpointLocation": "/x",
        }
    )
    assert made.columns == (("path", "path"), ("width", "w"))
    assert (made.rate, made.writers, made.delay, made.expires) == (400.0, 8, 60.0, 7200.0)
    assert pickle.loads(pickle.dumps(made)) == made


def test_names_with_commas_go_as_json():
    made = Submission.from_options(GIVEN | {"columns": '{"path": "a,b=c"}'})
    assert made.columns == (("path", "a,b=c"),)


def test_columns_as_values():
    assert pairs_of(None) is None
    assert pairs_of(["a", "b"]) == (("a", "a"), ("b", "b"))
    assert pairs_of({"a": "b"}) == (("a", "b"),)
    with pytest.raises(ConfigurationError, match="list of names"):
        pairs_of("a,b")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"submision_id": "x"}, "no option 'submision_id'. Did you mean 'submission_id'"),
        ({"path": "/x"}, "no option 'path'"),
        ({"dry_run": "true"}, "no option 'dry_run'"),
        ({"rate": "fast"}, "'rate' takes a number"),
        ({"rate": "nan"}, "rate takes a number, more than 0"),
        ({"rate": "0"}, "more than 0"),
        ({"rate": "-1"}, "more than 0"),
        ({"rate": "inf"}, "more than 0"),
        ({"writers": "1.5"}, "whole number"),
        ({"writers": "0"}, "whole number, more than 0"),
        ({"delay": "soon"}, "soon"),
        ({"delay": "-1"}, "-1"),
        ({"columns": "a,,b"}, "empty name"),
        ({"columns": '{"a"'}, "not JSON"),
        ({"unique": "row"}, "stream or batch"),
        ({"task": ""}, "task takes a text"),
        ({"broker": "local:///tmp/x.db"}, "in exactly one way"),
        ({"app": "", "broker": "redis://x"}, "no broker of the kind 'redis'"),
        ({"app": "", "broker_env": "a b"}, "name of an environment variable"),
        ({"app": ""}, "name the broker"),
    ],
)
def test_what_is_wrong_is_said(changes, words):
    with pytest.raises(ConfigurationError, match=words):
        Submission.from_options(GIVEN | changes)


@pytest.mark.parametrize("name", ["task", "key"])
def test_what_is_missing_is_said(name):
    with pytest.raises(ConfigurationError, match=f"'{name}' is missing"):
        Submission.from_options({key: value for key, value in GIVEN.items() if key != name})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broker", STORAGE),
        ("broker", BUS),
        ("broker", f"https://abc.queue.core.windows.net/?sv=1&sig={SECRET}"),
        ("broker_env", STORAGE),
        ("task", BUS),
        ("queue", f"AccountKey={SECRET}"),
        ("accountkey", STORAGE),
        ("submission_id", f"x?sig={SECRET}"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(name, value):
    given = {key: text for key, text in GIVEN.items() if key != "app" or name != "broker"}
    with pytest.raises(ConfigurationError) as caught:
        Submission.from_options(given | {name: value})
    assert SECRET not in str(caught.value)
    if name != "accountkey":
        assert "environment variable" in str(caught.value)


@pytest.mark.parametrize(
    "address", ["local:///tmp/x.db", "servicebus://contoso", "storagequeue://abc"]
)
def test_an_address_without_a_key_is_an_option(address):
    made = Submission(task="a", key="b", broker=address)
    assert made.broker == address


def test_the_variable_must_be_set_where_it_is_read(monkeypatch, tmp_path):
    made = Submission(task="a", key="b", broker_env="SHOP_BROKER")
    monkeypatch.delenv("SHOP_BROKER", raising=False)
    with pytest.raises(ConfigurationError, match="SHOP_BROKER is not set where Spark runs this"):
        made.open_app()
    monkeypatch.setenv("SHOP_BROKER", f"local://{tmp_path}/queues.db")
    with_address = made.open_app()
    assert with_address.address == f"local://{tmp_path}/queues.db"


def test_ids_of_batches_differ_only_where_asked():
    made = Submission(task="a", key="b", app="x")
    assert made.in_batch("query", "7").submission_id == "query"
    each = Submission(task="a", key="b", app="x", submission_id="s", unique="batch")
    assert each.in_batch("query", "7").submission_id == "s/7"
