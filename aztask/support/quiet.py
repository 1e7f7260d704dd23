"""Whether the SDKs of a service keep quiet: no spans and no trace headers of their own.

Telemetry sets this around requests for which it makes spans itself. The adapters apply it to their
SDKs. It holds for the current thread or coroutine, so other uses of an SDK in the same process are
traced as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("aztask-quiet", default=False)


def is_quiet() -> bool:
    """True if the SDKs must not trace the current request."""
    return _quiet.get()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the SDKs quiet inside the ``with`` block."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)
