"""Jobs: an action over many items, as a row that any process goes on with.

Rules
1. A job is a request (`aztask.operate.requests`) and how far it reaches: dead letters that come
   after it was made are not part of it.
2. `aztask.operate.jobrunner` works on it; this file says what a job is, lists and cancels jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Final

from aztask.app import App
from aztask.errors import ConfigurationError, NotFound
from aztask.operate.action import Action, Progress, results_of
from aztask.operate.ledger import JOBS, Ledger, ledger_of, packed, unpacked
from aztask.stores.rows import Cell, Kept, New, Row, change

OPEN: Final = "open"
DONE: Final = "done"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATES: Final = (OPEN, DONE, FAILED, CANCELLED)


@dataclass(frozen=True, slots=True)
class Job:
    """A job. Times are UTC epoch seconds of the store.

    * `kind`, `values`: the request. `by`, `via`: who made it, and through what.
    * `text`: what it does, in words. `count`: on how many it acts. `done`: confirmed so far.
    * `state`: one of `STATES`. `error`: why it stopped, or what is tried again.
    * `holder`: the process that works on it, until `until`; none does after that.
    * `reach`: the last position in each queue. `before`: dead letters that came later are not part
      of it, where there are no positions.
    * `plan`: the batch that is being sent: task id, generation, hop, and what its replay follows.
    * `idle`: how often in a row all that is left was held by another process.
    """

    kind: str
    values: Mapping[str, str]
    by: str
    via: str
    text: str
    count: int
    created: float
    changed: float
    done: int = 0
    state: str = OPEN
    error: str = ""
    holder: str = ""
    until: float = 0.0
    reach: Mapping[str, int] = field(default_factory=dict)
    before: float = 0.0
    plan: Sequence[Sequence[Any]] = ()
    idle: int = 0
    key: str = ""

    def shown(self, now: float) -> str:
        """Its state for people: an open one is ``running`` or ``waiting``."""
        if self.state != OPEN:
            return self.state
        return "running" if self.holder and now < self.until else "waiting"


@dataclass(frozen=True, slots=True)
class JobsPage:
    """Jobs, the newest first. next: behind which the next page begins, "". damaged: skipped."""

    jobs: Sequence[Job]
    next: str
    at: float
    damaged: int = 0


def jobs(app: App, *, limit: int = 50, after: str = "") -> JobsPage:
    """A page of jobs. Raises ConfigurationError without a result store, BrokerUnavailable."""
    ledger = ledger_for_jobs(app)
    rows = ledger.page(JOBS, limit + 1, after)
    found = [job_of(row) for row in rows[:limit]]
    some = [each for each in found if each is not None]
    following = rows[limit - 1].place.key if len(rows) > limit else ""
    return JobsPage(some, following, ledger.now(), len(found) - len(some))


def job(app: App, key: str) -> Job:
    """One job by its key. Raises NotFound, and as `jobs` does."""
    (row,) = ledger_for_jobs(app).get(JOBS, [key])
    found = None if row is None else job_of(row)
    if found is None:
        raise NotFound("there is no such job; jobs are kept for 90 days")
    return found


def cancel(app: App, key: str) -> CancelJob:
    """Stop an open job: what is done stays done. Raises NotFound, and as `jobs` does.

    The process that works on it stops with its next note of progress.
    """
    found = job(app, key)
    return CancelJob(app, int(found.state == OPEN), found)


@dataclass(slots=True)
class CancelJob(Action[bool]):
    """Ends a job; `act` returns False if it has ended already."""

    name: ClassVar[str] = "job-cancel"

    job: Job

    def __str__(self) -> str:
        return f"cancel the job: {self.job.text}"

    def _act(self, progress: Progress) -> bool:
        ledger = ledger_for_jobs(self.app)

        def decide(row: Row | None) -> New[bytes, bool] | Kept[bool]:
            found = None if row is None else job_of(row)
            if found is None or found.state != OPEN:
                return Kept(False)
            ended = replace(
                found,
                state=CANCELLED,
                error=f"cancelled by {self.by}",
                changed=ledger.now(),
                holder="",
                plan=(),
            )
            return New(packed_job(ended), True)

        done = change(_JobCell(ledger, self.job.key), decide, "the job")
        self.done = int(done)
        return done


@dataclass(frozen=True, slots=True)
class _JobCell(Cell[Row | None, bytes]):
    """The row of a job."""

    ledger: Ledger
    key: str

    def read(self) -> Row | None:
        """The row as it is now."""
        (row,) = self.ledger.get(JOBS, [self.key])
        return row

    def write(self, data: bytes, before: Row | None) -> bool:
        """Replace the row that was read; False if it has changed."""
        return self.ledger.write(JOBS, self.key, data, before) is not None


# -- rows ------------------------------------------------------------------------------------------


def ledger_for_jobs(app: App) -> Ledger:
    """The ledger that keeps an app's jobs. Raises ConfigurationError without one."""
    found = ledger_of(results_of(app))
    if found is None:
        raise ConfigurationError("this result store cannot keep jobs; use local:// or tables://")
    return found


def packed_job(job: Job) -> bytes:
    """A job as the bytes of its row."""
    record = asdict(job)
    record.pop("key")
    return packed(record)


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("kind", "by", "via", "text", "state", "error", "holder"), (str,)),
    **dict.fromkeys(("count", "done", "idle"), (int,)),
    **dict.fromkeys(("created", "changed", "until", "before"), (float,)),
    **dict.fromkeys(("values", "reach"), (dict,)),
    "plan": (list, tuple),
}


def job_of(row: Row) -> Job | None:
    """The job in a row; None if it is damaged."""
    record = unpacked(row)
    if record is None or record.get("state") not in STATES:
        return None
    known: dict[str, Any] = {
        each.name: record.get(each.name) for each in fields(Job) if each.name != "key"
    }
    typed = all(type(known[name]) in kinds for name, kinds in _TYPES.items())
    if not typed or not all(_planned(each) for each in record["plan"]):
        return None
    texts = all(isinstance(each, str) for each in record["values"].values())
    numbers = all(type(each) is int for each in record["reach"].values())
    return Job(**{**known, "key": str(row.place.key)}) if texts and numbers else None


def _planned(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 4:
        return False
    return isinstance(entry[0], str) and all(type(each) is int for each in entry[1:])
