"""The place of the events: an argument of the commands, or the settings of the workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from aztask.cli.spark.session import session_options
from aztask.config import environment_options
from aztask.errors import ConfigurationError

ACCOUNT_VARIABLE = "AZTASK_EVENTS_ACCOUNT"


def events_options(function: Callable[..., None]) -> Callable[..., None]:
    """``[PATH]``, ``--account-variable`` and the session's options.

    The command gets ``path`` and ``account_variable`` as `aztask.spark.read_events` takes them.
    """

    @click.argument("path", required=False)
    @click.option(
        "--account-variable",
        metavar="NAME",
        help="Read PATH as a container's name; this environment variable, here and on executors, "
        "holds the account's connection string.",
    )
    @session_options
    @wraps(function)
    def gathered(*args: Any, path: str | None, account_variable: str | None, **rest: Any) -> None:
        if path is None:
            path, account_variable = _from_settings(account_variable)
        function(*args, path=path, account_variable=account_variable, **rest)

    return gathered


def _from_settings(account_variable: str | None) -> tuple[str, str | None]:
    """The container to which workers upload, otherwise the directory to which they write."""
    options = environment_options()
    container = options.get("events_container")
    if container is not None:
        given = account_variable or ("events_account" in options and ACCOUNT_VARIABLE) or None
        return container, given
    if "events" in options:
        return options["events"], None
    raise ConfigurationError(
        "there is no PATH to events; give one (a directory or blob://ACCOUNT/CONTAINER), or set "
        "AZTASK_EVENTS or AZTASK_EVENTS_CONTAINER"
    )
