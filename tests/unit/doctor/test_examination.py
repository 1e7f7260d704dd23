"""All checks, on a real app with a local broker."""

import re
import time

import pytest

from aztask import App
from aztask.errors import BrokerUnavailable
from aztask.operate.doctor import contradictions, examine, handler_findings
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, RunKey, Start, State, WorkerRecord
from aztask.support.finding import Level
from aztask.testing import emulator


@pytest.fixture
def app(tmp_path):
    (tmp_path / "q.db").touch(mode=0o600)
    url = f"local://{tmp_path}/q.db"
    app = App("shop", broker=url, results=url, events=str(tmp_path / "events"))
    app.task(len)
    yield app
    app.close()


def found(app, *queues, **options):
    """{(subject, check): finding}."""
    return {(each.subject, each.check): each for each in examine(app, queues, **options)}


def test_a_sound_setup_has_no_problem_and_is_not_changed(app, tmp_path):
    findings = found(app, "default")
    assert {each.level for each in findings.values()} <= {Level.OK, Level.WARNING}
    assert findings["app", "app"].text == "shop: 1 task; queues default"
    assert findings["queue default", "exists"].text == "it is created when it is first used"
    assert "can be written" in findings["events", "events"].text
    assert not (tmp_path / "events").exists()
    assert contradictions(app, ["default"]) == []


def test_it_shows_how_much_is_stored(app, tmp_path):
    app.send("len", ["abc"], task_id="a")
    app.results.start([Start(RunKey("b"), "len", "default", 1, "one", "w", 1.0)])
    outcome = Outcome(State.SUCCEEDED, Complete(), at=2.0)
    app.results.record([Finish(RunKey("b"), "one", outcome)])
    findings = found(app, "default")
    assert re.fullmatch(r"the queue file has [1-9][\d,]* bytes", findings["broker", "size"].text)
    text = findings["results", "size"].text
    assert re.fullmatch(r".* holds 2 runs, 1 of them not ended; a file of [1-9][\d,]* bytes", text)
    size = sum(path.stat().st_size for path in (tmp_path / "events").rglob("*.jsonl"))
    assert findings["events", "size"].text == f"1 event files of {size} bytes in {tmp_path}/events"
    assert size > 0


def test_what_is_missing_is_a_warning_with_advice(tmp_path):
    (tmp_path / "q.db").touch(mode=0o600)
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    findings = found(app, "default", named=False)
    assert findings["app", "app"].text.startswith("none was given with -A")
    assert findings["results", "results"].level is Level.WARNING
    assert "AZTASK_RESULTS" in findings["results", "results"].advice
    assert findings["events", "events"].level is Level.OK
    app.close()


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, False),
        ({"signing_keys": ["a key of sixteen bytes"]}, True),
        ({"signing_keys": ["a key of sixteen bytes"], "id_key": "another, of sixteen"}, False),
    ],
)
def test_signing_keys_without_an_id_key_are_a_warning(tmp_path, options, warned):
    app = App("shop", broker=f"local://{tmp_path}/q.db", **options)
    finding = found(app, "default").get(("app", "id-key"))
    assert (finding is not None) is warned
    if finding is not None:
        assert finding.level is Level.WARNING
        assert "AZTASK_ID_KEY" in finding.advice
    app.close()


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, False),
        ({"signing_keys": ["a key of sixteen bytes"]}, True),
        ({"signing_keys": ["a key of sixteen bytes"], "environment": "staging"}, False),
    ],
)
def test_signing_keys_without_an_environment_are_a_warning(tmp_path, options, warned):
    app = App("shop", broker=f"local://{tmp_path}/q.db", **options)
    finding = found(app, "default").get(("app", "environment"))
    assert (finding is not None) is warned
    if finding is not None:
        assert finding.level is Level.WARNING
        assert "AZTASK_ENVIRONMENT" in finding.advice
    app.close()


def test_an_unreachable_broker_is_asked_once(app, monkeypatch):
    asked = []

    def inspector(self):
        asked.append(1)
        raise BrokerUnavailable("nothing answers on port 5671")

    monkeypatch.setattr(LocalBroker, "inspector", inspector)
    findings = found(app, "a", "b", "c")
    assert findings["broker", "answers"].level is Level.PROBLEM
    assert "port" in findings["broker", "answers"].advice
    assert asked == [1]
    assert findings["results", "results"].level is Level.OK, "the other checks go on"


def test_what_two_checks_find_is_said_once(tmp_path, monkeypatch):
    """Without the administration, both permissions are tried on a queue that does not exist."""
    with emulator() as bus:
        closed = bus.connection_string.replace(f":{bus.port};", ":1;")
        monkeypatch.setenv("AZTASK_SERVICEBUS_ADMIN", closed)
        app = App("shop", broker=bus.connection_string)
        said = [str(each) for each in examine(app, ["nosuch"])]
        app.close()
    assert sum("there is no queue 'nosuch'" in each for each in said) == 1
    assert len(said) == len(set(said))


def test_events_that_cannot_be_written_are_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    app = App("shop", broker="local://:memory:", events=str(tmp_path / "file" / "events"))
    finding = found(app, "default")["events", "events"]
    assert finding.level is Level.PROBLEM
    assert "cannot be written" in finding.text
    app.close()


def test_a_priority_that_no_running_worker_serves_is_a_warning(app):
    app.queue("orders", priorities={"high": 4, "low": 1})
    assert ("results", "priorities") not in found(app, "orders"), "no worker runs at all"
    now = time.time()
    app.results.heartbeat(WorkerRecord("w", now, now, ("orders", "orders-low"), 0, 0))
    finding = found(app, "orders")["results", "priorities"]
    assert finding.level is Level.WARNING
    assert finding.text.startswith("no worker serves orders-high: messages of")
    app.results.heartbeat(WorkerRecord("v", now, now, ("orders-high",), 0, 0))
    assert ("results", "priorities") not in found(app, "orders")


# -- handlers of unsigned messages -----------------------------------------------------------------

KEY = "a-key-that-no-attacker-knows-0123456789"


def handling(tmp_path, **options):
    (tmp_path / "q.db").touch(mode=0o600)
    app = App("shop", broker=f"local://{tmp_path}/q.db", **options)
    app.handler(queue="asked", model=dict, unsigned=True, name="shop.asked")(lambda order: None)
    app.handler(queue="silent", model=dict, name="shop.silent")(lambda order: None)
    return app


def unsigned(app):
    return [each for each in handler_findings(app) if each.check == "unsigned"]


def test_with_keys_handlers_of_unsigned_messages_are_listed(tmp_path):
    opted, silent = unsigned(handling(tmp_path, signing_keys=[KEY]))
    assert (opted.level, silent.level) == (Level.OK, Level.WARNING)
    assert opted.text == "handlers take unsigned messages, as the code says: asked"
    assert "no program signs: silent;" in silent.text
    assert "unsigned=True" in silent.advice
    app = handling(tmp_path, signing_keys=[KEY])
    assert set(unsigned(app)) <= set(examine(app, ["default"]))


@pytest.mark.parametrize("options", [{"old_signatures": False}, {"environment": "prod"}])
def test_without_old_signatures_such_a_handler_is_a_problem(tmp_path, options):
    _, silent = unsigned(handling(tmp_path, signing_keys=[KEY], **options))
    assert silent.level is Level.PROBLEM
    assert "unsigned=True" in str(silent.error)


def test_without_keys_handlers_are_no_finding(tmp_path):
    assert unsigned(handling(tmp_path)) == []
