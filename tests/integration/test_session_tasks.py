"""Tasks of sessions on real workers: in order, one at a time, fairly, through kills."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bus import address_at, broker_at
from harness import Site, site_in, wait_until
from proxy import Proxy
from session_app import counted, lapsing, quick, rejected, shaky, step

from aztask import App
from aztask.errors import TaskFailed
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.records.base import State
from aztask.testing import RunningEmulator

LEASE = 2.0
ORDERS = ("-Q", "orders", "-c", "4")


@contextmanager
def on_service_bus(
    folder: Path, bus: RunningEmulator, *, port: int | None = None
) -> Iterator[Site]:
    """port: of a proxy in front of the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
        manager = broker_at(bus)
        if "orders" in manager.queues():
            manager.delete("orders")
        manager.declare("orders", QueueOptions(lease=LEASE, sessions=True, max_deliveries=100))
        manager.close()
        broker = address_at(bus, port)
        with site_in(folder, joint=False, broker=broker, module="session_app") as site:
            yield site


@pytest.fixture(params=["local", "servicebus"])
def site(request: pytest.FixtureRequest, bus: RunningEmulator, tmp_path: Path) -> Iterator[Site]:
    if request.param == "servicebus":
        with on_service_bus(tmp_path / "site", bus) as made:
            yield made
    else:
        with site_in(tmp_path / "site", module="session_app") as made:
            yield made


@pytest.fixture
def app(site: Site) -> App:
    """An app on the site's addresses that knows the queue and no task."""
    made = site.app()
    made.queue("orders", sessions=True, lease=LEASE)
    return made


def send(app: App, task: str, session: str, *args: object, **options: object) -> str:
    """Send by name, as a program does that does not have the tasks' code; the task id."""
    return app.send(task, args, queue="orders", session=session, **options).id  # type: ignore[arg-type]


def story(site: Site) -> dict[str, list[str]]:
    """{session: what happened in it, in order}, as "start 3" and "end 3"."""
    told: dict[str, list[str]] = defaultdict(list)
    for line in site.lines():
        session, number = line.key.split("/")
        told[session].append(f"{line.event} {number}")
    return told


def in_order(count: int) -> list[str]:
    return [f"{event} {number}" for number in range(count) for event in ("start", "end")]


def test_in_order_and_one_at_a_time_over_two_workers(site: Site, app: App) -> None:
    sessions = [f"s{number}" for number in range(50)]
    workers = [site.worker(*ORDERS) for _ in range(2)]
    ids = [send(app, step.name, each, number, 0.02) for number in range(4) for each in sessions]
    assert [app.result(each).get(timeout=60) for each in ids[-50:]] == [3] * 50
    assert story(site) == {each: in_order(4) for each in sessions}
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log
    assert not any(" 0 succeeded" in worker.log for worker in workers), "both took part"


def test_a_retry_keeps_its_place_and_stops_no_other_session(site: Site, app: App) -> None:
    worker = site.worker("-Q", "orders", "-c", "1")
    send(app, shaky.name, "a", 0, 0)
    send(app, shaky.name, "a", 1, 2)
    last = send(app, shaky.name, "a", 2, 0)
    others = [send(app, step.name, f"b{number}", number) for number in range(4)]
    assert app.result(last).get(timeout=30) == 0
    assert [app.result(each).get(timeout=30) for each in others] == [0, 1, 2, 3]
    assert story(site)["a"] == [
        *("start 0", "end 0"),
        *("start 1", "start 1", "start 1", "end 1"),
        *("start 2", "end 2"),
    ]
    lines = [line.key for line in site.lines("start")]
    assert any(key.startswith("b") for key in lines[2 : lines.index("a/2")]), "b ran meanwhile"
    assert worker.stop() == 0, worker.log


def test_left_to_lapse_it_keeps_its_place_too(site: Site, app: App) -> None:
    worker = site.worker(*ORDERS)
    assert app.result(send(app, step.name, "b", 0)).get(timeout=30) == 0, "the pool is up"
    send(app, lapsing.name, "a", 0, 1)
    last = send(app, step.name, "a", 1)
    assert app.result(last).get(timeout=30) == 1
    assert story(site)["a"] == ["start 0", "start 0", "end 0", "start 1", "end 1"]
    first, second = (line.at for line in site.lines("start", "a/0"))
    assert second - first > 0.5 * LEASE, "not before the lease had ended"
    assert worker.stop() == 0, worker.log


def test_after_a_dead_letter_the_next_goes_on_and_a_delayed_one_joins_when_due(
    site: Site, app: App
) -> None:
    worker = site.worker(*ORDERS)
    assert app.result(send(app, step.name, "b", 0)).get(timeout=30) == 0, "the pool is up"
    send(app, rejected.name, "a", 0)
    late = send(app, step.name, "a", 1, delay=3.0)
    send(app, step.name, "a", 2)
    assert app.result(late).get(timeout=30) == 1
    assert story(site)["a"] == ["start 0", "start 2", "end 2", "start 1", "end 1"]
    (dead,) = app.broker.peek("orders", dead_letter=True)
    assert dead.envelope.session == "a"
    assert worker.stop() == 0, worker.log


def test_an_unknown_task_holds_its_session_for_the_grace_and_no_longer(
    site: Site, app: App
) -> None:
    unknown = send(app, "nobody.knows", "a")
    last = send(app, step.name, "a", 1)
    other = send(app, step.name, "b", 0)
    worker = site.worker(*ORDERS, LEDGER_GRACE="1")
    assert app.result(other).get(timeout=30) == 0
    with pytest.raises(TaskFailed, match="nobody"):
        app.result(unknown).get(timeout=30)
    assert app.result(last).get(timeout=30) == 1
    (start,) = site.lines("start", "a/1")
    (run,) = app.results.history(unknown)
    assert run.outcome is not None
    assert start.at >= run.outcome.at, "it waited for the one before"
    assert worker.stop() == 0, worker.log


def test_without_a_result_store_retries_are_counted_and_end(site: Site, app: App) -> None:
    send(app, shaky.name, "a", 0, 1)
    send(app, quick.name, "a", 1, 9)
    send(app, step.name, "a", 2)
    worker = site.worker(*ORDERS, LEDGER_RESULTS="")
    wait_until(lambda: "end 2" in story(site)["a"], 30, "the last one ran")
    assert story(site)["a"] == ["start 0", "start 0", "end 0", *["start 1"] * 3, *in_order(3)[4:]]
    (dead,) = app.broker.peek("orders", dead_letter=True)
    assert dead.dead_letter_reason == "retries-exhausted"
    assert worker.stop() == 0, worker.log


def test_a_deploy_finishes_what_runs_and_hands_the_session_on(site: Site, app: App) -> None:
    last = [send(app, step.name, "a", number, 3.0 - number) for number in range(3)][-1]
    threads = (*ORDERS, "--pool", "threads")
    first = site.worker(*threads)
    wait_until(lambda: site.lines("start"), 20, "the first message runs")
    second = site.worker(*threads)
    wait_until(lambda: second.log, 20, "the second worker is up")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.log
    assert app.result(last).get(timeout=30) == 2
    assert story(site)["a"] == in_order(3)
    pause = site.lines("start", "a/1")[0].at - site.lines("end", "a/0")[0].at
    assert pause < LEASE, "the session was given back, not left to lapse"
    assert second.stop() == 0, second.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_worker_that_goes_away_in_the_middle(site: Site, app: App, number: int) -> None:
    """The sessions' leases lapse; nothing is lost, and no message passes the one before it."""
    sessions = [f"s{each}" for each in range(6)]
    ids = [send(app, step.name, each, n, 0.1) for n in range(4) for each in sessions]
    first = site.worker(*ORDERS)
    wait_until(lambda: len(site.lines("start")) > 8, 30, "the first worker is in the middle")
    if number == signal.SIGSTOP:
        first.freeze()
    else:
        first.signal(number)
    second = site.worker(*ORDERS)
    assert [app.result(each).get(timeout=60) for each in ids[-6:]] == [3] * 6
    if number == signal.SIGSTOP:
        first.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert first.stop() == 0, first.log
    for session in sessions:
        starts = [text for text in story(site)[session] if text.startswith("start")]
        assert starts[0] == "start 0"
        assert sorted(set(starts)) == [f"start {n}" for n in range(4)]
        again = [text for text in starts if starts.count(text) > 1]
        assert len(again) <= 2, "at most what was started and not recorded runs again"
    for each in ids:
        assert [record.state for record in app.results.history(each)] == [State.SUCCEEDED]
    assert second.stop() == 0, second.log


def test_no_session_starves_behind_a_long_one(site: Site, app: App) -> None:
    last = [send(app, step.name, "long", number, 0.1) for number in range(40)][-1]
    short = [send(app, step.name, f"z{number}", 0) for number in range(3)]
    worker = site.worker("-Q", "orders", "-c", "1", "--session-share", "300ms")
    assert [app.result(each).get(timeout=30) for each in short] == [0, 0, 0]
    assert app.result(last).state == State.PENDING, "the long session is not through"
    told = story(site)["long"]
    assert told == in_order(40)[: len(told)]
    assert worker.stop() == 0, worker.log


def test_the_state_survives_messages_and_workers(site: Site, app: App) -> None:
    first = site.worker("-Q", "orders", "-c", "1", "--max-tasks", "1")
    (pid,) = app.result(send(app, counted.name, "a")).get(timeout=20)
    assert first.wait() == 0, first.log
    second = site.worker("-Q", "orders", "-c", "1")
    seen = app.result(send(app, counted.name, "a", True)).get(timeout=20)
    assert seen[0] == pid and len(seen) == 3, "the run that died had stored its state"
    assert len(app.result(send(app, counted.name, "b")).get(timeout=20)) == 1
    assert second.stop() == 0, second.log


def test_sent_from_the_command_line(site: Site, app: App) -> None:
    command = [sys.executable, "-m", "aztask", "send"]
    for options in (["-A", "session_app"], ["-q", "orders"]):
        sent = subprocess.run(
            [*command, *options, "sessions.step", "--args", "[0]", "--session", "a"],
            env={**site.environment, "AZTASK_BROKER": site.broker},
            capture_output=True,
            check=False,
            text=True,
        )
        assert sent.returncode == 0, sent.stderr
    worker = site.worker(*ORDERS)
    wait_until(lambda: story(site)["a"] == [*in_order(1), *in_order(1)], 20, "both ran")
    assert worker.stop() == 0, worker.log


def test_a_burst_ends_when_all_sessions_are_empty(site: Site, app: App) -> None:
    for session in ("a", "b", "c"):
        send(app, step.name, session, 0)
    worker = site.worker(*ORDERS, "--burst")
    assert worker.wait() == 0, worker.log
    assert story(site) == {session: in_order(1) for session in ("a", "b", "c")}


def test_connections_that_break_keep_the_order(bus: RunningEmulator, tmp_path: Path) -> None:
    """A session goes with its connection; whoever takes it goes on with what was not settled."""
    proxy = Proxy(bus.port)
    with on_service_bus(tmp_path / "site", bus, port=proxy.port) as site:
        app = site.app()
        app.queue("orders", sessions=True, lease=LEASE)
        ids = [send(app, step.name, f"s{s}", n, 0.1) for n in range(5) for s in range(3)]
        worker = site.worker(*ORDERS)
        for seen in (3, 8):
            wait_until(lambda seen=seen: len(site.lines("start")) > seen, 30, "it works")
            proxy.reset_all()
        assert [app.result(each).get(timeout=60) for each in ids[-3:]] == [4] * 3
        for told in story(site).values():
            starts = [text for text in told if text.startswith("start")]
            assert starts == sorted(starts) and len(set(starts)) == 5
        for each in ids:
            assert [record.state for record in app.results.history(each)] == [State.SUCCEEDED]
        assert worker.stop() == 0, worker.log
        assert "Traceback" not in worker.log
    proxy.close()


def test_a_message_of_a_session_without_tasks(site: Site, app: App) -> None:
    for body in (b"1", b"2"):
        app.broker.send("orders", [Envelope(body, session="a"), Envelope(body, session="b")])
    with app.receive("orders", session="b") as lease:
        assert (lease.body, lease.delivery.session) == (b"1", "b")
        lease.complete()
    with app.receive("orders", session="b") as lease:
        assert lease.body == b"2"
    with app.receive("orders") as lease:
        assert lease.delivery.session in ("a", "b")
        lease.complete()


def test_storage_queues_have_none_and_say_so_at_the_start(tmp_path: Path) -> None:
    with site_in(
        tmp_path / "site", broker="UseDevelopmentStorage=true", module="session_app"
    ) as site:
        worker = site.worker(*ORDERS)
        assert worker.wait() == 4
        assert worker.log.count("\n") == 1 and "no sessions" in worker.log, worker.log
