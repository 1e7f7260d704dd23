"""Every figure of a real run, with kills, a freeze and cut-off runs, recomputed by DuckDB.

DuckDB parses the lines itself, and SQL says here once more what each figure means.
"""

import json
import math
from collections import Counter
from datetime import UTC, datetime
from itertools import islice
from statistics import NormalDist

import duckdb
import pytest
from realrun import made, made_workflows

from aztask.operate.cli.main import run
from aztask.operate.deadletters.letters import error_signature
from aztask.spark import compact, place_of, read_events, workflow_statistics
from aztask.spark.events.lengths import CUT_OFF
from aztask.spark.events.statistics import (
    ACCURACY,
    OUTCOMES,
    RAN,
    SHARES,
    SPREADS,
    columns,
    plain,
)
from aztask.stores.events.event import EVENT_KINDS

COLUMNS = {
    **dict.fromkeys(("id", "event", "task_id", "task", "queue", "worker"), "VARCHAR"),
    **dict.fromkeys(("error_type", "error", "workflow_id", "parent_id"), "VARCHAR"),
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


def figures(directory, capsys, *options):
    assert run(["spark", "stats", str(directory), "--json", *options]) == 0
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


def test_comparisons_and_advice_of_a_real_run(database, directory, spark, capsys):
    """The deploy is where the log's third quarter begins: both spans are half the log."""
    first, last = database.execute("SELECT min(ts), max(ts) FROM e").fetchone()
    deploy = datetime.fromtimestamp(round(first + (last - first) / 2), UTC)
    found = figures(directory, capsys, "--deploy", deploy.isoformat())
    period, around = found["comparisons"]
    assert same(period["begin"], first) and same(period["end"], last)
    assert same(period["split"], (first + last) / 2)
    length = min(last - deploy.timestamp(), deploy.timestamp() - first)
    assert (around["about"], around["split"]) == ("deploy", deploy.timestamp())
    assert same(around["end"] - around["split"], length)
    assert same(around["split"] - around["begin"], length)
    assert check_comparison(database, period) + check_comparison(database, around) > 100
    advice = [(row["rule"], row["about"]) for row in found["advice"]]
    assert advice == expected_advice(database, found)
    assert ("dominating_error", "ledger.rejecting") in advice


WORKFLOWS = 30
PATHS = f"""
WITH RECURSIVE t AS (
    SELECT workflow_id AS w, task_id, max(task) AS task,
        regexp_extract(task_id, '[0-9]+$')::INT AS number,
        regexp_extract(max(parent_id), '[0-9]+$')::INT AS parent,
        min(ts) FILTER (event = 'started') AS began,
        max(ts) FILTER (event IN ('succeeded', 'failed', 'cancelled', 'expired', 'dead_lettered'))
            AS ended,
        count(*) FILTER (event IN ({listed(RAN)})) AS runs,
        sum(duration_seconds) FILTER (event IN ({listed(RAN)})) AS busy
    FROM e WHERE workflow_id IS NOT NULL AND task_id <> '' GROUP BY ALL
), follows AS (
    SELECT t.w, t.number, CASE WHEN any_value(p.number) IS NULL
        THEN arg_max(m.number, m.ended) ELSE any_value(p.number) END AS before
    FROM t
    LEFT JOIN t p ON p.w = t.w AND p.number = t.parent
    LEFT JOIN t m ON m.w = t.w AND m.number > t.parent AND m.number < t.number
    GROUP BY t.w, t.number
), path AS (
    SELECT w, arg_max(number, ended) AS number, 0 AS back FROM t GROUP BY w
    UNION ALL
    SELECT path.w, before, back + 1
    FROM path JOIN follows ON follows.w = path.w AND follows.number = path.number
    WHERE before IS NOT NULL
)
SELECT w AS workflow_id, row_number() OVER backwards AS step, task_id, task,
    greatest(0, coalesce(began - lag(ended) OVER backwards, 0)) AS wait_seconds,
    ended - began AS run_seconds, busy AS busy_seconds, runs
FROM path JOIN t USING (w, number)
WINDOW backwards AS (PARTITION BY w ORDER BY back DESC)
ORDER BY w, step
"""


def test_critical_paths_of_real_workflows(tmp_path, spark):
    directory = made_workflows(tmp_path, WORKFLOWS)
    with duckdb.connect() as connection:
        connection.execute(MEASURED, [f"{directory}/date=*/hour=*/*.jsonl", COLUMNS])
        expected = rows(connection, PATHS)
    events = read_events(spark, directory)
    found = plain(workflow_statistics(events.events).critical_paths)
    events.close()
    assert len({row["workflow_id"] for row in expected}) == WORKFLOWS
    assert len({row["task_id"].rpartition(".")[2] for row in expected}) > 4, "paths differ"
    assert {row["runs"] for row in expected} == {1, 2}, "retries are on some paths"
    assert len(found) == len(expected)
    for row, its in zip(found, expected, strict=True):
        assert row["state"] == "succeeded"
        for name, value_ in its.items():
            close = isinstance(value_, float) and same(row[name], value_)
            assert close or row[name] == value_, (name, row, its)


STEPS = 20
PLACED = f"""
CREATE OR REPLACE TEMP TABLE placed AS
SELECT queue, task, event, wait, run, ts >= $split AS after, greatest(0, least({STEPS - 1}, floor(
    (ts - CASE WHEN ts >= $split THEN $split ELSE $begin END) / ($end - $split) * {STEPS}
)))::INT AS step
FROM e WHERE ts BETWEEN $begin AND $end
"""
COUNTED = {
    "done": ("succeeded",),
    "retried": ("resubmitted",),
    "dead_lettered": ("dead_lettered",),
    "runs": RAN,
    "ended": ("succeeded", "dead_lettered", "cancelled", "expired"),
    "enqueued": ("enqueued",),
}
PARTS = {"p50": 0.5, "p95": 0.95}
MEASURED_TWICE = [f"{name}_{share}" for name in ("wait", "run") for share in PARTS]


def check_comparison(database, comparison):
    """Every figure of both sides, each p, and each mark; returns the number of figures."""
    database.execute(PLACED, {name: comparison[name] for name in ("begin", "split", "end")})
    compared, chances, marks = 0, [], []
    for key in ("queue", "task"):
        sides = parts(database, key, ["after"])
        steps = parts(database, key, ["after", "step"])
        found = comparison[f"{key}s"]
        assert {row[key] for row in found} == {name for name, *_ in sides}
        for row in found:
            compared += sum(
                check_side(row[side], sides.get((row[key], after)))
                for side, after in (("before", False), ("after", True))
            )
            for name in ("done", "retried", "dead_lettered", *MEASURED_TWICE):
                values = [
                    [value(steps.get((row[key], after, step)), name) for step in range(STEPS)]
                    for after in (False, True)
                ]
                test = chance_of(*([v for v in side if v is not None] for side in values))
                assert (row["p"][name] is None) == (test is None), (row, name)
                if test is not None:
                    assert math.isclose(row["p"][name], test[0], rel_tol=1e-6, abs_tol=1e-9)
                    chances.append(test[0])
                    marks.append((row, name, *test))
                compared += 1
    in_order = sorted(chances)
    few = [p for rank, p in enumerate(in_order, 1) if p <= 0.01 * rank / len(in_order)]
    for row, name, p, direction in marks:
        before, after = (share(row[side], name) for side in ("before", "after"))
        gone = before is not None and after is not None and before != after
        there = gone and ("more" if after > before else "less") == direction
        marked = there and p <= max(few, default=-1)
        assert row["changed"].get(name) == (direction if marked else None), (row, name)
    return compared


def parts(database, key, by):
    """{(name, *by): the counts, and the sorted waits and runs}."""
    counted = [
        f"count(*) FILTER (event IN ({listed(kinds)})) AS {name}" for name, kinds in COUNTED.items()
    ]
    measured = [
        f"list({name} ORDER BY {name}) FILTER ({name} IS NOT NULL) AS {name}_values"
        for name in ("wait", "run")
    ]
    columns_ = ", ".join([key, *by, "count(*) AS events", *counted, *measured])
    found = rows(database, f"SELECT {columns_} FROM placed GROUP BY {', '.join([key, *by])}")
    return {tuple(row[name] for name in (key, *by)): row for row in found}


def check_side(found, expected):
    for name in ("events", *COUNTED):
        assert found[name] == (expected[name] if expected else 0)
    for name in ("wait", "run"):
        values = (expected[f"{name}_values"] if expected else None) or []
        for part, value_ in PARTS.items():
            check_rank(found[f"{name}_{part}"], values, value_, name)
    return len(COUNTED) + 1 + len(MEASURED_TWICE)


def value(step, name):
    """A figure of one step as it is tested; None where it has none."""
    if name == "done":
        return step["done"] if step else 0
    if step is None or name in ("retried", "dead_lettered"):
        return None if step is None else share(step, name)
    measure, part = name.split("_")
    values = step[f"{measure}_values"]
    return values[math.ceil(PARTS[part] * len(values)) - 1] if values else None


def share(part, name):
    whole = {"retried": "runs", "dead_lettered": "ended"}.get(name)
    if whole is None:
        return part[name]
    return part[name] / part[whole] if part[whole] else None


def chance_of(before, after):
    """The two-sided p of the rank-sum test, and where the values went."""
    if min(len(before), len(after)) < 5:
        return None
    together = sorted(before + after)
    places = {}
    for place, each in enumerate(together, 1):
        places.setdefault(each, []).append(place)
    ranks = sum(sum(places[each]) / len(places[each]) for each in after)
    n, m, total = len(before), len(after), len(together)
    above = ranks - m * (m + 1) / 2 - n * m / 2
    ties = sum(count**3 - count for count in Counter(together).values())
    variance = n * m / 12 * (total + 1 - ties / total / (total - 1))
    direction = "more" if above > 0 else "less"
    if variance <= 0:
        return 1.0, direction
    z = max(0, abs(above) - 0.5) / math.sqrt(variance)
    return 2 * NormalDist().cdf(-z), direction


def expected_advice(database, found):
    """(rule, about) of each piece of advice, from the log and the comparisons checked above."""
    by_rule = (
        late_queues(found["comparisons"]),
        short_leases(database),
        one_errors(database),
        worse_tasks(database, found["comparisons"]),
        silent_workers(database),
    )
    names = ("falls_behind", "short_lease", "dominating_error", "worse_deploy", "frozen_worker")
    return [
        (rule, about) for rule, its in zip(names, by_rule, strict=True) for about in islice(its, 3)
    ]


def late_queues(comparisons):
    (period,) = [each for each in comparisons if each["about"] == "period"]
    for row in sorted(period["queues"], key=lambda row: -(row["after"]["wait_p50"] or 0)):
        before, after = row["before"], row["after"]
        if row["changed"].get("wait_p50") == "more" and after["wait_p50"] >= 1:
            left = after["enqueued"] - after["ended"]
            doubled = after["wait_p50"] >= 2 * (before["wait_p50"] or 0)
            if left > 0.05 * after["enqueued"] if after["enqueued"] else doubled:
                yield row["queue"]


def short_leases(database):
    lengths = {row["queue"]: row for row in rows(database, survival(["queue"]))}
    lost = rows(
        database,
        "SELECT queue, count(*) FILTER (event = 'lease_lost') AS lost, max(lease) AS lease, "
        "count(*) FILTER (event = 'received') AS received FROM e GROUP BY 1 ORDER BY 2 DESC",
    )
    for row in lost:
        its = lengths.get(row["queue"])
        if row["lost"] >= max(3, 0.001 * row["received"]) and its is not None:
            long = its["longest"] if its["p99"] is None else its["p99"]
            if row["lease"] is None or long >= 0.95 * row["lease"]:
                yield row["queue"]


def failures(database):
    """What each failed run failed with."""
    found = rows(
        database,
        "SELECT task, ts, concat(error_type, ': ', coalesce(error, '')) AS text FROM e "
        "WHERE event IN ('failed', 'resubmitted') AND error_type IS NOT NULL",
    )
    return [{**row, "signature": error_signature(row["text"].rstrip(": "))} for row in found]


def one_errors(database):
    most = {}
    for (task, _), count in Counter(
        (row["task"], row["signature"]) for row in failures(database)
    ).items():
        most[task] = max(most.get(task, 0), count)
    dead = rows(
        database,
        "SELECT task, count(*) FILTER (event = 'dead_lettered') AS dead, "
        "count(*) FILTER (event IN ('failed', 'resubmitted')) AS failures "
        "FROM e GROUP BY 1 ORDER BY 2 DESC, 1",
    )
    for row in dead:
        share_of_one = most.get(row["task"], 0) / max(1, row["failures"])
        if row["dead"] >= 3 and share_of_one >= 0.8:
            yield row["task"]


def worse_tasks(database, comparisons):
    (deploy,) = [each for each in comparisons if each["about"] == "deploy"]
    since = {row["task"] for row in failures(database) if row["ts"] >= deploy["split"]}
    worse = []
    for row in deploy["tasks"]:
        for name in ("dead_lettered", "retried"):
            if row["changed"].get(name) == "more" and row["task"] in since:
                sides = [share(row[side], name) or 0 for side in ("before", "after")]
                worse.append((sides[0] - sides[1], row["task"]))
                break
    return (task for _, task in sorted(worse, key=lambda each: each[0]))


def silent_workers(database):
    (lease,) = database.execute("SELECT min(lease) FROM e").fetchone()
    found = rows(
        database,
        "SELECT worker, max(gap) AS silence FROM (SELECT worker, event, ts - lag(ts) OVER "
        "(PARTITION BY worker ORDER BY ts) AS gap FROM e WHERE worker <> '') "
        "WHERE event IN ('lease_lost', 'settle_failed') GROUP BY 1 ORDER BY 2 DESC NULLS LAST",
    )
    return (r["worker"] for r in found if (r["silence"] or 0) >= max(1, lease or 0))


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
