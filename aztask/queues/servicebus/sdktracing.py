"""Switches the SDK's own tracing off for single requests, see `aztask.support.quiet`.

The SDK's tracing is a setting of the whole process (``azure.core.settings``). It makes spans for
each message, and overwrites the message's ``traceparent`` with theirs. The program may want that
for its other Service Bus clients, so the setting itself stays as it is: only the SDK's view of it
depends on the current request.
"""

from __future__ import annotations

from typing import Any

from azure.core.settings import settings
from azure.servicebus._common import tracing

from aztask.support.quiet import is_quiet


class _Settings:
    """``azure.core.settings`` as the SDK's tracing sees it."""

    def tracing_implementation(self) -> Any:
        """The class of the SDK's spans; None while aztask makes the spans."""
        return None if is_quiet() else settings.tracing_implementation()

    def __getattr__(self, name: str) -> Any:
        return getattr(settings, name)


def install() -> None:
    """Install the view. An SDK that keeps its settings elsewhere is left alone."""
    if hasattr(tracing, "settings"):
        vars(tracing)["settings"] = _Settings()
