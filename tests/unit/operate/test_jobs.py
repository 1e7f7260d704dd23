"""Jobs: one process at a time, from the last confirmed item on, and not beyond what was counted."""

import dataclasses
import json
import math
import threading
import time

import pytest
from recordedruns import record_run

from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError, NotFound
from aztask.operate import jobrunner
from aztask.operate import jobs as records
from aztask.operate.action import audit
from aztask.operate.deadletters import DeadLetters
from aztask.operate.deadletters.sweep import Sweep
from aztask.operate.jobrunner import JobRunner, make_job
from aztask.operate.jobs import job, jobs
from aztask.operate.ledger import JOBS, Ledger, ledger_of
from aztask.operate.requests import prepare
from aztask.queues.local.broker import LocalBroker
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import RunKey, State

ALL = {"queue": "default", "all": "yes"}


class Shop:
    """An app; `joint`: whether broker and results are one file."""

    def __init__(self, folder, joint):
        results = "queues.db" if joint else "results.db"
        self.app = App(
            "shop", broker=f"local://{folder}/queues.db", results=f"local://{folder}/{results}"
        )

        @self.app.task
        def add(left, right):
            return left + right

        self.app.broker.declare("default")

    def dead(self, *ids):
        for task_id in ids:
            self.app.send("shop.add", [1, 2], task_id=task_id)
        receiver = self.app.broker.receiver("default", lease=30.0)
        taken = 0
        while taken < len(ids):
            some = receiver.receive(100, 1.0)
            receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in some])
            taken += len(some)
        receiver.close()

    def letters(self):
        return sorted(each.id for each in DeadLetters(self.app, "default").list(1000))

    def waiting(self):
        """(id, generation) of every message that waits."""
        found = self.app.broker.peek("default", limit=1000)
        messages = [self.app.message_in(e.envelope, "default", e.position) for e in found]
        return sorted((each.id, each.generation) for each in messages)

    def make(self, name="replay", **values):
        values = values or ALL
        return make_job(prepare(self.app, name, values), name, values, by="ann", via="page")

    def job(self, key):
        return job(self.app, key)


@pytest.fixture(params=[True, False], ids=["joint", "apart"])
def shop(request, tmp_path):
    found = Shop(tmp_path, request.param)
    yield found
    found.app.close()


IDS = [f"t{number:03}" for number in range(250)]


def test_a_job_is_made_without_doing_anything_and_done_by_a_runner(shop):
    shop.dead("a", "b")
    key = shop.make()
    assert (shop.letters(), shop.waiting()) == (["a", "b"], [])
    made = shop.job(key)
    assert (made.count, made.done, made.state, made.by, made.via) == (2, 0, "open", "ann", "page")
    assert "replay 2 dead letters" in made.text
    done = JobRunner(shop.app, "me").work_once()
    assert (done.done, done.state, done.error) == (2, "done", "")
    assert shop.waiting() == [("a", 1), ("b", 1)]
    assert JobRunner(shop.app).work_once() is None
    (entry,) = audit(shop.app).entries
    assert (entry.by, entry.via, entry.done) == ("ann", "page, as a job", 2)


def test_what_comes_after_the_job_was_made_stays(shop):
    shop.dead("a")
    shop.make()
    shop.dead("late")
    JobRunner(shop.app).work_once()
    assert (shop.letters(), shop.waiting()) == (["late"], [("a", 1)])


def test_what_is_purged_before_a_process_looks_again_counts_as_done(shop):
    shop.dead("a", "b")
    key = shop.make()
    prepare(shop.app, "purge", {"queue": "default", "ids": "b"}).act(by="bob")
    shop.dead("c")
    JobRunner(shop.app).work_once()
    assert (shop.letters(), shop.waiting()) == (["c"], [("a", 1)])
    assert (shop.job(key).state, shop.job(key).done) == ("done", 2)


def test_only_one_process_works_on_a_job(shop, monkeypatch):
    shop.dead("a")
    key = shop.make()
    held, go = threading.Event(), threading.Event()
    replay = DeadLetters.replay

    def slow(self, *given, **named):
        held.set()
        assert go.wait(10)
        return replay(self, *given, **named)

    monkeypatch.setattr(DeadLetters, "replay", slow)
    thread = threading.Thread(target=JobRunner(shop.app, "one").work_once)
    thread.start()
    assert held.wait(10)
    assert JobRunner(shop.app, "two").work_once() is None
    page = jobs(shop.app)
    assert page.jobs[0].shown(page.at) == "running"
    assert page.jobs[0].holder.startswith("one ")
    go.set()
    thread.join(10)
    assert shop.job(key).state == "done"


class Died(BaseException):
    """The process is gone: nothing that it would have done afterwards happens."""


def end_lease(shop, key):
    """The lease of the process that died ends."""
    ledger = records.ledger_for_jobs(shop.app)
    (row,) = ledger.get(JOBS, [key])
    ended = dataclasses.replace(shop.job(key), until=0.0)
    assert ledger.write(JOBS, key, records.packed_job(ended), row) is not None


def finish(shop, key):
    """Work until the job has ended: leases of the process that died run out before."""
    until = time.monotonic() + 20
    while shop.job(key).state == "open":
        assert time.monotonic() < until, shop.job(key)
        if JobRunner(shop.app, "next").work_once() is None:
            time.sleep(0.1)
    return shop.job(key)


def die_after(monkeypatch, batches):
    """Die when that many replays were sent; what was sent stays sent."""
    sent = []
    send = LocalBroker.send

    def dying(self, queue, envelopes):
        answer = send(self, queue, envelopes)
        sent.append(len(envelopes))
        if len(sent) == batches:
            raise Died
        return answer

    monkeypatch.setattr(LocalBroker, "send", dying)


def test_another_process_goes_on_and_each_gets_one_new_generation(shop, monkeypatch):
    shop.dead(*IDS)
    key = shop.make()
    with monkeypatch.context() as dying:
        die_after(dying, 2)
        with pytest.raises(Died):
            JobRunner(shop.app, "dead").work_once()
    left = len(shop.letters())
    assert left > 0
    assert shop.job(key).state == "open"
    assert JobRunner(shop.app, "early").work_once() is None, "the lease of the dead one holds"
    end_lease(shop, key)
    done = finish(shop, key)
    assert (done.done, done.state, done.error) == (250, "done", "")
    assert shop.letters() == []
    assert sorted(set(shop.waiting())) == [(each, 1) for each in IDS]


def test_one_that_ran_in_between_gets_no_further_generation(tmp_path, monkeypatch):
    """The window of a replay without a journal: sent, run to its end, and not completed."""
    shop = Shop(tmp_path, joint=False)
    try:
        shop.dead("a")
        key = shop.make()
        with monkeypatch.context() as dying:
            die_after(dying, 1)
            with pytest.raises(Died):
                JobRunner(shop.app, "dead").work_once()
        assert shop.job(key).plan == [["a", 0, 0, 0]]
        run_all(shop.app)
        assert shop.app.results.get("a").key.generation == 1
        end_lease(shop, key)
        assert finish(shop, key).done == 1
        assert shop.waiting() == [("a", 1)], "the same message again, which a worker recognises"
    finally:
        shop.app.close()


def test_what_a_dead_process_holds_keeps_its_generation_while_others_are_replayed(
    tmp_path, monkeypatch
):
    """Its letters are held until its leases end, and their replays may have run by then."""
    shop = Shop(tmp_path, joint=False)
    try:
        shop.dead(*IDS)
        key = shop.make()
        with monkeypatch.context() as dying:
            dying.setattr(Sweep, "__exit__", lambda sweep, *error: sweep._keeper.stop())
            die_after(dying, 1)
            with pytest.raises(Died):
                JobRunner(shop.app, "dead").work_once()
        held = sorted(each[0] for each in shop.job(key).plan)
        assert [each[0] for each in shop.waiting()] == held
        run_all(shop.app)
        end_lease(shop, key)
        monkeypatch.setattr(jobrunner, "HELD_SECONDS", 0.2)
        assert JobRunner(shop.app, "next").work_once().state == "open"
        assert shop.letters() == held, "the others were replayed"
        assert finish(shop, key).done == 250
        assert shop.waiting() == [(each, 1) for each in IDS]
    finally:
        shop.app.close()


def run_all(app):
    """What a worker does with a message that waits: it runs, and is completed."""
    receiver = app.broker.receiver("default", lease=30.0)
    for each in receiver.receive(100, 1.0):
        message = app.message_in(each.envelope, "default", each.position)
        record_run(app, RunKey(*message.key), State.SUCCEEDED, Complete())
        receiver.settle([(each, Complete())])
    receiver.close()


def test_a_process_that_lost_its_job_stops(shop, monkeypatch):
    shop.dead(*IDS)
    key = shop.make()
    monkeypatch.setattr(jobrunner, "NOTED_EVERY", 0.0)
    replace = DeadLetters._replace
    batches = []

    def cancelling(self, *given, **named):
        replace(self, *given, **named)
        batches.append(1)
        if len(batches) == 2:
            records.cancel(shop.app, key).act(by="bob")

    monkeypatch.setattr(DeadLetters, "_replace", cancelling)
    JobRunner(shop.app).work_once()
    ended = shop.job(key)
    assert (ended.state, ended.error) == ("cancelled", "cancelled by bob")
    assert 0 < len(shop.letters()) < 250
    assert JobRunner(shop.app).work_once() is None


def test_a_service_that_does_not_answer_is_asked_again(shop, monkeypatch):
    shop.dead("a")
    key = shop.make()
    with monkeypatch.context() as away:
        away.setattr(jobrunner, "RETRY_SECONDS", 0.2)
        away.setattr(DeadLetters, "replay", unreachable)
        JobRunner(shop.app).work_once()
    waits = shop.job(key)
    assert (waits.state, waits.error) == ("open", "no answer")
    assert JobRunner(shop.app).work_once() is None, "not before its pause has passed"
    time.sleep(0.3)
    assert JobRunner(shop.app).work_once().state == "done"
    assert shop.job(key).error == ""


def unreachable(self, *given, **named):
    raise BrokerUnavailable("no answer")


def test_a_job_ends_if_another_process_keeps_what_is_left(shop, monkeypatch):
    shop.dead("a", "b")
    key = shop.make()
    monkeypatch.setattr(jobrunner, "MOST_IDLE", 2)
    monkeypatch.setattr(jobrunner, "HELD_SECONDS", 0.01)
    holder = shop.app.broker.receiver("default", lease=60.0, dead_letter=True)
    assert len(holder.receive(1, 1.0)) == 1
    ended = finish(shop, key)
    holder.close()
    assert (ended.done, ended.state) == (1, "failed")
    assert ended.error == "1 dead letter of it: another process holds them"


def test_an_error_that_stays_ends_the_job(shop, monkeypatch):
    shop.dead("a")
    key = shop.make()
    monkeypatch.setattr(
        DeadLetters,
        "replay",
        lambda *given, **named: (_ for _ in ()).throw(ConfigurationError("x")),
    )
    JobRunner(shop.app).work_once()
    assert (shop.job(key).state, shop.job(key).error) == ("failed", "x")


def test_a_process_that_ends_gives_the_job_back(shop, monkeypatch):
    shop.dead(*IDS)
    key = shop.make()
    monkeypatch.setattr(jobrunner, "LOOK_SECONDS", 0.01)
    stopping = threading.Event()
    replace = DeadLetters._replace

    def stop(self, *given, **named):
        stopping.set()
        return replace(self, *given, **named)

    with monkeypatch.context() as ending:
        ending.setattr(DeadLetters, "_replace", stop)
        JobRunner(shop.app).run(stopping)
    assert shop.job(key).state == "open"
    assert JobRunner(shop.app).work_once().done == 250


def test_purges_and_cancellations_are_jobs_too(shop):
    shop.dead("a", "b")
    shop.make("purge", queue="default", task="shop.add")
    shop.app.send("shop.add", [1, 2], task_id="w")
    shop.make("cancel", task="shop.add")
    assert [JobRunner(shop.app).work_once().done for _ in range(2)] == [2, 1]
    assert shop.letters() == []


def test_what_is_done_at_once_is_no_job(shop):
    with pytest.raises(ConfigurationError, match="it is no job"):
        shop.make("pause", queue="default")


def test_damaged_jobs_hide_no_other(shop):
    shop.dead("a")
    key = shop.make()
    ledger = ledger_of(shop.app.results)
    (good,) = ledger.get(JOBS, [key])
    whole = json.loads(good.values["data"])
    wrong = {
        "state": "x",
        "count": "1",
        "plan": [[1]],
        "values": {"a": 1},
        "reach": {"a": "b"},
        "by": 1,
        "created": 1e300,
        "until": 10**400,
    }
    for number, (name, value) in enumerate(wrong.items()):
        data = json.dumps({**whole, name: value}).encode()
        ledger.write(JOBS, f"0000000000000{number}-x", data, None)
    endless = json.dumps({**whole, "before": math.inf}).encode()
    for key, data in (("00000000000009-x", b"\xff"), ("00000000000010-x", endless)):
        ledger.write(JOBS, key, data, None)
    found = jobs(shop.app)
    assert (len(found.jobs), found.damaged) == (1, 10)
    assert JobRunner(shop.app).work_once().state == "done"
    with pytest.raises(NotFound):
        job(shop.app, "00000000000009-x")


def test_a_job_that_fails_unexpectedly_has_failed_and_hides_no_other(shop, monkeypatch):
    shop.dead("a", "b")
    first, second = shop.make(), shop.make()
    prepared = jobrunner.prepare

    def prepare(app, kind, values):
        monkeypatch.setattr(jobrunner, "prepare", prepared)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(jobrunner, "prepare", prepare)
    runner = JobRunner(shop.app)
    assert {runner.work_once().state for _ in range(2)} == {"failed", "done"}
    assert (job(shop.app, first).state, job(shop.app, second).state) == ("failed", "done")
    assert "a bug" in job(shop.app, first).error


def test_an_open_job_is_found_behind_any_number_of_ended_ones(shop, monkeypatch):
    monkeypatch.setattr(jobrunner, "PAGE", 3)
    shop.dead("a")
    first, runner = shop.make(), JobRunner(shop.app)

    def hold(seconds):
        ledger = ledger_of(shop.app.results)
        (row,) = ledger.get(JOBS, [first])
        held = dataclasses.replace(shop.job(first), until=ledger.now() + seconds)
        ledger.write(JOBS, first, records.packed_job(held), row)

    hold(3600.0)
    for _ in range(2):
        for _ in range(7):
            records.cancel(shop.app, shop.make()).act()
        assert runner.work_once() is None, "another process has it"
    hold(0.0)
    for each in (runner, JobRunner(shop.app)):
        assert each.work_once().key == first
        ledger = ledger_of(shop.app.results)
        (row,) = ledger.get(JOBS, [first])
        again = dataclasses.replace(shop.job(first), state="open")
        ledger.write(JOBS, first, records.packed_job(again), row)


def test_jobs_are_paged_the_newest_first_also_those_of_one_moment(shop, monkeypatch):
    shop.dead("a")
    now = ledger_of(shop.app.results).now()
    monkeypatch.setattr(Ledger, "now", lambda ledger: now)  # Azure Tables tells whole seconds
    keys = [shop.make() for _ in range(9)]
    first = jobs(shop.app, limit=5)
    rest = jobs(shop.app, limit=5, after=first.next)
    assert [each.key for each in [*first.jobs, *rest.jobs]] == keys[::-1]
    assert (len(first.jobs), rest.next) == (5, "")
    assert JobRunner(shop.app).work_once().key == keys[0], "the oldest is done first"


def test_the_commands_list_run_and_cancel(cli):
    app = cli.app()

    @app.task
    def add(left, right):
        return left + right

    app.broker.declare("default")
    shop = Shop.__new__(Shop)
    shop.app = app
    shop.dead("a", "b")
    key, other = shop.make(), shop.make("purge")
    places = {"AZTASK_BROKER": cli.address, "AZTASK_RESULTS": cli.address}
    assert "cancelled" in cli("jobs", "cancel", other, **places).out
    assert "ended already" in cli("jobs", "cancel", other).out
    assert cli("jobs", "cancel", "nothing").code == 5
    assert f"{key}: replay 2 dead letters" in cli("jobs", "run", "--once").out
    lines = [json.loads(line) for line in cli("jobs", "list", "--json").out.splitlines()]
    states = {each["id"]: (each["state"], each["done"]) for each in lines}
    assert states == {key: ("done", 2), other: ("cancelled", 0)}
    assert "cancelled" in cli("jobs", "list").out
