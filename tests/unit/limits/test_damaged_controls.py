"""The control document: what a change of it leaves, which ones are read, and which are damaged."""

import json

import pytest

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import ConfigurationError
from aztask.limits.control import (
    MOST,
    NAME,
    Controls,
    ControlState,
    Pause,
    Reach,
    Scale,
    Scope,
    UnreadableControls,
    scale_of,
)
from aztask.queues.engine import Database
from aztask.stores.records.controls import EntryChange
from aztask.stores.records.local.store import LocalResults

PAUSE = ["queue", "orders", 5.0, "ann@desk"]
SCALE = ["worker", "w1", 4, 5.0, "ann@desk"]


@pytest.fixture
def store(tmp_path):
    database = Database(str(tmp_path / "results.db"))
    yield LocalResults(database).controls
    database.close()


def write(store, **record):
    text = json.dumps({"v": 1, "pauses": [], **record})
    assert store.write([EntryChange(NAME, text.encode())]) != [None]
    return Controls(store)


def test_a_document_is_read(store):
    state = write(store, pauses=[PAUSE], scales=[SCALE]).read()
    assert state.listed() == [Pause(Scope.QUEUE, "orders", 5.0, "ann@desk")]
    assert list(state.scales.values()) == [Scale(Reach.WORKER, "w1", 4, 5.0, "ann@desk")]
    assert state


def changed(record, place, value):
    return [*record[:place], value, *record[place + 1 :]]


@pytest.mark.parametrize(
    "pause",
    [
        PAUSE[:3],
        [*PAUSE, "more"],
        changed(PAUSE, 0, "worker"),
        changed(PAUSE, 1, 7),
        changed(PAUSE, 2, float("inf")),
        changed(PAUSE, 2, float("nan")),
        changed(PAUSE, 2, True),
        changed(PAUSE, 2, "now"),
        changed(PAUSE, 3, None),
    ],
    ids=str,
)
def test_a_damaged_pause_is_an_error(store, pause):
    with pytest.raises(UnreadableControls, match="resume --all"):
        write(store, pauses=[PAUSE, pause]).read()


@pytest.mark.parametrize(
    "scale",
    [
        SCALE[:4],
        changed(SCALE, 0, "task"),
        changed(SCALE, 1, 7),
        changed(SCALE, 2, 0),
        changed(SCALE, 2, MOST + 1),
        changed(SCALE, 2, True),
        changed(SCALE, 2, 4.0),
        changed(SCALE, 3, float("inf")),
        changed(SCALE, 3, False),
        changed(SCALE, 4, None),
    ],
    ids=str,
)
def test_a_damaged_scale_is_an_error(store, scale):
    with pytest.raises(UnreadableControls, match="resume --all"):
        write(store, scales=[SCALE, scale]).read()


@pytest.mark.parametrize("size", [1, MOST])
def test_the_smallest_and_the_largest_scale_are_read(store, size):
    (scale,) = write(store, scales=[changed(SCALE, 2, size)]).read().scales.values()
    assert scale.size == size


def test_a_document_of_a_newer_release_says_so(store):
    with pytest.raises(UnreadableControls, match="newer release"):
        write(store, v=2).read()


def test_what_is_said_of_a_worker_comes_before_its_queues_and_those_before_all():
    everyone = Scale(Reach.ALL, "", 1, 9.0)
    early, late = Scale(Reach.QUEUE, "a", 2, 1.0), Scale(Reach.QUEUE, "b", 3, 2.0)
    one = Scale(Reach.WORKER, "w1", 4, 0.0)
    given = [late, one, everyone, early]
    assert scale_of(given, "w1", ["a", "b"]) is one
    assert scale_of(given, "w2", ["a", "b"]) is late, "of several queues the latest counts"
    assert scale_of(given, "w2", ["a"]) is early
    assert scale_of(given, "w2", ["c"]) is everyone
    assert scale_of([one, early], "w2", ["c"]) is None
    assert [str(each) for each in (everyone, early, one)] == ["all workers", "queue a", "worker w1"]


def test_a_state_is_true_if_anything_is_paused_or_scaled():
    assert not ControlState()
    assert ControlState(versions={"control-tenants-a": "1"})
    assert ControlState(scales={(Reach.ALL, ""): Scale(Reach.ALL, "", 1, 9.0)})
    pause = Pause(Scope.QUEUE, "orders", 5.0)
    assert ControlState({(Scope.QUEUE, "orders"): pause})


def test_resume_all_names_the_tenants_of_every_document(store):
    names = [f"customer={number}" for number in range(40)]
    controls = Controls(store)
    controls.pause(Scope.TENANT, names, 5.0)
    assert len(controls.read().versions) > 5
    assert sorted(each.name for each in controls.resume_all()) == sorted(names)
    assert not controls.read()


def test_of_the_same_name_the_state_that_is_over_the_other_counts():
    mine, theirs = (Pause(Scope.QUEUE, "a", at) for at in (1.0, 2.0))
    other = Pause(Scope.TASK, "t", 3.0)
    over = ControlState({(Scope.QUEUE, "a"): mine}).over(
        ControlState({(Scope.QUEUE, "a"): theirs, (Scope.TASK, "t"): other})
    )
    assert over.listed() == [mine, other]


# -- what is changed, and what stays ---------------------------------------------------------------


def test_a_name_has_1_to_512_printable_characters(store):
    controls = Controls(store)
    (new,) = controls.pause(Scope.TASK, ["x" * 512], 5.0)
    assert controls.read().task_paused(new.name)
    for name in ("", "x" * 513, "a\nb"):
        with pytest.raises(ConfigurationError, match="1 to 512 printable characters"):
            controls.pause(Scope.TASK, [name], 5.0)
    for name in ("x" * 513, "a\nb"):
        with pytest.raises(ConfigurationError, match="1 to 512 printable characters"):
            controls.scale(Reach.WORKER, [name], 4, 5.0, forget=set())
    assert len(controls.read().listed()) == 1
    assert not controls.read().scales


def test_only_workers_that_have_ended_lose_their_concurrency(store):
    controls = Controls(store)
    controls.scale(Reach.ALL, [""], 1, 1.0, forget=set())
    controls.scale(Reach.QUEUE, ["w1"], 2, 2.0, forget=set())
    controls.scale(Reach.WORKER, ["w1", "w2"], 3, 3.0, forget=set())
    (made,) = controls.scale(Reach.WORKER, ["w3"], 4, 4.0, forget={"w1", "", "other"})
    assert (made.size, made.at, "@" in made.by) == (4, 4.0, True)
    left = controls.read().scales
    assert {str(each): each.size for each in left.values()} == {
        "all workers": 1, "queue w1": 2, "worker w2": 3, "worker w3": 4,
    }  # fmt: skip


def test_only_the_named_ones_are_reset(store):
    controls = Controls(store)
    controls.scale(Reach.QUEUE, ["a", "b"], 2, 2.0, forget=set())
    controls.scale(Reach.WORKER, ["a"], 3, 3.0, forget=set())
    assert [str(each) for each in controls.unscale(Reach.QUEUE, ["a"])] == ["queue a"]
    assert [str(each) for each in controls.read().scales.values()] == ["queue b", "worker a"]
    assert controls.unscale(Reach.QUEUE, ["a"]) == []


def test_a_task_and_a_queue_of_one_name_are_paused_apart(store):
    controls = Controls(store)
    controls.pause(Scope.TASK, ["x"], 2.0)
    controls.pause(Scope.QUEUE, ["x"], 2.0)
    controls.pause(Scope.TASK, ["y"], 1.0)
    state = controls.read()
    assert [str(each) for each in state.listed()] == ["task y", "queue x", "task x"]
    assert (state.tasks, state.queues) == ({"x", "y"}, {"x"})
    assert [str(each) for each in controls.resume(Scope.TASK, ["x"])] == ["task x"]
    assert [str(each) for each in controls.read().listed()] == ["task y", "queue x"]


def test_without_anything_paused_the_store_holds_no_document(store):
    controls = Controls(store)
    controls.pause(Scope.TENANT, ["customer=a"], 5.0)
    controls.pause(Scope.TASK, ["x"], 5.0)
    names = [NAME, *controls.read().versions]
    assert None not in store.read(names)
    controls.resume(Scope.TENANT, ["customer=a"])
    controls.resume(Scope.TASK, ["x"])
    assert store.read(names) == [None, None]


def test_documents_are_those_of_every_release(store):
    controls = Controls(store)
    controls.pause(Scope.QUEUE, ["orders"], 5.0)
    controls.scale(Reach.WORKER, ["w1"], 4, 6.0, forget=set())
    controls.pause(Scope.TENANT, ["customer=a"], 7.0)
    (entry,) = store.read([NAME])
    record = json.loads(entry.data)
    assert record["v"] == 1
    assert record["pauses"][0][:3] == ["queue", "orders", 5.0]
    assert record["scales"][0][:4] == ["worker", "w1", 4, 6.0]
    assert [each.value for each in Reach] == ["all", "queue", "worker"]
    (tenants,) = record["tenants"]
    assert tenants == "control-tenants-0", "it is chosen by the SHA-256 of the name"
    (entry,) = store.read([tenants])
    kept = json.loads(entry.data)
    assert (kept["v"], kept["pauses"][0][:3]) == (1, ["tenant", "customer=a", 7.0])
    assert b", " not in entry.data, "as short as it can be: documents have a limit"
    assert record.keys() == {"v", "write", "pauses", "scales", "tenants"}


def test_a_document_that_becomes_too_long_is_refused_and_stays(store):
    controls = Controls(store)
    names = [f"{number}{'x' * 500}" for number in range(200)]
    with pytest.raises(ConfigurationError, match="too much is paused"):
        controls.pause(Scope.TASK, names, 5.0)
    assert not controls.read()
    controls.pause(Scope.TASK, names[:50], 5.0)
    assert len(controls.read().tasks) == 50


@pytest.mark.parametrize("tenants", [5, [1], "text"])
def test_damaged_names_of_tenants_are_an_error(store, tenants):
    with pytest.raises(UnreadableControls, match="resume --all"):
        write(store, tenants=tenants).read()


@pytest.fixture
def owned(tmp_path):
    """The controls of an owner, and those without one, on the same store."""
    owner = Owner("servicebus://shop.servicebus.windows.net", "shop")
    database = Database(str(tmp_path / "results.db"))
    stored = LocalResults(database, owner=owner).controls
    yield Controls(stored), Controls(stored.of(NO_OWNER))
    database.close()


def test_a_pause_without_an_owner_is_taken_over_by_the_one_that_pauses_it_again(owned):
    mine, unowned = owned
    unowned.pause(Scope.QUEUE, ["a", "b"], 1.0)
    (new,) = mine.pause(Scope.QUEUE, ["a", "c"], 2.0)
    assert (new.name, new.at) == ("c", 2.0)
    assert [str(each) for each in unowned.read().listed()] == ["queue b"]
    assert [(each.name, each.at) for each in mine.read().listed()] == [
        ("a", 1.0), ("b", 1.0), ("c", 2.0),
    ]  # fmt: skip
    assert [str(each) for each in mine.read_both()[1].listed()] == ["queue b"]
    assert not unowned.read_both()[1], "without an owner there is nothing beside it"


def test_an_owner_ends_what_has_no_owner_too_and_names_it_once(owned):
    mine, unowned = owned
    mine.pause(Scope.TASK, ["a"], 1.0)
    unowned.pause(Scope.TASK, ["a", "b"], 2.0)
    assert [str(each) for each in mine.resume(Scope.TASK, ["a", "b"])] == ["task a", "task b"]
    assert not mine.read()
    unowned.scale(Reach.ALL, [""], 2, 3.0, forget=set())
    mine.scale(Reach.ALL, [""], 5, 4.0, forget=set())
    assert not unowned.read(), "the owner's own takes its place"
    assert [each.size for each in mine.unscale(Reach.ALL, [""])] == [5]
    unowned.scale(Reach.QUEUE, ["q"], 2, 3.0, forget=set())
    assert [str(each) for each in mine.unscale(None, ())] == ["queue q"]
    unowned.pause(Scope.TASK, ["c"], 2.0)
    assert [str(each) for each in mine.resume_all()] == ["task c"]
    assert not mine.read()
