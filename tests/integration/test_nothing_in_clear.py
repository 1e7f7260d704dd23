"""A secret is put into every place that encryption covers, and looked for in every byte.

Arguments, results, error texts, tracebacks, checkpoints, states of sessions, steps, signals, parts
of streams, keys of unique tasks and limits, stored steps of workflows, schedules, debounced calls
and payloads; on each broker; in its files, the results, payloads, events, logs and process titles.
Keys encrypt it, or a team's own codec. Without encryption the same search finds it, so it looks in
the right places.
"""

from __future__ import annotations

import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from azurite import account_of, storing
from azurite import running as azurite_running
from bus import bus_site
from harness import Site, site_in
from storage import storage_site
from vault_app import CODEC, SESSIONS
from waiting import wait_until

from aztask import App
from aztask.errors import TaskFailed
from aztask.limits.declaration import limit_of
from aztask.message.codec import Codec
from aztask.message.encryption import CODED, MARKER
from aztask.operate.deadletters.view import DeadLetters
from aztask.operate.queues import arguments_of
from aztask.operate.workers import running
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Outcome, Provisioned
from aztask.testing import emulator
from aztask.uniqueness.rules import key_of

SECRET: Final = "4111-1111-1111-1111"
KEYS: Final = {
    "AZTASK_SIGNING_KEYS": "a-key-that-no-attacker-knows-0123456789",
    "AZTASK_ID_KEY": "an-id-key-that-no-attacker-knows-0123456789",
    "AZTASK_ENCRYPTION_KEYS": "a-key-that-encrypts-and-is-long-enough-0123",
}
BROKERS: Final = ("local", "storagequeue", "servicebus")
CODE: Final = Path(__file__).with_name("vault_app.py")
DEAD: Final = {f"vault.{name}" for name in ("fails", "rejects", "not_plain")}


def spellings(text: str) -> list[bytes]:
    """The text as it may be written: plain, in two bytes a character, in hexadecimal, in base64."""
    data = text.encode()
    found = [data, text.encode("utf-16-le"), data.hex().encode()]
    for shift in range(3):  # base64 has three bytes in four characters, so it depends on the place
        coded = b64encode(b"\0" * shift + data).rstrip(b"=")
        found.append(coded[(0, 2, 3)[shift] : len(coded) - 1])
    return found


@dataclass
class World:
    """folder: everything that is written. titles: of the processes. letters: descriptions."""

    folder: Path
    site: Site
    titles: bytes = b""
    letters: dict[str, str] = field(default_factory=dict)

    def places(self, text: str) -> set[str]:
        """The files that have the text in some spelling, by the first part of their names."""
        found, spelled = set(), spellings(text)
        for path in self.folder.rglob("*"):
            if path.is_file() and any(each in path.read_bytes() for each in spelled):
                found.add(str(path.relative_to(self.folder)))
        if any(each in self.titles for each in spelled):
            found.add("titles")
        if any(text in each for each in self.letters.values()):
            found.add("letters")
        return found


@contextmanager
def _site(broker: str, folder: Path) -> Iterator[Site]:
    options = {"module": "vault_app"}
    with ExitStack() as stack:
        if broker == "local":
            site = stack.enter_context(site_in(folder / "site", joint=False, **options))
            site.app().broker.declare("default")
        elif broker == "storagequeue":
            server = stack.enter_context(azurite_running(folder / "azurite-queue"))
            stores = stack.enter_context(storing(folder / "azurite"))
            site = stack.enter_context(storage_site(folder / "site", server))
            site.module, site.results = "vault_app", account_of(*stores)
            site._app = None
        else:
            bus = stack.enter_context(emulator(data=str(folder / "bus.db")))
            site = stack.enter_context(
                bus_site(folder / "site", bus, QueueOptions(lease=60.0), **options)
            )
        site.extra |= {"VAULT_PAYLOADS": str(site.folder / "payloads"), "AZTASK_OWNER": "vault"}
        yield site


def _reader(site: Site) -> App:
    return App(
        "vault",
        broker=site.broker,
        results=site.results,
        payloads=site.extra["VAULT_PAYLOADS"],
        owner="vault",
        **CODEC if "VAULT_CODEC" in site.extra else {},
    )


def _titles() -> bytes:
    lines = [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    found = []
    for path in lines:
        try:
            found.append(path.read_bytes() + path.with_name("comm").read_bytes())
        except OSError:  # it has ended
            continue
    return b"\n".join(found)


def _meet_everything(world: World) -> None:
    site = world.site
    with closing(_reader(site)) as app:
        if isinstance(app.results, Provisioned):
            app.results.create()
        if app.broker.capabilities.sessions:
            app.broker.declare(SESSIONS, QueueOptions(sessions=True, lease=60.0))
            site.extra["VAULT_SESSIONS"] = "1"
    subprocess.run([sys.executable, str(CODE)], env=site.environment, check=True, timeout=120)
    queues = f"default,{SESSIONS}" if "VAULT_SESSIONS" in site.extra else "default"
    worker = site.worker("-Q", queues, "-c", "4", "--log-tasks", "all")
    with closing(_reader(site)) as app:

        def ended() -> bool:
            return {each.id for each in DeadLetters(app, "default").list()} >= DEAD

        def parked() -> bool:
            return (found := _outcome(app, "vault.flow")) is not None and found.parked

        def retried() -> bool:
            found = _outcome(app, "vault.flow")
            return found is not None and found.error_type == "StepRetry"

        wait_until(ended, 60, "three tasks are dead-lettered")
        wait_until(parked, 60, "the flow waits for its signal")
        wait_until((site.folder / "mark-runs").exists, 60, "a task runs on")
        app.result("vault.flow").signal("approved", SECRET)
        wait_until(retried, 60, "its step is to be retried")
        wait_until(lambda: SECRET in _progress(app), 60, "its progress is told")
        world.titles = _titles()
        for letter in DeadLetters(app, "default").list():
            world.letters[letter.id] = f"{letter.reason} {letter.description}"
            assert SECRET in repr(arguments_of(app, letter.message, letter.problem).args)
        assert app.result("vault.returns").get(timeout=10) == SECRET
        assert app.result("vault.large").get(timeout=10) == SECRET * 2000
        if "VAULT_SESSIONS" in site.extra:
            app.result("vault.remembers").get(timeout=30)  # its session has the secret as its state
        with pytest.raises(TaskFailed, match=SECRET) as raised:
            app.result("vault.fails").get(timeout=10)
        assert "vault_app.py" in raised.value.traceback
        waits = _outcome(app, "vault.saves")
        assert waits is not None
        assert SECRET in waits.error
    (site.folder / "mark-end").touch()
    assert worker.stop() == 0, worker.log
    assert "vault.fails" in worker.log


def _progress(app: App) -> list[object]:
    return [each.progress for each in running(app).rows]


def _outcome(app: App, name: str) -> Outcome | None:
    record = app.results.get(name) if app.results is not None else None
    return None if record is None else record.outcome


@pytest.fixture(
    scope="module",
    params=[(broker, how) for broker in BROKERS for how in ("encrypted", "codec", "clear")],
    ids="-".join,
)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, bool]]:
    broker, how = request.param
    encrypt = how != "clear"
    folder = tmp_path_factory.mktemp("vault")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        patch.setenv("AZTASK_ENCRYPT", "1" if encrypt else "0")
        with _site(broker, folder) as site:
            site.extra |= {"VAULT_CODEC": "1"} if how == "codec" else {}
            made = World(folder, site)
            _meet_everything(made)
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    written = {start for start in (MARKER, CODED) if any(start in data for data in files)}
    assert written == {"encrypted": {MARKER}, "codec": {CODED}, "clear": set()}[how]
    yield made, encrypt  # the services have ended, and have written what they had


def _unkeyed() -> dict[str, str]:
    """What anyone could try out: digests of the secret that need no key."""
    app = App("vault", broker="local://:memory:", results="local://:memory:")
    task = app.task(name="vault.once", unique=lambda card: card)(lambda card: None)
    assert task.unique is not None
    limit = limit_of("customer", rate="1/m", key=lambda card, **_: card)
    return {
        "the key of a unique task": key_of(Codec(), task, task.unique, (SECRET,), {}).split(":")[1],
        "the entry of a limit": limit.entry(SECRET).removeprefix("limit-rate-"),
    }


def test_the_secret_is_nowhere(world: tuple[World, bool]) -> None:
    made, encrypt = world
    found = made.places(SECRET)
    if encrypt:
        assert found == set()
        return
    kinds = ("events", "payloads", "worker", "letters")
    missing = [each for each in kinds if not any(each in name for name in found)]
    assert missing == [], "the search looks in the wrong places"
    assert any("azurite" in name or "bus.db" in name or "queues" in name for name in found)
    assert any("azurite/table" in name or "results" in name for name in found)


def test_no_key_of_a_unique_task_or_a_limit_can_be_tried_out(world: tuple[World, bool]) -> None:
    made, encrypt = world
    for what, digest in _unkeyed().items():
        assert bool(made.places(digest)) is not encrypt, what
