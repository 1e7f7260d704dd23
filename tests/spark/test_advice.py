"""Each rule of advice speaks where it must, and is silent where it must not."""

import random
import shlex

import pytest
from browser import opened
from events_site import write_log

from aztask.spark import read_events
from aztask.spark.report.advice import MOST_NAMED, RULES, advise
from aztask.spark.report.charts import sentence
from aztask.spark.report.page import render
from aztask.spark.report.summary import summarize
from aztask.stores.events.event import Event

BEGIN = 1_790_000_000 // 3600 * 3600
LENGTH = 3600.0
DEPLOY = BEGIN + LENGTH / 2
LEASE = 30.0


class Log:
    """Events of tasks that a worker tells, in seconds after the beginning."""

    def __init__(self):
        self.events = []

    def tell(self, kind, at, queue, task, worker="w1", **more):
        number = len(self.events)
        about = (kind, more.pop("task_id", f"id-{number}"), task, queue)
        ts = BEGIN + round(at, 6)
        self.events.append(Event(*about, ts=ts, worker=worker, id=f"e-{number}", **more))

    def task(self, at, queue, task, *, wait=0.01, run=0.1, error=None, dead=False, worker="w1"):
        self.tell("enqueued", at, queue, task)
        at += wait
        if at + run > LENGTH:
            return
        self.tell("received", at, queue, task, worker)
        self.tell("started", at, queue, task, worker, wait_seconds=wait, lease_seconds=LEASE)
        kind = "failed" if dead else "resubmitted" if error else "succeeded"
        more = {"error_type": "OSError", "error": error} if error else {}
        about = {"duration_seconds": run, "held_seconds": run, "lease_seconds": LEASE}
        about["margin_seconds"] = LEASE - run
        self.tell(kind, at + run, queue, task, worker, **about, **more)
        if dead:
            self.tell("dead_lettered", at + run, queue, task, worker)


def troubled():
    """A log with one case for each rule."""
    draw, log = random.Random(3), Log()
    for number in range(1800):
        at = number * 2.0
        late = at > LENGTH / 2
        # Half of what is sent since the middle never starts, and waits grow with it.
        backlog = (at - LENGTH / 2) / 2 if late else 0.0
        log.task(at, "behind it", "shop.page", wait=0.01 + draw.random() + backlog)
        log.task(at, "mail", "shop.shaky", error="no" if draw.random() < 0.2 * late else None)
    for number in range(40):
        dead = number % 2 == 0
        error = f"no room for {number} bytes" if number else "other"
        log.task(number * 80.0, "mail", "shop.mail", error=error, dead=dead)
    for number in range(30):
        log.task(number * 100.0, "video", "shop.cut", run=40.0 + number)
    for number in range(10):
        at = number * 300.0
        about = {"task_id": f"lost-{number}", "lease_seconds": LEASE}
        log.tell("started", at, "video", "shop.cut", f"v{number}", wait_seconds=0.1, **about)
        log.tell("renewed", at + LEASE / 2, "video", "shop.cut", f"v{number}", **about)
        log.tell("lease_lost", at + LEASE, "video", "shop.cut", f"v{number}", **about)
    log.tell("started", 100.0, "mail", "shop.page", "frozen", task_id="f", lease_seconds=LEASE)
    log.tell("lease_lost", 400.0, "mail", "shop.page", "frozen", task_id="f", lease_seconds=LEASE)
    return log.events


def calm():
    """A log with what looks like trouble, and is none."""
    draw, log = random.Random(4), Log()
    for number in range(1800):
        at = number * 2.0
        late = at > LENGTH / 2
        # It waits longer since the middle, and keeps up; another one is slow, and always was.
        log.task(at, "slower", "shop.page", wait=(2.0 if late else 0.1) + draw.random())
        log.task(at, "long", "shop.batch", wait=60 + draw.random())
        # Errors of many kinds, as many before the deploy as after it; runs far below the lease.
        kind = draw.choice(["no room", "no network", "no file"])
        failed = draw.random() < 0.1
        log.task(at, "mail", "shop.mail", error=kind if failed else None, dead=failed)
    # Two leases were lost, without a silence before.
    for number in range(2):
        at = 1000.5 + number * 500
        about = {"task_id": f"lost-{number}", "lease_seconds": LEASE}
        log.tell("started", at - LEASE, "mail", "shop.page", "w1", wait_seconds=0.1, **about)
        log.tell("lease_lost", at, "mail", "shop.page", "w1", **about)
    return log.events


def summary_of(spark, folder, events):
    write_log(folder, events)
    read = read_events(spark, folder)
    found = summarize(read, deploy=DEPLOY)
    read.close()
    return found


@pytest.fixture(scope="module")
def trouble(spark, tmp_path_factory):
    return summary_of(spark, tmp_path_factory.mktemp("troubled"), troubled())


@pytest.fixture(scope="module")
def peace(spark, tmp_path_factory):
    return summary_of(spark, tmp_path_factory.mktemp("calm"), calm())


def test_every_rule_speaks_of_its_case_and_of_no_other(trouble):
    found = {(row["rule"], row["about"]): row for row in trouble.advice}
    assert set(found) == {
        ("falls_behind", "behind it"),
        ("short_lease", "video"),
        ("dominating_error", "shop.mail"),
        ("worse_deploy", "shop.shaky"),
        ("frozen_worker", "frozen"),
    }
    assert {rule for rule, _ in found} == {rule.__name__ for rule in RULES}
    commands = {rule: row["command"] for (rule, _), row in found.items()}
    assert commands["falls_behind"] == "aztask worker -Q 'behind it'"
    place = shlex.quote(trouble.place)
    assert commands["short_lease"] == f"aztask spark recommend {place} -Q video"
    assert commands["dominating_error"] == "aztask dlq replay --task shop.mail --dry-run"
    assert commands["worse_deploy"].startswith("aztask explain id-")
    assert commands["frozen_worker"] == "aztask workers"


def test_the_sentences_have_the_figures(trouble):
    texts = {row["rule"]: row["text"] for row in trouble.advice}
    sent = sum(
        event.event == "enqueued" and event.queue == "behind it" and event.ts >= spans(trouble)
        for event in troubled()
    )
    assert f" {sent} tasks were sent" in texts["falls_behind"]
    assert "lost 10 leases" in texts["short_lease"]
    assert "The lease is 30 s" in texts["short_lease"]
    assert "20 dead letters, and 98 %" in texts["dominating_error"]
    assert "OSError: no room for <n> bytes" in texts["dominating_error"]
    assert "The last error was OSError: no" in texts["worse_deploy"]
    assert "was silent for 5 min and lost 1 lease:" in texts["frozen_worker"]


def spans(summary):
    (period,) = (each for each in summary.comparisons if each["about"] == "period")
    return period["split"]


def test_nothing_is_said_of_what_is_no_trouble(peace):
    assert peace.advice == []
    assert "No rule of advice applies" in render(peace)


def plain(queue=None, task=None, signatures=(), workers=(), comparisons=()):
    """The figures that rules read, as far as a test needs them."""
    row = {"queue": "q", "lease_lost": 0, "received": 100, "lease_max": 30.0, "run_max": 1.0}
    its = {"task": "t", "dead_lettered": 0, "failed": 0, "resubmitted": 0}
    return {
        "place": "events",
        "total": {"lease_min": 30.0},
        "queues": [{**row, "run_p99": 1.0, **(queue or {})}],
        "tasks": [{**its, **(task or {})}],
        "signatures": list(signatures),
        "workers": list(workers),
        "comparisons": list(comparisons),
    }


def waiting(changed="more", *, before=0.5, after=5.0, enqueued=100, ended=90):
    sides = {"wait_p50": before}, {"wait_p50": after, "enqueued": enqueued, "ended": ended}
    row = {"queue": "q", "before": sides[0], "after": sides[1]}
    row["changed"] = {"wait_p50": changed} if changed else {}
    return {"comparisons": [{"about": "period", "queues": [row], "tasks": []}]}


def error(runs, task="t"):
    return {"task": task, "runs": runs, "signature": "OSError: no", "sample": "", "last": 1.0}


def silent(seconds):
    return {"workers": [{"worker": "w", "silence": seconds, "lost": 1}]}


DEAD = {"dead_lettered": 10, "failed": 10, "resubmitted": 0}


@pytest.mark.parametrize(
    ("rule", "more", "speaks"),
    [
        ("falls_behind", waiting(), True),
        ("falls_behind", waiting(changed=None), False),
        ("falls_behind", waiting(changed="less"), False),
        ("falls_behind", waiting(after=0.9), False),
        ("falls_behind", waiting(ended=95), False),
        ("falls_behind", waiting(enqueued=0, ended=50), True),
        ("falls_behind", waiting(before=3.0, enqueued=0, ended=50), False),
        ("short_lease", {"queue": {"lease_lost": 3, "run_p99": 29.0}}, True),
        ("short_lease", {"queue": {"lease_lost": 3, "run_p99": None, "run_max": 30.0}}, True),
        ("short_lease", {"queue": {"lease_lost": 3, "run_p99": 9.0, "lease_max": None}}, True),
        ("short_lease", {"queue": {"lease_lost": 2, "run_p99": 60.0}}, False),
        ("short_lease", {"queue": {"lease_lost": 3, "run_p99": 28.0}}, False),
        ("short_lease", {"queue": {"lease_lost": 0, "run_p99": 60.0}}, False),
        ("short_lease", {"queue": {"lease_lost": 9, "run_p99": 60.0, "received": 10**4}}, False),
        ("short_lease", {"queue": {"lease_lost": 9, "run_p99": None, "run_max": None}}, False),
        ("dominating_error", {"task": DEAD, "signatures": [error(8)]}, True),
        ("dominating_error", {"task": DEAD, "signatures": [error(7), error(3)]}, False),
        ("dominating_error", {"task": DEAD, "signatures": [error(10, "other")]}, False),
        ("dominating_error", {"task": DEAD}, False),
        (
            "dominating_error",
            {"task": {**DEAD, "dead_lettered": 2}, "signatures": [error(10)]},
            False,
        ),
        ("frozen_worker", silent(30.0), True),
        ("frozen_worker", silent(29.0), False),
        ("frozen_worker", silent(None), False),
    ],
)
def test_where_a_rule_begins_to_speak(rule, more, speaks):
    assert [row["rule"] for row in advise(plain(**more))] == [rule] * speaks


@pytest.mark.parametrize(
    ("changed", "last", "speaks"),
    [("more", 60.0, True), ("more", 40.0, False), ("less", 60.0, False), (None, 60.0, False)],
)
def test_a_deploy_is_named_for_what_came_after_it(changed, last, speaks):
    side = {"retried": 5, "runs": 100, "dead_lettered": 0, "ended": 90}
    row = {"task": "t", "before": side, "after": {**side, "retried": 20}}
    row["changed"] = {"retried": changed} if changed else {}
    each = {"about": "deploy", "split": 50.0, "queues": [], "tasks": [row]}
    its = {**error(5), "last": last, "task_id": "a b"}
    found = advise(plain(comparisons=[each], signatures=[its]))
    assert [row["command"] for row in found] == ["aztask explain 'a b'"] * speaks


def test_a_few_are_named_the_worst_first():
    figures = plain()
    figures["workers"] = [
        {"worker": f"w{n}", "silence": 100.0 + n, "lost": 1} for n in range(2 * MOST_NAMED)
    ]
    names = [row["about"] for row in advise(figures)]
    assert names == [f"w{n}" for n in reversed(range(MOST_NAMED, 2 * MOST_NAMED))]


def test_the_page_shows_the_advice_first(trouble, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(render(trouble))
    for dark in (False, True):
        with opened(page.as_uri(), dark=dark) as shown:
            section = shown.locator("section").first
            assert section.locator("h2").inner_text() == "What to do"
            assert section.locator("li").count() == len(trouble.advice) == 5
            commands = section.locator("code").all_inner_texts()
            assert commands == [row["command"] for row in trouble.advice]


def test_a_shown_command_gives_the_shell_the_name_and_nothing_else():
    """Names come from events: one may hold quotes and a command of its own."""
    name = "x'; touch it \"#"
    shown = sentence(f"aztask worker -Q {shlex.quote(name)}")
    assert shlex.split(shown) == ["aztask", "worker", "-Q", name]
