"""A clock probe that stays behind is no task: it goes away by itself, and nothing counts it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bus import broker_at
from harness import ROOT, wait_until

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.servicebus import senders
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.settlement import Complete, DeadLetter
from aztask.testing import RunningEmulator

pytestmark = pytest.mark.services
_numbers = itertools.count(1)
ALL = Selection(everything=True)


@pytest.fixture
def broker(bus: RunningEmulator) -> Iterator[ServiceBusBroker]:
    made = broker_at(bus)
    yield made
    made.close()


def leave_probe(
    broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch, queue: str, lives: float
) -> None:
    """A probe that is due in a second, and whose cancellation is not answered."""

    def unanswered(self: senders.Senders, number: int) -> bool:
        raise BrokerUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(senders.Senders, "cancelled", unanswered)
        patch.setattr(senders, "DUE_SECONDS", (1.0, 1.0))
        patch.setattr(senders, "MARGIN", 0.01)
        patch.setattr(senders, "TIME_TO_LIVE", lives)
        with pytest.raises(BrokerUnavailable):
            broker._probe(queue, in_session=False)


def made_queue(bus: RunningEmulator, **settings: object) -> str:
    name = f"probed-{next(_numbers)}"
    bus.create_queue(name, **settings)
    return name


def test_a_probe_is_due_soon_and_lives_shortly() -> None:
    assert senders.DUE_SECONDS[0] + senders.TIME_TO_LIVE <= 120.0


def test_a_worker_drops_it_and_a_peek_skips_it(
    bus: RunningEmulator, broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = made_queue(bus)
    leave_probe(broker, monkeypatch, queue, 60.0)
    assert broker.peek(queue, limit=10) == []
    assert broker._peeking.counted(queue).scheduled == 0
    assert broker.stats(queue).scheduled == 0  # the service itself counts it
    wait_until(lambda: broker.stats(queue).active == 1, 30, "it is due")
    broker.send(queue, [Envelope(b"x", message_id="task")])
    assert [each.envelope.message_id for each in broker.peek(queue, limit=1)] == ["task"]
    receiver = broker.receiver(queue, lease=60.0)
    (delivery,) = receiver.receive(10, 20.0)
    assert delivery.envelope.message_id == "task"
    receiver.settle([(delivery, Complete())])
    receiver.close()
    wait_until(lambda: broker.stats(queue).active == 0, 30, "nothing is left")


def raw_dead(broker: ServiceBusBroker, queue: str) -> int:
    """The service's own count, with the probes."""
    return broker._admin.stats(queue).dead or 0


def test_one_that_became_a_dead_letter_is_neither_counted_shown_nor_replayed(
    bus: RunningEmulator, broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of the broker, with and without the permission to manage, and of dlq agree."""
    queue = made_queue(bus, dead_letter_expired=True)
    leave_probe(broker, monkeypatch, queue, 0.5)
    wait_until(lambda: raw_dead(broker, queue) == 1, 30, "it has expired")
    assert broker.stats(queue).dead == 0
    assert broker._peeking.counted(queue).dead == 0
    app = App("probed", broker=bus.connection_string)
    letters = DeadLetters(app, queue)
    assert list(letters.list()) == []
    assert letters.groups() == []
    assert letters.count(ALL) == 0
    assert letters.replay(ALL).done == 0
    assert letters.purge(ALL).done == 0
    wait_until(lambda: raw_dead(broker, queue) == 0, 30, "the purge deleted it")
    app.close()


def test_beside_a_dead_letter_each_counts_one_and_a_replay_drops_the_probe(
    bus: RunningEmulator, broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = made_queue(bus, dead_letter_expired=True)
    leave_probe(broker, monkeypatch, queue, 0.5)
    wait_until(lambda: raw_dead(broker, queue) == 1, 30, "it has expired")
    assert broker.stats(queue).dead == 0
    broker.send(queue, [Envelope(b"x", message_id="task")])
    receiver = broker.receiver(queue, lease=60.0)
    (delivery,) = receiver.receive(1, 20.0)
    receiver.settle([(delivery, DeadLetter("rejected"))])
    receiver.close()
    wait_until(lambda: raw_dead(broker, queue) == 2, 30, "both are dead")
    assert broker.stats(queue).dead == 1
    app = App("probed", broker=bus.connection_string)
    letters = DeadLetters(app, queue)
    assert letters.count(ALL) == len(letters.list()) == 1
    report = letters.replay(ALL)
    assert (report.done, report.lost) == (1, 0)
    wait_until(lambda: raw_dead(broker, queue) == 0, 30, "the sweep met the probe first")
    app.close()


def test_a_clock_that_is_an_hour_behind_finds_the_time_all_the_same(
    bus: RunningEmulator, broker: ServiceBusBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first probe is due at once, so it cannot be peeked at as a scheduled one."""
    queue = made_queue(bus)
    behind = replace(broker._clock, wall=lambda: time.time() - 3600.0)  # type: ignore[type-var]
    monkeypatch.setattr(broker, "_clock", behind)
    monkeypatch.setattr(broker._service_clock, "_clock", behind)
    broker._probe(queue, in_session=False)
    assert abs(broker._service_clock.offset - 3600.0) < 60.0


SHOP = """
from aztask import App
from aztask.queues.servicebus import senders

app = App("shop", default_queue={queue!r}, results="local:///{folder}/results.db")


@app.task
def ship(order: int) -> int:
    with open({ledger!r}, "a") as ledger:
        ledger.write(f"{{order}}\\n")
    return order


def send_late() -> None:
    # a sender with a delay asks the service for its time first
    {times}
    ship.with_options(delay=1).delay(0)
"""
LATER = "senders.DUE_SECONDS = (600.0, 600.0)"
"""So that the probe is not due by itself while a busy machine starts a sender and a worker."""

SHORTER = "senders.DUE_SECONDS, senders.MARGIN, senders.TIME_TO_LIVE = (1.0, 1.0), 0.01, 1.0"


class Shop:
    """An app on a queue, whose sender is killed between the probe and its cancellation."""

    def __init__(self, folder: Path, bus: RunningEmulator, queue: str, times: str) -> None:
        self.folder, self.ledger = folder, folder / "ledger"
        text = SHOP.format(queue=queue, folder=folder, ledger=str(self.ledger), times=times)
        (folder / "shop.py").write_text(text)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "AZTASK_APP": "shop:app",
            "AZTASK_BROKER": bus.connection_string,
            "AZTASK_SERVICEBUS_ADMIN": bus.admin_connection_string,
        }

    def run(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**self._environment, **extra},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    def aztask(self, *arguments: str) -> str:
        done = self.run("-m", "aztask", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def die_sending(self) -> None:
        died = self.run("-c", "import shop; shop.send_late()", AZTASK_FAILPOINT="probed:KILL")
        assert died.returncode == -signal.SIGKILL, died.stderr


def test_a_burst_ends_although_a_sender_died_with_its_probe(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    queue = made_queue(bus, lock_seconds=60)
    shop = Shop(tmp_path, bus, queue, LATER)
    shop.die_sending()
    with bus.administration_client() as admin:

        def scheduled() -> int:
            counts = admin.get_queue_runtime_properties(queue)
            return int(counts.scheduled_message_count)

        assert scheduled() == 1
        shop.aztask("send", "shop.ship", "--args", "[1]")
        log = shop.aztask("worker", "-c", "1", "--burst")
        assert scheduled() == 1  # it still waits, and the worker did not
    assert "1 succeeded" in log
    assert shop.ledger.read_text() == "1\n"


def test_a_probe_of_a_dead_sender_is_no_dead_letter_that_a_replay_sends(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    queue = made_queue(bus, lock_seconds=60, dead_letter_expired=True)
    shop = Shop(tmp_path, bus, queue, SHORTER)
    shop.die_sending()
    with bus.administration_client() as admin:

        def counts() -> tuple[int, int]:
            found = admin.get_queue_runtime_properties(queue)
            return int(found.total_message_count), int(found.dead_letter_message_count)

        wait_until(lambda: counts() == (1, 1), 30, "it has expired among the dead letters")
        assert "aztask-clock" not in shop.aztask("dlq", "list", "-Q", queue)
        shop.aztask("dlq", "replay", "-Q", queue, "--all", "--yes")
        log = shop.aztask("worker", "-c", "1", "--burst")
        assert "0 succeeded, 0 failed" in log
        assert not shop.ledger.exists()
        assert counts()[0] == counts()[1]  # nothing was sent
