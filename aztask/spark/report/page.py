"""The report: one HTML file that needs nothing else, for a person to look at.

Rules
1. It loads nothing: no script, font, image or style from anywhere, and its own policy forbids it.
2. Whatever stands in events (names of tasks, queues, errors) is text: escaped, on one line, cut.
3. Colour never says anything alone: a word or a number says it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aztask.spark.report import charts
from aztask.spark.report.style import STYLE
from aztask.spark.report.summary import Summary
from aztask.spark.report.text import count, moment, per_second, safe, seconds, share
from aztask.version import __version__

MOST_ROWS: Final = 20
"""Rows of a chart; all rows stand in the tables."""
MOST_TABLE_ROWS: Final = 500
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str], Callable[[Row], str]]
"""A table's column: its heading, a row's text, and the CSS class of the cell."""


def render(summary: Summary, *, made_at: float | None = None) -> str:
    """The whole page. made_at: seconds since 1970, instead of now."""
    made = moment(time.time() if made_at is None else made_at)
    body = _nothing() if summary.total is None else "".join(_sections(summary, summary.total))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Tasks: {safe(summary.place)}</title><style>{STYLE}</style></head><body><main>"
        f"{_header(summary, made)}{body}{_what_was_read(summary)}{_footer(summary)}"
        "</main></body></html>\n"
    )


def _header(summary: Summary, made: str) -> str:
    total = summary.total
    span = ""
    if total is not None:
        span = f"{moment(total['first_ts'])} to {moment(total['last_ts'])} UTC &middot; "
    return (
        f"<header><h1>What the tasks did</h1><p>{safe(summary.place)} &middot; {span}"
        f"made {made} UTC</p></header>"
    )


def _sections(summary: Summary, total: Row) -> Iterable[str]:
    busiest = sorted(summary.tasks, key=lambda row: (-row["runs"], row["task"]))
    busiest = [row for row in busiest if row["runs"]][:MOST_ROWS]
    queues = sorted(summary.queues, key=lambda row: (-row["events"], row["queue"]))[:MOST_ROWS]
    step = summary.step_seconds
    every = f"one bar for each {seconds(step)}"
    yield _cards(total)
    yield _section(
        "Outcomes over time",
        f"How runs ended, {every}.",
        charts.legend(charts.OUTCOMES)
        + charts.stacked_bars("Outcomes over time", summary.timeline, step, charts.OUTCOMES),
    )
    yield '<div class="pair">'
    for title, column, text in (
        ("Wait over time", "wait", "From being due to being started"),
        ("Run over time", "run", "How long a run took"),
    ):
        drawn = charts.lines(title, summary.timeline, step, column)
        yield _section(title, f"{text}: median (line), 99th percentile (dashed).", drawn)
    yield "</div>"
    yield _by_task(busiest)
    yield _by_queue(summary, queues)
    yield _troubled(summary)
    yield _numbers("All tasks in numbers", "task", summary.tasks)
    yield _numbers("All queues in numbers", "queue", summary.queues)


def _by_task(rows: Sequence[Row]) -> str:
    most = "" if len(rows) < MOST_ROWS else f" The {MOST_ROWS} busiest tasks."
    return _section(
        "How long tasks run",
        "Dark: median to 90th percentile. Pale: to the 99th, which stands at the right. Dot: the "
        f"longest.{most}",
        charts.spreads("Run times by task", rows, "task", "run"),
    ) + _section(
        "How runs end",
        f"Each task's runs by outcome; their number at the right.{most}",
        charts.legend(charts.OUTCOMES)
        + charts.mix("Outcomes by task", rows, "task", charts.OUTCOMES),
    )


def _by_queue(summary: Summary, rows: Sequence[Row]) -> str:
    return (
        _section(
            "How long tasks wait",
            "From being due to being started, by queue; read as above.",
            charts.spreads("Waits by queue", rows, "queue", "wait"),
        )
        + _section(
            "What is left of the lease at settlement",
            "By queue. Bar: from the 1st percentile, which stands at the right, to the median. "
            "Dot: the least. In the shaded tenth a late renewal costs the lease.",
            charts.margins("Lease left at settlement, by queue", rows),
        )
        + _section(
            "Runs by queue and hour",
            "Darker where there are more.",
            charts.heat("Runs by queue and hour", summary.queue_hours),
        )
    )


def _section(title: str, text: str, body: str) -> str:
    heading = f"<h2>{safe(title)}</h2><p>{safe_sentence(text)}</p>"
    return f'<section>{heading}<div class="wide">{body}</div></section>'


def safe_sentence(text: str) -> str:
    """Our own sentences, which may be longer than a name."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _cards(total: Row) -> str:
    lost, failed = total["lease_lost"], total["settle_failed"]
    least, lease = total["margin_min"], total["lease_max"]
    close = least is not None and lease is not None and least < 0.1 * lease
    kept = None if total["retry_rate"] is None else total["succeeded"] / total["runs"]
    cards = [
        ("Runs", count(total["runs"]), f"{share(kept)} succeeded", _level(kept, 0.95, 0.8)),
        ("Throughput", per_second(total["throughput"]), "runs over the whole time", ""),
        (
            "Wait",
            seconds(total["wait_p50"]),
            f"99 % below {seconds(total['wait_p99'])}, longest {seconds(total['wait_max'])}",
            "",
        ),
        (
            "Run",
            seconds(total["run_p50"]),
            f"99 % below {seconds(total['run_p99'])}, longest {seconds(total['run_max'])}",
            "",
        ),
        ("Retried", share(total["retry_rate"]), f"{count(total['resubmitted'])} runs", ""),
        (
            "Dead letters",
            count(total["dead_lettered"]),
            f"{share(total['dead_letter_rate'])} of the tasks that ended",
            "poor" if (total["dead_letter_rate"] or 0) > 0.01 else "",
        ),
        (
            "Leases lost",
            count(lost),
            f"{share(total['lost_rate'])} of deliveries, {count(failed)} settlements failed",
            "poor" if lost or failed else "good",
        ),
        (
            "Least lease left",
            seconds(least),
            f"of {seconds(lease)}, at settlement; {total['renewals_mean'] or 0:.2g} renewals each",
            "warn" if close else "",
        ),
    ]
    return f'<div class="cards">{"".join(map(_card, cards))}</div>'


def _card(card: tuple[str, str, str, str]) -> str:
    name, value, text, level = card
    word = {"warn": "<b>close</b>", "poor": "<b>look here</b>"}.get(level, "")
    return (
        f'<div class="card {level}"><h2>{name}</h2><strong>{value}{word}</strong>'
        f"<span>{text}</span></div>"
    )


def _level(value: float | None, good: float, warn: float) -> str:
    if value is None:
        return ""
    return "good" if value >= good else "warn" if value >= warn else "poor"


def _troubled(summary: Summary) -> str:
    """The tasks that fail most, and of what."""
    errors: dict[str, list[str]] = {}
    for row in summary.errors:
        errors.setdefault(row["task"], []).append(f"{row['error_type']} ({count(row['runs'])})")
    rows = [row for row in summary.tasks if _trouble(row)]
    rows = sorted(rows, key=lambda row: (-_trouble(row), row["task"]))[:MOST_ROWS]
    if not rows:
        return _section("Where it hurts", "No task failed, was dead-lettered or lost a lease.", "")
    columns: list[Column] = [
        ("runs", lambda row: count(row["runs"]), _plain),
        ("retried", lambda row: share(row["retry_rate"]), _marked("retry_rate", 0.05, 0.25)),
        ("failed", lambda row: count(row["failed"]), _plain),
        (
            "dead letters",
            lambda row: count(row["dead_lettered"]),
            _marked("dead_letter_rate", 1e-9, 0.01),
        ),
        ("leases lost", lambda row: count(row["lease_lost"]), _marked("lease_lost", 1e-9, 1e9)),
        ("99 % run below", lambda row: seconds(row["run_p99"]), _plain),
        (
            "most frequent errors",
            lambda row: safe(", ".join(errors.get(row["task"], ["–"])[:3])),
            lambda row: "text",
        ),
    ]
    return _section(
        "Where it hurts",
        "Tasks with the most failed runs, dead letters and lost leases.",
        _table("task", rows, columns),
    )


def _trouble(row: Row) -> int:
    names = ("failed", "resubmitted", "dead_lettered", "lease_lost", "settle_failed")
    return int(sum(row[name] for name in names))


def _plain(row: Row) -> str:
    return ""


def _marked(name: str, warn: float, poor: float) -> Callable[[Row], str]:
    def level(row: Row) -> str:
        value = row[name] or 0
        return "poor" if value >= poor else "warn" if value >= warn else ""

    return level


def _numbers(title: str, key: str, rows: Sequence[Row]) -> str:
    """Every row, folded away."""

    def of(name: str, form: Callable[[Any], str]) -> Column:
        return name.replace("_", " "), lambda row: form(row[name]), _plain

    kinds = ("succeeded", "resubmitted", "snoozed", "failed", "dead_lettered", "lease_lost")
    columns = [
        *(of(name, count) for name in ("runs", *kinds, "settle_failed")),
        *(of(f"wait_{part}", seconds) for part in ("p50", "p90", "p99", "max")),
        *(of(f"run_{part}", seconds) for part in ("p50", "p90", "p99", "max")),
        *(of(f"held_{part}", seconds) for part in ("p50", "p99", "max")),
        *(of(f"margin_{part}", seconds) for part in ("p50", "p10", "p01", "min")),
        of("throughput", per_second),
    ]
    shown = rows[:MOST_TABLE_ROWS]
    more = f"<p>{count(len(rows) - len(shown))} more rows.</p>" if len(rows) > len(shown) else ""
    return (
        f"<section><details><summary>{title}</summary>"
        f'<div class="wide">{_table(key, shown, columns)}</div>{more}</details></section>'
    )


def _table(key: str, rows: Sequence[Row], columns: Sequence[Column]) -> str:
    heads = "".join(
        f'<th scope="col" class="{level(rows[0]) if rows else ""}">{name}</th>'
        for name, _, level in columns
    )
    body = "".join(
        f'<tr><td title="{safe(row[key])}">{safe(row[key])}</td>'
        + "".join(f'<td class="{level(row)}">{text(row)}</td>' for _, text, level in columns)
        + "</tr>"
        for row in rows
    )
    return (
        f'<table><thead><tr><th scope="col">{key}</th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _what_was_read(summary: Summary) -> str:
    counts = summary.counts
    facts = [
        f"{count(counts['events'])} events from {count(counts['files'])} files "
        f"({count(counts['compacted_files'])} compacted)",
        f"{count(counts['duplicates'])} further copies of events, dropped",
    ]
    facts += [f"{count(number)} &times; {safe(what)}" for what, number in counts["odd"].items()]
    facts += [
        f"not read: {count(number)} &times; {safe(what)}"
        for what, number in counts["skipped"].items()
    ]
    items = "".join(f"<li>{fact}</li>" for fact in facts)
    return f"<section><h2>What was read</h2><ul>{items}</ul></section>"


def _footer(summary: Summary) -> str:
    return (
        f"<footer>Counts are exact. A percentile is a value that occurred, and its rank is off by "
        f"at most one in {count(summary.accuracy)}. Times are UTC. aztask {__version__}</footer>"
    )


def _nothing() -> str:
    return '<p class="notice">There are no events.</p>'
