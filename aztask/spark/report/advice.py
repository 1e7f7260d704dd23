"""What to do about a log's figures: plain sentences, each with the command to run next.

Rules
1. A rule reads figures that the report already has, and speaks only where they leave little doubt:
   a list that cries wolf is not read. Where the data is missing it is silent.
2. Each rule names at most `MOST_NAMED` queues, tasks or workers, the worst first.
3. Names in a command are quoted for a shell, because they come from events.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, TypeAlias

from aztask.spark.report.charts import seconds
from aztask.spark.report.comparison import value_of
from aztask.support.display import plural

MOST_NAMED: Final = 3
FELT_SECONDS: Final = 1.0
"""A queue whose tasks wait for less does not fall behind, whatever the change."""
LEFT_SHARE: Final = 0.05
"""A queue falls behind if more than this share of what was sent had not ended."""
LONGER: Final = 2.0
"""Times as long as before, where the log does not tell what was sent."""
LOSSES: Final = 3
LOSS_SHARE: Final = 0.001
"""As `aztask.spark.recommendation`: fewer lost leases are no reason for a longer one."""
NEAR_LEASE: Final = 0.95
DEAD_LETTERS: Final = 3
DOMINATING: Final = 0.8

Row: TypeAlias = dict[str, Any]


def advise(figures: Row) -> list[Row]:
    """The advice for a summary as plain data: rule, about (a name), text and command."""
    return [row for rule in RULES for row in islice(rule(figures), MOST_NAMED)]


def falls_behind(figures: Row) -> Iterator[Row]:
    """A queue in which less ends than is sent, and whose tasks wait longer than before."""
    rows = [row for each in _compared(figures, "period") for row in each["queues"]]
    for row in sorted(rows, key=lambda row: -(row["after"]["wait_p50"] or 0.0)):
        before, after = row["before"], row["after"]
        if row["changed"].get("wait_p50") != "more" or after["wait_p50"] < FELT_SECONDS:
            continue
        sent, ended = after["enqueued"], after["ended"]
        if sent and sent - ended <= LEFT_SHARE * sent:
            continue  # it waits longer, and keeps up
        if not sent and after["wait_p50"] < LONGER * before["wait_p50"]:
            continue
        told = f" {plural(sent, 'task')} were sent and {ended:,} ended;" if sent else ""
        yield {
            "rule": "falls_behind",
            "about": row["queue"],
            "text": f"The queue {row['queue']} falls behind:{told} half of its tasks waited longer "
            f"than {seconds(after['wait_p50'])}; in the period before, than "
            f"{seconds(before['wait_p50'])}. Add a worker, or let the workers run more at once.",
            "command": f"aztask worker -Q {shlex.quote(row['queue'])}",
        }


def short_lease(figures: Row) -> Iterator[Row]:
    """A queue that loses leases, because its runs take as long as the lease, or longer."""
    for row in sorted(figures["queues"], key=lambda row: -row["lease_lost"]):
        lost, lease = row["lease_lost"], row["lease_max"]
        if lost < LOSSES or lost < LOSS_SHARE * row["received"]:
            continue
        # Beyond the longest run that is known, if too many runs were cut off to tell.
        long = row["run_max"] if row["run_p99"] is None else row["run_p99"]
        if long is None or (lease is not None and long < NEAR_LEASE * lease):
            continue
        held = "No lease was kept" if lease is None else f"The lease is {seconds(lease)}"
        yield {
            "rule": "short_lease",
            "about": row["queue"],
            "text": f"The queue {row['queue']} lost {plural(lost, 'lease')}, and its longest runs "
            f"take {seconds(long)} or more. {held}: it is too short for them.",
            "command": "aztask spark recommend "
            f"{shlex.quote(figures['place'])} -Q {shlex.quote(row['queue'])}",
        }


def dominating_error(figures: Row) -> Iterator[Row]:
    """A task that is dead-lettered, nearly always with the same error."""
    most: dict[str, Row] = {}
    for row in figures["signatures"]:
        if row["runs"] > most.get(row["task"], {"runs": 0})["runs"]:
            most[row["task"]] = row
    for row in sorted(figures["tasks"], key=lambda row: -row["dead_lettered"]):
        error, failures = most.get(row["task"]), row["failed"] + row["resubmitted"]
        if row["dead_lettered"] < DEAD_LETTERS or error is None or not failures:
            continue
        share = error["runs"] / failures
        if share < DOMINATING:
            continue
        yield {
            "rule": "dominating_error",
            "about": row["task"],
            "text": f"{row['task']} has {plural(row['dead_lettered'], 'dead letter')}, and "
            f"{100 * share:.0f} % of its failures are one error: {error['signature']}. Correct "
            "that, then replay them.",
            "command": f"aztask dlq replay --task {shlex.quote(row['task'])} --dry-run",
        }


def frozen_worker(figures: Row) -> Iterator[Row]:
    """A worker that was silent for as long as a lease, and then learned that it had lost one."""
    lease = (figures["total"] or {}).get("lease_min")
    rows = [row for row in figures["workers"] if row["silence"] is not None]
    for row in sorted(rows, key=lambda row: -row["silence"]):
        if row["silence"] < max(FELT_SECONDS, lease or 0.0):
            return
        yield {
            "rule": "frozen_worker",
            "about": row["worker"],
            "text": f"The worker {row['worker']} was silent for {seconds(row['silence'])} and lost "
            f"{plural(row['lost'], 'lease')}: it was frozen. Check whether its machine was "
            "suspended, or had no memory or CPU left.",
            "command": "aztask workers",
        }


def worse_deploy(figures: Row) -> Iterator[Row]:
    """A task that is retried or dead-lettered more since the deploy; with the last such task."""
    last: dict[str, Row] = {}
    for row in figures["signatures"]:
        if row["last"] > last.get(row["task"], {"last": 0.0})["last"]:
            last[row["task"]] = row
    for each in _compared(figures, "deploy"):
        found = []
        for row in each["tasks"]:
            error = last.get(row["task"])
            for name in ("dead_lettered", "retried"):
                worse = row["changed"].get(name) == "more"
                if worse and error is not None and error["last"] >= each["split"]:
                    sides = [value_of(row[side], name) or 0.0 for side in ("before", "after")]
                    found.append((sides, name, row["task"], error))
                    break
        for sides, name, task, error in sorted(found, key=lambda its: its[0][0] - its[0][1]):
            kind = "runs are retried" if name == "retried" else "tasks are dead-lettered"
            yield {
                "rule": "worse_deploy",
                "about": task,
                "text": f"Since the deploy, {100 * sides[1]:.2g} % of {task}'s {kind}; before, "
                f"{100 * sides[0]:.2g} %. The last error was {error['sample']}",
                "command": f"aztask explain {shlex.quote(error['task_id'])}",
            }


RULES: Final = (falls_behind, short_lease, dominating_error, worse_deploy, frozen_worker)


def _compared(figures: Row, about: str) -> list[Row]:
    return [each for each in figures["comparisons"] if each["about"] == about]
