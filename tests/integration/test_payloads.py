"""Large arguments, results and checkpoints through real workers, on every broker."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import azurite as services
import kombu
import pytest
from azurite import Azurite
from bus import address_at
from harness import Site, wait_until
from ledger_app import double, echo, saves, weigh, weigh_if, weigh_later
from payloadsite import LARGE, app_of, collect, payload_site, stored
from proxy import Proxy, proxied

from aztask.celery import transport
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.payloads.store import PayloadKind
from aztask.testing import RunningEmulator

REQUEST = re.compile(rb"\A(GET|PUT|POST|DELETE) (?!\S*comp=list)(\S+) HTTP/1\.1\r\n")
"""A worker also lists payloads, once an hour."""

ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", "30s")


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with services.running(tmp_path_factory.mktemp("blobs"), service="blob") as server:
        yield server


@pytest.fixture
def counted(blobs: Azurite) -> Iterator[Proxy]:
    """The blob service, with its requests counted: those within a batch are a part of it."""
    with proxied(blobs.port, requests=REQUEST) as made:
        yield made


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Site]:
    with payload_site(tmp_path / "site", joint=True, payload_threshold=10_000) as site:
        yield site


def test_twenty_megabytes_on_local_without_any_setting(tmp_path: Path) -> None:
    with payload_site(tmp_path / "site", joint=True) as site:
        data = LARGE * 4
        result = site.app().send(double.name, ["a", data])
        (payload,) = stored(site)
        assert payload.size > len(data)
        site.worker(*ARGUMENTS)
        assert result.get(timeout=30) == data + data
        wait_until(lambda: not stored(site), 10, "the arguments are removed")
        assert len(stored(site, "results")) == 1


def test_five_megabytes_on_a_storage_queue(
    azurite: Azurite, blobs: Azurite, counted: Proxy, tmp_path: Path
) -> None:
    check_requests(tmp_path, azurite.connection_string, blobs, counted, "storage")


def test_five_megabytes_on_service_bus(
    bus: RunningEmulator,
    blobs: Azurite,
    counted: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    check_requests(tmp_path, address_at(bus, None), blobs, counted, "service-bus")


def check_requests(
    folder: Path, broker: str, blobs: Azurite, counted: Proxy, container: str
) -> None:
    """One request writes each argument and one reads it; removals share requests."""
    account = services.account_of(blobs, blob=counted.port)
    given = {"payloads": container, "payloads_account": account}
    direct = {"payloads": container, "payloads_account": services.account_of(blobs)}
    count = 6
    with payload_site(folder / "site", broker=broker, direct=direct, **given) as site:
        app = site.app()
        app.broker.declare("default", QueueOptions(lease=30.0))
        app.put("this creates the container")
        sender = app_of(site, **given)
        results = [sender.send(weigh.name, [f"k{n}", LARGE]) for n in range(count)]
        assert counted.counts == {"PUT": count}
        worker = site.worker(*ARGUMENTS)
        assert [each.get(timeout=60) for each in results] == [len(LARGE)] * count
        wait_until(lambda: not stored(site), 20, "the arguments are removed")
        assert worker.stop() == 0, worker.log
        removals = counted.counts["DELETE"] + counted.counts["POST"]
        assert (counted.counts["PUT"], counted.counts["GET"]) == (count, count)
        assert 1 <= removals <= count
        large = sender.send(double.name, ["d", LARGE * 3])
        site.worker(*ARGUMENTS)
        assert large.get(timeout=60) == LARGE * 6
        assert len(stored(site, "results")) == 1
        sender.close()


@pytest.mark.parametrize("pool", ["processes", "threads", "asyncio"])
def test_every_pool_fetches(local: Site, pool: str) -> None:
    app = local.app()
    value = app.put(LARGE)
    results = [
        app.send(weigh.name, ["a", LARGE]),
        app.send(weigh_later.name, ["b", LARGE]),
        app.send(weigh.name, ["c", value]),
        app.send(weigh_later.name, ["d"], {"data": value}),
    ]
    local.worker(*ARGUMENTS, "--pool", pool)
    assert [each.get(timeout=30) for each in results] == [len(LARGE)] * 4
    wait_until(lambda: not stored(local), 10, "the arguments are removed")
    assert len(stored(local, "values")) == 1


def test_a_chain_passes_a_large_value_on(local: Site) -> None:
    app = local.app()
    first, second = (app.task(name=each.name)(each.function) for each in (double, echo))
    result = (first.s("a", b"x" * 50_000) | second.s()).delay()
    local.worker(*ARGUMENTS)
    assert result.get(timeout=30) == b"x" * 100_000


def test_a_large_checkpoint_is_stored_apart_and_removed_at_the_end(local: Site) -> None:
    result = local.app().send(saves.name, ["a", 50_000])
    local.worker(*ARGUMENTS)
    assert result.get(timeout=30) == 50_000
    wait_until(lambda: not stored(local, "saved"), 10, "the checkpoint is removed")


def test_a_dead_letter_keeps_its_arguments_and_a_replay_runs(local: Site, tmp_path: Path) -> None:
    app, ready = local.app(), tmp_path / "ready"
    result = app.send(weigh_if.name, ["a", str(ready), LARGE])
    local.worker(*ARGUMENTS)
    wait_until(lambda: app.broker.stats("default").dead == 1, 20, "it is a dead letter")
    assert "removed 0 payloads" in collect(local)
    assert len(stored(local)) == 1
    ready.touch()
    assert DeadLetters(app, "default").replay(Selection(everything=True)).done == 1
    assert result.get(timeout=20) == len(LARGE)
    wait_until(lambda: not stored(local), 10, "the arguments are removed")


def test_a_purged_message_leaves_its_payload_to_the_collector(local: Site) -> None:
    app = local.app()
    app.send(weigh.name, ["a", LARGE])
    app.send(weigh.name, ["b", LARGE], delay=3600)
    assert "removed 0 payloads" in collect(local)
    app.broker.purge("default")
    assert "removed 0 payloads" in collect(local, after=60.0)  # too young
    assert "removed 2 payloads of 9.8 MiB" in collect(local)
    assert stored(local) == []


def test_results_and_values_are_collected_when_they_have_ended(local: Site) -> None:
    app = local.app()
    app.put(LARGE, keep=3600.0)
    app.payloads.keep(PayloadKind.RESULT, LARGE)
    assert "removed 1 payload " in collect(local)  # 3 hours later: the value has ended
    assert not stored(local, "values")
    collect(local, after=app.settings.result_retention_seconds)
    assert len(stored(local, "results")) == 1
    collect(local, after=app.settings.result_retention_seconds + 4 * 3600.0)
    assert not stored(local, "results")


@pytest.mark.parametrize(
    "arguments", [["queues", "peek", "default", "--arguments"], ["dlq", "show"]]
)
def test_commands_show_where_the_arguments_are(local: Site, arguments: list[str]) -> None:
    """They do not fetch 100 MB for a line of a table."""
    app = local.app()
    result = app.send(weigh_if.name, ["a", "/nowhere", LARGE])
    if arguments[0] == "dlq":
        local.worker(*ARGUMENTS)
        wait_until(lambda: app.broker.stats("default").dead == 1, 20, "it is a dead letter")
        arguments = [*arguments, result.id]
    shown = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", *arguments],
        env=local.environment,
        cwd=local.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the arguments are stored apart, 5,120," in shown.stdout
    assert "Traceback" not in shown.stdout + shown.stderr


def test_celery_and_kombu_refuse_with_one_line(local: Site) -> None:
    """Without the arguments they would run the task with none."""
    app = local.app()
    app.send(weigh.name, ["a", LARGE])
    got: list[object] = []
    transport.register()
    options = {"broker": local.broker}
    with kombu.Connection("aztask://", transport_options=options) as connection:
        consumer = kombu.Consumer(connection.channel(), [kombu.Queue("default")])
        consumer.register_callback(lambda body, message: got.append(body))
        with consumer, suppress(TimeoutError):
            connection.drain_events(timeout=1)
    assert got == []
    (letter,) = DeadLetters(app, "default").list()
    assert letter.reason == "undecodable"
    assert "its arguments are stored beside the queue" in letter.description
    assert "\n" not in letter.description
    assert len(stored(local)) == 1
