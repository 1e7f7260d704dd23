"""Values that are hard to write, and processes that are not the task's own: each harms its own task
alone. Real workers, on each broker.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from azurite import running
from bus import bus_site
from harness import Site, site_in, wait_until
from ledger_app import hostile, saves, work
from storage import storage_site

from aztask import App
from aztask.errors import TaskFailed
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.operate.deadletters.view import DeadLetters
from aztask.queues.base import QueueOptions
from aztask.queues.engine import NewMessage
from aztask.queues.local.broker import LocalBroker
from aztask.queues.local.payload import payload_of
from aztask.stores.records.base import State
from aztask.testing import emulator

LEASE = 5.0
HEALTHY = 20
FAILURES = {
    "surrogate": ("ValueError", "a\\udc80b"),
    "nul": ("ValueError", "a\\x00b"),
    "reject": ("Reject", "reason \\udc80"),
    "text": ("Unprintable", "(its text cannot be read: RuntimeError)"),
    "huge": ("ValueError", "\\udc80" * 600),
    "exits": ("Exiting", "(its text cannot be read: SystemExit)"),
    "giant": ("ValueError", "x" * 4_000),
    "key": ("EncodeError", "the value cannot be written as msgpack: a dict has a tuple as a key"),
}
ONCE = {"reject", "key"}
"""These are not retried."""

FORKS = {"fork-return": "0", "fork-raise": "1", "fork-exit": "7"}

Sites = Callable[[str], AbstractContextManager[Site]]


@pytest.fixture(params=["one file", "two files", "storage", "servicebus"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A broker and a result store; workers are killed at the end."""
    folder = tmp_path / "site"
    if request.param == "storage":
        with running(tmp_path / "azurite") as server, storage_site(folder, server) as made:
            yield made
    elif request.param == "servicebus":
        with emulator() as bus, bus_site(folder, bus, QueueOptions(lease=LEASE)) as made:
            yield made
    else:
        with site_in(folder, joint=request.param == "one file") as made:
            yield made


def start(site: Site, pool: str = "processes"):
    return site.worker("-Q", "default", "--pool", pool, "-c", "2", "--lease", f"{LEASE}s")


def test_a_value_that_cannot_be_written_fails_that_task_alone(site: Site) -> None:
    app = site.app()
    for how in FAILURES:
        app.send(hostile.name, [how, how], task_id=how)
    for n in range(HEALTHY):
        app.send(work.name, [f"t{n}"], task_id=f"t{n}")
    worker = start(site)
    for n in range(HEALTHY):
        assert app.result(f"t{n}").get(timeout=30) == f"t{n}"
    for how, (kind, text) in FAILURES.items():
        with pytest.raises(TaskFailed) as failure:
            app.result(how).get(timeout=30)
        assert failure.value.error_type == kind
        assert failure.value.error.startswith(text)
        assert site.counts("start")[how] == (1 if how in ONCE else 2), "its retry ran too"
    assert worker.stop() == 0, worker.log
    assert app.broker.stats("default").dead == len(FAILURES)
    assert len(worker.log) < 300_000, "the text of 50 MB is not in it"
    assert "pool process" not in worker.log, "none ended"
    assert site.counts("start") == {
        **{f"t{n}": 1 for n in range(HEALTHY)},
        **{how: 1 if how in ONCE else 2 for how in FAILURES},
    }


@pytest.mark.parametrize("pool", ["processes", "threads"])
@pytest.mark.parametrize("site", ["one file"], indirect=True)
def test_a_process_that_a_task_forks_cannot_answer_for_it(site: Site, pool: str) -> None:
    """It has the pool process's sockets: it would answer a second time, and take deliveries."""
    app = site.app()
    for how in FORKS:
        app.send(hostile.name, [how, how], task_id=how)
    for n in range(HEALTHY):
        app.send(work.name, [f"t{n}"], task_id=f"t{n}")
    worker = start(site, pool)
    for how, status in FORKS.items():
        assert app.result(how).get(timeout=20) == status, "how the forked process ended"
    for n in range(HEALTHY):
        assert app.result(f"t{n}").get(timeout=20) == f"t{n}"
    assert set(site.counts("start").values()) == {1}
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("site", ["storage", "servicebus"], indirect=True)
def test_a_checkpoint_that_no_retry_could_carry_is_refused_when_it_is_made(site: Site) -> None:
    """The limit is stated: what fits is kept, and nothing hangs beside what does not."""
    app = site.app()
    fits, too_large = LIMITS[app.broker.capabilities.name]
    app.send(saves.name, ["fits", fits], task_id="fits")
    for n in range(3):
        app.send(saves.name, [f"large{n}", too_large], task_id=f"large{n}")
    for n in range(HEALTHY):
        app.send(work.name, [f"t{n}"], task_id=f"t{n}")
    worker = start(site)
    assert app.result("fits").get(timeout=30) == fits
    for n in range(3):
        with pytest.raises(TaskFailed, match="the checkpoint does not fit") as failure:
            app.result(f"large{n}").get(timeout=30)
        assert failure.value.error_type == "MessageTooLarge"
    for n in range(HEALTHY):
        assert app.result(f"t{n}").get(timeout=30) == f"t{n}"
    wait_until(lambda: app.broker.stats("default").dead == 3, 10, "they are dead letters")
    assert [run.state for run in app.results.history("large0")] == [State.FAILED]
    assert worker.stop() == 0, worker.log


LIMITS = {
    "storagequeue": (46_000, 50_000),
    "servicebus": (150_000, 300_000),
}
"""Bytes of a checkpoint that fits beside the arguments, and of one that does not."""


def hostile_envelopes(app: App) -> dict[str, tuple[Envelope, str]]:
    """{task id: (a message that no client of aztask sends, the reason of its dead letter)}."""
    body, content_type, encoding = app.codec.encode_arguments(["x"], {})

    def message(task_id: str, body: bytes = body, **fields: Any) -> Envelope:
        values = {"content_type": content_type, "content_encoding": encoding, **fields}
        return app.codec.to_envelope(TaskMessage(task_id, work.name, "default", body, **values))

    compressed = message("junk", zlib.compress(body) + b"junk")
    compressed = replace(
        compressed, headers={**compressed.headers, "compression": "application/x-gzip"}
    )
    found = {
        "1e999": (
            message("1e999", b'[["x", 1e999], {}, {}]', content_type="application/json"),
            "undecodable",
        ),
        "junk": (compressed, "undecodable"),
        "stray": (message("stray", b"", pointer=999_999), "foreign-pointer"),
    }
    if app.broker.capabilities.name != "servicebus":  # AMQP has no such type
        plain = message("extension")
        headers = {**plain.headers, "x-odd": [msgpack.ExtType(5, b"x")]}
        found["extension"] = (replace(plain, headers=headers), "undecodable")
    return found


def test_a_hostile_message_is_a_dead_letter_and_harms_no_other_one(site: Site) -> None:
    app = site.app()
    envelopes = hostile_envelopes(app)
    app.broker.send("default", [envelope for envelope, _ in envelopes.values()])
    dead = [reason for _, reason in envelopes.values()]
    if isinstance(app.broker, LocalBroker):
        payload = msgpack.unpackb(payload_of(envelopes["junk"][0]))
        for number in range(1, len(payload)):
            damaged = msgpack.packb([*payload[:number], [number], *payload[number + 1 :]])
            app.broker.engine.send("default", [NewMessage(damaged, f"m{number}", None, None)])
            dead.append("undecodable")
    for n in range(HEALTHY):
        app.send(work.name, [f"t{n}"], task_id=f"t{n}")
    worker = start(site)
    for n in range(HEALTHY):
        assert app.result(f"t{n}").get(timeout=30) == f"t{n}"
    wait_until(lambda: app.broker.stats("default").dead == len(dead), 20, "they are dead letters")
    letters = DeadLetters(app, "default").list(limit=100)
    assert sorted(each.reason for each in letters) == sorted(dead)
    assert all(each.description for each in letters)
    assert worker.stop() == 0, worker.log
    assert site.counts("start") == {f"t{n}": 1 for n in range(HEALTHY)}
