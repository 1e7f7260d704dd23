"""``aztask worker --supervisors``: several supervisors that start, answer and end as one worker."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from harness import Site, Worker, wait_until
from ledger_app import work
from prometheus_client.parser import text_string_to_metric_families

TWO = ("-Q", "default", "--supervisors", "2", "-c", "2", "--name", "w", "--lease", "2s")
HTTP = ("--http", "127.0.0.1:0")


def asked(url: str, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{url}/{page}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def url_of(worker: Worker) -> str:
    wait_until(lambda: "/healthz and /readyz" in worker.log, 20, "the worker logs its address")
    return re.findall(r"probes at (http://\S+)/metrics", worker.log)[0]


def supervisors(worker: Worker) -> list[int]:
    """The process ids of those that run, the oldest first."""
    overseer = worker.process.pid
    return [
        int(pid) for pid in Path(f"/proc/{overseer}/task/{overseer}/children").read_text().split()
    ]


def finished(site: Site, count: int) -> bool:
    return sum(site.counts("end").values()) >= count


def test_they_share_the_tasks_and_drain_as_one_worker(site: Site) -> None:
    worker = site.worker(*TWO, *HTTP)
    url = url_of(worker)
    seen = set()

    def ready() -> bool:
        status, text = asked(url, "readyz")
        seen.add((status, text.split(":")[0]))
        return status == 200

    wait_until(ready, 30, "both are ready")
    assert (503, "supervisor 1") in seen, "it was not ready before"
    assert asked(url, "healthz") == (200, "ok\n")
    for number in range(40):
        site.app().send(work.name, [str(number), 0.05])
    wait_until(lambda: finished(site, 40), 30, "all tasks have ended")
    assert set(site.counts("start").values()) == {1}, "each ran once"

    def counted() -> dict[str, float]:
        text = asked(url, "metrics")[1]
        return {
            sample.labels["supervisor"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "aztask_tasks_total" and sample.labels["outcome"] == "succeeded"
        }

    wait_until(lambda: sum(counted().values()) == 40, 10, "the metrics count all")
    assert counted().keys() == {"1", "2"}, "both have worked"
    slow = site.app().send(work.name, ["slow", 2.0])
    wait_until(lambda: site.lines("start", "slow"), 10, "a task runs")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: asked(url, "readyz")[0] == 503, 5, "not ready while it drains")
    assert worker.wait() == 0, worker.log
    assert slow.get(timeout=1) == "slow", "it was waited for"
    assert worker.log.count(": 2 supervisors, 2 processes, queues default") == 1
    assert worker.log.count("app ledger (ledger_app)") == 1
    assert sorted(re.findall(r"worker (w\.\d) stopped", worker.log)) == ["w.1", "w.2"]


@pytest.mark.kills
def test_one_that_is_killed_is_replaced_and_nothing_is_lost(site: Site) -> None:
    worker = site.worker(*TWO)
    sent: list[str] = []

    def both_work() -> bool:
        if len(site.lines("start")) + 4 > len(sent):  # so that some always wait
            sent.append(str(len(sent)))
            site.app().send(work.name, [sent[-1], 0.3])
        return len({line.pid for line in site.lines("end")}) == 2

    wait_until(both_work, 30, "both work")
    killed = supervisors(worker)[-1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: site.counts("end").keys() == set(sent), 40, "all have ended")
    wait_until(lambda: len(supervisors(worker)) == 2, 20, "another one runs")
    assert killed not in supervisors(worker)
    assert re.search(r"w\.\d has died \(SIGKILL\); another one starts in [\d.]+ s", worker.log)
    assert worker.log.count(": 2 supervisors, 2 processes") == 1
    assert worker.stop() == 0, worker.log


@pytest.mark.kills
def test_they_drain_when_their_overseer_is_killed(site: Site) -> None:
    worker = site.worker(*TWO)
    wait_until(lambda: len(supervisors(worker)) == 2, 30, "both run")
    site.app().send(work.name, ["a", 2.0])
    wait_until(lambda: site.lines("start", "a"), 30, "a task runs")
    pids = supervisors(worker)
    worker.process.kill()
    worker.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "they end")
    assert site.counts("end") == {"a": 1}
    assert "is gone: it drains" in worker.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_each_process_gets_is_one_signal(site: Site, number: int) -> None:
    """systemd and terminals send it to all of them. The second supervisor has only just begun."""
    worker = site.worker(*TWO)
    site.app().send(work.name, ["a", 3.0])
    wait_until(lambda: site.lines("start", "a"), 30, "the task runs")
    wait_until(lambda: len(supervisors(worker)) == 2, 30, "both run")
    for pid in [*supervisors(worker), worker.process.pid]:
        os.kill(pid, number)
    assert worker.wait() == 0, worker.log
    assert site.counts("end") == {"a": 1}, "a second signal would have cut it"


def test_a_second_signal_gives_everything_back_at_once(site: Site) -> None:
    worker = site.worker(*TWO)
    site.app().send(work.name, ["a", 60.0])
    wait_until(lambda: site.lines("start", "a"), 30, "the task runs")
    worker.signal(signal.SIGTERM)
    time.sleep(0.5)
    assert worker.process.poll() is None, "it waits for the task"
    worker.signal(signal.SIGTERM)
    assert worker.wait(15) == 0, worker.log
    assert site.app().broker.stats("default").active == 1, "it was given back"


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (("-A", "nosuch:app"), 2, "there is no module 'nosuch'"),
        (("-Q", "misspelt"), 5, "queue 'misspelt' does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_its_exit_code(
    site: Site, given: tuple[str, ...], code: int, words: str
) -> None:
    worker = site.worker("--supervisors", "2", *given)
    assert worker.wait() == code, worker.log
    errors = [line for line in worker.log.splitlines() if line.startswith("aztask: error")]
    assert len(errors) == 1 and words in errors[0], worker.log


def test_burst_ends_all_when_all_is_done(site: Site) -> None:
    for number in range(10):
        site.app().send(work.name, [str(number), 0.05])
    worker = site.worker("-c", "2", "--burst", AZTASK_WORKER_SUPERVISORS="2")
    assert worker.wait() == 0, worker.log
    assert len(site.counts("end")) == 10
    assert worker.log.count("stopped:") == 2, worker.log
