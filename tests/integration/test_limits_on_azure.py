"""Limits and pauses of workers that have nothing in common but a storage account (Azurite)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import azurite
import pytest
from harness import Site, site_in, wait_until
from limits_app import fifty, five, free
from test_limits import most_at_once, most_in

from aztask.limits.control import Controls, Scope
from aztask.stores.records.base import Provisioned, State
from aztask.stores.records.controls import controls_of

ARGUMENTS = ("-c", "4", "--lease", "20s", "--poll-ceiling", "0.3s")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A new account, with its queue and its table."""
    folder = tmp_path / "account"
    with azurite.storing(folder) as stores, azurite.running(folder / "queue") as queues:
        account = azurite.account_of(queues, *stores)
        with site_in(
            tmp_path / "site", joint=False, broker=account, results=account, module="limits_app"
        ) as made:
            app = made.app()
            app.broker.declare("default")
            assert isinstance(app.results, Provisioned)
            app.results.create()
            yield made


def test_two_workers_keep_their_limits_and_a_pause(site: Site) -> None:
    app = site.app()
    keys = [f"{number:02}" for number in range(60)]
    workers = [site.worker(*ARGUMENTS) for _ in range(2)]
    sent = [app.send(fifty.name, [key], task_id=key) for key in keys]
    assert [each.get(timeout=60) for each in sent] == keys
    starts = site.lines("start")
    assert most_in([line.at for line in starts], 1.0) <= 50
    for key in keys:
        (run,) = app.results.history(key)
        assert (run.state, run.key.hop, run.starts) == (State.SUCCEEDED, 0, 1)
    held = [app.send(five.name, [f"h{number}", 0.2]) for number in range(20)]
    assert [each.get(timeout=60) for each in held] == [f"h{number}" for number in range(20)]
    site.ledger.write_text(
        "".join(line for line in site.ledger.read_text().splitlines(True) if " h" in line)
    )
    assert most_at_once(site) <= 5
    store = controls_of(app.results)
    assert store is not None
    Controls(store).pause(Scope.QUEUE, ["default"], time.time())
    time.sleep(5.0)
    late = app.send(free.name, ["late"])
    time.sleep(1.0)
    assert not site.lines("start", "late")
    Controls(store).resume_all()
    wait_until(lambda: site.lines("start", "late"), 15, "it runs")
    assert late.get(timeout=20) == "late"
    assert [worker.stop() for worker in workers] == [0, 0], workers[0].log
