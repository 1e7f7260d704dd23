"""When a delivery may start, as its slots allow it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Window:
    """It may start from `opens` until `closes`, on the clock of the deadlines."""

    opens: float
    closes: float

    @property
    def timed(self) -> bool:
        """Whether it matters when the delivery starts."""
        return self.closes != math.inf


ALWAYS: Final = Window(-math.inf, math.inf)
"""No limit applies."""
