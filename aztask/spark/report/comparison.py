"""Two spans of a log side by side: a period beside the one before it, and a deploy's two sides.

Rules
1. Both spans have the same length and lie within the log: where it does not reach back far enough,
   both are shorter.
2. An event counts in the span in which it happened. A run that a deploy interrupted counts in the
   span of its end, its wait in that of its start.
3. Each span is divided into `STEPS` equal steps. A change is marked if the figures of the steps
   after the split are larger, or smaller, than those before it by more than chance
   (`rank_sum`, then `discoveries`). Steps, not runs, are compared, because runs are not
   independent: one outage fails a thousand at once, and fills one step.
4. Retries and dead letters are tested as shares, of runs and of tasks that ended: twice the traffic
   alone marks neither. A step without runs has no share and no percentile; with fewer than
   `LEAST_STEPS` steps on either side, nothing is said.
5. Spark reads the events once for all figures. The driver gets the steps of the `MOST_ROWS` busiest
   queues and tasks, however long the log is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from aztask.errors import ConfigurationError
from aztask.spark.events.statistics import ACCURACY, RAN, plain

STEPS: Final = 20
"""Steps of each span."""
LEAST_STEPS: Final = 5
"""Steps with a figure that each span needs for a test."""
FALSE_SHARE: Final = 0.01
"""The expected share of marks that are chance."""
MOST_ROWS: Final = 200
"""Queues, and tasks, of a comparison."""
MEASURED: Final = ("wait_p50", "wait_p95", "run_p50", "run_p95")
FIGURES: Final = ("done", "retried", "dead_lettered", *MEASURED)
WHOLES: Final = {"retried": "runs", "dead_lettered": "ended"}
"""The figures that are tested as a share, and of what."""

Row: TypeAlias = dict[str, Any]
Direction: TypeAlias = Literal["more", "less"]

_KEYS: Final = ("span", "after", "step", "queue", "task")
LEVELS_COMPARED: Final = ("queue", "task")
_COUNTS: Final = ("events", "done", "retried", "dead_lettered", "runs", "ended", "enqueued")


@dataclass(frozen=True, slots=True)
class Span:
    """What is compared: [begin, split) with [split, end], in seconds since 1970.

    about: ``period`` or ``deploy``.
    """

    about: str
    begin: float
    split: float
    end: float


def spans_of(
    first: float, last: float, *, period: float | None = None, deploy: float | None = None
) -> list[Span]:
    """What to compare in a log from `first` to `last`, in seconds since 1970.

    period: its length in seconds; None: half the log. deploy: when it was. Nothing if the log has
    no length. Raises ConfigurationError if the deploy is not within the log.
    """
    found = []
    length = min((last - first) / 2, math.inf if period is None else period)
    if length > 0:
        found.append(Span("period", last - 2 * length, last - length, last))
    if deploy is not None:
        length = min(last - deploy, deploy - first, math.inf if period is None else period)
        if length <= 0:
            raise ConfigurationError(
                f"the deploy at {deploy:.0f} is not within the log, which is from {first:.0f} to "
                f"{last:.0f} (seconds since 1970)"
            )
        found.append(Span("deploy", deploy - length, deploy, deploy + length))
    return found


def compare(events: DataFrame, spans: Sequence[Span]) -> list[Row]:
    """The comparison of each span: about, begin, split, end, queues and tasks. Runs one job.

    Rows have queue or task; before and after, each with `FIGURES` and runs, ended, enqueued and
    events; p, the probability that chance alone makes such a difference, of each figure that could
    be tested; changed: ``more`` or ``less`` of those whose change is larger than chance.
    """
    if not spans:
        return []
    rows = plain(_steps(events, spans))
    return [
        {
            "about": span.about,
            "begin": span.begin,
            "split": span.split,
            "end": span.end,
            **{
                f"{key}s": _tested(
                    [row for row in rows if row["span"] == number and row["key"] == key], key
                )
                for key in LEVELS_COMPARED
            },
        }
        for number, span in enumerate(spans)
    ]


def _steps(events: DataFrame, spans: Sequence[Span]) -> DataFrame:
    """For each span, and each of its busiest queues and tasks, the figures of all steps.

    Columns: span, key (``queue`` or ``task``), name, events, parts. A part has after, step (-1: all
    of them) and the figures.
    """
    kind = F.col("event")
    placed = events.select(
        *("queue", "task", "event"),
        F.when(kind == "started", F.col("wait_seconds")).alias("wait"),
        F.when(kind.isin(*RAN), F.col("duration_seconds")).alias("run"),
        F.explode(F.array(*(_place(*each) for each in enumerate(spans)))).alias("place"),
    ).where(F.col("place").isNotNull())
    flat = placed.select("place.*", "queue", "task", "event", "wait", "run")
    keys = {name: F.col(name) for name in _KEYS}
    sets = [
        [keys[name] for name in (*sides, key)]
        for key in LEVELS_COMPARED
        for sides in (("span", "after"), ("span", "after", "step"))
    ]
    figures = flat.groupingSets(sets, *keys.values()).agg(
        # The bits of the keys that a row sums over: 1 is task, 2 is queue, 4 is step.
        F.grouping_id().alias("sums"),
        F.count("*").alias("events"),
        _count("done", "succeeded"),
        _count("retried", "resubmitted"),
        _count("dead_lettered", "dead_lettered"),
        _count("runs", *RAN),
        _count("ended", "succeeded", "dead_lettered", "cancelled", "expired"),
        _count("enqueued", "enqueued"),
        *(F.percentile_approx(name, [0.5, 0.95], ACCURACY).alias(name) for name in ("wait", "run")),
    )
    of_queue = F.col("sums").bitwiseAND(1) == 1
    part = F.struct(
        "after",
        F.when(F.col("sums").bitwiseAND(4) == 4, -1).otherwise(F.col("step")).alias("step"),
        *_COUNTS,
        *(
            F.col(name)[place].alias(f"{name}_{share}")
            for name in ("wait", "run")
            for place, share in enumerate(("p50", "p95"))
        ),
    )
    gathered = figures.groupBy(
        "span",
        F.when(of_queue, "queue").otherwise("task").alias("key"),
        F.when(of_queue, F.col("queue")).otherwise(F.col("task")).alias("name"),
    ).agg(F.sum("events").alias("events"), F.collect_list(part).alias("parts"))
    busiest = Window.partitionBy("span", "key").orderBy(F.desc("events"), "name")
    ranked = gathered.withColumn("rank", F.row_number().over(busiest))
    return ranked.where(F.col("rank") <= MOST_ROWS).orderBy("span", "key", "rank").drop("rank")


def _place(number: int, span: Span) -> Column:
    """Where in a span an event is: (its number, whether after the split, the step); else null."""
    ts = F.col("ts")
    after = ts >= span.split
    since = ts - F.when(after, span.split).otherwise(span.begin)
    step = F.floor(since / (span.end - span.split) * STEPS)
    return F.when(
        (ts >= span.begin) & (ts <= span.end),
        F.struct(
            F.lit(number).alias("span"),
            after.alias("after"),
            # The end belongs to the last step, and no rounding makes a step more.
            F.greatest(F.lit(0), F.least(F.lit(STEPS - 1), step)).cast("int").alias("step"),
        ),
    )


def _count(name: str, *kinds: str) -> Column:
    return F.count(F.when(F.col("event").isin(*kinds), 1)).alias(name)


# -- what is larger than chance --------------------------------------------------------------------


def _tested(rows: Sequence[Row], key: str) -> list[Row]:
    """The rows of a comparison, with p and changed."""
    made = []
    for row in rows:
        sides: dict[bool, dict[int, Row]] = {False: {}, True: {}}
        for part in row["parts"]:
            sides[part["after"]][part["step"]] = part
        tests = {
            name: rank_sum(*(_values(sides[after], name) for after in (False, True)))
            for name in FIGURES
        }
        whole = {after: _whole(sides[after].get(-1)) for after in (False, True)}
        made.append(
            {key: row["name"], "before": whole[False], "after": whole[True], "tests": tests}
        )
    limit = discoveries([test[0] for row in made for test in row["tests"].values() if test])
    for row in made:
        tests = row.pop("tests")
        row["p"] = {name: test[0] if test else None for name, test in tests.items()}
        row["changed"] = {
            name: test[1]
            for name, test in tests.items()
            if test and test[0] <= limit and test[1] == _direction(row, name)
        }
    return made


def _whole(part: Row | None) -> Row:
    """The figures of all steps of one side; counts are 0 and the rest unknown without events."""
    names = (*_COUNTS, *MEASURED)
    if part is None:
        return {name: None if name in MEASURED else 0 for name in names}
    return {name: part[name] for name in names}


def _values(steps: Mapping[int, Row], name: str) -> list[float]:
    """A figure of each step that has one. Nothing done in a step is a figure, too: 0."""
    if name == "done":
        return [float(steps[at]["done"]) if at in steps else 0.0 for at in range(STEPS)]
    parts = [part for at, part in steps.items() if at >= 0]
    return [value for part in parts if (value := value_of(part, name)) is not None]


def value_of(part: Row, name: str) -> float | None:
    """A figure as it is tested: a share where there is a whole, which may be unknown."""
    whole = WHOLES.get(name)
    if whole is None:
        return None if part[name] is None else float(part[name])
    return part[name] / part[whole] if part[whole] else None


def _direction(row: Row, name: str) -> Direction | None:
    """Where the figure of the whole span went."""
    before, after = (value_of(row[side], name) for side in ("before", "after"))
    if before is None or after is None or before == after:
        return None
    return "more" if after > before else "less"


def rank_sum(before: Sequence[float], after: Sequence[float]) -> tuple[float, Direction] | None:
    """The two-sided p of the Mann-Whitney test, and where the values went; None for too few.

    The rank-sum test asks whether values of one side tend to be larger, and assumes no shape of
    their distribution. p is from its normal approximation, corrected for ties and continuity, which
    is close from five values on either side: H. B. Mann and D. R. Whitney, "On a test of whether
    one of two random variables is stochastically larger than the other", Annals of Mathematical
    Statistics 18 (1947), 50-60; ties as in E. L. Lehmann, "Nonparametrics" (1975), section 1.4.

    It assumes steps that are independent: a log whose load rises and falls in a longer rhythm than
    a span has steps that resemble their neighbours, and a difference between day and night is
    marked. Compare spans of a whole rhythm, such as one day.
    """
    if min(len(before), len(after)) < LEAST_STEPS:
        return None
    together = sorted([(value, False) for value in before] + [(value, True) for value in after])
    total, ties, ranks, at = len(together), 0, 0.0, 0
    while at < total:
        same = at
        while same < total and together[same][0] == together[at][0]:
            same += 1
        ties += (same - at) ** 3 - (same - at)
        # Equal values share the mean of their ranks, which count from 1.
        ranks += (at + same + 1) / 2 * sum(is_after for _, is_after in together[at:same])
        at = same
    expected = len(after) * (total + 1) / 2
    spread = len(before) * len(after) / 12 * (total + 1 - ties / (total * (total - 1)))
    direction: Direction = "more" if ranks > expected else "less"
    if spread <= 0:
        return 1.0, direction
    distance = max(0.0, abs(ranks - expected) - 0.5) / math.sqrt(spread)
    return math.erfc(distance / math.sqrt(2)), direction


def discoveries(found: Sequence[float]) -> float:
    """The largest p that is marked, so that at most `FALSE_SHARE` of the marks are chance; else -1.

    Of a hundred tasks with seven figures each, 7 would be marked by chance at 1 % each. This is
    the step-up procedure of Y. Benjamini and Y. Hochberg, "Controlling the false discovery rate",
    Journal of the Royal Statistical Society B 57 (1995), 289-300.
    """
    limit = -1.0
    for rank, p in enumerate(sorted(found), 1):
        if p <= FALSE_SHARE * rank / len(found):
            limit = p
    return limit


def shown(row: Row, name: str, form: Callable[[float], str]) -> str:
    """A figure on both sides, with ``more`` or ``less`` where the change is larger than chance."""
    sides = [_shown_side(row[side], name, form) for side in ("before", "after")]
    return " → ".join(sides) + (f", {row['changed'][name]}" if name in row["changed"] else "")


def _shown_side(part: Row, name: str, form: Callable[[float], str]) -> str:
    if part[name] is None:
        return "–"
    if name in MEASURED:
        return form(part[name])
    share = value_of(part, name) if name in WHOLES and part[name] else None
    return f"{part[name]:,}" + (f" ({100 * share:.2g} %)" if share is not None else "")
