"""Every figure of a real run, with kills, a freeze and cut-off runs, recomputed by DuckDB.

DuckDB parses the lines itself, and SQL says here once more what each figure means.
"""

import json
import math

import duckdb
import pytest
from realrun import made

from aztask.operate.cli.main import run
from aztask.spark import compact, place_of
from aztask.spark.events.lengths import CUT_OFF
from aztask.spark.events.statistics import ACCURACY, OUTCOMES, RAN, SHARES, SPREADS, columns
from aztask.stores.events.event import EVENT_KINDS

COLUMNS = {
    **dict.fromkeys(("id", "event", "task_id", "task", "queue", "worker", "error_type"), "VARCHAR"),
    **dict.fromkeys(("ts", "duration_seconds", "wait_seconds", "lease_seconds"), "DOUBLE"),
    **dict.fromkeys(("margin_seconds", "held_seconds"), "DOUBLE"),
    **dict.fromkeys(("delivery_count", "resubmit_count", "renewals"), "BIGINT"),
}
BOUND = 1.011
"""Estimates are up to 1.1 % too long."""


def listed(names):
    return ", ".join(f"'{name}'" for name in names)


MEASURED = f"""
CREATE TABLE e AS
SELECT *, floor(ts / 3600)::BIGINT * 3600 AS hour,
    CASE WHEN event = 'started' THEN wait_seconds END AS wait,
    CASE WHEN event IN ({listed(RAN)}) THEN duration_seconds END AS run,
    CASE WHEN event IN ({listed(OUTCOMES)}) THEN margin_seconds END AS margin,
    CASE WHEN event IN ({listed(OUTCOMES)}) THEN lease_seconds END AS lease,
    held_seconds AS held
FROM (
    SELECT *, row_number() OVER (PARTITION BY id) AS copy
    FROM read_json(?, format = 'newline_delimited', ignore_errors = true,
        hive_partitioning = false, columns = ?)
    WHERE id IS NOT NULL
) WHERE copy = 1
"""

RUNS = f"""
CREATE TABLE r AS
WITH deliveries AS (
    SELECT worker, task, queue, task_id, coalesce(delivery_count, 0) AS d,
        coalesce(resubmit_count, 0) AS r,
        min(ts) FILTER (event = 'started') AS began,
        bool_or(event IN ({listed(RAN)})) AS ended,
        max(ts) FILTER (event IN ('started', 'renewed')) AS seen,
        max(ts + lease_seconds) FILTER (event IN ('started', 'renewed')) AS until,
        max(ts) FILTER (event = 'lease_lost') AS lost
    FROM e GROUP BY ALL
)
SELECT task, queue, hour, ts AS noted, run AS seconds,
    coalesce(error_type IN ({listed(CUT_OFF)}), false) AS cut
FROM e WHERE run IS NOT NULL
UNION ALL
SELECT task, queue, floor(coalesce(lost, seen) / 3600)::BIGINT * 3600, coalesce(lost, seen),
    greatest(0, CASE WHEN lost IS NULL THEN seen ELSE least(lost, until) END - began), true
FROM deliveries WHERE began IS NOT NULL AND NOT ended
"""


def counts(keys):
    """SQL of every figure that is exact, and of the sorted values of each measure."""
    kinds = [f"count(*) FILTER (event = '{kind}') AS {kind}" for kind in EVENT_KINDS]
    spreads = [
        figure
        for name in SPREADS
        for figure in (
            f"avg({name}) AS {name}_mean",
            f"{'min' if name == 'margin' else 'max'}({name}) AS "
            f"{name}_{'min' if name == 'margin' else 'max'}",
            f"list({name} ORDER BY {name}) FILTER ({name} IS NOT NULL) AS {name}_values",
        )
    ]
    group = f"GROUP BY {', '.join(keys)}" if keys else ""
    inner = ", ".join(
        [*keys, "count(*) AS events", "min(ts) AS first_ts", "max(ts) AS last_ts",
         "min(lease) AS lease_min", "max(lease) AS lease_max", *kinds, *spreads,
         "sum(renewals) / nullif(count(held), 0) AS renewals_mean"]
    )  # fmt: skip
    runs, ended = " + ".join(RAN), "succeeded + dead_lettered + cancelled + expired"
    settlements = " + ".join((*OUTCOMES, "settle_failed"))
    return f"""
        SELECT *, {runs} AS runs,
            ({runs}) / nullif(greatest(last_ts - first_ts, 0), 0) AS throughput,
            resubmitted / nullif({runs}, 0) AS retry_rate,
            dead_lettered / nullif({ended}, 0) AS dead_letter_rate,
            lease_lost / nullif(received, 0) AS lost_rate,
            settle_failed / nullif({settlements}, 0) AS settle_failed_rate
        FROM (SELECT {inner} FROM e {group})
    """


def survival(keys):
    """SQL of the Kaplan-Meier estimates of the percentiles, and of the runs that were cut off."""
    by = f"PARTITION BY {', '.join(keys)}" if keys else ""
    group = f"GROUP BY {', '.join(keys)}" if keys else ""
    these = "".join(f"{key}, " for key in keys)
    found = ", ".join(
        f"min(seconds) FILTER (survival <= 1 - {part} + 1e-12) AS {share}"
        for share, part in SHARES.items()
    )
    return f"""
        WITH d AS (
            SELECT {these} seconds, count(*) FILTER (NOT cut) AS d, count(*) AS n
            FROM r GROUP BY {these} seconds
        ), at_risk AS (
            SELECT *, sum(n) OVER ({by} ORDER BY seconds DESC) AS risk FROM d
        ), curve AS (
            SELECT *, product(1 - d / risk) OVER ({by} ORDER BY seconds) AS survival FROM at_risk
        )
        SELECT {these} {found}, sum(n)::BIGINT AS runs, sum(n - d)::BIGINT AS cut,
            max(seconds) AS longest
        FROM curve {group}
    """


def rows(connection, sql, *arguments):
    found = connection.execute(sql, arguments)
    names = [each[0] for each in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The events of a real run of this test alone: its lines are there, and are not damaged."""
    events, _ = made(tmp_path_factory.mktemp("real"))
    return events


@pytest.fixture(scope="module")
def database(directory):
    """The lines of the run, as DuckDB reads them."""
    with duckdb.connect() as connection:
        connection.execute(MEASURED, [f"{directory}/date=*/hour=*/*.jsonl", COLUMNS])
        connection.execute(RUNS)
        yield connection


def figures(directory, capsys):
    assert run(["spark", "stats", str(directory), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_figure_of_a_real_run(database, directory, spark, capsys):
    cut = database.execute("SELECT count(*) FILTER (cut), count(*) FROM r").fetchone()
    assert cut[0] > 4, "workers were killed and frozen"
    before = figures(directory, capsys)
    assert before["total"]["run_cut_off"] == cut[0]
    compared = check(database, before)
    assert compared > 500
    compact(spark, place_of(directory), now=4e9)
    assert check(database, figures(directory, capsys)) == compared


def check(database, found):
    """Compare every figure of every level; returns their number."""
    compared = 0
    levels = {
        "tasks": ["task"],
        "queues": ["queue"],
        "queue_hours": ["queue", "hour"],
        "total": [],
    }
    for level, keys in levels.items():
        theirs = [found["total"]] if level == "total" else found[level]
        ours = {tuple(row[key] for key in keys): row for row in rows(database, counts(keys))}
        lengths = {tuple(row[key] for key in keys): row for row in rows(database, survival(keys))}
        assert len(theirs) == len(ours)
        for row in theirs:
            key = tuple(row[key] for key in keys)
            compared += check_row(row, ours[key], lengths.get(key, {}))
    return compared + check_timeline(database, found)


def check_row(row, expected, lengths):
    compared = 0
    assert row["run_cut_off"] == lengths.get("cut", 0)
    for name in columns():
        measure, _, what = name.rpartition("_")
        if measure == "run" and lengths.get("cut"):
            compared += check_estimate(row, what, lengths)
        elif measure in SPREADS and what in SPREADS[measure]:
            values = expected[f"{measure}_values"] or []
            check_rank(row[name], values, SPREADS[measure][what], name)
            compared += 1
        else:
            assert same(row[name], expected[name]), (name, row[name], expected[name])
            compared += 1
    return compared


def check_estimate(row, what, lengths):
    """A figure of runs among which some were cut off."""
    found = row[f"run_{what}"]
    if what == "mean":
        assert found is None
    elif what == "max":
        assert same(found, lengths["longest"])
    elif lengths[what] is None:
        assert found is None, what
    else:
        least = max(lengths[what], 1e-4)  # the first bin
        assert least * (1 - 1e-9) <= found <= least * BOUND, (what, found, lengths)
    return 1


def check_rank(found, values, part, name):
    """It occurred, and its rank is off by one in `ACCURACY`, and by rounding."""
    if not values:
        assert found is None, name
        return
    slack = len(values) / ACCURACY + 1
    low = max(0, math.floor(part * len(values) - slack))
    high = min(len(values) - 1, math.ceil(part * len(values) + slack))
    assert found in values[low : high + 1], (name, found, values[low], values[high])


def check_timeline(database, found):
    """The counts of each step, and its runs that were cut off."""
    step = found["step_seconds"]
    kinds = ("succeeded", "failed", "resubmitted", "lease_lost", "dead_lettered", "enqueued")
    each = ", ".join(f"count(*) FILTER (event = '{kind}') AS {kind}" for kind in kinds)
    at = f"floor(ts / {step})::BIGINT * {step}"
    ours = {r["at"]: r for r in rows(database, f"SELECT {at} AS at, {each} FROM e GROUP BY 1")}
    cut = dict(
        database.execute(
            f"SELECT {at.replace('ts', 'noted', 1)}, count(*) FROM r WHERE cut GROUP BY 1"
        ).fetchall()
    )
    assert ours.keys() == {row["at"] for row in found["timeline"]}
    for row in found["timeline"]:
        for kind in kinds:
            assert row[kind] == ours[row["at"]][kind]
        assert row["run_cut_off"] == cut.get(row["at"], 0)
    return len(ours) * (len(kinds) + 1)


def same(found, expected):
    if found is None or expected is None:
        return found is None and expected is None
    return math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
