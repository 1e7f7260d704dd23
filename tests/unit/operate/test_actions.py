"""Every action is counted before it acts, acts on what was counted, and leaves one event."""

import importlib
import inspect
import pkgutil
import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import get_type_hints

import pytest
from recordedruns import record_run

import aztask.operate
from aztask import App, group
from aztask.address.owner import Owner
from aztask.errors import AztaskError, BrokerUnavailable, ConfigurationError, NotFound
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.operate import (
    controls,
    jobs,
    orphans,
    owners,
    queues,
    resharding,
    schedules,
    steps,
    tasks,
    workflows,
)
from aztask.operate.action import Action
from aztask.operate.deadletters import DeadLetters, Selection, actions, mutes
from aztask.operate.explain import explain
from aztask.operate.jobrunner import make_job
from aztask.operate.move.move import move
from aztask.operate.requests import prepare
from aztask.queues.engine import Database
from aztask.settlement import Complete, DeadLetter
from aztask.steps.home import StepHome
from aztask.steps.records import DONE, STEP, StepRecord
from aztask.stores.events.sink import read_events
from aztask.stores.payloads.store import PayloadKind
from aztask.stores.records.base import RunKey, RunningTask, RunRecord, State, WorkerRecord
from aztask.stores.records.local.store import LocalResults
from aztask.workflows.joins import TaskEnd
from aztask.workflows.place import NodePlace


@dataclass
class Shop:
    """An app with a queue, tasks and a schedule; its events are on."""

    app: App
    folder: object
    extra: dict = field(default_factory=dict)
    opened: list = field(default_factory=list)

    def events(self):
        """What operators did."""
        found = read_events(self.folder / "events")
        acted = [each for each in found if each.event == "operator_acted"]
        return sorted(acted, key=lambda each: each.ts)

    def dead(self, *ids, task="shop.add"):
        """Send these and dead-letter them."""
        for task_id in ids:
            self.app.send(task, [1, 2], task_id=task_id)
        receiver = self.app.broker.receiver("default", lease=30.0)
        found = receiver.receive(len(ids), 1.0)
        assert len(found) == len(ids)
        receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in found])

    def letters(self):
        return sorted(each.id for each in DeadLetters(self.app, "default").list())

    def waiting(self):
        return sorted(each.id for each in queues.waiting(self.app, "default"))


@pytest.fixture
def shop(tmp_path):
    place = f"local://{tmp_path}/queues.db"
    app = App(
        "shop", broker=place, results=place, events=str(tmp_path / "events"), payload_threshold=1000
    )

    @app.task
    def add(left, right):
        return left + right

    app.broker.declare("default")
    made = Shop(app, tmp_path)
    yield made
    for each in (*made.opened, app):
        each.close()


@dataclass
class Case:
    """One action that was made and not done.

    * `count`: what it must have counted. `done`: what it must have done, `count` by default.
    * `before`, `after`: a look at the world, and what it must show then.
    * `late`: makes more of what the action would have counted.
    """

    action: Action
    count: int
    look: object
    before: object
    after: object
    done: int | None = None
    late: object = None


# -- queues ----------------------------------------------------------------------------------


def create_queues(shop):
    action = queues.create(shop.app, ["orders", "bulk"], {})
    return Case(action, 2, shop.app.broker.queues, ["default"], ["bulk", "default", "orders"])


def delete_queue(shop):
    shop.dead("a")
    shop.app.send("shop.add", [1, 2])
    return Case(queues.delete(shop.app, "default"), 2, shop.app.broker.queues, ["default"], [])


def purge_queue(shop):
    shop.app.send("shop.add", [1, 2], task_id="a")
    return Case(queues.purge(shop.app, "default"), 1, shop.waiting, ["a"], [])


def move_to_more_shards(shop):
    place = f"local://{shop.folder}/queues.db"
    app = App("shop", broker=place, results=place, events=str(shop.folder / "events"))
    shop.opened.append(app)
    app.queue("parts", shards=2)
    app.broker.declare("parts")
    action = resharding.reshard(app, "parts", 3)
    look = lambda: app.broker.layouts.rows.read("parts").layout.sent.count  # noqa: E731
    return Case(action, 1, look, 2, 3)


# -- tasks -----------------------------------------------------------------------------------


def states(shop, *ids):
    return lambda: [shop.app.result(each).state for each in ids]


def cancel_by_id(shop):
    shop.app.send("shop.add", [1, 2], task_id="waits")
    record_run(shop.app, RunKey("over"), State.SUCCEEDED, Complete())
    action = tasks.cancel(shop.app, ["waits", "over", "unknown"])
    look = states(shop, "waits", "over")
    return Case(action, 2, look, ["pending", "succeeded"], ["cancelled", "succeeded"])


def cancel_by_name(shop):
    shop.app.send("shop.add", [1, 2], task_id="a")
    shop.app.send("shop.other", [1, 2], task_id="b")

    def late():
        shop.app.send("shop.add", [1, 2], task_id="c")

    action = tasks.cancel_chosen(shop.app, tasks.Chosen("shop.add"))
    look = states(shop, "a", "b", "c")
    return Case(action, 1, look, ["pending"] * 3, ["cancelled", "pending", "pending"], late=late)


# -- controls --------------------------------------------------------------------------------


def paused(shop):
    return lambda: sorted(map(str, controls.controls(shop.app).pauses))


def pause(shop):
    names = controls.Names(["default", "bulk"], ["shop.add"])
    shop.app.broker.declare("bulk")
    controls.pause(shop.app, controls.Names(["bulk"])).controls.pause(
        controls.Scope.QUEUE, ["bulk"], 5.0
    )
    return Case(
        controls.pause(shop.app, names),
        2,
        paused(shop),
        ["queue bulk"],
        ["queue bulk", "queue default", "task shop.add"],
    )


def resume(shop):
    controls.pause(shop.app, controls.Names(["default"], ["shop.add"])).act(by="before")
    Breakers(shop.app.results.controls).open(
        OpenBreaker("shop.add", time.time(), time.time() + 60.0, "w", "6 of 10 failed")
    )
    action = controls.resume(shop.app, controls.Names(["other"], ["shop.add"]))
    return Case(action, 2, paused(shop), ["queue default", "task shop.add"], ["queue default"])


def resume_all(shop):
    controls.pause(shop.app, controls.Names(["default"], ["shop.add"])).act(by="before")
    action = controls.resume_all(shop.app)
    return Case(action, 2, paused(shop), ["queue default", "task shop.add"], [])


def scale(shop):
    def look():
        return [(str(each), each.size) for each in controls.controls(shop.app).scales]

    action = controls.scale(shop.app, 3, queues=["default"])
    return Case(action, 1, look, [], [("queue default", 3)])


def change_limit(shop):
    def look():
        return [(str(each), each.numbers) for each in controls.controls(shop.app).limits]

    shop.app.limit("api", rate="10/s", concurrency=3)
    action = controls.change_limit(shop.app, "api", rate="5/s", concurrency=1)
    return Case(action, 1, look, [], [("limit api", "rate 5/1s, concurrency 1")])


# -- schedules -------------------------------------------------------------------------------


def scheduled(shop):
    """Start the schedule, as a worker does."""
    shop.app.schedule("often", shop.app.tasks["shop.add"].s(1, 2), every=60)
    runner = shop.app.schedules.runner("worker")
    runner.turn()
    runner._look_at = 0.0
    runner.turn()


def state_of_schedule(shop):
    return lambda: schedules.schedule(shop.app, "often", 5).schedule.state


def pause_schedule(shop):
    scheduled(shop)
    action = schedules.pause(shop.app, "often")
    return Case(action, 1, state_of_schedule(shop), "active", "paused")


def resume_schedule(shop):
    scheduled(shop)
    schedules.pause(shop.app, "often").act(by="before")
    action = schedules.resume(shop.app, "often")
    return Case(action, 1, state_of_schedule(shop), "paused", "active")


def trigger_schedule(shop):
    scheduled(shop)
    action = schedules.trigger(shop.app, "often")
    return Case(action, 1, lambda: len(shop.waiting()), 0, 1)


def backfill_schedule(shop):
    scheduled(shop)
    end = datetime.now(UTC).replace(second=30, microsecond=0) - timedelta(minutes=5)
    action = schedules.backfill(shop.app, "often", end - timedelta(minutes=3), end)
    return Case(action, 3, lambda: len(shop.waiting()), 0, 3)


# -- workflows -------------------------------------------------------------------------------


def cancel_workflow(shop):
    group([shop.app.tasks["shop.add"].s(1, 2)]).delay(workflow_id="w")

    def look():
        return workflows.workflow(shop.app, "w").root.cancelled_at is not None

    return Case(workflows.cancel(shop.app, "w"), 1, look, False, True)


def resume_workflow(shop):
    members = [shop.app.tasks["shop.add"].s(1, each) for each in range(2)]
    group(members).delay(workflow_id="w")
    receiver = shop.app.broker.receiver("default", lease=30.0)
    found = receiver.receive(2, 1.0)
    receiver.settle([(found[0], DeadLetter("rejected", "no stock"))])
    task_id = str(found[0].envelope.headers["id"])
    engine = shop.app.workflows.engine
    plan = engine.graphs.plan("w")
    node = next(each for each in plan.nodes if each.task and task_id == f"w.{each.number}")
    end = TaskEnd("w", NodePlace.of(plan, node), 0, State.FAILED, b"", "ValueError", "no stock")
    engine.joins.ended([end])
    return Case(workflows.resume(shop.app, "w"), 1, shop.letters, [task_id], [])


# -- dead letters ----------------------------------------------------------------------------


def replay(shop):
    shop.dead("a", "b")
    action = actions.replay(shop.app, (), Selection(everything=True))
    return Case(action, 2, shop.letters, ["a", "b"], ["late"], late=lambda: shop.dead("late"))


def replay_counted(shop):
    shop.dead("a", "b")
    action = actions.replay_counted(
        shop.app, {"default": (Selection(ids={"a"}), 1), "other": (Selection(ids={"a"}), 0)}
    )
    return Case(action, 1, shop.letters, ["a", "b"], ["b"])


def replay_by_id(shop):
    shop.dead("a", "b")
    action = actions.replay_by_id(shop.app, {"default": {"a", "x"}})
    return Case(action, 1, shop.letters, ["a", "b"], ["b"])


def purge(shop):
    shop.dead("a", "b")
    action = actions.purge(shop.app, ["default"], Selection(reason="rejected"))
    return Case(action, 2, shop.letters, ["a", "b"], ["late"], late=lambda: shop.dead("late"))


# -- the rest --------------------------------------------------------------------------------


def adopt(shop):
    theirs = Owner("local://elsewhere", "shop")
    store = LocalResults(Database(f"{shop.folder}/queues.db"), owner=theirs)
    now = time.time()
    store.heartbeat(WorkerRecord("w", now, now, ("default",), 0, 0, broker=theirs.broker))
    record = App("shop", broker=f"local://{shop.folder}/other.db", results=store)
    record_run(record, RunKey("a"), State.SUCCEEDED, Complete())
    record.close()
    action = owners.adoption(shop.app, theirs.broker)

    def look():
        return theirs.broker in {
            each.broker for each in owners.owners_of(shop.app, shop.app.results)
        }

    return Case(action, 1, look, True, False)


def move_app(shop):
    for number in range(2):
        shop.app.send("shop.add", [number, 1])
    there = shop.app.at(f"local://{shop.folder}/new.db")
    shop.opened.append(there)

    def look():
        return [each.broker.stats("default").living for each in (shop.app, there) if _made(each)]

    def _made(app):
        return "default" in app.broker.queues()

    return Case(
        move(shop.app, there), 2, look, [2], [0, 3], 3, lambda: shop.app.send("shop.add", [1, 1])
    )


def reset_steps(shop):
    store = StepHome(shop.app).store()
    for number, name in enumerate(("one", "two", "three"), 1):
        record = StepRecord(STEP, DONE, name, "", "1", False, number, b"", 1.8e9)
        store.write("a", "0", record, None)
    action = steps.reset(shop.app, "a", "two")
    return Case(action, 2, lambda: len(store.read("a", "0")), 3, 1)


def send_signal(shop):
    shop.app.results.expect([RunRecord(RunKey("a"), "shop.work", "default", State.PENDING)])
    store = shop.app.sends.signals.store
    action = steps.signal(shop.app, "a", "approved", 7)
    return Case(action, 1, lambda: len(store.read("a").signals), 0, 1)


def collect(shop):
    shop.app.payloads.keep(PayloadKind.ARGUMENTS, b"x" * 2000)
    action = orphans.collect(shop.app, shop.app.payloads, time.time() + 3 * 3600.0)
    return Case(action, 1, lambda: len(list(shop.app.payloads.store.list())), 1, 0)


def edit(shop):
    shop.dead("a", "b")
    return Case(
        actions.edit(shop.app, "default", "a", [3, 4], {}), 1, shop.letters, ["a", "b"], ["b"]
    )


def cancel_job(shop):
    shop.dead("a")
    values = {"queue": "default", "all": "yes"}
    prepared = prepare(shop.app, "replay", values)
    key = make_job(prepared, "replay", values, by="ann", via="page")
    action = jobs.cancel(shop.app, key)
    return Case(action, 1, lambda: jobs.job(shop.app, key).state, "open", "cancelled")


def muted(shop):
    return lambda: len(mutes.mutes(shop.app).by_key)


def mute_group(shop):
    shop.dead("a")
    action = mutes.mute(shop.app, "default", "shop.add", "rejected", "no stock")
    return Case(action, 1, muted(shop), 0, 1)


def unmute_group(shop):
    mute_group(shop).action.act()
    action = mutes.unmute(shop.app, "default", "shop.add", "rejected", "no stock")
    return Case(action, 1, muted(shop), 1, 0)


CASES = {
    "controls.pause": pause,
    "controls.resume": resume,
    "controls.resume_all": resume_all,
    "controls.change_limit": change_limit,
    "controls.scale": scale,
    "steps.reset": reset_steps,
    "steps.signal": send_signal,
    "deadletters.actions.edit": edit,
    "deadletters.actions.purge": purge,
    "deadletters.actions.replay": replay,
    "deadletters.actions.replay_by_id": replay_by_id,
    "deadletters.actions.replay_counted": replay_counted,
    "deadletters.mutes.mute": mute_group,
    "deadletters.mutes.unmute": unmute_group,
    "jobs.cancel": cancel_job,
    "move.move.move": move_app,
    "orphans.collect": collect,
    "owners.adoption": adopt,
    "queues.create": create_queues,
    "queues.delete": delete_queue,
    "queues.purge": purge_queue,
    "resharding.reshard": move_to_more_shards,
    "schedules.backfill": backfill_schedule,
    "schedules.pause": pause_schedule,
    "schedules.resume": resume_schedule,
    "schedules.trigger": trigger_schedule,
    "tasks.cancel": cancel_by_id,
    "tasks.cancel_chosen": cancel_by_name,
    "workflows.cancel": cancel_workflow,
    "workflows.resume": resume_workflow,
}


def functions():
    """Every public function of the layer, by module and name; what draws it is no part of it."""
    package = aztask.operate
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if info.name.startswith(("aztask.operate.cli", "aztask.operate.top")):
            continue
        module = importlib.import_module(info.name)
        for name, each in vars(module).items():
            if inspect.isfunction(each) and each.__module__ == info.name and name[0] != "_":
                yield f"{info.name.removeprefix('aztask.operate.')}.{name}", each


def is_action(function):
    returned = get_type_hints(function, vars(inspect.getmodule(function))).get("return")
    return inspect.isclass(returned) and issubclass(returned, Action)


def leaves(kind):
    below = kind.__subclasses__()
    return {each for sub in below for each in leaves(sub)} if below else {kind}


def test_every_action_of_the_layer_has_a_case():
    found = {name: each for name, each in functions() if is_action(each)}
    assert found.keys() == CASES.keys()
    kinds = {get_type_hints(each)["return"] for each in found.values()}
    ours = {each for each in leaves(Action) if each.__module__.startswith("aztask.operate.")}
    assert kinds == ours
    names = {kind.name for kind in kinds}
    assert {"replay", "purge", "cancel", "pause", "resume", "scale", "adopt"} <= names


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_action_is_counted_done_and_written_down(shop, name):
    case = CASES[name](shop)
    before = len(shop.events())
    assert case.action.count == case.count > 0
    assert (case.action.done, case.look()) == (0, case.before), "counting changes nothing"
    assert len(shop.events()) == before
    if case.late is not None:
        case.late()
    case.action.act(by="ann@desk")
    assert case.look() == case.after
    assert case.action.done == (case.count if case.done is None else case.done)
    (event,) = shop.events()[before:]
    assert (event.by, event.action) == ("ann@desk", case.action.name)
    assert (event.selected, event.done) == (case.count, case.action.done)
    assert (event.reason, event.error_type) == (str(case.action), None)
    assert abs(event.ts - time.time()) < 600


def purge_everything(shop):
    shop.dead("a", "b")
    return actions.purge(shop.app, ["default"], Selection(everything=True))


@pytest.mark.parametrize(
    "make",
    [purge, replay, replay_by_id, purge_everything],
)
def test_an_action_says_whether_it_keeps_to_what_was_counted(shop, make):
    made = make(shop)
    action = made.action if isinstance(made, Case) else made
    before = action.count
    shop.dead("late")
    action.act(by="ann@desk")
    assert ("late" in shop.letters()) is action.exact
    assert action.done == before + (not action.exact)


@pytest.mark.parametrize("make", [delete_queue, purge_queue])
def test_an_action_on_a_whole_queue_is_not_exact(shop, make):
    assert not make(shop).action.exact


def test_what_failed_is_written_down_with_what_was_done(shop, monkeypatch):
    for task_id in ("a", "b", "c"):
        shop.app.send("shop.add", [1, 2], task_id=task_id)
    action = tasks.cancel_chosen(shop.app, tasks.Chosen("shop.add"))
    cancel, seen = shop.app.results.cancel, []

    def fails(task_id, at, *, running):
        seen.append(task_id)
        if len(seen) == 2:
            raise BrokerUnavailable("the store is gone")
        return cancel(task_id, at, running=running)

    monkeypatch.setattr(shop.app.results, "cancel", fails)
    with pytest.raises(BrokerUnavailable):
        action.act(by="ann@desk")
    (event,) = shop.events()
    assert (event.selected, event.done) == (3, 1)
    assert (event.error_type, event.error) == ("BrokerUnavailable", "the store is gone")


def test_an_interruption_is_written_down(shop):
    shop.dead("a", "b")
    action = actions.replay(shop.app, (), Selection(everything=True), rate=1.0)

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        action.act(progress=stop)
    (event,) = shop.events()
    assert (event.error_type, event.selected, event.done) == ("KeyboardInterrupt", 2, 1)
    assert action.report.done == 1
    assert "@" in event.by


def test_without_events_nothing_is_written(tmp_path):
    place = f"local://{tmp_path}/queues.db"
    app = App("shop", broker=place, results=place)
    app.broker.declare("default")
    queues.purge(app, "default").act()
    app.close()
    assert not list(tmp_path.rglob("*.jsonl"))


def test_listeners_of_the_app_get_the_event(shop):
    heard = []
    shop.app.on_event(heard.append)
    queues.purge(shop.app, "default").act(by="ann@desk")
    assert [(each.event, each.by, each.queue) for each in heard] == [
        ("operator_acted", "ann@desk", "default")
    ]


def test_one_task_is_explained_with_what_was_done_to_it(shop):
    shop.app.send("shop.add", [1, 2], task_id="a")
    tasks.cancel(shop.app, ["a"]).act(by="ann@desk")
    texts = [each.text for each in explain(shop.app, "a").entries]
    assert "ann@desk said: cancel a" in texts


def test_what_does_not_exist_is_not_counted(shop):
    for ask in (
        lambda: schedules.pause(shop.app, "nothing"),
        lambda: workflows.cancel(shop.app, "nothing"),
        lambda: tasks.cancel_chosen(shop.app, tasks.Chosen("shop.ad")),
        lambda: controls.pause(shop.app, controls.Names(tenants=["nothing=a"])),
    ):
        with pytest.raises(NotFound):
            ask()
    with pytest.raises(AztaskError, match="no worker"):
        controls.scale(shop.app, 3, workers=["nobody"])
    assert shop.events() == []


def test_a_worker_that_runs_is_scaled_and_its_tasks_are_cancelled(shop):
    now = time.time()
    task = RunningTask("runs", "shop.add", "default", now)
    shop.app.results.heartbeat(WorkerRecord("w", now, now, ("default",), 1, 0, tasks=(task,)))
    assert controls.scale(shop.app, 3, workers=["w"]).count == 1
    assert tasks.cancel_chosen(shop.app, tasks.Chosen("shop.add", running=True)).count == 1


def test_signed_rows_are_adopted_with_keys_alone(tmp_path):
    """Without them, no worker would believe the rows: a signed note says that they were adopted."""
    keys = ["a-key-that-no-attacker-knows-0123456789"]

    def opened(owner, **options):
        places = {"broker": f"local://{tmp_path}/{owner}.db", "results": f"local://{tmp_path}/r.db"}
        return closing(App("shop", owner=owner, **places, **options))

    with opened("old", signing_keys=keys) as old, opened("new") as keyless:
        record_run(old, RunKey("a"), State.SUCCEEDED, Complete())
        with pytest.raises(ConfigurationError, match=r"are signed.*Set AZTASK_SIGNING_KEYS"):
            owners.adoption(keyless, "old")
        with opened("new", signing_keys=keys) as new:
            assert owners.adoption(new, "old").act() >= 1
            assert new.result("a").state == "succeeded"
