"""Spans of several processes in one file: an exporter that appends, and a reader."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


@dataclass
class Span:
    """A finished span. Ids are numbers; start and end are nanoseconds."""

    name: str
    kind: str
    trace: int
    id: int
    parent: int | None
    attributes: dict[str, Any]
    links: list[tuple[int, int, dict[str, Any]]]
    status: str
    start: int
    end: int
    pid: int
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class FileExporter(SpanExporter):
    """Appends each span as a line, with one write."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        text = "".join(json.dumps(_fields(span)) + "\n" for span in spans)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
        return SpanExportResult.SUCCESS


def _fields(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent.span_id if span.parent else None,
        "attributes": dict(span.attributes or {}),
        "links": [
            (each.context.trace_id, each.context.span_id, dict(each.attributes or {}))
            for each in span.links
        ],
        "status": span.status.status_code.name,
        "start": span.start_time,
        "end": span.end_time,
        "pid": os.getpid(),
        "events": [(each.name, dict(each.attributes or {})) for each in span.events],
    }


def provider(path: str | Path) -> TracerProvider:
    """A provider that writes every span to the file at once."""
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(FileExporter(path)))
    return made


def spans(path: Path) -> list[Span]:
    """All finished spans, in the order of their starts."""
    if not path.exists():
        return []
    found = [Span(**json.loads(line)) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda span: span.start)
