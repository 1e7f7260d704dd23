"""Whether the SDKs of a service keep quiet: no spans and no trace headers of their own.

Telemetry sets this around requests for which it makes spans itself. The adapters apply it to their
SDKs. It holds for the current thread or coroutine, so other uses of an SDK in the same process are
traced as usual.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

_quiet: ContextVar[bool] = ContextVar("aztask-quiet", default=False)


def is_quiet() -> bool:
    """True if the SDKs must not trace the current request."""
    return _quiet.get()


class quiet:  # noqa: N801  # used as a function; a generator would take twice as long
    """Keep the SDKs quiet inside the ``with`` block."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token: Token[bool] = _quiet.set(True)

    def __exit__(self, *_: object) -> None:
        _quiet.reset(self._token)
