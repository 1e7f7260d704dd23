"""Two releases, and two versions of the code, on one queue while flows wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aztask.message import headers
from aztask.settlement import DeadLetter
from aztask.steps.suspension import STEP_ORDER, OrderChanged
from aztask.worker.pipeline.redelivery import UNKNOWN_TASK

from .course import Course, Decision
from .running import run
from .test_flows import flow
from .test_simulation import CALM

KINDS = ("local", "storage", "bus")
DEPLOY = Decision(8.0, "deploy", "a")
OF_VERSION_1 = Decision(9.0, "kill", "a", (0.0,))
"""Only the first worker still has the first version of the code."""


def mixed(kind: str, *kills: float) -> Course:
    flows = [flow(plan, (30.0, "go"), (60.0, "go")) for plan in ("wsw", "szs", "lsc", "sns", "zc")]
    former = Decision(5.0, "former", "a", (200.0, 2))
    killed = [Decision(at, "kill", "a", (at % 1.0,)) for at in kills]
    return replace(CALM, kind=kind, quiet_at=2000.0, decisions=(*flows, former, *killed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_release_before_puts_off_what_continues_a_flow(kind: str) -> None:
    report = run(mixed(kind, 8.1, 13.9, 20.5, 40.7))
    assert report.text == ""
    assert report.faults["kill"] == 4
    assert report.counts[f"put off: {UNKNOWN_TASK}"]
    assert not report.counts[f"given up: {UNKNOWN_TASK}"]


def test_a_continuation_under_the_plain_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "CONTINUE", "")
    assert run(mixed("local")).name == "goes-on-where-it-is-known"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["o", "pzs"])
def test_a_flow_of_another_version_waits_for_a_worker_that_has_it(kind: str, plan: str) -> None:
    """What the second version has begun is met by the first one, which is deployed again."""
    begun = [replace(flow(plan), at=12.0)] * 12
    decisions = (DEPLOY, OF_VERSION_1, *begun, Decision(16.0, "deploy", "a"))
    report = run(replace(CALM, kind=kind, quiet_at=1500.0, decisions=decisions))
    assert report.text == ""
    assert report.counts[f"put off: {STEP_ORDER}"]
    assert not report.counts[f"given up: {STEP_ORDER}"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flow_whose_version_is_gone_is_a_dead_letter_after_the_grace(kind: str) -> None:
    back = Decision(800.0, "deploy", "a"), Decision(900.0, "replay", "a")
    decisions = (*[flow("o")] * 6, DEPLOY, OF_VERSION_1, *back)
    report = run(replace(CALM, kind=kind, quiet_at=1500.0, decisions=decisions))
    assert report.text == ""
    assert report.counts[f"given up: {STEP_ORDER}"]


def test_a_patched_flow_goes_on_in_either_version() -> None:
    decisions = (*[flow("spzsp")] * 6, DEPLOY, OF_VERSION_1)
    report = run(replace(CALM, quiet_at=900.0, decisions=decisions))
    assert report.text == ""
    assert not report.counts[f"put off: {STEP_ORDER}"]


def test_a_dead_letter_before_the_grace_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderChanged, "settlement", lambda *_: DeadLetter(STEP_ORDER, ""))
    report = run(replace(CALM, decisions=(*[flow("o")] * 6, DEPLOY, OF_VERSION_1)))
    assert report.name == "waits-for-the-grace"
