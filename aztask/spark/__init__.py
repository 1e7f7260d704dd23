"""The data pipeline on Spark: submit DataFrames as tasks, analyse events, triage dead letters.

Rules
1. Only ``aztask spark ...`` imports it from outside, when such a command runs: `cli` has them.
2. Executors import it too, so no module here does any work on import.
3. Names are imported on first use. Without pyspark, one line says what to install.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aztask.spark.needs import TABLE_LIBRARIES, check_installed

if TYPE_CHECKING:
    from aztask.spark.deadletters import dead_letters
    from aztask.spark.events.compaction import CompactionReport, compact
    from aztask.spark.events.frame import EventCounts, Events, read_events, stream_events
    from aztask.spark.events.places import place_of
    from aztask.spark.events.statistics import Statistics, statistics
    from aztask.spark.events.workflows import WorkflowStatistics, workflow_statistics
    from aztask.spark.session import active_session, get_session
    from aztask.spark.submission.datasource import register, stream
    from aztask.spark.submission.results import results, wait
    from aztask.spark.submission.submission import Target, task_id
    from aztask.spark.submission.submit import SubmitReport, submit
    from aztask.spark.tables.follow import FollowedBatch, follow_events
    from aztask.spark.tables.tables import (
        TableReport,
        TableRows,
        append_events,
        read_table,
        store_dead_letters,
        store_results,
    )

__all__ = [
    "CompactionReport",
    "EventCounts",
    "Events",
    "FollowedBatch",
    "Statistics",
    "SubmitReport",
    "TableReport",
    "TableRows",
    "Target",
    "WorkflowStatistics",
    "active_session",
    "append_events",
    "compact",
    "dead_letters",
    "follow_events",
    "get_session",
    "place_of",
    "read_events",
    "read_table",
    "register",
    "results",
    "statistics",
    "store_dead_letters",
    "store_results",
    "stream",
    "stream_events",
    "submit",
    "task_id",
    "wait",
    "workflow_statistics",
]

_HOMES = {
    "CompactionReport": "aztask.spark.events.compaction",
    "EventCounts": "aztask.spark.events.frame",
    "Events": "aztask.spark.events.frame",
    "FollowedBatch": "aztask.spark.tables.follow",
    "Statistics": "aztask.spark.events.statistics",
    "SubmitReport": "aztask.spark.submission.submit",
    "TableReport": "aztask.spark.tables.tables",
    "TableRows": "aztask.spark.tables.tables",
    "Target": "aztask.spark.submission.submission",
    "WorkflowStatistics": "aztask.spark.events.workflows",
    "active_session": "aztask.spark.session",
    "append_events": "aztask.spark.tables.tables",
    "compact": "aztask.spark.events.compaction",
    "dead_letters": "aztask.spark.deadletters",
    "follow_events": "aztask.spark.tables.follow",
    "get_session": "aztask.spark.session",
    "place_of": "aztask.spark.events.places",
    "read_events": "aztask.spark.events.frame",
    "read_table": "aztask.spark.tables.tables",
    "register": "aztask.spark.submission.datasource",
    "results": "aztask.spark.submission.results",
    "statistics": "aztask.spark.events.statistics",
    "store_dead_letters": "aztask.spark.tables.tables",
    "store_results": "aztask.spark.tables.tables",
    "stream": "aztask.spark.submission.datasource",
    "stream_events": "aztask.spark.events.frame",
    "submit": "aztask.spark.submission.submit",
    "task_id": "aztask.spark.submission.submission",
    "wait": "aztask.spark.submission.results",
    "workflow_statistics": "aztask.spark.events.workflows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aztask.spark' has no attribute {name!r}")
    check_installed()
    if ".tables." in _HOMES[name]:
        check_installed(TABLE_LIBRARIES, extra="delta")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
