"""What waits in a result store is signed for its place there: it cannot be sent before its turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aztask import App, chain, chord
from aztask.errors import BrokerUnavailable, CodecError, ContentRefused
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.headers import STORED_ONLY
from aztask.message.message import TaskMessage
from aztask.message.signatures import STORED
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.schedules.stored import read_schedule
from aztask.schedules.template import SPEC
from aztask.stores.records.damage import Damaged
from aztask.stores.records.workflows import DocumentChange
from aztask.support.clock import SYSTEM_CLOCK
from aztask.uniqueness.engine import read_claim
from aztask.workflows.graph import DELAY, EXPIRES, Graphs, pack_messages, read_messages
from aztask.workflows.repair import Repair
from aztask.workflows.starting import WorkflowLauncher

KEY = "a-key-that-no-attacker-knows-0123456789"
QUEUE = "default"


def make(**options: Any) -> App:
    options = {"results": "local://:memory:", **options}
    app = App("shop", broker="local://:memory:", **options)
    app.task(name="shop.approve")(lambda: None)
    app.task(name="shop.ship")(lambda *order: None)
    app.task(name="shop.one", unique="arguments")(lambda order: None)
    app.task(name="shop.late", unique="arguments", debounce=60.0)(lambda order: None)
    return app


@pytest.fixture(params=[True, False], ids=["old too", "new only"])
def shop(request: pytest.FixtureRequest) -> Iterator[App]:
    with closing(make(signing_keys=[KEY], old_signatures=request.param)) as app:
        yield app


def of_workflow(app: App) -> Envelope:
    chain(app.tasks["shop.approve"].si(), app.tasks["shop.ship"].si()).delay(workflow_id="w")
    return step(app, "w", 1)


def of_chord_body(app: App) -> Envelope:
    members = [app.tasks["shop.approve"].si(), app.tasks["shop.approve"].si()]
    chord(members, app.tasks["shop.ship"].s()).delay(workflow_id="w")
    root = app.workflows.engine.graphs.root("w")
    assert root is not None
    plan = app.workflows.engine.graphs.plan("w", root)
    assert plan is not None
    (node,) = [each.number for each in plan.nodes if each.task == "shop.ship"]
    return step(app, "w", node)


def step(app: App, workflow: str, node: int) -> Envelope:
    graphs: Graphs = app.workflows.engine.graphs
    root = graphs.root(workflow)
    assert root is not None
    return graphs.messages(workflow, root, [node])[node][1]


def of_schedule(app: App) -> Envelope:
    app.schedules.create("nightly", app.tasks["shop.ship"].si(), every=3600)
    kept = app.results.schedules.read("shop.nightly")  # type: ignore[union-attr]
    return envelope_of(read_schedule(kept.head.data).template)


def of_unique_task(app: App) -> Envelope:
    """As it lies there until it is sent."""
    rules, engine = app.tasks["shop.one"].unique, app.unique_engine("shop.one")
    assert rules is not None
    engine.take(rules, "key", TaskMessage("t1", "shop.one", QUEUE, b"\x93\x90\x80\x80"), 0.0)
    return held(app)


def of_debounced_task(app: App) -> Envelope:
    app.tasks["shop.late"].delay(1)
    return held(app)


def held(app: App) -> Envelope:
    store = app.results.uniques  # type: ignore[union-attr]
    holders = store.due(store.now() + 1e6, 5)
    (payload,) = filter(None, (read_claim(each.data).payload for each in holders))
    for each in holders:
        store.release(each)
    return envelope_of(payload)


PLACES = [of_workflow, of_chord_body, of_schedule, of_unique_task, of_debounced_task]


@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.__name__)
def test_no_queue_accepts_what_is_stored(shop: App, place: Callable[[App], Envelope]) -> None:
    stored = place(shop)
    with pytest.raises(ContentRefused, match="signed to be stored, and not to be sent"):
        shop.codec.from_envelope(stored, QUEUE, any_age=True)
    bare = replace(stored, content_type=stored.content_type.partition(";")[0])
    for changed in (bare, replace(bare, headers={**bare.headers, "aztask-signature-2": ""})):
        with pytest.raises(CodecError):
            shop.codec.from_envelope(changed, QUEUE, any_age=True)


def test_a_stored_message_lies_in_its_own_place_alone(shop: App) -> None:
    stored = of_workflow(shop)
    assert shop.codec.from_envelope(stored, QUEUE, stored="workflow w, node 1").workflow == "w"
    for other in ("workflow w, node 0", "workflow v, node 1", "schedule w"):
        with pytest.raises(ContentRefused, match=f"another place than that of {other}"):
            shop.codec.from_envelope(stored, QUEUE, stored=other)


def test_what_was_sent_is_stored_by_releases_before_alone(shop: App) -> None:
    """Such a release signs alike what it stores and what it sends."""
    shop.tasks["shop.ship"].delay(1)
    (sent,) = shop.broker.peek(QUEUE)
    if shop.settings.old_signatures:
        read = shop.codec.from_envelope(sent.envelope, QUEUE, stored="workflow w, node 1")
        assert read.task == "shop.ship"
    else:
        with pytest.raises(ContentRefused, match=r"not signed to be stored; a release before 0\.2"):
            shop.codec.from_envelope(sent.envelope, QUEUE, stored="workflow w, node 1")


def test_headers_of_stored_messages_alone() -> None:
    assert {SPEC, DELAY, EXPIRES} == STORED_ONLY


@pytest.mark.parametrize("header", sorted(STORED_ONLY))
def test_no_queue_accepts_what_only_a_stored_message_has(shop: App, header: str) -> None:
    """A release before 0.2 has signed it as it signed what it sent."""
    message = TaskMessage("t1", "shop.ship", QUEUE, b"\x93\x90\x80\x80", extra={header: 1})
    for codec in (shop.codec, Codec()):
        with pytest.raises(ContentRefused, match="made to be stored, and not to be sent"):
            codec.from_envelope(codec.to_envelope(message), QUEUE, any_age=True)


def test_the_schedule_of_an_old_release_is_no_occurrence(shop: App) -> None:
    shop.schedules.create("nightly", shop.tasks["shop.ship"].si(), every=3600)
    kept = shop.results.schedules.read("shop.nightly")  # type: ignore[union-attr]
    stored = Codec().from_envelope(envelope_of(read_schedule(kept.head.data).template), QUEUE,
                                   stored="schedule shop.nightly")  # fmt: skip
    with pytest.raises(ContentRefused, match="made to be stored, and not to be sent"):
        shop.codec.from_envelope(shop.codec.to_envelope(stored), QUEUE)


@pytest.mark.parametrize("state", ["active", "paused"])
def test_workers_sign_a_schedule_of_an_old_release_anew_where_it_lies(state: str) -> None:
    """Old signatures can be refused then, although the schedule lies there for years."""
    with (
        closing(make(signing_keys=[KEY])) as app,
        closing(make(signing_keys=[KEY], old_signatures=False, results=app.results)) as strict,
    ):
        app.schedules.create("nightly", app.tasks["shop.ship"].si(1), every=3600)
        if state == "paused":
            app.schedules.pause("nightly")
        engine = app.schedules.engine
        view = engine.view("shop.nightly")
        assert view is not None
        message = engine.definition(view).message
        old = app.codec.to_envelope(replace(message, extra={SPEC: engine.definition(view).spec}))
        before = replace(view.schedule, template=payload_of(old))
        assert engine.commit(view, before, ()) is not None
        with pytest.raises(ContentRefused, match="not signed to be stored"):
            strict.schedules.engine.definition(strict.schedules.engine.view("shop.nightly"))
        app.schedules.runner("w1").turn()
        after = engine.view("shop.nightly")
        assert after is not None
        assert STORED.encode() in after.schedule.template
        assert replace(after.schedule, template=b"") == replace(before, template=b"")
        assert strict.schedules.engine.definition(after).message.task == "shop.ship"
        app.schedules.runner("w2").turn()
        assert engine.view("shop.nightly").tag == after.tag, "once"  # type: ignore[union-attr]


def test_a_schedule_with_a_wrong_signature_is_not_signed_anew() -> None:
    with (
        closing(make(signing_keys=[KEY])) as app,
        closing(make(signing_keys=["another-key-0123456789"], results=app.results)) as other,
    ):
        app.schedules.create("nightly", app.tasks["shop.ship"].si(1), every=3600)
        engine = app.schedules.engine
        view = engine.view("shop.nightly")
        assert view is not None
        message = engine.definition(view).message
        old = app.codec.to_envelope(replace(message, extra={SPEC: engine.definition(view).spec}))
        before = replace(view.schedule, template=payload_of(old))
        assert engine.commit(view, before, ()) is not None
        with suppress(CodecError):
            other.schedules.runner("w1").turn()
        after = engine.view("shop.nightly")
        assert after is not None
        assert after.schedule.template == before.template


SIGNING_ANEW = {
    "aztask/schedules/engine.py": "test_a_schedule_with_a_wrong_signature_is_not_signed_anew",
    "aztask/schedules/runner.py": "test_a_schedule_with_a_wrong_signature_is_not_signed_anew",
    "aztask/stores/records/controls.py": "test_adopted_entries_are_signed_anew",
    "aztask/workflows/mailing.py": "test_nothing_that_was_refused_is_signed_anew",
    "aztask/workflows/repair.py": "test_signing_anew_is_tried_again_until_it_has_succeeded",
}
"""What signs again something that it has read, and the test that it signs nothing it refused."""


def test_every_place_that_signs_anew_is_tested() -> None:
    root = Path(__file__).parents[3]
    found = {
        str(path.relative_to(root))
        for path in (root / "aztask").rglob("*.py")
        if re.search(r"def _?sign(ed)?_anew", path.read_text())
    }
    assert found == set(SIGNING_ANEW)
    tests = "".join(
        path.read_text()
        for path in (Path(__file__), *(root / "tests" / "contract").glob("*signed.py"))
    )
    assert all(f"def {name}(" in tests for name in SIGNING_ANEW.values())


def workflow_of_an_old_release(path: str) -> None:
    """A workflow whose steps are signed as they would be sent, and whose rows are not signed."""
    with (
        closing(make(signing_keys=[KEY], results=path, owner="one")) as app,
        closing(make(results=path, owner="one")) as old,
    ):
        of_workflow(app)
        store = old.workflows.engine.store
        root = app.workflows.engine.graphs.root("w")
        assert root is not None
        names = [f"part-{root.token}-0", f"plan-{root.token}", "root"]
        part, plan, head = store.read([("w", name) for name in names])
        assert part is not None and plan is not None and head is not None
        before = [
            (node, queue, app.codec.to_envelope(Codec().from_envelope(each, queue, stored="any")))
            for node, queue, each in read_messages(part.data)
        ]
        changes = [pack_messages(before), plan.data, head.data]
        tags = [each.tag for each in (part, plan, head)]
        found = [DocumentChange("w", *each) for each in zip(names, changes, tags, strict=True)]
        assert None not in store.write(found)


def repair_of(app: App) -> Repair:
    """What looks after open workflows in a worker."""
    engine = app.workflows.engine
    starter = WorkflowLauncher(engine, app.broker, app.codec, SYSTEM_CLOCK)
    return Repair(engine, starter, app.broker, SYSTEM_CLOCK, app.tasks)


def look(app: App) -> None:
    repair_of(app).look()


def test_workers_sign_a_workflow_of_an_old_release_anew_where_it_lies(tmp_path: Path) -> None:
    """Old signatures can be refused then, although the workflow waits for years."""
    path = f"local://{tmp_path}/results.db"
    workflow_of_an_old_release(path)

    def strict() -> App:
        return make(signing_keys=[KEY], old_signatures=False, results=path, owner="one")

    with closing(strict()) as app, pytest.raises(Damaged):
        app.workflows.engine.graphs.root("w")
    with closing(make(signing_keys=[KEY], results=path, owner="one")) as app:
        assert STORED not in step(app, "w", 1).content_type
        (sent,) = app.workflows.engine.store.read([("w", "root")])
        look(app)
        assert STORED in step(app, "w", 1).content_type
        (signed,) = app.workflows.engine.store.read([("w", "root")])
        assert sent is not None and signed is not None and sent.data == signed.data
        look(app)
        assert app.workflows.engine.store.read([("w", "root")]) == [signed], "once"
    with closing(strict()) as app:
        engine = app.workflows.engine
        root = engine.graphs.root("w")
        assert root is not None
        assert engine.mailer.send("w", root, [(2, 0)]) == []
        (message,) = app.broker.peek(QUEUE)
        assert app.codec.from_envelope(message.envelope, QUEUE).task == "shop.ship"


def test_a_step_with_a_wrong_signature_is_not_signed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"local://{tmp_path}/results.db"
    workflow_of_an_old_release(path)
    with closing(make(signing_keys=["another-key-0123456789"], results=path, owner="one")) as app:
        look(app)
        assert STORED not in step(app, "w", 1).content_type
        assert "workflow w is not signed anew: " in caplog.text


class Interrupted:
    """Fails the first writes of a store's documents, as an outage or another writer does."""

    def __init__(self, store: Any, failures: list[Any]) -> None:
        self._write, self._failures = store.write, failures
        store.write = self

    def __call__(self, changes: Any) -> Any:
        if not self._failures:
            return self._write(changes)
        failure = self._failures.pop(0)
        if isinstance(failure, Exception):
            raise failure
        return failure


@pytest.mark.parametrize("failure", [BrokerUnavailable("away"), [None, None, None]])
def test_signing_anew_is_tried_again_until_it_has_succeeded(tmp_path: Path, failure: Any) -> None:
    path = f"local://{tmp_path}/results.db"
    workflow_of_an_old_release(path)
    with closing(make(signing_keys=[KEY], results=path, owner="one")) as app:
        Interrupted(app.workflows.engine.store, [failure])
        repair = repair_of(app)
        with suppress(BrokerUnavailable):
            repair.look()
        assert STORED not in step(app, "w", 1).content_type
        repair.look()
        assert STORED in step(app, "w", 1).content_type


def test_what_a_worker_sends_from_the_store_is_signed_for_its_queue(shop: App) -> None:
    shop.schedules.create("nightly", shop.tasks["shop.ship"].si(), every=3600)
    shop.schedules.trigger("nightly")
    of_workflow(shop)
    sent = shop.broker.peek(QUEUE)
    assert sorted(shop.codec.from_envelope(each.envelope, QUEUE).task for each in sent) == [
        "shop.approve", "shop.ship",
    ]  # fmt: skip
    assert not any(STORED in each.envelope.content_type for each in sent)


def test_without_keys_nothing_has_a_place() -> None:
    with closing(make()) as app:
        for place in PLACES[2:]:
            assert STORED not in place(app).content_type


# -- environments ----------------------------------------------------------------------------------


def test_messages_of_another_environment_are_refused() -> None:
    with (
        closing(make(signing_keys=[KEY], environment="staging")) as staging,
        closing(make(signing_keys=[KEY], environment="production")) as production,
        closing(make(signing_keys=[KEY])) as nowhere,
    ):
        apps = (staging, production, nowhere)
        for sender in apps:
            sender.tasks["shop.ship"].delay(1)
            (sent,) = sender.broker.peek(QUEUE)
            for reader in apps:
                if reader is sender:
                    assert reader.codec.from_envelope(sent.envelope, QUEUE).task == "shop.ship"
                else:
                    with pytest.raises(ContentRefused):
                        reader.codec.from_envelope(sent.envelope, QUEUE)
        stored = of_workflow(staging)
        with pytest.raises(ContentRefused):
            production.codec.from_envelope(stored, QUEUE, stored="workflow w, node 1")


def test_the_environment_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZTASK_ENVIRONMENT", "staging")
    with closing(make(signing_keys=[KEY])) as app:
        assert app.settings.environment == "staging"
