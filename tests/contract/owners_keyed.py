"""Two owners on one store: unique tasks, control entries, dead letters and lease advice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from aztask.address.shards import ShardLayout, ShardRange
from aztask.config import Settings
from aztask.leaseadvice import document
from aztask.leaseadvice.advice import Advice, Evidence
from aztask.leaseadvice.advisor import LeaseAdvisor
from aztask.leaseadvice.document import LeaseDocument, publish_advice
from aztask.leaseadvice.stores import LeaseFile
from aztask.limits.breakers import Breakers, OpenBreaker, breakers_of_apps
from aztask.limits.claiming import Claims, Wanted
from aztask.limits.control import ControlDocument, Controls, Reach, Scope
from aztask.limits.declaration import Limit, Rate
from aztask.limits.holders import usage_of
from aztask.limits.permits import Permits
from aztask.limits.storeclock import StoreClock
from aztask.message.envelope import Envelope
from aztask.operate.deadletters.letters import DeadLetterBrowser
from aztask.operate.draining import HeldPermits as DrainedPermits
from aztask.operate.findings import pause_findings
from aztask.stores.connections import Connections
from aztask.stores.records.controls import ControlStore, controls_of
from aztask.stores.records.deadindex import DeadIndex, IndexedDeadLetter, Indexing
from aztask.stores.records.uniques import uniques_of
from aztask.stores.shardlayouts import LayoutRows
from aztask.support.clock import SYSTEM_CLOCK
from aztask.worker.pipeline.uniquekeys import unique_engine

if TYPE_CHECKING:
    from owners import Scenario, World

LIMIT = Limit("api", Rate(1, 60.0), 1)
OPEN = OpenBreaker("shop.charge", 5.0, 6.0, "worker", "6 of 10 runs failed in 60 s")
ADVICE = Advice(90.0, False, "raised", Evidence(100, 60.0, 60.0), "pipeline", 5.0)


def controls(world: World) -> ControlStore:
    found = controls_of(world.store)
    assert found is not None
    return found


def index(world: World) -> DeadIndex:
    assert isinstance(world.store, Indexing)
    return world.store.dead_index


def permits(world: World) -> Permits:
    clock = StoreClock(controls(world), SYSTEM_CLOCK)
    clock.refresh()
    return Permits(controls(world), clock, "worker", SYSTEM_CLOCK)


def leases(mine: World, theirs: World) -> tuple[LeaseFile, LeaseFile, Path]:
    """One document for both, with advice of mine for the queue default."""
    path = Path(mine.app.broker.transaction_key).parent / "leases.json"  # type: ignore[attr-defined]
    stores = (LeaseFile(path, mine.owner), LeaseFile(path, theirs.owner))
    assert publish_advice(stores[0], {"default": ADVICE}, stores[0].load())
    return *stores, path


# -- shards ----------------------------------------------------------------------------------


def shard_layouts(mine: World, theirs: World) -> None:
    """My queue has my shards, whatever queue of that name another broker has."""
    each = ShardLayout(ShardRange(0, 4), epoch=1), ShardLayout(ShardRange(0, 9), epoch=1)
    rows = LayoutRows(controls(mine)), LayoutRows(controls(theirs))
    for store, layout in zip(rows, each, strict=True):
        assert store.read("parts") is None
        store.make("parts", layout)
    rows[1].announce("parts", each[1].moved(2, ordered=False), by="theirs")
    found = rows[0].read("parts")
    assert found is not None
    assert found.layout == each[0]
    rows[0].finish("parts", 2, 0)
    moved = rows[1].read("parts")
    assert moved is not None
    assert moved.layout.former == each[1].sent


# -- unique tasks ----------------------------------------------------------------------------


def debounced_calls(mine: World, theirs: World) -> None:
    """Their housekeeping does not send my debounced call, and their call is another task."""
    for each in (mine, theirs):
        each.app.broker.declare("default")
        each.app.task(name="shop.mail", unique="arguments", debounce=0.05)(print)
    engines = [unique_engine(each.app) for each in (mine, theirs)]
    assert engines[0] is not None
    assert engines[1] is not None
    first = mine.app.tasks["shop.mail"].delay("a").id
    store = uniques_of(mine.store)
    assert store is not None
    until = time.monotonic() + 20.0
    while not store.due(store.now(), 1):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert engines[1].repair() == 0
    assert theirs.app.broker.stats("default").active == 0
    assert theirs.app.tasks["shop.mail"].delay("a").id != first
    assert engines[0].repair() == 1
    assert mine.app.broker.stats("default").active == 1


# -- control entries -------------------------------------------------------------------------


def pauses(mine: World, theirs: World) -> None:
    at, here, there = time.time(), Controls(controls(mine)), Controls(controls(theirs))
    here.pause(Scope.QUEUE, ["default"], at)
    here.pause(Scope.TENANT, ["customer=acme"], at)
    here.scale(Reach.ALL, [""], 3, at, forget=set())
    assert not there.read()
    assert there.resume(Scope.QUEUE, ["default"]) == []
    assert there.unscale(None, []) == []
    assert there.resume_all() == []
    state = here.read()
    assert state.queue_paused("default")
    assert state.tenant("customer", "acme") is not None
    assert state.scales


def pause_document(mine: World, theirs: World) -> None:
    ControlDocument(controls(mine)).pause(Scope.TASK, ["shop.charge"], 5.0)
    ControlDocument(controls(theirs)).resume_all()
    assert not ControlDocument(controls(theirs)).read()
    assert ControlDocument(controls(mine)).read().task_paused("shop.charge")


def breakers(mine: World, theirs: World) -> None:
    Breakers(controls(mine)).open(OPEN)
    assert Breakers(controls(theirs)).read() == {}
    assert Breakers(controls(theirs)).close_all() == []
    assert OPEN.task in Breakers(controls(mine)).read()


def breakers_of_all_apps(mine: World, theirs: World) -> None:
    Breakers(controls(mine)).open(OPEN)
    assert not [row for each in breakers_of_apps(controls(theirs)) for row in each.read()]
    assert [row for each in breakers_of_apps(controls(mine)) for row in each.read()] == [OPEN.task]


def slots(mine: World, theirs: World) -> None:
    assert LIMIT.rate is not None
    for each in (mine, theirs):
        clock = StoreClock(controls(each), SYSTEM_CLOCK)
        clock.refresh()
        claims = Claims(controls(each), clock)
        (slot,) = claims.claim(Wanted(LIMIT.entry(""), LIMIT.rate), clock.now())
        assert slot.at < clock.now() + 5.0, "the other one's slot is not in the way"


def held_permits(mine: World, theirs: World) -> None:
    entry, here, there = LIMIT.permits_entry(""), permits(mine), permits(theirs)
    assert here.take(entry, 1, 5.0)
    assert there.take(entry, 1, 5.0)
    there.release_all()
    assert usage_of(controls(mine), LIMIT).held == {"worker": 1}
    controls(theirs).purge("limit-", controls(theirs).time().at + 60.0)
    assert usage_of(controls(mine), LIMIT).held == {"worker": 1}


def usage(mine: World, theirs: World) -> None:
    assert permits(mine).take(LIMIT.permits_entry(""), 1, 5.0)
    assert usage_of(controls(mine), LIMIT).held == {"worker": 1}
    assert usage_of(controls(theirs), LIMIT).held == {}


def drained_permits(mine: World, theirs: World) -> None:
    assert permits(mine).take(LIMIT.permits_entry("a"), 1, 5.0)
    assert DrainedPermits(controls(mine), LIMIT, "a").held()
    assert not DrainedPermits(controls(theirs), LIMIT, "a").held()


def findings(mine: World, theirs: World) -> None:
    Controls(controls(mine)).pause(Scope.QUEUE, ["default"], 5.0)
    Breakers(controls(mine)).open(OPEN)
    assert len(list(pause_findings(mine.store))) == 2
    assert list(pause_findings(theirs.store)) == []


# -- dead letters ----------------------------------------------------------------------------


def dead_letters(mine: World, theirs: World) -> None:
    """Their listing, purge and replay do not touch notes of my queue of the same name."""
    envelope = Envelope(b"x", message_id="a:0:0")
    index(mine).note([IndexedDeadLetter("default", envelope, "why", "what", 5.0, 3)])
    theirs.app.broker.declare("default")
    browser = DeadLetterBrowser(theirs.app, "default", SYSTEM_CLOCK)
    browser._index = index(theirs)  # local queues list all, and need none
    assert list(browser.all()) == []
    browser.met_all()
    browser.emptied()
    index(theirs).drop("default", {"a:0:0"})
    assert list(index(theirs).notes("default")) == []
    assert [each.key for each in index(mine).notes("default")] == ["a:0:0"]


# -- lease advice ----------------------------------------------------------------------------


def advice(mine: World, theirs: World) -> None:
    here, there, _ = leases(mine, theirs)
    assert there.load().document.entry("default").advice is None
    other = Advice(30.0, False, "set", Evidence(), "pipeline", 6.0)
    assert publish_advice(there, {"default": other}, there.load())
    assert here.load().document.entry("default").advice == ADVICE


def advisor(mine: World, theirs: World) -> None:
    _, _, path = leases(mine, theirs)
    settings = Settings(lease_advice=str(path))
    brokers = [Connections(each.app.broker, None, app="shop") for each in (mine, theirs)]
    found = [LeaseAdvisor(settings, each).advice("default") for each in brokers]
    assert found == [ADVICE, None]


def adopted_advice(mine: World, theirs: World) -> None:
    here, there, _ = leases(mine, theirs)
    assert document.owners(there) == {mine.owner.of_broker}
    assert document.adopt(here, theirs.owner) == 0
    assert document.adopt(there, mine.owner) == 1
    assert document.adopt(there, mine.owner) == 0
    assert there.load().document.entry("default").advice == ADVICE
    assert here.load().document.entry("default") == LeaseDocument().entry("default")


SCENARIOS: dict[str, Scenario] = {
    "aztask.leaseadvice.advisor.LeaseAdvisor": advisor,
    "aztask.leaseadvice.document.adopt": adopted_advice,
    "aztask.leaseadvice.document.owners": adopted_advice,
    "aztask.leaseadvice.document.publish_advice": advice,
    "aztask.operate.draining.HeldPermits": drained_permits,
    "aztask.limits.breakers.Breakers": breakers,
    "aztask.limits.breakers.breakers_of_apps": breakers_of_all_apps,
    "aztask.limits.claiming.Claims": slots,
    "aztask.limits.control.ControlDocument": pause_document,
    "aztask.limits.control.Controls": pauses,
    "aztask.limits.permits.Permits": held_permits,
    "aztask.stores.shardlayouts.LayoutRows": shard_layouts,
    "aztask.limits.holders.usage_of": usage,
    "aztask.operate.findings.pause_findings": findings,
    "aztask.stores.records.deadindex.index_for": dead_letters,
    "aztask.uniqueness.engine.UniqueEngine": debounced_calls,
}
EXEMPT: dict[str, str] = {
    "aztask.leaseadvice.document.DocumentCell": "passes the store to adopt",
    "aztask.spark.cli.recommend._work": "passes the store to publish_evidence",
    "aztask.limits.storeclock.StoreClock": "reads the store's clock only, which all share",
    "aztask.stores.shardlayouts.StoredLayouts": "passes the store to LayoutRows",
    "aztask.stores.records.controls.EntryCell": "one entry of the caller's store",
    "aztask.stores.records.uniques.HolderCell": "one key of the caller's store",
    "aztask.uniqueness.engine.TakingCell": "one key of the caller's store",
    "aztask.spark.recommendation.recommend.publish": "passes the store to publish_evidence",
    "aztask.spark.recommendation.recommend.publish_evidence": "passes the store to publish_advice",
    "aztask.worker.pipeline.settling.Settler": "notes its own dead letters, and reads none",
    "aztask.worker.upkeep.leasewatch._load": "passes the store on; the document is that of all",
}
