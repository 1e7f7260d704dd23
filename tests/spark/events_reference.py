"""The statistics of an event log in plain Python, and the comparison with Spark's."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from aztask.spark.events.lengths import CUT_OFF
from aztask.spark.events.statistics import ACCURACY, OUTCOMES, RAN, SHARES, SPREADS
from aztask.stores.events.event import EVENT_KINDS, Event


class Group:
    """The events of one row of figures."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.times: list[float] = []
        self.leases: list[float] = []
        self.renewals: list[int] = []
        self.measures: dict[str, list[float]] = {name: [] for name in SPREADS}

    def add(self, event: Event) -> None:
        self.kinds[event.event] += 1
        self.times.append(event.ts)
        told = {
            "wait": event.wait_seconds if event.event == "started" else None,
            "run": event.duration_seconds if event.event in RAN else None,
            "margin": event.margin_seconds if event.event in OUTCOMES else None,
            "held": event.held_seconds,
        }
        for name, value in told.items():
            if value is not None:
                self.measures[name].append(value)
        if event.event in OUTCOMES and event.lease_seconds is not None:
            self.leases.append(event.lease_seconds)
        if event.renewals is not None:
            self.renewals.append(event.renewals)

    def exact(self) -> dict[str, Any]:
        """All figures of the row except the percentiles."""
        kinds = self.kinds
        runs = sum(kinds[kind] for kind in RAN)
        ended = sum(kinds[k] for k in ("succeeded", "dead_lettered", "cancelled", "expired"))
        settlements = sum(kinds[kind] for kind in (*OUTCOMES, "settle_failed"))
        span = max(self.times) - min(self.times)
        figures: dict[str, Any] = {kind: kinds[kind] for kind in EVENT_KINDS}
        figures |= {
            "events": kinds.total(),
            "runs": runs,
            "first_ts": min(self.times),
            "last_ts": max(self.times),
            "throughput": runs / span if span > 0 else None,
            "lease_min": min(self.leases, default=None),
            "lease_max": max(self.leases, default=None),
            "retry_rate": kinds["resubmitted"] / runs if runs else None,
            "dead_letter_rate": kinds["dead_lettered"] / ended if ended else None,
            "lost_rate": kinds["lease_lost"] / kinds["received"] if kinds["received"] else None,
            "settle_failed_rate": kinds["settle_failed"] / settlements if settlements else None,
            "renewals_mean": mean(self.renewals, len(self.measures["held"])),
        }
        for name, values in self.measures.items():
            figures[f"{name}_mean"] = mean(values, len(values))
            edge = "min" if name == "margin" else "max"
            figures[f"{name}_{edge}"] = (min if edge == "min" else max)(values, default=None)
        return figures


def mean(values: list[Any], count: int) -> float | None:
    return math.fsum(values) / count if count else None


def groups(events: Iterable[Event]) -> dict[str, dict[tuple[Any, ...], Group]]:
    """{level: {key: its events}}, each event counted once by its id."""
    made: dict[str, dict[tuple[Any, ...], Group]] = defaultdict(lambda: defaultdict(Group))
    seen = set()
    for event in events:
        if event.id in seen:
            continue
        seen.add(event.id)
        hour = math.floor(event.ts / 3600) * 3600
        for level, key in (
            ("task", (event.task,)),
            ("queue", (event.queue,)),
            ("queue_hour", (event.queue, hour)),
            ("total", ()),
        ):
            made[level][key].add(event)
    return made


def cut_off(events: Iterable[Event]) -> Iterator[tuple[str, str, float, float | None]]:
    """(task, queue, seconds, held) of each run that started and did not end."""
    for task, queue, seconds, held, _ in _cut_off(events):
        yield task, queue, seconds, held


def _cut_off(
    events: Iterable[Event],
) -> Iterator[tuple[str, str, float, float | None, float]]:
    """As `cut_off`, and when the log last knows of the run."""
    runs: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in {each.id: each for each in events}.values():
        run = (event.worker, event.task, event.queue, event.task_id)
        runs[(*run, event.delivery_count, event.resubmit_count)].append(event)
    for (_, task, queue, *_), its in runs.items():
        starts = [each.ts for each in its if each.event == "started"]
        if not starts or any(each.event in RAN for each in its):
            continue
        granted = [each for each in its if each.event in ("started", "renewed")]
        until = max(each.ts + (each.lease_seconds or math.inf) for each in granted)
        lost = [each for each in its if each.event == "lease_lost"]
        noted = known = max(each.ts for each in granted)
        if lost:
            noted = max(each.ts for each in lost)
            known = min(noted, until)
        held = max(each.held_seconds or 0.0 for each in lost) if lost else None
        yield task, queue, max(0.0, known - min(starts)), held, noted


def lengths(events: Iterable[Event]) -> dict[tuple[Any, ...], list[tuple[float, bool]]]:
    """{(task, queue), each None in a sum: (seconds, whether it was cut off) of each run}."""
    found: dict[tuple[Any, ...], list[tuple[float, bool]]] = defaultdict(list)
    for task, queue, seconds, cut, _ in _runs(events):
        for key in ((task, None), (None, queue), (None, None)):
            found[key].append((seconds, cut))
    return found


def lengths_over_time(
    events: Iterable[Event], length: int, *, by_queue: bool
) -> dict[tuple[str | None, int], list[tuple[float, bool]]]:
    """{(queue, or None, the beginning of a step of so many seconds): as `lengths`}."""
    found: dict[tuple[str | None, int], list[tuple[float, bool]]] = defaultdict(list)
    for _, queue, seconds, cut, ts in _runs(events):
        found[queue if by_queue else None, math.floor(ts / length) * length].append((seconds, cut))
    return found


def _runs(events: Iterable[Event]) -> list[tuple[str, str, float, bool, float]]:
    """(task, queue, seconds, whether it was cut off, when that was noted) of each run."""
    events = list({each.id: each for each in events}.values())
    runs = [
        (each.task, each.queue, each.duration_seconds, each.error_type in CUT_OFF, each.ts)
        for each in events
        if each.event in RAN and each.duration_seconds is not None
    ]
    runs += [(task, queue, seconds, True, ts) for task, queue, seconds, _, ts in _cut_off(events)]
    return runs


NEAR_A_STEP = 0.02
"""Of what is left beyond a percentile."""


def survived(runs: list[tuple[float, bool]], part: float) -> float | None:
    """The Kaplan-Meier estimate of a percentile; None if the runs do not tell it."""
    ended = Counter(seconds for seconds, cut in runs if not cut)
    survival, at_risk, before = 1.0, len(runs), 0
    times = sorted(seconds for seconds, _ in runs)
    for seconds in sorted(ended):
        while times[before] < seconds:
            before += 1
        at_risk = len(runs) - before
        survival *= 1 - ended[seconds] / at_risk
        if survival <= 1 - part + 1e-12:
            return seconds
    return None


def check_lengths(row: dict[str, Any], runs: list[tuple[float, bool]]) -> int:
    """Assert the percentiles of a row with runs that were cut off; returns their number."""
    cut = sum(cut for _, cut in runs)
    assert row["run_cut_off"] == cut
    assert (row["run_p50_low"] is None and row["run_p50_high"] is None) or len(runs) < 1000
    for share, part in SHARES.items() if cut else ():
        # In a bin, what was cut off counts as at risk for what ended before it: that moves the
        # curve by much less than its steps, but may decide on which side of one a percentile is.
        near = NEAR_A_STEP * (1 - part)
        low, high = survived(runs, part - near), survived(runs, part + near)
        found = row[f"run_{share}"]
        if found is None:
            assert high is None, (share, low)
        else:
            assert low is not None, (share, found)
            assert low * (1 - 1e-9) <= max(found, 1e-4), (share, low, found, high)
            assert high is None or found <= max(high, 1e-4) * 1.011, (share, low, found, high)
    if cut:
        assert math.isclose(row["run_max"], max(seconds for seconds, _ in runs), abs_tol=1e-9)
    return 5


def compare(row: dict[str, Any], group: Group) -> int:
    """Assert every figure of a row; returns their number.

    Where runs were cut off, `check_lengths` compares those of runs.
    """
    compared = 0
    cut = bool(row.get("run_cut_off"))
    for name, expected in group.exact().items():
        if cut and name in ("run_mean", "run_max"):
            continue
        found = row[name]
        same = found == expected or (
            isinstance(expected, float)
            and found is not None
            and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
        )
        assert same, f"{name} is {found}, plain Python says {expected}"
        compared += 1
    for name, shares in SPREADS.items():
        if cut and name == "run":
            continue
        values = sorted(group.measures[name])
        for share, part in shares.items():
            check_percentile(row[f"{name}_{share}"], values, part, f"{name}_{share}")
            compared += 1
    return compared


def check_percentile(found: float | None, values: list[float], part: float, what: str) -> None:
    """A percentile is a value that occurred; its rank is off by count / ACCURACY, and rounding."""
    if not values:
        assert found is None, f"{what} is {found}, but nothing was measured"
        return
    slack = len(values) / ACCURACY + 1
    low = max(0, math.floor(part * len(values) - slack))
    high = min(len(values) - 1, math.ceil(part * len(values) + slack))
    assert found in values[low : high + 1], (
        f"{what} is {found}, which is not among ranks {low} to {high} of {len(values)}: "
        f"{values[low]} to {values[high]}"
    )
