"""Beats of an older revision and of this one side by side, both killed at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fleetprocesses import seed_of_run
from previous import WITH_BEATS, MissingRelease, previous_release

from tests.integration.beatsite import BeatSite, check_each_once, kill_at_random

KILLS = 20


def test_each_occurrence_is_sent_once(tmp_path: Path) -> None:
    try:
        old = previous_release(tmp_path / "before", WITH_BEATS)
    except MissingRelease as error:
        pytest.fail(str(error), pytrace=False)
    site = BeatSite(tmp_path)
    try:
        kill_at_random(site, random.Random(seed_of_run()), KILLS, old)
        check_each_once(site)
    finally:
        site.end()
