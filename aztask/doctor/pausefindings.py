"""Findings about what is paused: by operators, who may have forgotten it, or by breakers."""

from __future__ import annotations

from collections.abc import Iterator

from aztask.doctor.naming import minute, named_rows
from aztask.errors import AztaskError
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.limits.control import Controls
from aztask.results.base import ResultStore
from aztask.results.controls import controls_of
from aztask.support.finding import Finding, failed, warning


def pause_findings(store: ResultStore) -> Iterator[Finding]:
    """A warning for what is paused, and one for open circuit breakers; none if all runs."""
    controls = controls_of(store)
    if controls is None:
        return
    try:
        pauses = Controls(controls).read().listed()
        if pauses:
            rows = [(str(each), f"since {minute(each.at)}, by {each.by}") for each in pauses]
            text = f"paused for all workers: {named_rows(rows)}"
            yield warning("results", "paused", text, "to resume it, run aztask control resume")
    except AztaskError as error:
        yield failed("results", "paused", error)
    try:
        breakers = list(Breakers(controls).read().values())
        if breakers:
            text = f"open circuit breakers: {named_rows([_described(row) for row in breakers])}"
            advice = (
                "find out why these tasks fail (aztask result --state failed); a breaker closes "
                "when a probe succeeds, or with aztask control resume --task NAME"
            )
            yield warning("results", "breakers", text, advice)
    except AztaskError as error:
        yield failed("results", "breakers", error)


def _described(row: OpenBreaker) -> tuple[str, str]:
    probes = f", failed probes: {row.failures}" if row.failures else ""
    return f"task {row.task}", f"since {minute(row.at)}, {row.why}{probes}"
