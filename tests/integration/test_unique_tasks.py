"""Unique tasks with real processes: senders and workers that die at each step."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import azurite
import pytest
from harness import Site, site_in, wait_until

from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.stores.records.base import State
from aztask.stores.records.uniques import uniques_of

ARGUMENTS = ("-c", "2", "--pool", "threads", "--lease", "1.5s", "--max-lease", "60s")
SENDERS = 50
CODE = """
import os, sys, threading, time
from unique_app import single
go = sys.argv[1]
while not os.path.exists(go):
    time.sleep(0.001)
ids = []
threads = [threading.Thread(target=lambda: ids.append(single.delay("a").id)) for _ in range(10)]
for each in threads: each.start()
for each in threads: each.join()
print(*ids)
"""


@contextmanager
def site_on(where: str, folder: Path) -> Iterator[Site]:
    if where == "local":
        with site_in(folder / "site", module="unique_app") as site:
            yield site
        return
    with azurite.storing(folder / "azurite") as services:
        account = azurite.account_of(*services)
        with site_in(folder / "site", module="unique_app", results=account) as site:
            site.app().results.create()  # type: ignore[union-attr]
            yield site


def holders(site: Site) -> int:
    store = uniques_of(site.app().results)
    assert store is not None
    return len(store.due(1e11, 10))


def send(site: Site, call: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from unique_app import *\nprint({call}.delay('a').id)"],
        env={**site.environment, "AZTASK_FAILPOINT": failpoint},
        cwd=site.folder,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("where", ["local", "tables"])
def test_fifty_senders_some_of_which_die_send_one_task(where: str, tmp_path: Path) -> None:
    """Five processes of ten threads; two of them are killed at a step of their send."""
    dice = random.Random(3)
    with site_on(where, tmp_path) as site:
        go = site.folder / "go"
        steps = ["unique-taken:KILL", "unique-sent:KILL", "", "", ""]
        dice.shuffle(steps)
        senders = [
            subprocess.Popen(
                [sys.executable, "-c", CODE, str(go)],
                env={**site.environment, "AZTASK_FAILPOINT": step},
                cwd=site.folder,
                stdout=subprocess.PIPE,
                text=True,
            )
            for step in steps
        ]
        time.sleep(2.0)
        go.touch()
        printed = [each.communicate(timeout=60)[0] for each in senders]
        worker = site.worker(*ARGUMENTS)
        wait_until(lambda: site.counts("end").get("a"), 60, "it has run")
        wait_until(lambda: holders(site) == 0, 60, "its key is free")
        assert site.counts("start") == {"a": 1}
        ids = {each for text in printed for each in text.split()}
        assert len(ids) <= 1
        for task_id in ids:
            (run,) = site.app().results.history(task_id)  # type: ignore[union-attr]
            assert run.state is State.SUCCEEDED
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("step", ["unique-taken", "unique-sent"])
def test_housekeeping_completes_a_send_whose_sender_died(step: str, tmp_path: Path) -> None:
    with site_on("local", tmp_path) as site:
        assert send(site, "single", f"{step}:KILL").returncode == -signal.SIGKILL
        assert holders(site) == 1
        worker = site.worker(*ARGUMENTS)
        wait_until(lambda: site.counts("end").get("a"), 60, "it has run")
        wait_until(lambda: holders(site) == 0, 60, "its key is free")
        time.sleep(1.0)
        assert site.counts("start") == {"a": 1}
        assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("joint", [True, False], ids=["one file", "two files"])
@pytest.mark.parametrize("step", ["claimed", "recorded", "settled"])
def test_a_worker_that_dies_leaves_no_key_behind(step: str, joint: bool, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", module="unique_app", joint=joint) as site:
        first = send(site, "single").stdout.strip()
        worker = site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL")
        assert worker.wait(60) == -signal.SIGKILL, worker.log
        second = site.worker(*ARGUMENTS)
        wait_until(lambda: site.app().result(first).ready(), 60, "it ends")
        wait_until(lambda: holders(site) == 0, 60, "its key is free")
        assert send(site, "single").stdout.strip() != first
        assert second.stop() == 0, second.log


def test_a_dead_letter_frees_the_key_and_its_replay_takes_it_again(tmp_path: Path) -> None:
    with site_on("local", tmp_path) as site:
        first = send(site, "doomed").stdout.strip()
        worker = site.worker(*ARGUMENTS)
        wait_until(lambda: site.app().broker.stats("default").dead == 1, 60, "it is dead")
        wait_until(lambda: holders(site) == 0, 10, "its key is free")
        assert worker.stop() == 0, worker.log
        second = send(site, "doomed").stdout.strip()
        assert second != first
        letters = DeadLetters(site.app(), "default")
        report = letters.replay(Selection(ids=frozenset({first})))
        assert (report.done, report.held_back, report.lost) == (0, 1, 0)
        assert report.blocked == {first: second}
        ended = subprocess.run(
            [sys.executable, "-m", "aztask", "dlq", "replay", first, "--yes", "-A", "unique_app"],
            env=site.environment,
            cwd=site.folder,
            timeout=60,
            check=False,
            capture_output=True,
            text=True,
        )
        assert f"not replayed: {first} is unique, and task {second} holds its key" in ended.stderr
        assert "1 dead letter of unique tasks not replayed" in ended.stderr
        assert ended.returncode == 0, ended.stderr  # it was received: not counted as leased
        site.app().broker.purge("default")
        site.app().results.cancel(second, time.time())  # type: ignore[union-attr]
        assert letters.replay(Selection(ids=frozenset({first}))).done == 1
        assert send(site, "doomed").stdout.strip() == first


@pytest.mark.parametrize("step", ["", "unique-closing"])
def test_the_last_of_many_calls_runs_after_a_quiet_time(step: str, tmp_path: Path) -> None:
    with site_on("local", tmp_path) as site:
        workers = [site.worker(*ARGUMENTS, AZTASK_FAILPOINT=f"{step}:KILL" if step else "")]
        workers.append(site.worker(*ARGUMENTS))
        code = "for n in range(20): last = settled.delay('a', n)\nprint(last.id)"
        done = subprocess.run(
            [sys.executable, "-c", f"from unique_app import *\n{code}"],
            env=site.environment,
            cwd=site.folder,
            timeout=60,
            check=True,
            capture_output=True,
            text=True,
        )
        wait_until(lambda: site.app().result(done.stdout.strip()).ready(), 60, "it has run")
        assert site.counts("start") == {"a-19": 1}
        wait_until(lambda: holders(site) == 0, 60, "its key is free")
        assert workers[1].stop() == 0, workers[1].log
