"""A histogram that takes many values at once.

The library's own histogram takes them one by one, each under two locks. A worker counts its events
together, so it has hundreds of values for the same series at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

INFINITY: Final = "+Inf"


class Distribution(Collector):
    """One histogram with all its series. Any thread may call."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        text: str,
        labels: Sequence[str],
        buckets: Sequence[float],
    ) -> None:
        """Register the histogram.

        * `name`, `text`, `labels`: of the metric.
        * `buckets`: their highest values, ascending, without infinity.
        """
        self._name = name
        self._text = text
        self._labels = labels
        self._buckets = buckets
        self._series: dict[tuple[str, ...], _Series] = {}
        self._lock = Lock()
        registry.register(self)

    def observe(self, series: tuple[str, ...], values: Sequence[float]) -> None:
        """Add values to a series. `series`: the values of its labels, in their order."""
        if not values:
            return
        ordered = sorted(values)
        reached = [bisect_right(ordered, most) for most in self._buckets]
        added = [*reached, len(ordered)]
        with self._lock:
            known = self._series.get(series)
            if known is None:
                known = self._series[series] = _Series(len(added))
            known.add(added, sum(ordered))

    def describe(self) -> list[HistogramMetricFamily]:
        """The metric without values, from which the registry learns its name."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The metric with all its series."""
        (family,) = self.describe()
        names = [str(float(most)) for most in self._buckets]
        with self._lock:
            found = [(key, list(each.counts), each.total) for key, each in self._series.items()]
        for key, counts, total in found:
            buckets = list(zip([*names, INFINITY], map(float, counts), strict=True))
            family.add_metric(key, buckets, total)
        yield family


class _Series:
    """The counts of one series: of the values up to each bucket's limit, and of all values."""

    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0

    def add(self, counts: Sequence[int], total: float) -> None:
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += total
