"""Trace and span ids in the log of workers, so that a line leads to its trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.trace import get_current_span

NO_FIELDS: Final[Mapping[str, str]] = {}


def trace_fields() -> Mapping[str, str]:
    """``trace_id`` and ``span_id`` of the current span; empty without one."""
    span = get_current_span().get_span_context()
    if not span.is_valid:
        return NO_FIELDS
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}
