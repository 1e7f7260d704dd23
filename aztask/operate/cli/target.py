"""The app of a command: the one that -A names, else one for AZTASK_BROKER and AZTASK_RESULTS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import click

from aztask.address.urls import DEFAULT_FILE
from aztask.app import App
from aztask.app.loading import REASON_CHARACTERS, AppNotLoaded, find_object, is_celery, load_app
from aztask.config import read_environment
from aztask.errors import ConfigurationError
from aztask.operate.cli.failures import ImportFailed
from aztask.operate.cli.options import chosen_app
from aztask.support.display import safe_str

NAMELESS = "aztask"


@contextmanager
def open_app(
    *, required: str = "", creates: bool = False, reads: bool = False, celery: bool = False
) -> Iterator[App]:
    """Open the app; its connections are closed at the end of the block.

    required: the command that cannot do without -A, for the error. creates: whether the command may
    create the queue file. reads: it changes nothing, so it may not create the file of an app that
    -A names, either. celery: -A may name a Celery application; the app is a `CeleryApp` then.

    Raises ConfigurationError if a queue file is missing that the command may not create.
    """
    app = find_app(required=required, default_file=not creates, celery=celery)
    if reads or not (creates or app_spec()):
        _check_file(app)
    try:
        yield app
    finally:
        app.close()


def find_app(*, required: str = "", default_file: bool = False, celery: bool = False) -> App:
    """As `open_app`, without closing.

    default_file: without -A and AZTASK_BROKER, use the queue file of the working directory.

    Raises ImportFailed if the module cannot be imported, or the ConfigurationError that its own
    settings raised.
    """
    spec = app_spec()
    if spec is None:
        if required:
            raise click.UsageError(
                f"{required} needs an app: name it with -A module:app or in AZTASK_APP"
            )
        named = read_environment("AZTASK_BROKER") or not default_file
        return App(NAMELESS, broker=None if named else "local://")
    try:
        if celery and is_celery(found := find_object(spec)):
            return _celery_app(found)
        return load_app(spec)
    except AppNotLoaded as error:
        raise ImportFailed(str(error)) from error


def _celery_app(found: object) -> App:
    """The App for a Celery application; loaded here alone, so that other commands start fast."""
    module = import_module("aztask.operate.celeryapp")
    try:
        app: App = module.load_celery(found)
    except ConfigurationError:
        raise
    except Exception as error:
        text = safe_str(error, REASON_CHARACTERS)
        raise ImportFailed(
            f"the tasks of this Celery app cannot be imported: {type(error).__name__}: {text}"
        ) from error
    return app


def app_spec() -> str | None:
    """The ``module:app`` of -A or AZTASK_APP, None without either."""
    return chosen_app(click.get_current_context())


def _check_file(app: App) -> None:
    """Raise ConfigurationError if the queue file is missing: an empty listing would mislead."""
    missing = app.missing_file
    if missing is None:
        return
    if not (app_spec() or read_environment("AZTASK_BROKER")):
        raise ConfigurationError(
            f"there is no queue file {DEFAULT_FILE} here: name the app with -A module:app, or set "
            "AZTASK_BROKER to the address of the queues"
        )
    raise ConfigurationError(
        f"there is no queue file {missing}: check the address and the working directory; the "
        "first aztask send, aztask worker or aztask queues create makes it"
    )
