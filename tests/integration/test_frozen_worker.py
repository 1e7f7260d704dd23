"""A supervisor that is stopped (SIGSTOP) while its pool goes on: its runs end by themselves."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Site, site_in, wait_until
from ledger_app import steps, stubborn

LEASE = 3
RUN_SECONDS = 9.0
GRACE = 1.0
SLACK = 1.5
"""Seconds: this machine is shared. Without the guard the runs overlap for 5 s and more."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path / "site") as made:
        yield made


def has_ended(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not waited for it: it is stopped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_runs_of_a_stopped_supervisor_end_when_their_leases_do(site: Site, pool: str) -> None:
    keys = ["gentle", "stubborn"]
    arguments = ("-Q", "default", "--pool", pool, "-c", "2", "--lease", f"{LEASE}s")
    frozen = site.worker(*arguments, "--max-lease", "60s")
    for task, key in zip((steps, stubborn), keys, strict=True):
        site.app().send(task.name, [key, RUN_SECONDS], task_id=key)
    wait_until(lambda: len(site.lines("start")) == 2, 20, "both tasks run")
    first = {line.key: line.pid for line in site.lines("start")}
    frozen.freeze()
    site.worker(*arguments, "--max-lease", "60s")
    wait_until(lambda: len(site.lines("start")) == 4, 20, "both tasks run again")
    second = {line.key: line.at for line in site.lines("start") if line.pid != first[line.key]}
    wait_until(lambda: has_ended(first["stubborn"]), 10, "the process ended")
    ticks = [line.at for line in site.lines("tick", "stubborn") if line.pid == first["stubborn"]]
    assert max(ticks) < second["stubborn"] + GRACE + SLACK
    (stopped,) = (at for at in site.lines("stopped", "gentle") if at.pid == first["gentle"])
    assert stopped.at < second["gentle"] + SLACK
    frozen.signal(signal.SIGCONT)
    # the worker's own keeper may be the first to notice it
    said = re.compile("its process interrupted it|is interrupted, and killed")
    wait_until(lambda: len(said.findall(frozen.log)) == 2, 10, "both losses are logged")
    assert "Traceback" not in frozen.log
