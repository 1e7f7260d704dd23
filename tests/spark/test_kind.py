"""Classic Spark or Spark Connect: which of them a session is, and what it falls back to.

The commands themselves run over a server in tests/spark/long/test_connect.py.
"""

import socket

import pytest
from pyspark.errors import AnalysisException

from aztask.errors import ConfigurationError
from aztask.spark import get_session, kind, session

HOST = "sc://spark.example:443/;token=secret"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No address in the environment, and no session that runs."""
    for name in (kind.REMOTE, *kind._PROXIES, *(name.upper() for name in kind._PROXIES)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "active_session", lambda: None)


@pytest.mark.parametrize(
    ("master", "conf", "environment", "address"),
    [
        (None, {}, None, None),
        ("spark://HOST:7077", {}, None, None),
        (HOST, {}, None, HOST),
        (HOST, {}, "sc://another", HOST),
        (None, {"spark.remote": HOST}, "sc://another", HOST),
        (None, {"spark.master": "local"}, None, None),
        (None, {}, HOST, HOST),
        (None, {}, "", None),
    ],
)
def test_a_session_is_remote_where_the_master_or_the_environment_says_so(
    monkeypatch, master, conf, environment, address
):
    if environment is not None:
        monkeypatch.setenv(kind.REMOTE, environment)
    assert kind.remote_address(master, conf) == address


def test_a_master_beside_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv(kind.REMOTE, HOST)
    with pytest.raises(
        ConfigurationError, match="SPARK_REMOTE is set, and so is the master 'local'"
    ):
        get_session(master="local")


def test_the_client_alone_needs_an_address(monkeypatch):
    monkeypatch.setattr(kind, "is_remote_only", lambda: True)
    with pytest.raises(ConfigurationError, match=r"only Spark's client .* set SPARK_REMOTE=sc://"):
        get_session()
    assert kind.remote_address(HOST, {}) == HOST


def test_what_the_client_lacks_is_named(monkeypatch):
    monkeypatch.setattr(kind, "CONNECT_LIBRARIES", ("nosuch.package", "pyspark"))
    with pytest.raises(ConfigurationError, match=r"^nosuch.package is .*\[spark-connect\]") as told:
        get_session(master=HOST)
    assert "secret" not in str(told.value)


def test_a_server_that_is_not_there_is_named_at_once(monkeypatch):
    """Spark's client would try again for ten minutes."""
    monkeypatch.setattr(kind, "CONNECT_LIBRARIES", ())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"no Spark .* at 127.0.0.1:{port}: Conn"):
            get_session(master=f"sc://127.0.0.1:{port}/;token=secret")
    for wrong in ("sc://", "sc://:15002", "sc://HOST:x", "sc://HOST:99999"):
        with pytest.raises(ConfigurationError, match="is not like sc://HOST:15002"):
            get_session(master=wrong)


class Serverless:
    """A frame of compute that keeps nothing."""

    def persist(self):
        raise AnalysisException("[NOT_SUPPORTED_WITH_SERVERLESS] PERSIST TABLE is not supported")

    unpersist = persist


def test_what_cannot_be_kept_is_computed_again():
    frame = Serverless()
    assert kind.kept(frame) is frame
    kind.release(frame)
