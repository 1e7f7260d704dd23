"""An app's connections: opened once, when needed, and closed."""

import pytest

from aztask import App
from aztask.errors import ConfigurationError
from aztask.stores.connections import Connections


def test_broker_and_results_in_one_file_share_its_database(tmp_path):
    url = f"local://{tmp_path}/q.db"
    connections = Connections(url, url)
    assert not (tmp_path / "q.db").exists()
    broker, results = connections.broker(), connections.results()
    assert connections.broker() is broker
    assert broker.transaction_key == results.transaction_key
    connections.close()
    assert connections.broker() is not broker
    connections.close()


def test_two_files_share_nothing(tmp_path):
    connections = Connections(f"local://{tmp_path}/q.db", f"local://{tmp_path}/r.db")
    assert connections.broker().transaction_key != connections.results().transaction_key
    connections.close()


def test_results_are_optional_and_objects_are_taken_as_they_are(tmp_path):
    first = Connections("local://:memory:", None)
    second = Connections(first.broker(), None)
    assert second.broker() is first.broker()
    assert second.results() is None
    first.close()


def test_a_wrong_address_is_found_at_once():
    with pytest.raises(ConfigurationError, match="no broker of the kind"):
        Connections("redis://localhost", None)
    with pytest.raises(ConfigurationError, match="stores no results"):
        Connections("local://:memory:", "servicebus://shop")


def test_no_secret_is_shown():
    text = (
        "Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0"
    )
    assert "c2VjcmV0" not in Connections(text, None).shown()


@pytest.mark.parametrize("use", ["send", "delay", "map", "broker"])
def test_without_a_broker_the_first_use_says_what_to_set(use, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AZTASK_BROKER", raising=False)
    app = App("shop")
    task = app.task(len)
    actions = {
        "send": lambda: app.send("shop.len", ["a"]),
        "delay": lambda: task.delay("a"),
        "map": lambda: task.map([("a",)]),
        "broker": lambda: app.broker,
    }
    with pytest.raises(ConfigurationError) as caught:
        actions[use]()
    assert str(caught.value).startswith("no broker is named: set AZTASK_BROKER, or give App(")
    assert "local://" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    app.close()


def test_the_environment_names_the_broker(monkeypatch):
    monkeypatch.setenv("AZTASK_BROKER", "local://:memory:")
    app = App("shop")
    assert app.broker.capabilities.name == "local"
    app.close()
