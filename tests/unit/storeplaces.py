"""What a store keeps: its kinds of rows and its tables, with the columns that may hold anything."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Final

from aztask.stores.rows import Kind

SIGNED_ROW: Final = "encrypted by aztask.steps.records"
MESSAGE: Final = "a message, encrypted by Codec.to_envelope"
ROW: Final = "encrypted by aztask.stores.records.rowsigning"
DOCUMENT: Final = "encrypted by aztask.stores.records.documentsigning"
OPERATORS: Final = "what operators set and did, and counters: no values of tasks"
CLEAR: Final = "names, ids, states, times, digests"
COUNTS: Final = "names of queues, tasks and workers, times and counts"
PROGRESS: Final = "checkpoints in it are encrypted by aztask.worker.upkeep.heartbeat"
DESCRIPTION: Final = "with encryption an error's type and line: aztask.worker.pool.attempt"

KINDS: Final = {
    "PARTS": {"data": SIGNED_ROW},
    "STEPS": {"data": SIGNED_ROW},
    "WAITS": {"data": f"signals: {SIGNED_ROW}; parked runs: {MESSAGE}"},
    "HOLDERS": {"data": MESSAGE},
    "NOTES": {"envelope": MESSAGE, "reason": CLEAR, "description": DESCRIPTION},
    "READ": {},
    "NUMBERS": {},
    "ENTRIES": {"data": OPERATORS, "signature": CLEAR},
    "OPERATIONS": {"data": OPERATORS},
    "ONCE_RUNS": {"data": CLEAR},
    "ADOPTIONS": {"signature": CLEAR},
    "HISTORY": {"brief": COUNTS, "data": COUNTS},
}
"""The columns of bytes and text, by the name of the kind."""

TABLES: Final = {
    "runs": {
        "value": ROW,
        "saved": ROW,
        "error": "empty: it is in value",
        "traceback": "empty: it is in value",
        "earlier": "with encryption without texts of errors",
        "settlement": DESCRIPTION,
        "note": "what a frontend notes at the send: names and ids",
        "position": CLEAR,
        "signature": CLEAR,
        "saved_signature": CLEAR,
    },
    "sqlite_sequence": {"name": CLEAR, "seq": CLEAR},
    "workflow_documents": {"data": DOCUMENT, "signature": CLEAR},
    "workers": {"record": PROGRESS},
    "schedules": {"data": f"its template: {MESSAGE}; rules and times: {CLEAR}"},
    "apart_schedules": {"data": "as that of schedules"},
    "occurrences": {"data": CLEAR},
    "apart_occurrences": {"data": CLEAR},
    "schedule_claims": {"data": "a keyed digest of the definition, releases and times"},
}
"""The columns that may hold anything, of the tables that are no kinds."""


def kinds() -> dict[str, Kind]:
    found = {}
    for package in ("stores", "steps", "operate", "uniqueness", "limits", "schedules", "workflows"):
        root = importlib.import_module(f"aztask.{package}")
        for module in pkgutil.walk_packages(root.__path__, f"aztask.{package}."):
            if ".cli" in module.name or ".top" in module.name:
                continue
            values = vars(importlib.import_module(module.name))
            found |= {name: each for name, each in values.items() if isinstance(each, Kind)}
    return found
