"""Which occurrences are made: late ones, overlapping ones, and their ids."""

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import ConfigurationError
from aztask.schedules.rules import (
    MOST_WAITING,
    Rules,
    checked_rules,
    decide,
    due_times,
    jitter_of,
    read_rules,
    task_id_of,
)
from aztask.schedules.stored import Schedule
from aztask.schedules.triggers import Every
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import COMMITTED

HOUR = 3600.0
START = 1_800_000_000.0
FIRST = START
HOURLY = Every(HOUR)


def schedule(watermark=START, **fields):
    return Schedule(b"", "digest", 0, 0.0, 0.0, watermark, **fields)


def ages(rules, now, watermark=START):
    """How late the occurrences are that are made now, in hours."""
    return [(now - at) / HOUR for at in due_times(schedule(watermark), HOURLY, rules, now)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"missed": "skip"}, []),
        ({"missed": "latest"}, [0.5]),
        ({"missed": "all"}, [2.5, 1.5, 0.5]),
        ({"missed": "all", "max_missed": 2}, [1.5, 0.5]),
        ({"missed": "skip", "grace": 2 * HOUR}, [1.5, 0.5]),
        ({"missed": "all", "grace": 2 * HOUR}, [1.5, 0.5]),
        ({"missed": "latest", "grace": HOUR}, [0.5]),
        ({"missed": "latest", "grace": 60.0}, []),
    ],
)
def test_all_workers_were_down_for_three_hours(options, expected):
    """The last occurrence was half an hour ago, and none of the last three was made."""
    assert START % HOUR == 0
    assert ages(Rules(**options), START + 3.5 * HOUR) == expected


@pytest.mark.parametrize("missed", ["skip", "latest", "all"])
def test_an_occurrence_on_time_is_made(missed):
    assert ages(Rules(missed=missed), START + HOUR) == [0.0]
    assert ages(Rules(missed=missed), START + HOUR - 0.001) == []
    assert ages(Rules(missed=missed), START + HOUR + 30.0) == [30.0 / HOUR]


def test_exactly_as_late_as_allowed_is_not_too_late():
    assert ages(Rules(missed="skip"), START + HOUR + 60.0) == [60.0 / HOUR]
    assert ages(Rules(missed="skip"), START + HOUR + 60.01) == []


def decided(
    state, times, rules, now=START + 10 * HOUR, *, waiting=0, runs=lambda task_id, old: not old
):
    return decide("s", state, times, rules, now, waiting=waiting, runs=runs, by="me")


def test_the_watermark_moves_to_now_and_never_back():
    head, made = decided(schedule(), [], Rules())
    assert (head.watermark, made) == (START + 10 * HOUR, [])
    head, _ = decided(schedule(START + 20 * HOUR), [], Rules())
    assert head.watermark == START + 20 * HOUR


def test_more_than_a_transaction_takes_are_made_in_turns():
    times = [START + n * 60.0 for n in range(1, 200)]
    head, made = decided(schedule(), times, Rules(missed="all", max_missed=1000))
    assert [each.at for each in made] == times[:COMMITTED]
    assert head.watermark == times[COMMITTED - 1]


@pytest.mark.parametrize(
    ("overlap", "running", "states"),
    [
        ("allow", True, ["due", "due"]),
        ("skip", True, ["skipped", "skipped"]),
        ("skip", False, ["due", "skipped"]),
        ("queue", True, ["waiting", "waiting"]),
        ("queue", False, ["due", "waiting"]),
    ],
)
def test_an_overlap_is_decided_once_and_stored(overlap, running, states):
    asked = []

    def runs(task_id, old):
        asked.append(task_id)
        return running

    state = schedule(last_id="s@before", last_at=START)
    times = [START + HOUR, START + 2 * HOUR]
    head, made = decided(state, times, Rules(overlap=overlap), runs=runs)
    assert [each.state for each in made] == states
    assert asked == ([] if overlap == "allow" else ["s@before"])
    sent = [each.task_id for each in made if each.state == "due"]
    assert head.last_id == (sent[-1] if sent else "s@before")


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_without_a_due_time_no_task_is_looked_up(overlap):
    def runs(task_id, old):
        raise AssertionError("it is asked for")

    state = schedule(last_id="s@before", last_at=START)
    decided(state, [], Rules(overlap=overlap), runs=runs)


def test_a_task_that_vanished_blocks_for_a_bounded_time():
    state = schedule(last_id="s@before", last_at=START)
    rules = Rules(overlap="skip", overlap_limit=9 * HOUR)
    _, (made,) = decided(state, [START + 10 * HOUR], rules)
    assert made.state == "due"
    _, (made,) = decided(state, [START + 10 * HOUR], replace(rules, overlap_limit=11 * HOUR))
    assert (made.state, made.why) == ("skipped", "the task of s@before has not ended")


@pytest.mark.parametrize(("overlap", "expected"), [("queue", "waiting"), ("skip", "skipped")])
def test_an_occurrence_goes_behind_those_that_wait(overlap, expected):
    """Although the last task has ended: the one that waits comes next, and keeps its place."""
    state = schedule(last_id="s@before", last_at=START)
    rules = Rules(overlap=overlap)
    _, (made,) = decided(state, [START + HOUR], rules, waiting=1, runs=lambda task_id, old: False)
    assert made.state == expected


def test_a_task_that_waits_inside_its_code_blocks_for_as_long_as_it_waits():
    state = schedule(last_id="s@before", last_at=START)
    asked = []

    def runs(task_id, old):
        asked.append(old)
        return True

    for hours in (9, 11):
        rules = Rules(overlap="skip", overlap_limit=hours * HOUR)
        _, (made,) = decided(state, [START + 10 * HOUR], rules, runs=runs)
        assert made.state == "skipped"
    assert asked == [True, False]


def test_a_task_counts_as_lost_only_after_its_limit():
    state = schedule(last_id="s@before", last_at=START)
    rules = Rules(overlap="skip", overlap_limit=10 * HOUR)
    _, (made,) = decided(state, [START + 10 * HOUR], rules)
    assert made.state == "skipped", "it is exactly so old"


def test_an_occurrence_says_who_made_it_and_when():
    head, (made,) = decided(schedule(made=4), [START + HOUR], Rules())
    assert (made.at, made.made_at, made.by, made.kind) == (
        START + HOUR, START + 10 * HOUR, "me", "schedule",
    )  # fmt: skip
    assert (head.by, head.made, head.last_at) == ("me", 5, START + 10 * HOUR)


def test_one_that_is_made_by_hand_leaves_the_watermark():
    head, _ = decide(
        "s", schedule(), [START + HOUR], Rules(), START + 2 * HOUR,
        waiting=0, runs=lambda task_id, old: False, by="me", kind="backfill",
    )  # fmt: skip
    assert head.watermark == START


def test_only_so_many_occurrences_wait():
    state = schedule(last_id="s@before", last_at=START)
    times = [START + HOUR, START + 2 * HOUR]
    rules = Rules(overlap="queue")
    _, made = decided(state, times, rules, waiting=MOST_WAITING - 1)
    assert [each.state for each in made] == ["waiting", "skipped"]


def test_a_hundred_occurrences_wait_and_each_counts():
    state = schedule(last_id="s@before", last_at=START)
    times = [START + n * HOUR for n in range(1, 5)]
    _, made = decided(state, times, Rules(overlap="queue"), waiting=98)
    assert [each.state for each in made] == ["waiting", "waiting", "skipped", "skipped"]


def test_one_that_waits_for_an_unknown_task_says_so():
    _, (made,) = decided(schedule(), [START + HOUR], Rules(overlap="skip"), waiting=1)
    assert made.why == "the task of the occurrence before it has not ended"


def test_as_many_as_a_transaction_takes_are_made_at_once():
    times = [START + n * 60.0 for n in range(1, 91)]
    head, made = decided(schedule(), times, Rules(missed="all"))
    assert len(made) == 90
    assert head.watermark == START + 10 * HOUR


def test_an_occurrence_that_goes_now_has_the_plain_id_and_no_reason():
    _, (made,) = decided(schedule(), [START], Rules())
    assert (made.task_id, made.why, made.state) == ("s@2027-01-15T08:00:00Z", "", "due")


def test_of_a_watermark_in_the_future_nothing_is_due():
    """Another worker's clock, or the store's, has been set back."""
    for rules in (Rules(), Rules(missed="all"), Rules(missed="skip")):
        assert ages(rules, START, START + 3 * HOUR) == []
        assert ages(rules, START, START) == []


def test_ids_of_a_second_owner_have_its_mark():
    assert task_id_of("shop.nightly", START, "7f3a") == "shop.nightly~7f3a@2027-01-15T08:00:00Z"
    _, (made,) = decide(
        "s", schedule(), [START], Rules(), START,
        waiting=0, runs=lambda task_id, old: False, by="me", mark="7f3a",
    )  # fmt: skip
    assert made.task_id.startswith("s~7f3a@")


def test_ids_say_the_time_and_differ_for_each():
    assert task_id_of("shop.nightly", START) == "shop.nightly@2027-01-15T08:00:00Z"
    assert task_id_of("shop.nightly", START + 0.5) == "shop.nightly@2027-01-15T08:00:00.500Z"


@given(st.text(min_size=1, max_size=20), st.floats(0.0, 1e5))
def test_jitter_is_the_same_for_each_id_and_bounded(task_id, jitter):
    first = jitter_of(task_id, jitter)
    assert first == jitter_of(task_id, jitter)
    assert 0 <= first <= jitter


def test_jitter_spreads():
    found = [jitter_of(f"s@{n}", 100.0) for n in range(200)]
    assert min(found) < 10
    assert max(found) > 90


def test_rules_are_read_as_they_were_packed():
    rules = Rules("all", 7, 5.0, "queue", 60.0, 3.0)
    assert read_rules(rules.packed()) == rules
    assert read_rules(Rules().packed()) == Rules()


def test_the_usual_rules_send_the_latest_occurrence_and_allow_overlaps():
    usual = Rules("latest", 100, None, "allow", 86400.0, 0.0)
    assert Rules() == checked_rules("x", {}) == usual


def test_rules_are_those_of_the_options():
    options = {
        "missed": "skip", "max_missed": 7, "grace": timedelta(minutes=1), "overlap": "queue",
        "overlap_limit": 60, "jitter": 3,
    }  # fmt: skip
    assert checked_rules("x", options) == Rules("skip", 7, 60.0, "queue", 60.0, 3.0)
    assert checked_rules("x", {"grace": 0}).grace == 0.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"missed": "every"}, "missed takes 'latest' or 'skip' or 'all', not 'every'"),
        ({"max_missed": 0}, "max_missed takes a whole number from 1 to 1000, not 0"),
        ({"max_missed": 1001}, "max_missed takes a whole number from 1 to 1000, not 1001"),
        ({"max_missed": True}, "max_missed takes a whole number from 1 to 1000, not True"),
        ({"grace": -1}, "grace must be between"),
        ({"overlap": "forbid"}, "overlap takes 'allow' or 'skip' or 'queue'"),
        ({"overlap_limit": 0}, "overlap_limit must be between 1"),
        ({"overlap_limit": 0.5}, "overlap_limit must be between 1"),
        ({"jitter": "5"}, "jitter must be seconds"),
    ],
)
def test_wrong_rules_say_what_to_write(options, words):
    with pytest.raises(ConfigurationError, match=words):
        checked_rules("schedule 'x'", options)


def test_the_outermost_rules_are_allowed():
    assert checked_rules("x", {"max_missed": 1, "overlap_limit": 1}).max_missed == 1
    assert checked_rules("x", {"max_missed": 1000}).max_missed == 1000


@pytest.mark.parametrize(
    "packed",
    [
        None,
        [],
        {**Rules().packed(), "missed": "every"},
        {**Rules().packed(), "overlap": "forbid"},
        {**Rules().packed(), "max_missed": 0},
        {**Rules().packed(), "max_missed": 1001},
    ],
    ids=str,
)
def test_unknown_rules_are_damaged(packed):
    with pytest.raises(Damaged):
        read_rules(packed)
