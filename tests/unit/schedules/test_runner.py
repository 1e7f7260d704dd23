"""Workers that take turns on an injected clock, over one result file."""

import random
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from schedulesim import Killed, World, call

from aztask.message.codec import Codec
from aztask.queues.engine import Database
from aztask.schedules.stored import read_made
from aztask.stores.records.local.store import LocalResults
from aztask.stores.records.schedules import schedules_of

START = 1_800_000_000.0
HOUR = 3600.0


@pytest.fixture
def world(tmp_path):
    database = Database(str(tmp_path / "results.db"))
    yield World(LocalResults(database), START, random.Random(5))
    database.close()


def declaring(name="s", argument=1, **options):
    options = {"every": HOUR, **options}

    def declare(schedules):
        schedules.declare(schedules.plan(name, call(argument), **options))

    return declare


def ids(world):
    return [each.partition("@")[2] for each in world.sent]


def reasons(world, kind="occurrence_skipped"):
    return [each.reason for each in world.events if each.event == kind]


def states(world, name="shop.s"):
    rows = schedules_of(world.results).newest(name, 100)
    return [read_made(row).state for row in rows][::-1]


def test_the_first_occurrence_is_never_in_the_past(world):
    world.now = START + 10.0
    world.run([world.worker("a", declaring())], 2 * HOUR + 60.0, (20.0, 40.0))
    assert ids(world) == ["2027-01-15T09:00:00Z", "2027-01-15T10:00:00Z"]
    header = world.headers["shop.s@2027-01-15T09:00:00Z"]
    assert header == {"aztask-schedule": "shop.s", "aztask-scheduled-at": START + HOUR}


@pytest.mark.parametrize(("missed", "expected"), [("skip", 0), ("latest", 1), ("all", 3)])
def test_all_workers_down_for_three_hours(world, missed, expected):
    declare = declaring(missed=missed)
    world.run([world.worker("a", declare)], HOUR + 60.0, (10.0, 20.0))
    assert len(world.sent) == 1
    world.now += 3 * HOUR + 600.0
    world.run([world.worker("b", declare)], 300.0, (1.0, 20.0))
    assert len(world.sent) == 1 + expected
    world.run([world.worker("b", declare)], HOUR, (10.0, 20.0))
    assert len(world.sent) == 2 + expected
    assert reasons(world, "occurrence_sent") == ["schedule shop.s"] * (2 + expected)
    times = "2027-01-15T10:00:00Z to 2027-01-15T"
    assert (
        reasons(world)
        == {
            "skip": [f"schedule shop.s: 3 occurrences missed, {times}12:00:00Z (missed='skip')"],
            "latest": [
                f"schedule shop.s: 2 occurrences missed, {times}11:00:00Z (missed='latest')"
            ],
            "all": [],
        }[missed]
    )


def test_another_worker_sends_what_a_dead_one_made(world):
    declare = declaring()
    first = world.worker("a", declare)
    world.run([first], HOUR - 60.0, (10.0, 20.0))
    world.now = START + HOUR + 1.0

    def die(*arguments):
        raise Killed

    first._engine._sends.send_occurrence = die
    with pytest.raises(Killed):
        first.turn()
    assert states(world) == ["due"]
    second = world.worker("b", declare)
    world.run([second], 5.0, (1.0, 1.0))
    assert not world.sent  # the first may only be slow
    world.run([second], 30.0, (1.0, 1.0))
    assert ids(world) == ["2027-01-15T09:00:00Z"]
    assert states(world) == ["sent"]


def test_a_worker_that_makes_the_next_occurrence_leaves_the_one_before_to_its_maker(world):
    """It was made six to eleven seconds ago: its maker may only be slow."""
    declare = declaring(every=6)
    first, second = world.worker("a", declare), world.worker("b", declare)
    world.now = START + 1.0
    world.run([first], 2.0, (0.5, 0.5))  # so that it makes the first occurrence, and at once
    world.run([first, second], 2.0, (0.5, 0.5))
    world.now = START + 6.0

    def die(*arguments):
        raise Killed

    first._engine._sends.send_occurrence = die
    while states(world) != ["due"]:
        with suppress(Killed):
            first.turn()
        world.now += 0.1
    while not world.sent and world.now < START + 18.0:
        second.turn()
        world.now += 0.5
    assert ids(world) == ["2027-01-15T08:00:12Z"]
    assert states(world) == ["due", "sent"]


def test_a_schedule_that_failed_waits_for_its_pause_although_its_head_changes(world):
    schedules = world.schedules(declaring())
    worker = schedules.runner("a")
    attempts = []

    def fail(*arguments):
        attempts.append(world.now)
        raise ValueError("the broker says no")

    worker._engine._sends.send_occurrence = fail
    world.run([worker], HOUR - 1.0, (10.0, 20.0))
    world.now = START + HOUR
    while len(attempts) < 2:
        worker.turn()
        world.now += 0.5
    last = attempts[-1]
    for _ in range(8):  # four seconds with two looks, each of which finds another head
        schedules.engine.change("shop.s", lambda view: replace(view.schedule, made=99))
        worker.turn()
        world.now += 0.5
    assert attempts[-1] == last
    while len(attempts) < 3:
        worker.turn()
        world.now += 0.5
    assert attempts[-1] - last >= 5.0


def test_a_schedule_of_the_code_takes_over_one_that_was_made_at_run_time(world):
    made = world.schedules()
    made.create("s", call(1), every=HOUR)
    assert not made.view("s").schedule.of_code
    world.run([world.worker("a", declaring())], 60.0, (5.0, 10.0))
    assert made.view("s").schedule.of_code
    definition = made.engine.definition(made.view("s"))
    view = made.engine.define(definition, 0, "", made.view("s"), of_code=False)
    assert not view.schedule.of_code


def test_a_schedule_that_no_code_claims_stops_after_ten_minutes(world):
    declare = declaring(every=120.0)
    world.run([world.worker("a", declare)], HOUR, (5.0, 10.0))
    before = len(world.sent)
    other = world.worker("b", declaring("other", every=60.0))
    world.run([other], 2 * HOUR, (5.0, 10.0))
    sent = [each for each in world.sent if each.startswith("shop.s@")]
    assert before + 4 <= len(sent) <= before + 6
    world.run([world.worker("c", declare)], 600.0, (5.0, 10.0))
    later = [each for each in world.sent if each.startswith("shop.s@")]
    assert len(sent) + 5 <= len(later) <= len(sent) + 7  # the latest missed one, and the new ones


def test_claims_are_renewed_while_nothing_is_due(world):
    worker = world.worker("a", declaring(cron="0 0 1 1 *", every=None))
    world.run([worker], 6 * HOUR, (10.0, 60.0))
    view = world.schedules().view("s")
    assert world.now - view.claimed_at < 400.0


def test_one_that_was_made_at_run_time_needs_no_claim(world):
    world.schedules().create("s", call(1), every=HOUR)
    world.schedules().create("s", call(1), every=HOUR)
    world.run([world.worker("a", lambda schedules: None)], 3 * HOUR + 120.0, (30.0, 60.0))
    assert len(world.sent) == 3
    assert world.schedules().delete("s")
    world.run([world.worker("a", lambda schedules: None)], 3 * HOUR, (30.0, 60.0))
    assert len(world.sent) == 3


def test_the_higher_release_wins_and_an_old_worker_does_not_flap_it(world):
    new = world.worker("new", declaring(every=600.0, release=2))
    world.run([new], 60.0, (5.0, 10.0))
    old = world.worker("old", declaring(every=60.0, release=1))
    world.run([new, old], HOUR, (5.0, 10.0))
    assert len(world.sent) in (5, 6)
    assert world.schedules().view("s").schedule.release == 2


def test_of_equal_releases_the_worker_that_started_last_wins(world):
    old = world.worker("old", declaring(every=600.0))
    world.run([old], 60.0, (5.0, 10.0))
    new = world.worker("new", declaring(every=60.0))
    world.run([old, new], HOUR, (5.0, 10.0))
    assert 55 <= len(world.sent) <= 60
    tags = {
        world.schedules().view("s").schedule.digest for _ in world.run([old, new], 60.0, (5, 9))
    }
    assert len(tags) == 1


def test_a_new_definition_of_the_same_times_keeps_the_watermark(world):
    world.run([world.worker("a", declaring(argument=1))], 60.0, (5.0, 10.0))
    world.now = START + 2.5 * HOUR
    world.run([world.worker("b", declaring(argument=2, missed="all"))], 60.0, (5.0, 10.0))
    assert len(world.sent) == 2


def test_pause_and_resume(world):
    worker = world.worker("a", declaring())
    world.run([worker], HOUR + 60.0, (30.0, 60.0))
    assert world.schedules().pause("s")
    world.run([worker, world.worker("b", declaring())], 5 * HOUR, (30.0, 60.0))
    assert len(world.sent) == 1
    assert world.schedules().resume("shop.s")
    world.run([worker], HOUR, (30.0, 60.0))
    assert len(world.sent) == 2
    assert not world.schedules().pause("unknown")


def test_a_queued_occurrence_follows_the_task_before_it(world):
    world.ends = False
    worker = world.worker("a", declaring(overlap="queue"))
    world.run([worker], 3 * HOUR + 60.0, (10.0, 30.0))
    assert states(world) == ["sent", "waiting", "waiting"]
    world.end("shop.s@2027-01-15T09:00:00Z")
    world.run([worker], 60.0, (5.0, 5.0))
    assert states(world) == ["sent", "sent", "waiting"]
    world.end("shop.s@2027-01-15T10:00:00Z")
    world.run([world.worker("b", declaring(overlap="queue"))], 60.0, (5.0, 5.0))
    assert ids(world) == [f"2027-01-15T{hour:02}:00:00Z" for hour in (9, 10, 11)]


def test_a_skipped_occurrence_says_why(world):
    world.ends = False
    schedules = world.schedules(declaring(overlap="skip"))
    world.run([schedules.runner("a")], 2 * HOUR + 60.0, (10.0, 30.0))
    newest, first = schedules.engine.history("shop.s", 5)
    assert (first.state, newest.state) == ("sent", "skipped")
    assert newest.why == f"the task of {first.task_id} has not ended"
    assert reasons(world) == [f"schedule shop.s: {newest.why}"]
    (skipped,) = [each for each in world.events if each.event == "occurrence_skipped"]
    assert (skipped.task_id, skipped.task, skipped.queue) == (
        newest.task_id,
        "shop.work",
        "default",
    )


def test_jitter_delays_the_message(world):
    world.run([world.worker("a", declaring(jitter=600.0))], 5 * HOUR, (1.0, 3.0))
    assert len({round(each) for each in world.delays.values()}) > 1
    assert all(0 <= each <= 600 for each in world.delays.values())


def test_a_template_that_nobody_signed_is_not_sent(world):
    world.schedules().create("s", call(1), every=HOUR)
    key = Codec(signing_keys=[b"k" * 32])
    worker = world.worker("a", lambda schedules: None, key)
    world.run([worker], 2 * HOUR, (30.0, 60.0))
    assert not world.sent
    world.schedules(codec=key).create("t", call(1), every=HOUR)
    world.run([worker], 2 * HOUR + 120.0, (30.0, 60.0))
    assert len(world.sent) == 2


def test_one_damaged_schedule_harms_no_other(world, caplog):
    store = schedules_of(world.results)
    store.commit("shop.damaged", b"\xc1", None)
    world.run([world.worker("a", declaring())], 2 * HOUR + 120.0, (30.0, 60.0))
    assert len(world.sent) == 2
    assert caplog.text.count("schedule shop.damaged: its head cannot be decoded") == 1


def test_an_error_of_one_send_stays_open_and_is_tried_again(world):
    world.deaths = 0.0
    worker = world.worker("a", declaring())
    sends = worker._engine._sends
    send = sends.send_occurrence
    failures = iter([True, True, False])

    def flaky(*arguments):
        if next(failures, False):
            raise ValueError("the broker says no")
        send(*arguments)

    sends.send_occurrence = flaky
    world.run([worker], HOUR + 120.0, (1.0, 2.0))
    assert states(world) == ["sent"]
    assert len(world.sent) == 1


def test_trigger_and_backfill(world):
    schedules = world.schedules(declaring())
    worker = schedules.runner("a")
    world.run([worker], 3 * HOUR + 60.0, (30.0, 60.0))
    triggered = schedules.trigger("s")
    assert triggered.startswith("shop.s@2027-01-15T11:01:00Z-")
    assert schedules.trigger("unknown") is None
    start, end = (datetime(2027, 1, 15, hour, tzinfo=UTC) for hour in (5, 11))
    filled = schedules.backfill("s", start, end)
    assert [each[-9:-4] for each in filled] == ["05:00", "06:00", "07:00", "08:00"]
    assert schedules.backfill("s", start, end) == []
    assert states(world) == ["sent"] * 8
    world.run([worker], HOUR, (30.0, 60.0))
    assert len(world.sent) == 9


def test_replacing_the_head_keeps_what_is_open(world):
    schedules = world.schedules(declaring(overlap="queue"))
    world.ends = False
    world.run([schedules.runner("a")], 2 * HOUR + 60.0, (10.0, 30.0))
    view = schedules.view("s")
    assert view.waiting == 1
    changed = schedules.engine.change("shop.s", lambda view: replace(view.schedule, made=99))
    assert (changed.waiting, changed.schedule.made) == (1, 99)
