"""Which failpoints a long run must reach, and where the others are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aztask.support.failpoint import STEPS

POOL: Final = "pool-"
"""What the names of the failpoints begin with at which a pool process starts."""

ELSEWHERE: Final[Mapping[str, str]] = {
    **{step: "integration/test_portable.py" for step in STEPS if step.startswith(POOL)},
    "stopping": "integration/test_kills.py",
    "uploaded": "integration/test_payload_kills.py",
    "loaded": "integration/test_payload_kills.py",
    "result-stored": "integration/test_payload_kills.py",
    "copied": "integration/test_workflow_unique.py",
    "removed": "integration/test_payload_kills.py",
    "row-filled": "simulation/test_simulation.py",
    "compact-written": "spark/test_compaction.py",
    "compact-published": "spark/test_compaction.py",
    "compact-removed": "spark/test_compaction.py",
    "table-claimed": "spark/test_follow.py",
    "table-written": "spark/test_tables.py",
    "table-odd": "spark/test_tables.py",
    "table-committed": "spark/test_tables.py",
}
"""Failpoints that courses do not reach, each with the file of the tests that kill there."""


def never_reached(points: Mapping[str, int]) -> list[str]:
    """The failpoints that the simulation should reach and did not."""
    return [step for step in STEPS if step not in ELSEWHERE and not points.get(step)]
