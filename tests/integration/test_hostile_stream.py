"""Streams of hostile messages with innocent ones among them, for real workers on every broker.

Every hostile message ends as a dead letter with a reason, or as a run that is recorded as expired;
no worker ends, no error is unexpected, and no innocent task waits for longer than one lease.

``AZTASK_FUZZ_SECONDS`` is the time of each test, see `fuzzing`. The failure of a test names the
seed and the round; ``AZTASK_FUZZ_SEED`` repeats them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fuzzing
import pytest
from azure.core.exceptions import HttpResponseError
from azure.storage.queue import QueueClient
from azurite import Azurite, running
from bus import bus_site
from harness import Site, Worker, site_in
from hostileamqp import payload_of
from hostilemessages import ACCEPTED, taken_as_it_is
from hostilestream import (
    Hostile,
    HostileStream,
    garbled,
    mark_of,
    packed_local,
    packed_storage,
    sent_mark,
)
from ledger_app import attacked, work
from rawclient import RawClient, transfer_frame
from storage import storage_site

from aztask import App
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.view import DeadLetters, DeadLetterView, Selection
from aztask.queues.base import QueueOptions
from aztask.queues.engine import NewMessage
from aztask.queues.local.broker import LocalBroker
from aztask.testing import RunningEmulator, emulator

LEASE = 30.0
ROUNDS = 2
HOSTILE = 60
FRAME = 60_000
"""Bytes of a message in one frame: the emulator accepts frames of 64 KiB."""
CHUNK = 12
"""Hostile messages between two innocent ones."""
LIMITS = ("delivery-limit", "MaxDeliveryCountExceeded", "unprocessable")
"""Reasons of messages that are given up on: none of these is to end like that."""
MEMORY_BYTES = 400 * 1024 * 1024
RETRY_SECONDS = 2.5
"""Longer than the grace for unknown tasks, in whole seconds as Storage counts them."""
NO_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd]")
"""Characters that XML 1.0 cannot hold (section 2.2). The service refuses them. Azurite does not,
and cannot hand out the batch that such a message is in."""
EXPIRED = "did not run: it expired before it could start"
KEY = "a-key-that-no-attacker-knows-0123456789"


class Attacker:
    """Writes to the queue as its service lets a stranger write."""

    def __init__(self, site: Site) -> None:
        self.app = site.app()

    def send(self, batch: Sequence[Hostile], dice: random.Random) -> list[Hostile]:
        """Send these; returns those that the service accepted."""
        raise NotImplementedError


class LocalAttacker(Attacker):
    """Writes into the file of the queue.

    `forged`: the ids of the messages that it wrote and that their signature does not fit, as the
    ledger writes ids.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.forged: set[str] = set()

    def send(self, batch: Sequence[Hostile], dice: random.Random) -> list[Hostile]:
        assert isinstance(self.app.broker, LocalBroker)
        messages = []
        for made in batch:
            payload = packed_local(made.fields)
            payload = garbled(dice, payload) if dice.random() < 0.1 else payload
            if made.forged_in(payload):
                self.forged.add(ascii(made.id).replace(" ", "_"))
            messages.append(NewMessage(payload, f"m{dice.getrandbits(60):x}", None, None))
        self.app.broker.engine.send("default", messages)
        return list(batch)


@dataclass
class StorageAttacker(Attacker):
    """Puts texts with the SDK."""

    app: App
    queue: QueueClient

    def send(self, batch: Sequence[Hostile], dice: random.Random) -> list[Hostile]:
        accepted = []
        for made in batch:
            text = packed_storage(made.fields)
            if dice.random() < 0.1:
                text = NO_XML.sub("", garbled(dice, text.encode()).decode("latin-1"))
            try:
                self.queue.send_message(text, time_to_live=-1)
            except (HttpResponseError, ValueError):
                continue  # too long
            accepted.append(made)
        return accepted


@dataclass
class BusAttacker(Attacker):
    """Speaks AMQP on a plain socket."""

    app: App
    port: int

    def send(self, batch: Sequence[Hostile], dice: random.Random) -> list[Hostile]:
        with RawClient(self.port) as client:
            client.attach("default")
            for number, made in enumerate(batch):
                payload = payload_of(made, dice)
                parts = [payload[at : at + FRAME] for at in range(0, len(payload), FRAME)] or [b""]
                for part in parts:
                    client.write(transfer_frame(number, part, more=part is not parts[-1]))
            states = [client.until("Disposition").state.descriptor for _ in batch]
        return [made for made, state in zip(batch, states, strict=True) if state == ACCEPTED]


@contextmanager
def attack_on(broker: str, folder: Path) -> Iterator[tuple[Site, Attacker, int]]:
    """A site, its attacker, and the most bytes of a body."""
    with ExitStack() as stack:
        if broker == "storage":
            server: Azurite = stack.enter_context(running(folder / "azurite"))
            site = stack.enter_context(storage_site(folder / "site", server))
            queue = QueueClient.from_connection_string(
                server.connection_string, "default", retry_total=0
            )
            stack.enter_context(queue)
            yield site, StorageAttacker(site.app(), queue), 40_000
        elif broker == "servicebus":
            bus: RunningEmulator = stack.enter_context(emulator())
            stack.enter_context(taken_as_it_is())
            options = QueueOptions(lease=LEASE)
            site = stack.enter_context(bus_site(folder / "site", bus, options))
            yield site, BusAttacker(site.app(), bus.port), 200_000
        else:
            joint = broker == "one file"
            site = stack.enter_context(site_in(folder / "site", joint=joint))
            site.app().broker.declare("default")
            yield site, LocalAttacker(site), 2_000_000


@dataclass
class Round:
    """One batch of hostile messages, with innocent ones among them."""

    site: Site
    app: App
    worker: Worker
    name: str
    accepted: list[Hostile] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    before: frozenset[str] = frozenset()
    """Marks of earlier rounds, of which some may have waited until now."""
    old: int = 0
    """What waits since an earlier round: a purge does not reach scheduled messages everywhere."""
    expired_before: int = 0

    def send(self, attacker: Attacker, stream: HostileStream) -> None:
        self.old, self.expired_before = self.waiting(), self._expired_lines()
        batch = [stream.next() for _ in range(HOSTILE)]
        for start in range(0, HOSTILE, CHUNK):
            self.accepted += attacker.send(batch[start : start + CHUNK], stream.dice)
            innocent = f"{self.name}-{start}"
            self.sent[innocent] = time.time()
            self.app.send(work.name, [innocent], task_id=innocent)

    def wait(self) -> None:
        """Wait until every message has ended or waits for its eta."""
        worker = self.worker
        until = time.monotonic() + 4 * LEASE
        while problem := self.missing() or self.unexplained():
            assert worker.process.poll() is None, f"{self.name}: the worker ended\n{worker.log}"
            assert time.monotonic() < until, f"{self.name}: {problem}\n{worker.log[-5000:]}"
            time.sleep(0.1)

    def missing(self) -> str:
        """What has not ended; "" if all has."""
        problem = self._missing()
        if not problem and self.waiting() > self.old:
            time.sleep(RETRY_SECONDS)  # what waits for a short retry only is running by then
            problem = self._missing()
        return problem

    def letters(self) -> list[DeadLetterView]:
        """All of them: a page of Service Bus ends where its answer is full."""
        return list(DeadLetters(self.app, "default").find(Selection(everything=True)))

    def waiting(self) -> int:
        """How many messages wait for a time; on Storage, how many there are."""
        stats = self.app.broker.stats("default")
        return (stats.scheduled if stats.scheduled is not None else stats.total) or 0

    def _missing(self) -> str:
        late = [each for each in self.sent if not self.app.result(each).ready()]
        waiting, stats = self.waiting() - self.old, self.app.broker.stats("default")
        ended = (stats.dead or 0) + self.expired()
        open_ = len(self.accepted) - ended - waiting
        if open_ < 0:
            open_ = min(open_ + self.twice(), 0)
        may_wait = sum(made.waits for made in self.accepted)
        busy = (stats.active or 0) + (stats.leased or 0)
        if late or open_ or busy or waiting > may_wait:
            peeked = self.app.broker.peek("default", limit=5)
            left = [(each.state, each.envelope) for each in peeked]
            known = f"{len(self.accepted)} accepted, {self.expired()} expired, {may_wait} may wait"
            return f"{known}; {late=} {open_=} {stats} {left}"[:3000]
        return ""

    def twice(self) -> int:
        """How many dead letters and waiting messages are there once more than they should be.

        That is no loss: on a slow machine an answer comes too late, and without duplicate
        detection a clone or a dead letter is sent again.
        """
        app = self.app
        found = [(each.message and each.message.id, each.envelope) for each in self.letters()]
        peeked = [each.envelope for each in app.broker.peek("default", limit=1000)]
        found += [(envelope.headers.get("id"), envelope) for envelope in peeked]
        keys = [
            repr(name) if name else (envelope.message_id, envelope.body) for name, envelope in found
        ]
        return len(keys) - len(set(keys))

    def expired(self) -> int:
        """How many ended because they were too old.

        The worker's log says so. The records do not: in a message that names its id twice, a task
        runs under the later one; and what Service Bus itself dead-letters is recorded as expired.
        """
        return self._expired_lines() - self.expired_before

    def _expired_lines(self) -> int:
        return self.worker.log.count(EXPIRED)

    def check(self) -> None:
        for letter in self.letters():
            shown = f"{self.name}: {letter.id} {letter.reason}: {letter.description}"
            assert letter.reason, shown
            assert letter.reason == "it ran" or letter.description, shown
            assert letter.reason not in LIMITS, shown
        starts = {line.key: line for line in self.site.lines("start")}
        counts = self.site.counts("start")
        for innocent, sent in self.sent.items():
            assert counts[innocent] == 1, f"{self.name}: {innocent} ran {counts[innocent]} times"
            delay = starts[innocent].at - sent
            assert delay < LEASE, f"{self.name}: {innocent} started {delay:.1f} s after its send"

    def unexplained(self) -> str:
        """What marks do not explain; "" if each dead letter is a message that was sent, and each of
        these ended or waits.

        What has no mark left has to be one of those that no mark explains: as many as there are.
        """
        sent = {made.mark for made in self.accepted}
        lines = [line for line in self.worker.log.splitlines() if EXPIRED in line]
        expired = [sent_mark(mark_of(line), sent) for line in lines[self.expired_before :]]
        letters = [each.envelope for each in self.letters()]
        peeked = [each.envelope for each in self.app.broker.peek("default", limit=10_000)]
        ends = [(sent_mark(mark_of(*_shown(each)), sent), each) for each in (*letters, *peeked)]
        named = {mark for mark, _ in ends} | set(expired)
        strangers = named - sent - self.before - {""}
        bare = [(each.message_id, repr(each.headers), each.body) for mark, each in ends if not mark]
        lost = [each for each in self.accepted if each.mark not in named]
        # A Storage queue shows none that wait, and its index has equal dead letters once.
        unseen = max(0, self.waiting() - self.old - len(peeked))
        equal = max(0, (self.app.broker.stats("default").dead or 0) - len(letters))
        waiting = [each for each in lost if each.waits][:unseen]
        lost = [each for each in lost if each not in waiting]
        few, many = len(bare) + equal, len(set(bare))  # twice on a slow machine, see `twice`
        few, many = few + expired.count(""), many + expired.count("")
        if strangers or len(lost) > few or many > len(lost) + self.old:
            names = sorted(each.name for each in lost)
            return f"no message for the marks {strangers} and {bare}; no end for {names}"
        return ""

    def clear(self) -> None:
        DeadLetters(self.app, "default").purge(Selection(everything=True))
        self.app.broker.purge("default")


def _shown(envelope: Envelope) -> tuple[object, ...]:
    """Where marks may be."""
    return (envelope.headers, envelope.message_id, envelope.correlation_id, envelope.body)


def memory_of(worker: Worker) -> int:
    """The most bytes that the supervisor ever needed."""
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def rounds() -> Iterator[int]:
    seconds, began = fuzzing.seconds(), time.monotonic()
    number = 0
    while number < ROUNDS if seconds is None else time.monotonic() - began < seconds:
        yield number
        number += 1


def run(site: Site, attacker: Attacker, room: int, **environment: str) -> Iterator[Round]:
    """Attack the worker, round after round; yields each after its checks."""
    app, seed = attacker.app, fuzzing.seed()
    worker = site.worker(
        *("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--log-tasks", "all"),
        LEDGER_GRACE="0.3",
        **environment,
    )
    before: frozenset[str] = frozenset()
    for number in rounds():
        this = Round(site, app, worker, f"seed-{seed}-round-{number}", before=before)
        stream = HostileStream(app.codec, attacked.name, f"{seed} {number}", room=room)
        this.send(attacker, stream)
        this.wait()
        this.check()
        yield this
        this.clear()
        before |= {made.mark for made in this.accepted if made.waits}
    assert memory_of(worker) < MEMORY_BYTES
    assert worker.stop() == 0, worker.log
    for word in ("Traceback", "failed unexpectedly", "pool process"):
        assert word not in worker.log, f"seed {seed}: {worker.log}"


@pytest.mark.parametrize("broker", ["two files", "storage", "servicebus"])
def test_hostile_messages_harm_no_other_one(broker: str, tmp_path: Path) -> None:
    with attack_on(broker, tmp_path) as (site, attacker, room):
        for each in run(site, attacker, room):
            assert len(each.accepted) > HOSTILE / 2


def test_no_changed_message_runs_where_keys_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker has seen signed messages, and changes them."""
    monkeypatch.setenv("AZTASK_SIGNING_KEYS", KEY)
    monkeypatch.setenv("AZTASK_ID_KEY", KEY)
    with attack_on("one file", tmp_path) as (site, attacker, room):
        assert isinstance(attacker, LocalAttacker)
        assert attacker.app.codec.signs
        for each in run(site, attacker, room):
            changed_and_ran = attacker.forged & site.counts("attacked").keys()
            assert changed_and_ran == set(), each.name
    assert len(attacker.forged) > 50
