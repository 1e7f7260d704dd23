"""``aztask worker --http`` and ``aztask exporter``: metrics and probes of real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import azurite as azurites
import pytest
from azurite import Azurite
from harness import Site, Worker, site_in, wait_until
from ledger_app import flaky, hold_gil, work
from prometheus_client.parser import text_string_to_metric_families
from proxy import Proxy, proxied

from aztask import App
from aztask.stores.records.base import Provisioned

HTTP = ("--http", "127.0.0.1:0")


def url_of(worker: Worker) -> str:
    found: list[str] = []

    def logged() -> bool:
        found[:] = re.findall(r"probes at (http://\S+)/metrics", worker.log)
        return bool(found)

    wait_until(logged, 20, "the worker logs its address")
    return found[0]


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(url: str) -> dict[str, float]:
    """{name and labels but the type of error: value}."""
    found = {}
    for family in text_string_to_metric_families(asked(f"{url}/metrics")[1]):
        for sample in family.samples:
            labels = ",".join(f"{name}={sample.labels[name]}" for name in sorted(sample.labels))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def ready(url: str) -> bool:
    return asked(f"{url}/readyz")[0] == 200


def test_metrics_and_probes_through_a_drain(site: Site) -> None:
    worker = site.worker("-Q", "default", "-c", "2", *HTTP, "--celery-metrics")
    url = url_of(worker)
    wait_until(lambda: ready(url), 20, "it is ready")
    app = site.app()
    app.send(flaky.name, ["a", 1], task_id="a")
    app.send('ledger.unknown"} 1', task_id="b")
    assert app.result("a").get(timeout=20) == 1
    done = "aztask_tasks_total{outcome=succeeded,queue=default,task=ledger.flaky}"
    wait_until(lambda: samples(url).get(done) == 1, 10, "the run is counted")
    put_off = "aztask_put_offs_total{queue=default,task=(unknown)}"
    wait_until(lambda: samples(url).get(put_off), 10, "the unknown task is put off")
    found = samples(url)
    assert found["aztask_tasks_total{outcome=retried,queue=default,task=ledger.flaky}"] == 1
    assert not any("ledger.unknown" in name for name in found)
    assert found["aztask_worker_capacity{}"] == 2
    assert found["aztask_broker_up{}"] == found["aztask_result_store_up{}"] == 1
    assert any(name.startswith("celery_task_retried_total") for name in found)
    assert found["process_resident_memory_bytes{}"] > 0

    app.send(work.name, ["slow", 4.0])
    wait_until(lambda: site.lines("start", "slow"), 10, "the task runs")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: not ready(url), 5, "it is not ready while it drains")
    assert asked(f"{url}/readyz")[1] == "the worker is stopping\n"
    assert asked(f"{url}/healthz") == (200, "ok\n")
    assert samples(url)["aztask_worker_draining{}"] == 1
    assert worker.wait() == 0, worker.log
    assert len(site.lines("end", "slow")) == 1


def test_probes_answer_while_tasks_hold_the_interpreter(site: Site) -> None:
    worker = site.worker("-Q", "default", "-c", "4", "--pool", "threads", *HTTP)
    url = url_of(worker)
    wait_until(lambda: ready(url), 20, "it is ready")
    for number in range(4):
        site.app().send(hold_gil.name, [str(number), 3.0, "sleep"])
    wait_until(lambda: site.counts("start"), 10, "a task holds the interpreter")
    took = []
    for path in ("healthz", "readyz", "metrics") * 10:
        began = time.monotonic()
        assert asked(f"{url}/{path}")[0] == 200
        took.append(time.monotonic() - began)
    assert len(site.lines("end")) < 4, "it was held all the time"
    assert statistics.median(took) < 0.1
    worker.kill()


def test_half_open_connections_fail_no_probe_of_a_worker(site: Site) -> None:
    """500 a second from the probe's own address: the worker's own manifests would restart it."""
    worker = site.worker("-Q", "default", "-c", "1", *HTTP)
    url = url_of(worker)
    wait_until(lambda: ready(url), 20, "it is ready")
    host, _, port = url.removeprefix("http://").partition(":")
    held: deque[socket.socket] = deque()
    took, rate, connections = [], 500, 2000
    began = time.monotonic()
    for number in range(connections):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        held.append(socket.create_connection((host, int(port)), timeout=10))
        if len(held) > 500:
            held.popleft().close()
        if number % 100 == 99:
            for path in ("healthz", "readyz"):
                asked_at = time.monotonic()
                assert asked(f"{url}/{path}") == (200, "ok\n")
                took.append(time.monotonic() - asked_at)
    assert time.monotonic() - began < 2 * connections / rate, "it was a flood"
    assert max(took) < 1.0, "the time that Kubernetes gives a probe"
    assert site.app().send(work.name, ["a"]).get(timeout=30) == "a"
    for each in held:
        each.close()
    assert worker.stop() == 0, worker.log


@pytest.fixture
def remote(azurite: Azurite, tmp_path: Path) -> Iterator[tuple[Site, dict[str, Proxy]]]:
    """Queues and tables, each behind a proxy, and a site whose workers go through them."""
    with (
        azurites.storing(tmp_path / "stores") as stores,
        proxied(azurite.port) as queues,
        proxied(stores[0].port) as tables,
    ):
        services = (azurite, *stores)
        direct = App(
            "ledger", broker=azurites.account_of(*services), results=azurites.account_of(*services)
        )
        direct.broker.declare("default")
        assert isinstance(direct.results, Provisioned)
        direct.results.create()
        direct.close()
        address = azurites.account_of(*services, queue=queues.port, table=tables.port)
        with site_in(tmp_path / "site", joint=False, broker=address, results=address) as site:
            yield site, {"broker": queues, "result store": tables}


def test_it_is_not_ready_within_15_s_of_losing_a_service(
    remote: tuple[Site, dict[str, Proxy]],
) -> None:
    site, proxies = remote
    worker = site.worker("-Q", "default", "-c", "1", *HTTP)
    url = url_of(worker)
    wait_until(lambda: ready(url), 20, "it is ready")
    for service, mode in (("broker", "blackhole"), ("result store", "reset")):
        proxies[service].set(mode)
        wait_until(lambda: not ready(url), 15, f"not ready without the {service}")
        assert service in asked(f"{url}/readyz")[1]
        assert asked(f"{url}/healthz")[0] == 200, "a restart would not help"
        proxies[service].set("pass")
        proxies[service].reset_all()
        wait_until(lambda: ready(url), 30, f"ready with the {service}")
    worker.kill()


def test_a_failing_part_is_named_and_only_an_essential_one_makes_it_unready(site: Site) -> None:
    site.module = "faulty_app"
    faults = site.folder / "faults"
    faults.mkdir()
    worker = site.worker("-Q", "default", "-c", "1", *HTTP, FAULTY_PARTS=str(faults))
    url = url_of(worker)
    wait_until(lambda: asked(f"{url}/readyz") == (200, "ok\n"), 30, "it is ready")
    metric = "aztask_part_failing{part=schedules}"
    wait_until(lambda: samples(url).get(metric) == 0, 30, "the part is listed")

    (faults / "schedules").touch()
    named = r"part schedules fails since \d{4}-\d\d-\d\dT[\d:]+Z: Injected: schedules"
    wait_until(lambda: re.search(named, asked(f"{url}/readyz")[1]), 60, "it is named")
    assert asked(f"{url}/readyz")[0] == 200, "tasks are run"
    assert samples(url)[metric] == samples(url)["aztask_worker_ready{}"] == 1
    assert site.app().send(work.name, ["meanwhile"]).get(timeout=30) == "meanwhile"
    wait_until(lambda: "schedules" in _failing(site), 30, "the heartbeat names it")
    examined = command(site, "doctor", "--json")
    found = [json.loads(line) for line in examined.stdout.splitlines()]
    assert any(
        line["level"] == "warning" and line["text"].startswith("schedules fails since ")
        for line in found
    ), found
    assert worker.log.count("Traceback") == 1, "it is logged once"
    assert asked(f"{url}/readyz")[0] == 200, "after longer than an essential part may fail"
    (faults / "schedules").unlink()
    wait_until(lambda: asked(f"{url}/readyz") == (200, "ok\n"), 90, "it works again")
    assert samples(url)[metric] == 0
    wait_until(lambda: _failing(site) == {}, 30, "the heartbeat, too")

    (faults / "receive").touch()
    wait_until(lambda: not ready(url), 60, "it is not ready while it receives nothing")
    assert "part intake default fails since" in asked(f"{url}/readyz")[1]
    assert asked(f"{url}/healthz")[0] == 200
    (faults / "receive").unlink()
    wait_until(lambda: asked(f"{url}/readyz") == (200, "ok\n"), 90, "it receives again")
    assert worker.stop() == 0, worker.log


def command(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of the app, as a user gives it."""
    return subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "ledger_app", *arguments],
        env=site.environment,
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def _failing(site: Site) -> dict[str, str]:
    """{part: since when it fails}, as ``aztask workers`` shows it for the only worker."""
    (line,) = command(site, "workers", "--json").stdout.splitlines()
    return {each["part"]: each["since"] for each in json.loads(line)["failing"]}


def test_the_exporter_counts_what_is_in_the_queues(site: Site) -> None:
    app = site.app()
    for _ in range(3):
        app.send("ledger.noop")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "aztask",
            "-A",
            "ledger_app",
            "exporter",
            "--http",
            "127.0.0.1:0",
            "--interval",
            "1s",
        ],
        env=site.environment,
        cwd=site.folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        (url,) = re.findall(r"queues at (http://\S+)/metrics", line)
        wanted = "aztask_queue_messages{queue=default,state=active}"
        wait_until(lambda: samples(url).get(wanted) == 3, 10, "the messages are counted")
        app.send("ledger.noop")
        wait_until(lambda: samples(url).get(wanted) == 4, 10, "the next turn counts the new one")
        assert asked(f"{url}/readyz")[0] == 200
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stderr.close()  # type: ignore[union-attr]


def test_an_address_that_is_taken_is_reported_at_once(site: Site) -> None:
    worker = site.worker("-Q", "default", *HTTP)
    port = url_of(worker).rpartition(":")[2]
    second = site.worker("-Q", "default", "--http", f"127.0.0.1:{port}")
    assert second.wait(20) == 4
    assert "cannot listen on 127.0.0.1" in second.log
    assert "Traceback" not in second.log
    assert worker.stop() == 0
