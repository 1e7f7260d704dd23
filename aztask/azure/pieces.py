"""An HTTP transport for the SDK that sends long bodies in pieces.

Why: the connection's time-out counts for the whole of a body that is given as bytes, because it is
one ``socket.sendall`` (Python's documentation, since 3.5). So 100 MB would have to be sent within
the five seconds that a connection may take. A body that is read from a stream is sent in blocks of
32 KiB, and each block has that time. The stream shares the memory of the bytes.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any, Final

from azure.core.pipeline.transport import RequestsTransport

WHOLE_BYTES: Final = 256 * 1024
"""A body up to this size is sent as a whole: that costs less CPU time."""


class PiecewiseTransport(RequestsTransport):  # type: ignore[misc]  # the SDK gives it no type
    """The SDK's own transport, but for bodies of more than `WHOLE_BYTES`."""

    def open(self) -> None:
        """Open the session, whose requests then send long bodies as streams."""
        super().open()
        session: Any = self.session
        if isinstance(session.request, PiecewiseRequest):
            return
        session.request = PiecewiseRequest(session.request)


class PiecewiseRequest:
    """``Session.request`` with long bytes as a stream."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def __call__(self, method: str, url: str, **options: Any) -> Any:
        """Send the request; the parameters are those of ``requests.Session.request``."""
        data = options.get("data")
        if isinstance(data, bytes) and len(data) > WHOLE_BYTES:
            options["data"] = BytesIO(data)
        return self._request(method, url, **options)
