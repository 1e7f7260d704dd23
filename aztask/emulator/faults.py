"""Faults on demand, to test how an application meets them: ``aztask emulator --fault``.

Rules
1. A fault is one that the service has: it is busy or slow, a connection breaks after the work was
   done and before its answer, all connections break at once.
2. The same `seed` chooses the same operations, as long as clients ask in the same order.
3. A dropped answer and a restart break the connection. Locks stay until they expire, as on the
   service; what was done is done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.durations import parse_duration

_SHARES: Final = ("busy", "drop")
_SECONDS: Final = ("latency", "restart", "idle")
_EXAMPLES: Final = "busy=0.1, drop=0.01, latency=50ms, restart=30s or idle=30s"


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong on purpose.

    busy: the share of sends and of management requests that are refused with server-busy, 0 to 1.
    drop: the share of answers whose connection is broken instead of writing them, 0 to 1.
    latency: seconds by which everything that the emulator writes is delayed.
    restart: seconds after which all connections are broken, again and again; 0: never.
    idle: seconds without use after which a link is detached; 0: never. A connection without links
    is closed after half of them, one that never had a link after a tenth, neither before 5 seconds.
    The service has 10, 5 and 1 minutes (learn.microsoft.com, "AMQP errors in Azure Service Bus").
    seed: of the choice.
    """

    busy: float = 0.0
    drop: float = 0.0
    latency: float = 0.0
    restart: float = 0.0
    idle: float = 600.0
    seed: int = 0
    _random: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a share above 1 or a number below 0."""
        for name in (*_SHARES, *_SECONDS):
            value, most = getattr(self, name), 1.0 if name in _SHARES else float("inf")
            if not 0.0 <= value <= most:
                limits = "a share from 0 to 1" if name in _SHARES else "not negative"
                raise ConfigurationError(f"the fault {name} must be {limits}, not {value:g}")
        # not for secrets: the same seed must choose the same
        object.__setattr__(self, "_random", random.Random(self.seed))  # noqa: S311

    @property
    def on_output(self) -> bool:
        """Whether something happens to what the emulator writes."""
        return self.drop > 0 or self.latency > 0

    def is_busy(self) -> bool:
        """Return whether to refuse this operation as busy."""
        return self.busy > 0 and self._random.random() < self.busy

    def drops(self) -> bool:
        """Return whether to lose this answer."""
        return self.drop > 0 and self._random.random() < self.drop


NO_FAULTS: Final = Faults()


def parse_faults(texts: Sequence[str], busy: float = 0.0) -> Faults:
    """Return the faults of options such as ``drop=0.01``. Raises ConfigurationError."""
    values: dict[str, Any] = {"busy": busy}
    for text in texts:
        name, equals, value = text.partition("=")
        known = (*_SHARES, *_SECONDS, "seed")
        if not equals or name not in known:
            hint = did_you_mean(name, known)
            raise ConfigurationError(f"--fault {text[:60]!r}: write {_EXAMPLES}.{hint}")
        read: Callable[[str], Any] = (
            parse_duration if name in _SECONDS else int if name == "seed" else float
        )
        try:
            values[name] = read(value)
        except ValueError:
            raise ConfigurationError(f"--fault {text[:60]!r}: write {_EXAMPLES}.") from None
    return Faults(**values)
