"""The data pipeline on Spark: submit DataFrames as tasks, learn from events, triage dead letters.

Rules
1. Nothing outside this package imports it, but ``aztask spark ...`` when such a command runs.
2. Executors import it too: a module here does no work when it is imported.
3. Names are imported when they are first used; without pyspark that is one line that says what to
   install, not a traceback.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aztask.spark.needs import check_installed

if TYPE_CHECKING:
    from aztask.spark.compaction import CompactionReport, compact
    from aztask.spark.datasource import register
    from aztask.spark.deadletters import dead_letters
    from aztask.spark.eventframe import EventCounts, Events, read_events, stream_events
    from aztask.spark.eventplaces import place_of
    from aztask.spark.eventstatistics import Statistics, statistics
    from aztask.spark.ids import task_id
    from aztask.spark.report import SubmitReport
    from aztask.spark.session import active_session, get_session
    from aztask.spark.streaming import stream
    from aztask.spark.submitting import submit
    from aztask.spark.target import Target

__all__ = [
    "CompactionReport",
    "EventCounts",
    "Events",
    "Statistics",
    "SubmitReport",
    "Target",
    "active_session",
    "compact",
    "dead_letters",
    "get_session",
    "place_of",
    "read_events",
    "register",
    "statistics",
    "stream",
    "stream_events",
    "submit",
    "task_id",
]

_HOMES = {
    "CompactionReport": "aztask.spark.compaction",
    "EventCounts": "aztask.spark.eventframe",
    "Events": "aztask.spark.eventframe",
    "Statistics": "aztask.spark.eventstatistics",
    "SubmitReport": "aztask.spark.report",
    "Target": "aztask.spark.target",
    "active_session": "aztask.spark.session",
    "compact": "aztask.spark.compaction",
    "dead_letters": "aztask.spark.deadletters",
    "get_session": "aztask.spark.session",
    "place_of": "aztask.spark.eventplaces",
    "read_events": "aztask.spark.eventframe",
    "register": "aztask.spark.datasource",
    "statistics": "aztask.spark.eventstatistics",
    "stream": "aztask.spark.streaming",
    "stream_events": "aztask.spark.eventframe",
    "submit": "aztask.spark.submitting",
    "task_id": "aztask.spark.ids",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aztask.spark' has no attribute {name!r}")
    check_installed()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
