"""How an error is written to a span: its type, its text and its traceback, with secrets masked."""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, Status, StatusCode

from aztask.support.display import safe_str, traceback_of
from aztask.support.masking import mask

TEXT_CHARACTERS: Final = 2_000
TRACEBACK_CHARACTERS: Final = 16_000


def name_of(error: BaseException) -> str:
    """``error.type``: the class, with its module unless that is ``builtins``."""
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def failed(span: Span, error: BaseException) -> None:
    """Mark the span as failed. The SDK's own recording would not mask secrets."""
    if not span.is_recording():
        return
    text = mask(safe_str(error, TEXT_CHARACTERS))
    span.add_event(
        "exception",
        {
            "exception.type": name_of(error),
            "exception.message": text,
            "exception.stacktrace": mask(traceback_of(error)[-2 * TRACEBACK_CHARACTERS :])[
                -TRACEBACK_CHARACTERS:
            ],
        },
    )
    failed_with(span, name_of(error), text)


def failed_with(span: Span, error_type: str, text: str) -> None:
    """Mark the span as failed for a reason that is no exception here."""
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, text))
