"""Which failpoints a long run must reach, and where the others are tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aztask.support.failpoint import STEPS

ELSEWHERE: Final[Mapping[str, str]] = {
    "stopping": "integration/test_drain_rounds.py",
    "unindexed": "integration/test_tables_worker.py",
    "noted": "integration/test_storage_deadletters.py",
    "stored": "integration/test_storage_deadletters.py",
    "cloned": "integration/test_servicebus_worker.py",
    "uploaded": "integration/test_payload_kills.py",
    "loaded": "integration/test_payload_kills.py",
    "result-stored": "integration/test_payload_kills.py",
    "copied": "integration/test_kills.py",
    "removed": "integration/test_payload_kills.py",
    "row-filled": "integration/test_workflow_kills.py",
    "probed": "integration/test_clock_probe.py",
    "compact-written": "spark/test_compaction.py",
    "compact-published": "spark/test_compaction.py",
    "compact-removed": "spark/test_compaction.py",
}
"""Failpoints of what is not simulated, each with the file of the tests that kill there."""


def never_reached(points: Mapping[str, int]) -> list[str]:
    """The failpoints that the simulation should reach and did not."""
    return [step for step in STEPS if step not in ELSEWHERE and not points.get(step)]
