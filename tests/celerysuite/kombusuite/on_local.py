"""Kombu's tests for every transport, on a local file.

Some of them only connect, which does not make Kombu load entry points; so the URLs are registered
by a call here. Celery's tests run without one.
"""

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

from aztask.celery import transport

transport.register()


@pytest.fixture
def connection(tmp_path):
    return kombu.Connection(f"aztask+local://{tmp_path}/queues.db")


@pytest.fixture
def invalid_connection(tmp_path):
    (tmp_path / "file").touch()
    return kombu.Connection(f"aztask+local://{tmp_path}/file/queues.db")


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
