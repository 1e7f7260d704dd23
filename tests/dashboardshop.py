"""An app with something of everything, whose every text is an attack, and its dashboard."""

import re
import time
from dataclasses import dataclass, field

import pytest
from starlette.testclient import TestClient

from aztask import App, chord, group
from aztask.dashboard.access import Account, Logins, hash_password
from aztask.dashboard.server import Dashboard
from aztask.dashboard.site import Site
from aztask.operate import controls, jobs
from aztask.operate.jobrunner import make_job
from aztask.operate.requests import Role, prepare
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.backlogs import Backlogs
from aztask.stores.records.base import (
    Finish,
    Outcome,
    RunKey,
    RunningTask,
    Start,
    State,
    WorkerRecord,
)
from aztask.stores.records.history import history_of
from aztask.stores.records.tallies import HOUR, SLOT, Author, Hour, Tally, bucket_of

PAYLOAD = """<script>alert(1)</script>"'><img src=x onerror=alert(2)>{{7*7}}\x1b[31m\u202e"""
"""Markup, ends of attributes, a template, a terminal code and a change of direction."""
TAGS = PAYLOAD.split("\x1b", maxsplit=1)[0]
"""The part of it that may be in an id or a name of ours."""
MODULE = """
from aztask import App

app = App("shop", broker={place!r}, results={place!r})


@app.task
def add(left, right):
    return left + right
"""
"""The same app as a module, for programs that open it at the place of the other."""
PASSWORD = "correct horse"
_HASH = hash_password(PASSWORD)


@dataclass
class Shop:
    """An app and its dashboard. `client` is not logged in; `as_` logs in."""

    app: App
    site: Site
    access: Logins
    entra: object = None
    made: list = field(default_factory=list)

    def client(self, host="testserver"):
        application = Dashboard(self.site, self.access, 0.05, self.entra).application(
            ["testserver"]
        )
        found = TestClient(application, base_url=f"http://{host}", follow_redirects=False)
        self.made.append(found)
        return found

    def as_(self, name):
        found = self.client()
        given = {"name": name, "password": PASSWORD}
        answer = found.post("/login", data=given, headers={"origin": "http://testserver"})
        assert answer.status_code == 303, answer.text
        return found


@pytest.fixture
def shop(tmp_path):
    place = f"local://{tmp_path}/queues.db"
    app = App("shop", broker=place, results=place, events=str(tmp_path / "events"))

    @app.task
    def add(left, right):
        """Add two numbers."""
        return left + right

    app.limit("api", rate="10/s", concurrency=3)
    app.schedule("nightly", add.s(1, 2), every=3600)
    app.broker.declare("default")
    accounts = {name: Account(Role.named(name), _HASH) for name in ("read", "act", "configure")}
    found = Shop(app, Site(app, patience=60.0), Logins(accounts))
    yield found
    for each in found.made:
        each.close()
    app.close()


def token_of(client):
    """What a form of this visitor's pages carries."""
    return re.search(r'name="csrf" value="([0-9a-f]+)"', client.get("/").text)[1]


def fill(app):
    """Something of everything, with `PAYLOAD` wherever a text goes."""
    now = time.time()
    for task_id in ("dead-1", "dead-2"):
        app.send("shop.add", [PAYLOAD, 2], task_id=task_id)
    receiver = app.broker.receiver("default", lease=30.0)
    found = receiver.receive(2, 1.0)
    receiver.settle([(each, DeadLetter("rejected", PAYLOAD)) for each in found])
    receiver.close()
    app.send("shop.add", [PAYLOAD, 2], task_id=f"waits {TAGS}")
    app.send(f"shop.{TAGS}", [1, 2], task_id="waits-2")
    for number, state in enumerate([State.SUCCEEDED, State.FAILED, State.RETRYING]):
        key = RunKey(f"run-{number} {PAYLOAD}")
        app.results.start([Start(key, f"shop.{PAYLOAD}", "default", 1, "o", PAYLOAD, now - 5)])
        outcome = Outcome(
            state, Complete(), app.codec.encode_value(PAYLOAD), PAYLOAD, PAYLOAD, PAYLOAD, now, 0.5
        )
        app.results.record([Finish(key, "o", outcome)])
    task = RunningTask(PAYLOAD, PAYLOAD, "default", now - 9, 1, app.codec.encode_value(PAYLOAD))
    app.results.heartbeat(
        WorkerRecord(
            f"w {PAYLOAD}", now - 60, now, ("default",), 1, 5, tasks=(task,), release=PAYLOAD
        )
    )
    hour = Hour(Author(PAYLOAD, int(now), PAYLOAD))
    begins = int(now / HOUR) * HOUR
    hour.series[PAYLOAD, PAYLOAD] = {int(now / SLOT) * SLOT: Tally(3, 1, runs={40: 4})}
    history_of(app.results).write(PAYLOAD, begins, hour, now)
    Backlogs(history_of(app.results)).add(PAYLOAD, now, 3)
    controls.pause(app, controls.Names(queues=["default"]), checked=False).act(by=PAYLOAD)
    group([app.tasks["shop.add"].s(1, 2), app.tasks["shop.add"].s(3, 4)]).delay(workflow_id="w")
    every = {"queue": "default", "all": "yes"}
    job = make_job(prepare(app, "replay", every), "replay", every, by=PAYLOAD, via=PAYLOAD)
    jobs.cancel(app, job).act(by=PAYLOAD)
    start_schedules(app)


def morning(app):
    """A shop whose payment service has answered with errors for half an hour."""
    now = time.time()
    problem = "PaymentError: card service answered 503 for {}"
    orders = [f"order-{number}" for number in range(4700, 4712)]
    for order in orders[:9]:
        app.send("shop.charge", [order], task_id=order, queue="payments")
    receiver = app.broker.receiver("payments", lease=30.0)
    found = receiver.receive(9, 1.0)
    reasons = [DeadLetter("retries-exhausted", problem.format(each)) for each in orders[:7]]
    reasons += [DeadLetter("rejected", "ValueError: no amount")] * 2
    receiver.settle(list(zip(found, reasons, strict=True)))
    receiver.close()
    for order in orders[9:11]:
        app.send("shop.charge", [order], task_id=order, queue="payments")
    for number in range(24):
        app.send("shop.send_invoice", [number], task_id=f"invoice-{number}", queue="mail")
    for number in range(40):
        spent, at = 0.2 + number % 7 * 0.05, now - 600 + number * 12
        _record(app, f"mail-{number}", "shop.send_invoice", "mail", at, spent)
    for attempt, at in enumerate((now - 900, now - 700, now - 300)):
        error = ("PaymentError", "card service answered 503 for order-4711")
        state = State.FAILED if attempt == 2 else State.RETRYING
        _record(app, "order-4711", "shop.charge", "payments", at, 2.5, state, error, attempt)
    rows = [("shop-7c9f-1", ("payments", "mail"), 4), ("shop-7c9f-2", ("mail", "default"), 2)]
    for name, queues, running in rows:
        tasks = tuple(
            RunningTask(f"invoice-{each}", "shop.send_invoice", "mail", now - 3 * each)
            for each in range(running)
        )
        record = WorkerRecord(name, now - 7200, now, queues, running, 4180, tasks=tasks)
        app.results.heartbeat(record)
    charge, close = app.tasks["shop.charge"], app.tasks["shop.close_month"]
    chord([charge.s(each) for each in orders[:4]], close.s()).delay(workflow_id="close-may")
    did(app)
    start_schedules(app)


def did(app):
    """The history of an hour of that shop: payments fail for half an hour, after a deploy."""
    now = time.time()
    busy = {("mail", "shop.send_invoice"): (40, 0.25), ("payments", "shop.charge"): (12, 2.5)}
    hours = {}
    for number in range(300):
        at = int(now / SLOT - 300 + number) * SLOT
        begins = at - at % HOUR
        hour = hours.setdefault(
            begins, Hour(Author("shop-7c9f-1", int(now - 2100), "0.1.0 2026.11.3"))
        )
        for name, (most, spent) in busy.items():
            count = int(most * (0.6 + 0.4 * abs((number % 60) / 30 - 1)))
            bad = count // 3 if name[1] == "shop.charge" and number > 120 else 0
            waits = {bucket_of(0.05 + number % 9 * 0.02 + bad * 0.6): count}
            runs = {bucket_of(spent): count - bad, bucket_of(spent * 4): bad}
            tally = Tally(count - bad, bad // 3, bad - bad // 3, waits=waits, runs=runs)
            hour.series.setdefault(name, {})[at] = tally
    waiting = Backlogs(history_of(app.results))
    for number in range(50):
        left = 40 * max(0, number - 20) if number < 40 else 80 * (50 - number)
        waiting.add("payments", now - 60 * (50 - number), left + number % 7)
    for begins, hour in hours.items():
        history_of(app.results).write("shop-7c9f-1!x", begins, hour, now)
    controls.pause(app, controls.Names(queues=["payments"]), checked=False).act(by="ann")
    controls.resume(app, controls.Names(queues=["payments"])).act(by="ann")


def _record(app, task_id, task, queue, at, spent, state=State.SUCCEEDED, error=("", ""), hop=0):
    key = RunKey(task_id, hop=hop)
    app.results.start([Start(key, task, queue, 1, f"{task_id}{hop}", "shop-7c9f-1", at - spent)])
    outcome = Outcome(state, Complete(), error_type=error[0], error=error[1], at=at, duration=spent)
    app.results.record([Finish(key, f"{task_id}{hop}", outcome)])


@pytest.fixture
def full(shop):
    fill(shop.app)
    return shop


def start_schedules(app):
    """Start the app's schedules, as a worker does that looks twice."""
    runner = app.schedules.runner("tester")
    runner.turn()
    runner._look_at = 0.0
    runner.turn()
