"""The headers and the note that hooks add to the messages of a send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aztask.errors import EncodeError
from aztask.hooks import Sending
from aztask.results.base import NOTE_BYTES


def with_headers(common: dict[str, Any], sent: Sending) -> list[dict[str, Any]]:
    """The fields of each message of a send, with the headers that hooks have set.

    Raises EncodeError for a note that no store keeps, before anything is sent.
    """
    if sent.each is None:
        return [with_shared_headers(common, sent)] * len(sent.ids)
    _check_note(sent)
    return [_with(common, {**sent.headers, **headers}) for headers in sent.each]


def with_shared_headers(common: dict[str, Any], sent: Sending) -> dict[str, Any]:
    """The fields of all messages of a send whose `each` is None; raises as `with_headers`."""
    _check_note(sent)
    return _with(common, sent.headers)


def _check_note(sent: Sending) -> None:
    if sent.note is not None and len(sent.note) > NOTE_BYTES:
        raise EncodeError(f"a note has at most {NOTE_BYTES} bytes, not {len(sent.note)}")


def _with(common: dict[str, Any], headers: Mapping[str, Any]) -> dict[str, Any]:
    if not headers:
        return common
    if len(headers) == 1 and "traceparent" in headers:  # telemetry alone
        return {**common, "traceparent": headers["traceparent"]}
    traceparent = headers.get("traceparent", common.get("traceparent"))
    extra = {name: value for name, value in headers.items() if name != "traceparent"}
    return {**common, "traceparent": traceparent, "extra": {**common["extra"], **extra}}
