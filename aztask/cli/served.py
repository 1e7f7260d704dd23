"""Loads the modules of commands that need an extra."""

from __future__ import annotations

import importlib
from typing import Any

from aztask.errors import ConfigurationError


def telemetry_module(name: str) -> Any:
    """A module of `aztask.telemetry.prometheus`. Raises ConfigurationError without the extra."""
    return extra_module(f"aztask.telemetry.prometheus.{name}", "--http", "prometheus")


def extra_module(module: str, what: str, extra: str) -> Any:
    """Import a module of aztask that needs an extra.

    what: the command or option, for the error. Raises ConfigurationError without the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is None or error.name.startswith("aztask"):
            raise
        raise ConfigurationError(
            f"{what} needs a package that is missing ({error.name}); install it with: "
            f'pip install "aztask[{extra}]"'
        ) from None
