"""Each request of a task's life on a Storage queue, disturbed in each way, under a real worker."""

from __future__ import annotations

import pytest
from harness import Site, wait_until
from ledger_app import work
from proxy import Proxy

from aztask import App
from aztask.errors import BrokerUnavailable, SendUnconfirmed
from aztask.stores.records.base import State

LEASE = 3.0
ARGUMENTS = ("-Q", "default", "-c", "2", "--lease", f"{LEASE}s", "--max-lease", "60s")
REQUESTS = {"receive": "GET", "renew": "PUT", "delete": "DELETE"}


def each(method: str, fault: str, times: int):
    """A hook that disturbs the first requests of this method, one of them on each connection."""
    done: list[bytes] = []

    def hook(line: bytes, number: int) -> str | None:
        if len(done) >= times or not line.startswith(method.encode()):
            return None
        done.append(line)
        return fault

    return hook


@pytest.mark.parametrize("fault", ["reset", "blackhole", "drop-reply"])
@pytest.mark.parametrize("request_", list(REQUESTS))
def test_nothing_is_lost_and_a_recorded_outcome_is_not_run_again(
    proxied_site: Site, proxy: Proxy, request_: str, fault: str
) -> None:
    site = proxied_site
    app = site.app()
    app.send(work.name, ["t", 1.2 * LEASE], task_id="t")  # one renewal at least
    proxy.hook = each(REQUESTS[request_], fault, times=2)
    worker = site.worker(*ARGUMENTS)
    assert app.result("t").get(timeout=60) == "t"
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "it is settled")
    assert [record.state for record in app.results.history("t")] == [State.SUCCEEDED]
    # only a renewal that got no answer may cost a further run: its lease is unknown or lost
    assert site.counts("end")["t"] == 1 or request_ == "renew"
    assert worker.process.poll() is None
    assert worker.stop() == 0, worker.log


@pytest.mark.parametrize("fault", ["reset", "blackhole", "drop-reply"])
def test_a_send_is_accepted_or_told(proxied_site: Site, proxy: Proxy, fault: str) -> None:
    """Never silence, and never twice without a word; sending again under the id is harmless."""
    site = proxied_site
    sender = App("sender", broker=site.broker)
    proxy.hook = each("POST", fault, times=1)
    try:
        sender.send(work.name, ["t"], task_id="t")
    except (SendUnconfirmed, BrokerUnavailable):
        sender.send(work.name, ["t"], task_id="t")
    sender.close()
    worker = site.worker(*ARGUMENTS)
    app = site.app()
    wait_until(lambda: app.broker.stats("default").total == 0, 30, "all is settled")
    assert app.result("t").get(timeout=10) == "t"
    assert site.counts("end") == {"t": 1}
    assert worker.stop() == 0
