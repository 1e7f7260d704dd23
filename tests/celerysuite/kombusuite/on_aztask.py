"""Kombu's tests for every transport, on the broker that ``AZTASK_BROKER`` names.

Some of them only connect, which does not make Kombu load entry points; so the URLs are registered
by a call here. Celery's tests run without one.
"""

import os

import kombu
import pytest
from t.integration.common import (
    BaseEventLoop,
    BaseExchangeTypes,
    BaseFailover,
    BaseMessage,
    BasePriority,
    BaseTimeToLive,
    BasicFunctionality,
)

from aztask import App
from aztask.celery import transport

transport.register()


BROKER = os.environ["AZTASK_BROKER"]
LOCAL = BROKER.startswith("local:")


@pytest.fixture
def connection(tmp_path):
    """One to a file of its own; of the other brokers, all queues are removed before."""
    if LOCAL:
        return kombu.Connection(f"aztask+local://{tmp_path}/queues.db")
    app = App("cleaner", broker=BROKER)
    for name in app.broker.queues():
        app.broker.delete(name)
    app.close()
    return kombu.Connection("aztask://", transport_options={"translate_names": True})


@pytest.fixture
def invalid_connection(tmp_path):
    (tmp_path / "file").touch()
    return kombu.Connection(
        f"aztask+local://{tmp_path}/file/queues.db" if LOCAL else "aztask+servicebus://127.0.0.1:9"
    )


@pytest.fixture
def failover_connection(tmp_path):
    (tmp_path / "file").touch()
    dead, live = f"{tmp_path}/file/queues.db", f"{tmp_path}/queues.db"
    return kombu.Connection(f"aztask+local://{dead};aztask+local://{live}")


class TestBasicFunctionality(BasicFunctionality):
    pass


class TestExchangeTypes(BaseExchangeTypes):
    pass


class TestTimeToLive(BaseTimeToLive):
    pass


class TestPriority(BasePriority):
    pass


class TestMessage(BaseMessage):
    pass


class TestEventLoop(BaseEventLoop):
    pass


class TestFailover(BaseFailover):
    pass
