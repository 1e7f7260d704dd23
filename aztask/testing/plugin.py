"""The pytest plugin: fixtures for inline tasks, a real worker, and a local Service Bus.

pytest finds it by its entry point in every test run, so it imports nothing of aztask until you use
a fixture. Settings in pytest's configuration::

    [tool.pytest.ini_options]
    aztask_app = "shop:app"                          # as for ``aztask -A``
    aztask_worker_options = "--pool asyncio -c 50"   # default: --pool threads -c 4

Fixtures: `aztask_app`, `aztask_inline`, `aztask_worker`, `servicebus_emulator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aztask.app import App
    from aztask.testing.inline import Inline
    from aztask.testing.servicebus import RunningEmulator
    from aztask.testing.worker import BackgroundWorker


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the settings of the fixtures."""
    parser.addini("aztask_app", "the app of the fixtures, as module:app")
    parser.addini("aztask_worker_options", "options of aztask worker for the fixture aztask_worker")


def _testing() -> Any:
    return import_module("aztask.testing")


@pytest.fixture(scope="session")
def aztask_app(pytestconfig: pytest.Config) -> App:
    """Your app, as the setting ``aztask_app`` names it."""
    spec = pytestconfig.getini("aztask_app")
    if not spec:
        raise pytest.UsageError(
            'name your app in pytest\'s configuration, for example aztask_app = "shop:app"'
        )
    app: App = import_module("aztask.app.loading").load_app(spec)
    return app


@pytest.fixture
def aztask_inline(aztask_app: App) -> Iterator[Inline]:
    """Your app in inline mode, for one test; see `App.inline`."""
    with _testing().Inline(aztask_app) as inline:
        yield inline


@pytest.fixture(scope="session")
def _aztask_worker(
    aztask_app: App, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackgroundWorker]:
    """The worker of the session; it starts before the first test that uses it."""
    spec = pytestconfig.getini("aztask_app")
    options = pytestconfig.getini("aztask_worker_options")
    folder = tmp_path_factory.mktemp("aztask")
    more = {"options": options} if options else {}
    with _testing().background_worker(aztask_app, spec, folder, **more) as worker:
        yield worker


@contextmanager
def _private(worker: BackgroundWorker) -> Iterator[None]:
    """Use the private queues in the block, and leave them empty."""
    with worker.in_use():
        try:
            yield
        finally:
            worker.clear()


@pytest.fixture
def aztask_worker(_aztask_worker: BackgroundWorker) -> Iterator[BackgroundWorker]:
    """A real worker in the background, on private queues that are empty at the start.

    One worker serves the whole session. At the end of the test, messages that have not started are
    deleted, and running tasks get ten seconds to end.
    """
    with _private(_aztask_worker):
        yield _aztask_worker


@pytest.fixture
def servicebus_emulator() -> Iterator[RunningEmulator]:
    """A fresh, empty local Service Bus for one test."""
    with _testing().emulator() as running:
        yield running
