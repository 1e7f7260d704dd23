"""How often the document without an owner is read."""

from aztask.address.owner import NO_OWNER, Owner
from aztask.limits.control import UNOWNED_SECONDS, Controls, Scope
from aztask.queues.engine import Database
from aztask.stores.records.local.store import LocalResults
from aztask.support.clock import Clock

OWNER = Owner("servicebus://shop.servicebus.windows.net", "shop")


class Counting:
    """A store that counts reads, and says that it is across a network."""

    def __init__(self, store, reads, *, remote):
        self._store = store
        self.reads = reads
        self.remote = remote
        self.owner = store.owner

    def of(self, owner):
        return Counting(self._store.of(owner), self.reads, remote=self.remote)

    def read(self, names):
        self.reads.append(self.owner)
        return self._store.read(names)


def counted(tmp_path, *, remote):
    reads, now = [], [0.0]
    clock = Clock(monotonic=lambda: now[0])
    database = Database(str(tmp_path / "results.db"))
    store = LocalResults(database, owner=OWNER).controls
    return reads, now, Controls(Counting(store, reads, remote=remote), clock), store


def test_a_remote_store_is_asked_for_pauses_without_an_owner_once_a_minute(tmp_path):
    reads, now, controls, store = counted(tmp_path, remote=True)
    for _ in range(30):
        controls.read()
        now[0] += 1.0
    assert reads.count(NO_OWNER) == 1
    assert reads.count(OWNER) == 30
    Controls(store.of(NO_OWNER)).pause(Scope.QUEUE, ["orders"], 5.0)
    now[0] += UNOWNED_SECONDS
    assert controls.read().queues == {"orders"}
    reads.clear()
    for _ in range(30):
        assert controls.read().queues == {"orders"}
    assert reads.count(NO_OWNER) == 30, "while something is paused, its end is noticed at once"
    Controls(store.of(NO_OWNER)).resume_all()
    assert not controls.read()


def test_a_file_is_always_asked(tmp_path):
    _, _, controls, store = counted(tmp_path, remote=False)
    assert not controls.read()
    Controls(store.of(NO_OWNER)).pause(Scope.QUEUE, ["orders"], 5.0)
    assert controls.read().queues == {"orders"}
