"""What a worker does with tasks that fail, hang, crash, ask for things, or cannot be read."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from celery import Celery
from harness import Site, wait_until
from ledger_app import (
    awaiting,
    big,
    chunks,
    echo,
    ending,
    endless,
    extending,
    fenced,
    flaky,
    hold_gil,
    once,
    rejecting,
    retry_later,
    snoozing,
    soft,
    steps,
    stubborn_too_long,
    too_long,
    work,
)

from aztask import App
from aztask.errors import BrokerError, ResultTimeout, TaskCancelled, TaskExpired, TaskFailed
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.operate.doctor import examine
from aztask.operate.workers import running
from aztask.stores.events.sink import read_events
from aztask.stores.records.base import State
from aztask.stores.records.onceruns import once_runs_of
from aztask.task import Task

POOLS = ["processes", "threads"]


def send(site: Site, task: Task, key: str, *arguments: object, **options: object) -> None:
    site.app().send(task.name, [key, *arguments], task_id=key, **options)


def start(site: Site, pool: str = "processes", *more: str, **environment: str):
    arguments = ("-Q", "default", "--pool", pool, "-c", "2", *more)
    return site.worker(*arguments, **environment)


def message_of(app: App, task: str, args: tuple[object, ...], task_id: str) -> TaskMessage:
    """A message as `app` would send it."""
    body, content_type, encoding = app.codec.encode_arguments(args, {})
    return TaskMessage(task_id, task, "default", body, content_type, encoding)


def nothing_left(app: App) -> bool:
    stats = app.broker.stats("default")
    return not (stats.active or stats.leased or stats.dead)


@pytest.mark.parametrize("pool", POOLS)
def test_results_retries_snoozes_and_rejections(site: Site, pool: str) -> None:
    app = site.app()
    send(site, work, "work")
    send(site, flaky, "flaky", 2)
    send(site, flaky, "hopeless", 99)
    send(site, snoozing, "snoozing", 3)
    send(site, rejecting, "rejected", "the address is wrong")
    send(site, awaiting, "awaiting")
    app.send(echo.name, [{"a": [1, None, 2.5, b"x"]}], task_id="echo")
    app.send(big.name, [300_000], task_id="big")
    app.send(echo.name, ["x" * 300_000], task_id="large argument")
    start(site, pool)
    assert app.result("work").get(timeout=20) == "work"
    assert app.result("flaky").get(timeout=10) == 2
    assert app.result("snoozing").get(timeout=10) == 3
    assert app.result("awaiting").get(timeout=10) == "awaiting"
    assert app.result("echo").get(timeout=10) == {"a": [1, None, 2.5, b"x"]}
    assert app.result("big").get(timeout=10) == b"x" * 300_000
    assert app.result("large argument").get(timeout=10) == "x" * 300_000
    with pytest.raises(TaskFailed, match="failure 3 of hopeless") as failure:
        app.result("hopeless").get(timeout=10)
    assert failure.value.error_type == "ValueError"
    assert "in flaky" in failure.value.traceback
    assert site.counts("start")["hopeless"] == 4
    with pytest.raises(TaskFailed, match="the address is wrong"):
        app.result("rejected").get(timeout=10)
    dead = {each.dead_letter_reason for each in app.broker.peek("default", dead_letter=True)}
    assert dead == {"retries-exhausted", "the address is wrong"}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("how", "error_type"),
    [
        ("segfault", "WorkerCrashed"),
        ("_exit", "WorkerCrashed"),
        ("SystemExit", "SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("MemoryError", "MemoryError"),
    ],
)
def test_a_violent_end_is_a_failed_attempt_and_the_worker_lives(
    site: Site, pool: str, how: str, error_type: str
) -> None:
    app = site.app()
    send(site, ending, how, how)
    worker = start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result(how).get(timeout=20)
    assert failure.value.error_type == error_type
    assert site.counts("start")[how] == 2  # one retry, then the dead letters
    send(site, work, "after")
    assert app.result("after").get(timeout=10) == "after"
    assert worker.stop() == 0, worker.log


def test_runaway_recursion_and_an_unserialisable_result_fail(site: Site) -> None:
    app = site.app()
    send(site, ending, "recursion", "recursion")
    send(site, ending, "unserialisable", "unserialisable")
    start(site)
    with pytest.raises(TaskFailed, match="recursion"):
        app.result("recursion").get(timeout=20)
    with pytest.raises(TaskFailed, match="no encoding"):
        app.result("unserialisable").get(timeout=10)
    assert site.counts("start")["unserialisable"] == 1


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("how", ["re", "sleep"])
def test_a_task_that_holds_the_gil_for_three_leases_keeps_its_lease(
    site: Site, pool: str, how: str
) -> None:
    """Leases of 3 s: on a busy machine, a renewal that is due may come half a second late."""
    app = site.app()
    send(site, hold_gil, "gil", 9.6, how)
    first = start(site, pool, "--lease", "3s", "--max-lease", "60s")
    second = start(site, pool, "--lease", "3s", "--max-lease", "60s")
    assert app.result("gil").get(timeout=120) == "gil"
    assert site.counts("start")["gil"] == 1
    assert first.stop() == 0
    assert second.stop() == 0
    assert "lost" not in first.log + second.log


@pytest.mark.parametrize("pool", POOLS)
def test_an_endless_loop_is_killed_at_its_time_limit_and_its_sibling_is_not_failed(
    site: Site, pool: str
) -> None:
    app = site.app()
    send(site, endless, "endless")
    send(site, work, "sibling", 1.5)
    start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result("endless").get(timeout=30)
    assert failure.value.error_type == "TimeLimitExceeded"
    assert site.counts("start")["endless"] == 2
    assert app.result("sibling").get(timeout=20) == "sibling"
    states = {record.state for record in app.results.history("sibling")}
    assert states == {State.SUCCEEDED}


def test_at_most_once_beside_a_task_that_is_killed_has_failed(site: Site) -> None:
    """It cannot be given back, so it ends with the cause instead of staying started for ever."""
    app = site.app()
    send(site, once, "once", 60)
    start(site, "threads")
    wait_until(lambda: site.lines("start", "once"), 20, "it starts")
    send(site, endless, "endless")
    with pytest.raises(TaskFailed, match="Interrupted: it ran beside another task: the time limit"):
        app.result("once").get(timeout=20)
    assert site.counts("start")["once"] == 1


def test_at_most_once_in_a_worker_that_must_stop_now_has_failed(site: Site) -> None:
    app = site.app()
    send(site, once, "once", 60)
    worker = start(site)
    wait_until(lambda: site.lines("start", "once"), 20, "it starts")
    worker.signal(signal.SIGTERM)
    time.sleep(0.3)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log
    with pytest.raises(TaskFailed, match="Interrupted: the worker stopped"):
        app.result("once").get(timeout=5)


@pytest.mark.parametrize("pool", POOLS)
def test_the_soft_limit_raises_in_the_task(site: Site, pool: str) -> None:
    app = site.app()
    send(site, soft, "soft")
    start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result("soft").get(timeout=20)
    assert failure.value.error_type == "TimeLimitExceeded"
    assert site.counts("cleanup")["soft"] == 1


@pytest.mark.parametrize("pool", POOLS)
def test_max_lease_stops_the_task_before_anybody_else_gets_the_message(
    site: Site, pool: str
) -> None:
    """It is a failed run, which counts: `max_retries=1` makes it two runs."""
    app = site.app()
    send(site, too_long, "long")
    start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result("long").get(timeout=40)
    assert failure.value.error_type == "MaxLeaseExceeded"
    starts, stops = site.lines("start", "long"), site.lines("stopped", "long")
    assert len(starts) == len(stops) == 2
    assert stops[0].at < starts[1].at, "the first run had stopped before the second began"
    (dead,) = DeadLetters(app, "default").list()
    assert (dead.reason, dead.description.partition(":")[0]) == (
        "retries-exhausted",
        "MaxLeaseExceeded",
    )
    site.stop_workers()
    events = [(each.event, each.error_type) for each in read_events(site.events)]
    assert ("resubmitted", "MaxLeaseExceeded") in events
    assert "lease_lost" not in dict(events)


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_that_ignores_its_max_lease_is_killed_and_has_failed(site: Site, pool: str) -> None:
    app = site.app()
    send(site, stubborn_too_long, "long")
    start(site, pool)
    with pytest.raises(TaskFailed) as failure:
        app.result("long").get(timeout=40)
    assert failure.value.error_type == "MaxLeaseExceeded"
    assert site.counts("start")["long"] == 1


def test_a_checkpoint_survives_the_death_of_its_process(site: Site) -> None:
    app = site.app()
    send(site, chunks, "job", 6, 4)
    start(site)
    assert app.result("job").get(timeout=20) == [0, 1, 2, 3, 4, 5]
    counts = {line.event for line in site.lines(key="job")}
    assert counts == {f"chunk{n}" for n in range(6)}
    assert [len(site.lines(f"chunk{n}")) for n in range(6)] == [1, 1, 1, 1, 2, 1]


def test_extending_the_lease(site: Site) -> None:
    send(site, extending, "more")
    start(site, "processes", "--lease", "2s")
    assert site.app().result("more").get(timeout=20) > 15.0


def test_a_frozen_pool_process_does_not_pass_the_fence(site: Site) -> None:
    """Its lease was renewed meanwhile: the fence asks for the lease, not the time."""
    app = site.app()
    send(site, fenced, "a", 0.2)
    start(site, "processes", "--lease", "1s", "--max-lease", "60s")
    assert app.result("a").get(timeout=20) == "a"
    assert site.counts("effect")["a"] == 1


def test_at_most_once_loses_rather_than_repeats(site: Site) -> None:
    app = site.app()
    send(site, once, "once", 30)
    worker = start(site)
    wait_until(lambda: site.lines("start", "once"), 20, "it starts")
    assert app.broker.stats("default").leased == 0, "the message is gone before the task runs"
    worker.kill()
    worker.wait()
    second = start(site, "processes", "--burst")
    assert second.wait() == 0
    assert site.counts("start")["once"] == 1
    send(site, once, "twice", 0)
    start(site)
    assert app.result("twice").get(timeout=20) == "twice"


@pytest.mark.kills
@pytest.mark.parametrize("step", ["claimed", "sent", "ran"])
def test_at_most_once_ends_as_lost_with_its_worker(site: Site, step: str) -> None:
    """Nothing would run it again, so another worker of the app ends it."""
    app = site.app()
    send(site, once, "once", 0)
    start(site, "processes", "--lease", "1s", AZTASK_FAILPOINT=f"{step}:KILL").wait()
    assert app.result("once").state == State.STARTED
    wait_until(lambda: running(app).rows, 30, "running shows it once the worker is silent")
    assert [row.task.task_id for row in running(app).rows] == ["once"]
    (found,) = [each for each in examine(app, ["default"]) if each.check == "lost"]
    assert "once (ledger.once on " in found.text
    start(site, LEDGER_GRAPH_SECONDS="2")
    with pytest.raises(TaskFailed) as failure:
        app.result("once").get(timeout=60)
    assert failure.value.error_type == "lost"
    assert site.counts("start")["once"] <= (step in {"sent", "ran"})
    notes = once_runs_of(app.results)
    assert notes is not None
    wait_until(lambda: not list(notes.all()), 20, "the note is deleted")
    assert nothing_left(app)


def test_at_most_once_runs_if_its_worker_died_before_the_removal(site: Site) -> None:
    """The run was noted, but its message is there: it comes again before the worker is gone."""
    app = site.app()
    send(site, once, "once", 0)
    start(site, "processes", "--lease", "1s", AZTASK_FAILPOINT="once-noted:KILL").wait()
    start(site, LEDGER_GRAPH_SECONDS="2")
    assert app.result("once").get(timeout=60) == "once"
    assert site.counts("start")["once"] == 1


def test_unknown_and_undecodable_messages_do_not_block(site: Site) -> None:
    app = site.app()
    broker = app.broker
    broker.send("default", [Envelope(b"\xc1garbage", message_id="no headers")])
    broker.send("default", [Envelope(b"", {"task": 7, "id": "x"}, "wrong type")])
    app.send("nobody.knows", [1], task_id="unknown")
    app.send("os.system", ["touch never"], task_id="os.system")
    good = app.codec
    message = message_of(app, "ledger.echo", (1,), "bad body")
    broken = good.to_envelope(message)
    broker.send("default", [Envelope(b"\xdf\xff\xff\xff\xff", broken.headers, "bad body:0:0")])
    send(site, work, "after")
    worker = start(site, LEDGER_GRACE="1")
    assert app.result("after").get(timeout=20) == "after"
    for task_id in ("unknown", "os.system"):
        with pytest.raises(TaskFailed) as failure:
            app.result(task_id).get(timeout=20)
        assert failure.value.error_type == "unknown-task"
    with pytest.raises(TaskFailed):
        app.result("bad body").get(timeout=20)
    wait_until(lambda: broker.stats("default").dead == 5, 10, "five dead letters")
    dead = broker.peek("default", dead_letter=True)
    reasons = sorted(each.dead_letter_reason or "" for each in dead)
    assert reasons == ["undecodable"] * 3 + ["unknown-task"] * 2
    assert b"\xc1garbage" in [each.envelope.body for each in dead]
    assert worker.stop() == 0


def test_a_pickle_of_a_celery_app_is_a_dead_letter_with_a_line_in_the_log(site: Site) -> None:
    """Celery's own workers may read it; ours never do."""
    path = site.broker.removeprefix("local://")
    celery = Celery("ledger", broker=f"aztask+local://{path}")
    celery.conf.update(task_default_queue="default", task_serializer="pickle")
    celery.send_task("ledger.echo", (1,), task_id="pickled")
    worker = start(site)
    broker = site.app().broker
    wait_until(lambda: broker.stats("default").dead == 1, 20, "a dead letter")
    (dead,) = broker.peek("default", dead_letter=True)
    assert dead.dead_letter_reason == "undecodable"
    wait_until(lambda: "application/x-python-serialize" in worker.log, 10, "a line in the log")
    assert worker.stop() == 0


def test_duplicate_detection_swallows_no_clone(site: Site) -> None:
    """Three snoozes, three retries, a dead letter and its replay, all inside the window."""
    app = site.app()
    app.queue("default", duplicate_window=600.0)
    app.broker.declare("default", app.queue_options("default"))
    send(site, snoozing, "snoozing", 3)
    send(site, flaky, "flaky", 3)
    send(site, flaky, "hopeless", 4)
    start(site)
    assert app.result("snoozing").get(timeout=20) == 3
    assert app.result("flaky").get(timeout=20) == 3
    with contextlib.suppress(TaskFailed):
        app.result("hopeless").get(timeout=20)
    DeadLetters(app, "default").replay(Selection(ids=("hopeless",)))
    wait_until(lambda: len(site.lines("start", "hopeless")) == 8, 20, "it runs four times again")
    assert [site.counts("start")[key] for key in ("snoozing", "flaky")] == [4, 4]


def test_a_known_task_id_is_not_run_again(site: Site) -> None:
    app = site.app()
    start(site)
    send(site, work, "a")
    assert app.result("a").get(timeout=20) == "a"
    send(site, work, "a")
    time.sleep(0.5)
    assert site.counts("start")["a"] == 1
    send(site, work, "a", force=True)
    wait_until(lambda: site.counts("start")["a"] == 2, 10, "forced, it runs again")


def test_two_copies_of_one_message_record_one_outcome(site: Site) -> None:
    """As after a send whose reply was lost: the same message id is stored twice."""
    app = site.app()
    message = message_of(app, "ledger.work", ("a", 0.5), "a")
    app.broker.send("default", [app.codec.to_envelope(message)] * 2)
    start(site)
    start(site)
    assert app.result("a").get(timeout=20) == "a"
    wait_until(lambda: app.broker.stats("default").leased == 0, 10, "both copies are gone")
    assert site.counts("start")["a"] == 1
    assert len(app.results.history("a")) == 1
    assert app.broker.stats("default").active == 0


def test_delays_expiry_and_cancellation(site: Site) -> None:
    app = site.app()
    sent = time.time()
    send(site, work, "delayed", delay=1.0)
    send(site, work, "expired", delay=0.6, expires=0.3)
    send(site, work, "cancelled")
    assert app.result("cancelled").cancel()
    assert app.result("cancelled").state == "cancelled"
    send(site, retry_later, "later", 0.7)
    start(site)
    assert app.result("delayed").get(timeout=20) == "delayed"
    assert site.lines("start", "delayed")[0].at - sent >= 1.0
    with pytest.raises(TaskExpired):
        app.result("expired").get(timeout=10)
    with pytest.raises(TaskCancelled):
        app.result("cancelled").get(timeout=10)
    assert app.result("later").get(timeout=10) - site.lines("start", "later")[0].at >= 0.7
    assert not site.lines("start", "expired")
    assert not site.lines("start", "cancelled")


@pytest.mark.parametrize("pool", POOLS)
def test_a_cancelled_run_is_stopped_where_that_is_asked_for(site: Site, pool: str) -> None:
    app = site.app()
    worker = start(site, pool)
    send(site, steps, "stopped", 60.0)
    send(site, steps, "goes-on", 8.0)
    wait_until(lambda: len(site.lines("start")) == 2, 20, "both run")
    assert app.result("stopped").cancel(running=True)
    assert app.result("goes-on").cancel()
    with pytest.raises(TaskCancelled):
        app.result("stopped").get(timeout=20)
    assert site.counts("stopped")["stopped"] == 1, "the task could leave things tidy"
    assert app.result("goes-on").get(timeout=20) == "goes-on"
    assert site.counts("start") == {"stopped": 1, "goes-on": 1}
    wait_until(lambda: nothing_left(app), 10, "both messages are gone")
    assert worker.stop() == 0
    assert "1 succeeded" in worker.log
    assert "1 cancelled" in worker.log


def test_a_cancelled_run_that_does_not_stop_is_killed(site: Site) -> None:
    app = site.app()
    start(site)
    send(site, hold_gil, "stuck", 120.0, "pow")
    wait_until(lambda: site.lines("start", "stuck"), 20, "it runs")
    assert app.result("stuck").cancel(running=True)
    with pytest.raises(TaskCancelled):
        app.result("stuck").get(timeout=20)
    send(site, work, "next")
    assert app.result("next").get(timeout=20) == "next"
    assert site.counts("start")["stuck"] == 1
    wait_until(lambda: nothing_left(app), 10, "its message is gone")


def test_sigterm_drains_and_a_second_one_releases(site: Site) -> None:
    app = site.app()
    send(site, work, "short", 1.0)
    worker = start(site)
    wait_until(lambda: site.lines("start", "short"), 20, "it runs")
    assert worker.stop() == 0
    assert app.result("short").get(timeout=1) == "short"
    send(site, work, "long", 30.0)
    worker = start(site)
    wait_until(lambda: site.lines("start", "long"), 20, "it runs")
    worker.signal(15)
    with pytest.raises(ResultTimeout):
        app.result("long").get(timeout=0.5)
    began = time.monotonic()
    worker.signal(15)
    assert worker.wait(5) == 0
    assert time.monotonic() - began < 3.0
    stats = app.broker.stats("default")
    assert (stats.active, stats.leased) == (1, 0), "released, available at once"


def test_the_result_store_away_for_a_while_delays_but_loses_nothing(split_site: Site) -> None:
    """Another process holds the store's write lock for longer than SQLite waits."""
    app = split_site.app()
    start(split_site)
    send(split_site, work, "warm")
    assert app.result("warm").get(timeout=20) == "warm"
    database = app.results._database
    with database.transaction():
        app.broker.send("default", [app.codec.to_envelope(
            message_of(app, "ledger.work", ("a", 0.0), "a")
        )])  # fmt: skip
        time.sleep(2.0)
    assert app.result("a").get(timeout=30) == "a"


@pytest.mark.parametrize("pool", POOLS)
def test_when_renewals_hang_the_task_stops_before_its_deadline(site: Site, pool: str) -> None:
    """Another process holds the file's write lock, so that no renewal gets through."""
    app = site.app()
    lease = 2.0
    send(site, steps, "a", 4.0)
    worker = start(site, pool, "--lease", f"{lease}s", "--max-lease", "60s")
    wait_until(lambda: site.lines("start", "a"), 20, "it runs")
    with app.results._database.transaction():
        locked_at = time.time()
        wait_until(lambda: site.lines("stopped", "a"), 10, "it is stopped")
        time.sleep(0.5)
    (stopped,) = site.lines("stopped", "a")
    assert stopped.at - locked_at < lease, "stopped before the lease can have ended"
    assert app.result("a").get(timeout=30) == "a"
    assert len(site.lines("start", "a")) == 2
    assert worker.stop() == 0, worker.log
    assert "not renewed in time" in worker.log


def test_prefetch_zero_holds_only_what_runs(site: Site) -> None:
    app = site.app()
    for n in range(6):
        send(site, work, f"t{n}", 1.0)
    start(site, "processes", "--prefetch", "0")
    wait_until(lambda: len(site.lines("start")) == 2, 20, "two run")
    time.sleep(0.3)
    assert app.broker.stats("default").leased == 2


def test_a_worker_and_a_client_notice_that_the_queue_file_was_replaced(site: Site) -> None:
    worker = site.worker("-c", "1")
    site.app().send(work.name, ["a"], task_id="a")
    assert site.app().result("a").get(timeout=30) == "a"
    for name in ("queues.db", "queues.db-wal", "queues.db-shm"):
        (site.folder / name).unlink(missing_ok=True)
    time.sleep(0.01)  # an open file counts as in place for a millisecond
    with pytest.raises(BrokerError, match="was deleted or replaced while it was open"):
        site.app().send(work.name, ["lost"], task_id="lost")
    fresh = App("ledger", broker=site.broker, results=site.results)
    fresh.send(work.name, ["b"], task_id="b")
    wait_until(lambda: "deleted or replaced" in worker.log, 20, "the worker notices it")
    assert worker.stop() == 0
    assert site.counts("start") == {"a": 1}, "it ran nothing of a file that is gone"
    site.worker("-c", "1")
    assert fresh.result("b").get(timeout=30) == "b"
    fresh.close()
    site.stop_workers()
