"""The report of a submission, which compares rows read with messages sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from aztask.errors import SubmitFailed
from aztask.spark.submission.send import MAX_ERRORS, PartitionReport
from aztask.support.display import one_line


@dataclass(frozen=True)
class SubmitReport:
    """The outcome of a submission.

    rows: as Spark itself counted them.
    sent: messages that the broker accepted, one for each row.
    retried: repeated sends; they add no messages, or duplicates that workers drop.
    failed: rows that could not be sent.
    seconds: from the first job to the last answer.
    checked: whether the keys were checked.
    dry_run: nothing was sent, and `sent` counts the messages that would have been.
    errors: the first few reasons of failed rows.
    """

    submission_id: str
    task: str
    queue: str
    rows: int
    sent: int
    retried: int
    failed: int
    partitions: int
    seconds: float
    checked: bool = False
    dry_run: bool = False
    errors: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, reports: Iterable[PartitionReport], *, rows: int | None = None, **about: Any
    ) -> Self:
        """The sum of the partitions. rows: Spark's count; None: the partitions' own."""
        parts = list(reports)
        errors = [line for part in parts for line in part.errors.splitlines()]
        return cls(
            rows=sum(part.rows for part in parts) if rows is None else rows,
            sent=sum(part.sent for part in parts),
            retried=sum(part.retried for part in parts),
            failed=sum(part.failed for part in parts),
            partitions=len(parts),
            errors=tuple(errors[:MAX_ERRORS]),
            **about,
        )

    def check(self) -> None:
        """Raise SubmitFailed, which carries this report, unless every row was sent."""
        if self.rows != self.sent + self.failed:
            raise SubmitFailed(
                f"the numbers do not add up: {self.rows:,} rows, {self.sent:,} sent and "
                f"{self.failed:,} failed; submit again under the submission id "
                f"{one_line(self.submission_id)!r}, which sends no task twice",
                self,
            )
        if self.failed:
            first = one_line(self.errors[0]) if self.errors else "no reason was given"
            raise SubmitFailed(
                f"{self.failed:,} of {self.rows:,} rows could not be sent, the others were "
                f"({first}); correct these rows and submit again under the submission id "
                f"{one_line(self.submission_id)!r}",
                self,
            )

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data, for JSON."""
        return {**asdict(self), "seconds": round(self.seconds, 3), "errors": list(self.errors)}
