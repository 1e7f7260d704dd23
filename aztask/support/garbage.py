"""The garbage collector of a process that serves for long and runs no code of the user."""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 20)
"""For `gc.set_threshold`: what such a process makes is short-lived and mostly free of cycles."""


def collect_rarely() -> None:
    """Collect less often, and skip all objects that exist now. Call it after the last import.

    Otherwise collections visit every imported module again and again: measured in a worker, a
    tenth of the CPU time of a task.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
