"""The audit: who did what, when, through what, to how many, and how it ended.

Rules
1. Every `aztask.operate.action.Action` leaves one entry when it has ended, whatever it ended with.
   Crash window: a process that dies before leaves none, whatever it has done.
2. An entry follows the act and never prevents it: if the store is unreachable, a line in the log
   says what was not noted.
3. Entries have no arguments of tasks, and secrets in their texts are masked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from aztask.app import App
from aztask.errors import AztaskError, ConfigurationError, NotFound
from aztask.operate.ledger import AUDIT, Ledger, ledger_of, newest_first, packed, unpacked
from aztask.stores.rows import Row
from aztask.support.display import mask, one_line

logger = logging.getLogger(__name__)

COMMAND: Final = "command line"
LONGEST: Final = 2_000
MOST_READ: Final = 2_000
"""Entries that are read at most to fill one page."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Something that was done.

    * `at`: when it ended, UTC epoch seconds. `by`: who. `via`: the command line, the page or MCP.
    * `action`: a fixed word, as `Action.name`. `text`: what, in words.
    * `selected`: on how many it should act; `done`: on how many it did.
    * `error`: why it stopped, "" if it did not.
    * `subject`: the one task, queue or workflow that it was about, "" if it was none.
    """

    at: float
    by: str
    via: str
    action: str
    text: str
    selected: int
    done: int
    error: str = ""
    subject: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, the newest first. next: behind which the next page begins, "". damaged: skipped."""

    entries: Sequence[AuditEntry]
    next: str
    damaged: int = 0


_TEXTS: Final = ("by", "via", "action", "text", "error", "subject")
_COUNTS: Final = ("selected", "done")


def note(app: App, entry: AuditEntry) -> str:
    """Write an entry; returns its key, "" if it could not be written (rule 2)."""
    ledger = ledger_of(app.results)
    if ledger is None:
        return ""
    record: dict[str, Any] = {**asdict(entry)}
    for name in _TEXTS:
        record[name] = one_line(mask(record[name]), LONGEST)
    try:
        key = newest_first(entry.at)
        ledger.write(AUDIT, key, packed(record), None)
        ledger.remove(AUDIT, ledger.old(AUDIT, entry.at))
    except AztaskError as error:
        logger.warning("the audit has no entry of %r: %s", record["text"], error)
        return ""
    return key


def audit(
    app: App, *, by: str = "", action: str = "", text: str = "", limit: int = 50, after: str = ""
) -> AuditPage:
    """A page of the audit. Conditions: who, which action, and a part of the text; "" means any.

    Raises ConfigurationError without a result store, BrokerUnavailable.
    """
    ledger = _ledger(app)
    found: list[AuditEntry] = []
    damaged, read, wanted = 0, 0, text.casefold()
    while len(found) <= limit and read < MOST_READ:
        rows = ledger.page(AUDIT, limit + 1, after)
        for row in rows:
            entry = _entry(row)
            damaged += entry is None
            if entry is not None and (
                by in ("", entry.by)
                and action in ("", entry.action)
                and wanted in f"{entry.text} {entry.subject} {entry.error}".casefold()
            ):
                found.append(entry)
        read += len(rows)
        if len(rows) <= limit:
            break
        after = rows[-1].place.key
    more = len(found) > limit
    return AuditPage(found[:limit], found[limit - 1].key if more else "", damaged)


def entry(app: App, key: str) -> AuditEntry:
    """One entry by its key. Raises NotFound, and as `audit` does."""
    (row,) = _ledger(app).get(AUDIT, [key])
    found = None if row is None else _entry(row)
    if found is None:
        raise NotFound("the audit has no such entry; entries are kept for 90 days")
    return found


def _ledger(app: App) -> Ledger:
    found = ledger_of(app.results)
    if found is None:
        raise ConfigurationError(
            "the audit is kept in the result store, and none is configured: set AZTASK_RESULTS"
        )
    return found


def _entry(row: Row) -> AuditEntry | None:
    record = unpacked(row)
    if record is None:
        return None
    known: dict[str, Any] = {each.name: record.get(each.name) for each in fields(AuditEntry)}
    texts = all(isinstance(known[name], str) for name in _TEXTS)
    counts = all(type(known[name]) is int for name in _COUNTS)
    if not texts or not counts or not isinstance(known["at"], int | float):
        return None
    return AuditEntry(**{**known, "key": str(row.place.key)})
