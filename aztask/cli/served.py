"""Loads the parts that serve metrics, which need an extra."""

from __future__ import annotations

import importlib
from typing import Any

from aztask.errors import ConfigurationError


def telemetry_module(name: str) -> Any:
    """A module of `aztask.telemetry.prometheus`. Raises ConfigurationError without the extra."""
    try:
        return importlib.import_module(f"aztask.telemetry.prometheus.{name}")
    except ImportError as error:
        if error.name is None or error.name.startswith("aztask"):
            raise
        raise ConfigurationError(
            f"--http needs a package that is missing ({error.name}); install it with: "
            'pip install "aztask[prometheus]"'
        ) from None
