"""No thread of a worker ends or stands still in silence: each one is made to raise, and to block.

The threads are found by `threading.enumerate` and in the kernel's lists, of the supervisor and its
children. A thread that no part of aztask claims and that is not in `LIBRARIES` fails the test.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from azurite import Azurite, account_of, storing
from bus import broker_at, bus_site
from harness import Site, Worker, pool_processes, site_in, wait_until
from storage import storage_site

from aztask.errors import ResultTimeout
from aztask.queues.base import QueueOptions
from aztask.stores.records.base import Provisioned
from aztask.testing import RunningEmulator
from aztask.worker.platform import is_portable

LIBRARIES: Final = {
    "MainThread": "the loop of the supervisor or of a pool process: the process ends with it",
    "test-injector": "the thread of this test",
    r"asyncio_\d+": "asyncio.to_thread of a pool process: the coroutine gets its errors",
    r"ThreadPoolExecutor-\d+_\d+": "opens connections or deletes rows in parallel: the part that "
    "waits for them gets their errors",
}
"""Threads that no part claims, with the reason. Everything else is ours."""

KERNEL: Final = {
    r"notify-rs.*": "watchfiles watches the files for --reload",
    r"tokio-.*": "watchfiles",
}
"""Threads that only the kernel knows, by their names there."""

POOLS: Final = ("processes", "threads", "asyncio")


class Injector:
    """The test's end of one process, see `parts_app`."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.pid = pid
        self._path = folder / str(pid)

    def ask(self, do: str, threads: list[str] | None = None) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self._path))
            with connection.makefile("rw") as file:
                file.write(json.dumps({"do": do, "threads": threads or []}) + "\n")
                file.flush()
                return json.loads(file.readline())

    def threads(self) -> list[tuple[str, int, str]]:
        return [tuple(each) for each in self.ask("list")]

    def failing(self) -> dict[str, str]:
        return dict(self.ask("failures"))

    def left(self) -> set[str]:
        return {name for name, _ in self.ask("hits")[0]}

    def hits(self) -> dict[str, str]:
        return dict(self.ask("hits")[1])


class Round:
    """A worker with everything on, and work for it."""

    def __init__(self, site: Site, pool: str, *options: str) -> None:
        self.site, self.pool = site, pool
        site.extra.setdefault("AZTASK_LEASE_ADVICE", "auto")
        site.extra["AZTASK_PAYLOAD_THRESHOLD"] = "50000"
        self.sessions = "PARTS_SESSIONS" in site.extra
        self.folder = site.folder / "sockets"
        self.folder.mkdir()
        if self.sessions:
            site.app().queue("ordered", sessions=True)
        site.module = "parts_app"
        shutil.copy(Path(__file__).with_name("parts_app.py"), site.folder)  # --reload watches it
        site.extra["PARTS_SOCKETS"] = str(self.folder)
        queues = "default,ordered" if self.sessions else "default"
        self.worker: Worker = site.worker(
            *("-Q", queues, "-c", "2", "--pool", pool, "--http", "127.0.0.1:0", "--reload"),
            *("--celery-metrics", *options),
        )
        self.count = 0

    def injectors(self) -> list[Injector]:
        pids = [self.worker.process.pid, *pool_processes(self.site.folder)]
        return [Injector(self.folder, pid) for pid in pids if (self.folder / str(pid)).exists()]

    def work(self) -> None:
        """Send one task of each kind, and wait until all have succeeded."""
        app = self.site.app()
        self.count += 1
        kinds = [("plain", {}), ("coroutine", {}), ("limited", {}), ("unique", {}), ("flow", {})]
        if self.sessions:
            kinds.append(("in_session", {"queue": "ordered", "session": f"s{self.count}"}))
        sent = []
        for name, options in kinds:
            key = f"{name}-{self.count}"
            app.send(f"parts.{name}", [self.count], task_id=key, **options)
            sent.append(key)
        for key in sent:
            try:
                value = app.result(key).get(timeout=90)
            except ResultTimeout as error:
                pytest.fail(f"{error}\n{self._standing()}\n{self.worker.log}")
            assert value == self.count, self.worker.log
        assert app.workflows.result(f"flow-{self.count}").get(timeout=90) == self.count

    def _standing(self) -> str:
        """What is in the queues, where each part was hit, and which of them fail, in each process.

        The stack of every thread is in the worker's log afterwards.
        """
        broker = self.site.app().broker
        lines = [f"{queue}: {broker.stats(queue)}" for queue in broker.queues()]
        for each in self.injectors():
            lines.append(f"{each.pid}: fails {each.failing()}, was hit {each.hits()}")
            each.ask("stacks")
        return "\n".join(lines)


def fork_servers(turn: Round) -> list[int]:
    """The process ids of the pool's fork server: a child without the app, and so no injector."""
    parent = f"PPid:\t{turn.worker.process.pid}\n"
    named = pool_processes(turn.site.folder, "aztask-fork")
    return [pid for pid in named if parent in Path(f"/proc/{pid}/status").read_text()]


def threads_beside_the_main_one(pid: int) -> list[str]:
    """What the kernel lists: a fork server must have no other thread, whose locks a fork copies."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(each / "comm").read_text().strip() for each in tasks if int(each.name) != pid]


def unclaimed(injector: Injector) -> list[str]:
    """The threads of a process that neither a part nor `LIBRARIES` claims."""
    known = injector.threads()
    found = [name for name, _, part in known if not part and not _listed(name, LIBRARIES)]
    natives = {injector.pid} | {
        native for _, native, _ in known
    }  # Python keeps an old one at a fork
    for task in Path(f"/proc/{injector.pid}/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has ended
        if int(task.name) not in natives and not _listed(name, KERNEL):
            found.append(f"{name} (of the kernel's list)")
    return found


def _listed(name: str, reasons: dict[str, str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in reasons)


def injectable(injector: Injector) -> dict[str, str]:
    """{thread: part} of the threads that belong to a part."""
    threads = injector.threads()
    return {name: part for name, _, part in threads if part and name != "MainThread"}


def check(turn: Round) -> None:
    turn.work()
    for injector in turn.injectors():
        _check_claims(injector)
    servers = fork_servers(turn)
    assert servers or turn.pool != "processes" or is_portable()
    for pid in servers:
        assert threads_beside_the_main_one(pid) == []
    for kind in ("block", "raise"):
        _inject(turn, kind)
    assert turn.worker.stop(60) == 0, turn.worker.log


def _inject(turn: Round, kind: str) -> None:
    """Let every thread raise or block at once, while tasks run; then all must work again."""
    go = turn.folder / "go"
    go.unlink(missing_ok=True)
    injectors = turn.injectors()
    ours = {injector.pid: injectable(injector) for injector in injectors}
    assert len(ours[turn.worker.process.pid]) >= 4
    seen: set[str] = set()
    for injector in injectors:
        injector.ask(kind, _hit(kind, ours[injector.pid]))
    if kind == "block":
        supervisor = injectors[0]

        def reported() -> bool:
            seen.update(supervisor.failing())
            hit = {ours[supervisor.pid][name] for name in supervisor.hits()}
            return bool(hit) and hit <= seen

        wait_until(reported, 25, "each part that stands still is reported")
        go.touch()
    for _ in range(3):
        turn.work()
    if kind == "raise":
        assert "failed unexpectedly" in turn.worker.log
    for injector in turn.injectors():
        _check_works(injector)
        alive = {name for name, _, part in injector.threads() if part}
        lost = {
            name
            for name in ours.get(injector.pid, {})
            if name not in alive and not _short_lived(name)
        }
        assert not lost, (lost, turn.worker.log)


def _hit(kind: str, names: Iterable[str]) -> list[str]:
    """The threads to inject into: of a pool of threads at most two raise.

    A delivery that meets three unexpected errors in a row is dead-lettered, as it should be.
    """
    pools: dict[str, list[str]] = {}
    for name in names:
        pools.setdefault(name.rstrip("0123456789"), []).append(name)
    return [each for pool in pools.values() for each in (pool if kind == "block" else pool[:2])]


def _check_claims(injector: Injector) -> None:
    """One that started or ended between the two lists is looked at again."""
    last: list[str] = []  # judged itself: another look could meet another thread that just starts

    def claimed() -> bool:
        last[:] = unclaimed(injector)
        return not last

    with suppress(AssertionError):
        wait_until(claimed, 5, "all are claimed")
    assert last == []


def _check_works(injector: Injector) -> None:
    last: dict[str, str] = {}

    def working() -> bool:
        last.clear()
        last.update(injector.failing())
        return not last

    with suppress(AssertionError):
        wait_until(working, 60, "all parts work again")
    assert last == {}


def _short_lived(name: str) -> bool:
    """Threads that end by themselves: when they have done what they were made for."""
    return name.startswith(
        (
            "aztask-keep-alive",
            "aztask-http-request",
            "aztask-alarm",
            "aztask-lease-advice",
            "aztask-lock",
            "aztask-closing",
        )
    )


@pytest.mark.parametrize("pool", POOLS)
def test_every_thread_on_local_files(tmp_path: Path, pool: str) -> None:
    with site_in(tmp_path / "site", extra={"PARTS_SESSIONS": "1"}) as site:
        check(Round(site, pool))


@pytest.mark.parametrize("pool", POOLS)
def test_every_thread_on_storage(azurite: Azurite, tmp_path: Path, pool: str) -> None:
    """Storage queues, Tables, event upload, payloads and lease advice, all across a network."""
    with (
        storing(tmp_path / "stores") as stores,
        storage_site(tmp_path / "site", azurite) as site,
    ):
        _across_a_network(site, *stores)
        check(Round(site, pool))


@pytest.mark.parametrize("pool", POOLS)
def test_every_thread_on_service_bus(bus: RunningEmulator, tmp_path: Path, pool: str) -> None:
    """Service Bus with sessions, and the rest as on Storage queues."""
    with (
        storing(tmp_path / "stores") as stores,
        bus_site(tmp_path / "site", bus, QueueOptions(lease=20)) as site,
    ):
        manager = broker_at(bus)
        manager.declare("ordered", QueueOptions(lease=20, sessions=True))
        manager.close()
        site.extra["PARTS_SESSIONS"] = "1"
        _across_a_network(site, *stores)
        check(Round(site, pool))


def _across_a_network(site: Site, *stores: Azurite) -> None:
    site.app().close()
    site._app, site.results = None, account_of(*stores)
    assert isinstance(site.app().results, Provisioned)
    site.app().results.create()
    site.extra["AZTASK_EVENTS_CONTAINER"] = "parts-events"
    site.extra["AZTASK_EVENTS_ACCOUNT"] = site.results
    site.extra["AZTASK_PAYLOADS"] = "parts-payloads"
    site.extra["AZTASK_PAYLOADS_ACCOUNT"] = site.results
    site.extra["AZTASK_LEASE_ADVICE"] = "parts-advice"
    site.extra["AZTASK_LEASE_ADVICE_ACCOUNT"] = site.results
