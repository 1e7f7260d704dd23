"""Answers of the table and blob services, as the SDK raises them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from azure.core.exceptions import HttpResponseError


def answered(status: int, code: str, *, in_header: bool = True) -> HttpResponseError:
    """An error as the SDK raises it: blobs tell the code in a header, tables in the body."""
    body = "" if in_header else json.dumps({"odata.error": {"code": code, "message": {}}})
    response: Any = SimpleNamespace(
        status_code=status,
        reason="",
        headers={"x-ms-error-code": code} if in_header else {},
        text=lambda: body,
    )
    return HttpResponseError(f"{code}\nsecond line", response=response)
