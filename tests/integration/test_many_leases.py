"""Two thousand started tasks of a 10 s lease, held by one worker for a minute."""

from __future__ import annotations

import json

from harness import Site, wait_until
from ledger_app import work

from aztask.stores.records.base import State

TASKS = 2_000
LEASE = 10.0
HOLD_SECONDS = 60.0


def test_no_renewal_is_late_and_no_lease_is_lost(site: Site, capsys) -> None:
    app = site.app()
    task = app.task(name=work.name)(work.function)
    task.map([(f"t{n}", HOLD_SECONDS) for n in range(TASKS)])
    worker = site.worker(
        "--pool", "threads", "-c", str(TASKS), "--lease", f"{LEASE}s", "--max-lease", "5m"
    )
    wait_until(lambda: len(site.lines("start")) == TASKS, 60, "all have started")
    wait_until(lambda: len(site.lines("end")) == TASKS, HOLD_SECONDS + 60, "all have ended")
    wait_until(lambda: app.broker.stats("default").leased == 0, 30, "all are settled")
    assert worker.stop() == 0, worker.log
    renewals, lost = [], 0
    for path in site.events.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "renewed":
                renewals.append(1.0 - event["margin_seconds"] / event["lease_seconds"])
            lost += event["event"] == "lease_lost"
    with capsys.disabled():
        print(f"\n{len(renewals)} renewals, the latest at {max(renewals):.0%} of the lease")
    assert len(renewals) >= TASKS * int(HOLD_SECONDS / LEASE)
    assert max(renewals) <= 0.85
    assert lost == 0
    assert len(app.results.recent(state=State.SUCCEEDED, limit=TASKS + 1)) == TASKS
