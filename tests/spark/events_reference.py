"""The statistics of an event log in plain Python, and the comparison with Spark's."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from aztask.spark.events.statistics import ACCURACY, OUTCOMES, RAN, SPREADS
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


def compare(row: dict[str, Any], group: Group) -> int:
    """Assert every figure of a row; returns their number."""
    compared = 0
    for name, expected in group.exact().items():
        found = row[name]
        same = found == expected or (
            isinstance(expected, float)
            and found is not None
            and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
        )
        assert same, f"{name} is {found}, plain Python says {expected}"
        compared += 1
    for name, shares in SPREADS.items():
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
