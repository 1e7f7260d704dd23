"""The app that a command works on: the one that -A names, or a nameless one on the environment's
addresses (AZTASK_BROKER, AZTASK_RESULTS).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from aztask.app import App
from aztask.cli.failures import ImportFailed
from aztask.cli.options import chosen_app
from aztask.errors import ConfigurationError
from aztask.loading import load_app
from aztask.results.base import ResultStore

NAMELESS = "aztask"


@contextmanager
def open_app(*, required: str = "") -> Iterator[App]:
    """The app; its connections are closed at the end.

    required: what needs an app of the user's own, for the error when none is named.
    """
    app = find_app(required=required)
    try:
        yield app
    finally:
        app.close()


def find_app(*, required: str = "") -> App:
    """As `open_app`, without closing.

    Raises ImportFailed where the module cannot be used, and the ConfigurationError of the module's
    own settings where that is what is wrong.
    """
    spec = app_spec()
    if spec is None:
        if required:
            raise click.UsageError(
                f"{required} needs an app: name it with -A module:app, or in AZTASK_APP"
            )
        return App(NAMELESS)
    try:
        return load_app(spec)
    except ConfigurationError as error:
        if isinstance(error.__cause__, ConfigurationError):
            raise
        raise ImportFailed(str(error)) from error


def app_spec() -> str | None:
    """What -A said."""
    return chosen_app(click.get_current_context())


def results_of(app: App) -> ResultStore:
    """The app's result store; ConfigurationError where it has none."""
    store = app.results
    if store is None:
        raise ConfigurationError(
            "no result store is configured: set AZTASK_RESULTS, for example to local://, or name "
            "an app that has one with -A"
        )
    return store
