"""Bounds within which a queue's lease may follow advice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aztask.errors import ConfigurationError
from aztask.support.durations import to_seconds

SHORTEST: Final = 30.0
"""Seconds: the default lower bound. A shorter lease can end during an ordinary network pause."""
LONGEST: Final = 7 * 86400.0
"""Seconds: the longest lease that any service grants (Storage queues' visibility time-out)."""
MIN_SAMPLES: Final = 100


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for an advised lease, in seconds, and the deliveries that advice needs.

    Raises ConfigurationError if they contradict each other.
    """

    least: float = SHORTEST
    most: float = LONGEST
    min_samples: int = MIN_SAMPLES

    def __post_init__(self) -> None:
        if not 0.0 < self.least <= self.most <= LONGEST:  # false for nan too
            raise ConfigurationError(
                f"a lease cannot be kept between {self.least:g} and {self.most:g} s; give two "
                f"numbers of seconds, the smaller first, above 0 and at most {LONGEST:.0f}"
            )

    def clamp(self, seconds: float) -> float:
        """`seconds`, moved to the nearer bound if it is outside."""
        return min(max(seconds, self.least), self.most)


def read_bounds(value: object, max_lease: float | None) -> bool | tuple[float, float]:
    """Check the setting ``adaptive``: True, False, or (least, most) in seconds.

    * `max_lease`: the setting, which must be longer; None if it is not known here.

    Raises ConfigurationError.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigurationError(
            f"adaptive is True, False or (least, most) in seconds, not a {type(value).__name__}"
        )
    least, most = (to_seconds(each, "adaptive") for each in value)
    bounds = Bounds(least, most)
    if max_lease is not None and bounds.most >= max_lease:
        raise ConfigurationError(
            f"adaptive leases of up to {bounds.most:g} s need a longer max_lease than "
            f"{max_lease:g} s: it limits the lease with all its renewals"
        )
    return bounds.least, bounds.most


def check_leases(lease: float, max_lease: float) -> None:
    """Raise ConfigurationError unless both durations, in seconds, fit each other."""
    if lease > LONGEST:
        raise ConfigurationError(
            f"lease is {lease:g} s; no service holds a message for more than 7 days at once"
        )
    if max_lease <= lease:
        raise ConfigurationError(
            f"max_lease ({max_lease:g} s) must be longer than lease ({lease:g} s): "
            "it limits the lease with all its renewals; raise it or shorten the lease"
        )
