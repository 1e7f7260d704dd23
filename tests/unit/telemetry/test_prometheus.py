"""Metrics in Prometheus' format: what they count, and that no message can break them."""

from __future__ import annotations

import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

from aztask import App
from aztask.hooks import WorkerStatus
from aztask.queues.base import QueueOptions
from aztask.stores.events.event import Event
from aztask.stores.records.base import RunningTask, WorkerRecord
from aztask.telemetry.labels import UNKNOWN, TaskLabels
from aztask.telemetry.prometheus.exporter import QueueDepths, exporting
from aztask.telemetry.prometheus.metrics import WorkerMetrics
from aztask.telemetry.prometheus.worker import Backlog, CeleryMetrics, joined

COMMON = ("t", "shop.add", "default")
HOSTILE = 'x"} 1\nevil{a="b\\'
EVENTS = (
    Event("received", *COMMON, delivery_count=1),
    Event("received", *COMMON, delivery_count=2),
    Event("started", *COMMON, wait_seconds=2.0),
    Event("started", *COMMON, resubmit_count=1, wait_seconds=0.5),
    Event("renewed", *COMMON, lease_seconds=10.0, margin_seconds=3.0),
    Event("succeeded", *COMMON, duration_seconds=0.4, lease_seconds=10.0, margin_seconds=5.0),
    Event("resubmitted", *COMMON, duration_seconds=0.2, error_type="OSError"),
    Event("failed", *COMMON, duration_seconds=0.2, error_type="OSError"),
    Event("expired", *COMMON),
    Event("waiting", *COMMON, duration_seconds=0.1, reason="it sleeps"),
    Event("lease_lost", *COMMON),
    Event("dead_lettered", *COMMON, error_type="retries-exhausted"),
    Event("put_off", *COMMON, reason="task shop.add is paused"),
    Event("lease_changed", "", "", "default", lease_seconds=5.0),
)


class Bench:
    def __init__(self):
        self.registry = CollectorRegistry()
        self.labels = TaskLabels({"shop.add"})
        self.metrics = WorkerMetrics(self.registry, self.labels, "w\n1")
        self.celery = CeleryMetrics(self.registry, self.labels, "w\n1")

    def feed(self, *events):
        backlog = Backlog([self.metrics.count, self.celery.count])
        for event in events:
            backlog.add(event)
        backlog.count()

    def value(self, name, /, **labels):
        return self.registry.get_sample_value(name, labels)

    def text(self):
        return generate_latest(self.registry).decode()


@pytest.fixture
def bench():
    return Bench()


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("aztask_messages_received_total", {"queue": "default"}, 2),
        ("aztask_messages_redelivered_total", {"queue": "default"}, 1),
        ("aztask_task_wait_seconds_sum", {"queue": "default"}, 2.0),
        ("aztask_task_punctuality_seconds_sum", {"queue": "default"}, 0.5),
        ("aztask_lease_renewals_total", {"queue": "default"}, 1),
        ("aztask_lease_margin_ratio_sum", {"queue": "default"}, 0.8),
        ("aztask_lease_losses_total", {"queue": "default", "kind": "lease_lost"}, 1),
        ("aztask_worker_info", {"worker": "w?1"}, 1),
    ]
    + [
        ("aztask_tasks_total", {"queue": "default", "task": "shop.add", "outcome": outcome}, 1)
        for outcome in ("succeeded", "retried", "failed", "expired", "waiting")
    ]
    + [
        (name, {"queue": "default", "task": "shop.add", **more}, value)
        for name, more, value in (
            ("aztask_task_duration_seconds_count", {}, 4),
            ("aztask_task_failures_total", {"error": "OSError"}, 2),
            ("aztask_dead_letters_total", {"reason": "retries-exhausted"}, 1),
            ("aztask_put_offs_total", {}, 1),
        )
    ]
    + [
        (f"celery_task_{name}", {"name": "shop.add", "hostname": "w?1", "queue_name": "default"}, n)
        for name, n in (
            ("received_total", 2),
            ("started_total", 2),
            ("succeeded_total", 1),
            ("retried_total", 1),
            ("revoked_total", 1),
            ("rejected_total", 1),
            ("runtime_count", 1),
            ("queue_wait_time_sum", 2.5),
        )
    ]
    + [
        (
            "celery_task_failed_total",
            {
                "name": "shop.add",
                "hostname": "w?1",
                "queue_name": "default",
                "exception": "OSError",
            },
            1,
        ),
        ("celery_worker_up", {"hostname": "w?1"}, 1),
    ],
)
def test_an_event_is_counted(bench, name, labels, value):
    bench.feed(*EVENTS)
    assert bench.value(name, **labels) == pytest.approx(value)


def test_the_status_is_taken_over(bench):
    status = WorkerStatus(0.0, 8, 4, (1.0, 7.5), 12, True)
    bench.metrics.status(status)
    bench.celery.status(status)
    names = ("running_tasks", "capacity", "held_messages", "longest_run_seconds", "draining")
    values = [bench.value(f"aztask_worker_{name}") for name in names]
    assert values == [2, 8, 12, 7.5, 1]
    assert bench.value("celery_worker_tasks_active", hostname="w?1") == 2
    bench.metrics.status(WorkerStatus(0.0, 8, 4, (), 0, False))
    assert bench.value("aztask_worker_longest_run_seconds") == 0


def test_no_message_adds_series_without_bound_or_breaks_the_format(bench):
    for number in range(5_000):
        name = f"{HOSTILE}{number}"
        bench.feed(
            Event("received", name, name, "default"),
            Event("resubmitted", name, name, "default", duration_seconds=1.0, error_type=name),
            Event("failed", name, name, "default", duration_seconds=1.0, error_type=name),
            Event("dead_lettered", name, name, "default", error_type=name),
        )
    families = list(text_string_to_metric_families(bench.text()))
    samples = [sample for family in families for sample in family.samples]
    assert len(samples) < 500
    assert not any(sample.name == "evil" for sample in samples)
    assert {each.labels["task"] for each in samples if "task" in each.labels} == {UNKNOWN}
    total = bench.value("aztask_tasks_total", queue="default", task=UNKNOWN, outcome="failed")
    assert total == 5_000


# -- the exporter ----------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path):
    made = App("shop", broker=f"local://{tmp_path}/q.db", results=f"local://{tmp_path}/q.db")
    made.task(name="shop.add")(lambda a, b: a + b)
    yield made
    made.close()


class Depths:
    def __init__(self, app, *queues):
        self.registry = CollectorRegistry()
        self.queues = list(queues)
        self.depths = QueueDepths(app, lambda: self.queues, self.registry, celery_names=True)
        self.depths.refresh()

    def value(self, name, /, **labels):
        return self.registry.get_sample_value(name, labels)


def test_depths_of_queues(app):
    app.tasks["shop.add"].map([(1, 2)] * 3)
    app.send("shop.add", [1, 2], delay=60)
    app.broker.declare("other", QueueOptions())
    depths = Depths(app, "default", "other")
    assert depths.value("aztask_queue_messages", queue="default", state="active") == 3
    assert depths.value("aztask_queue_messages", queue="default", state="scheduled") == 1
    assert depths.value("aztask_queue_length", queue="default") == 4
    assert depths.value("aztask_queue_dead_letters", queue="default") == 0
    assert 0 < depths.value("aztask_queue_oldest_message_seconds", queue="default") < 60
    assert depths.value("aztask_queue_oldest_message_seconds", queue="other") == 0
    assert depths.value("celery_queue_length", queue_name="default") == 4


def test_a_queue_that_cannot_be_read_has_no_figures(app):
    app.send("shop.add", [1, 2])
    depths = Depths(app, "default", "missing")
    assert depths.value("aztask_queue_up", queue="missing") == 0
    assert depths.value("aztask_queue_up", queue="default") == 1, "the others have theirs"
    app.broker.delete("default")
    depths.depths.refresh()
    assert depths.value("aztask_queue_up", queue="default") == 0
    assert depths.value("aztask_queue_messages", queue="default", state="active") is None
    depths.queues.remove("default")
    depths.depths.refresh()
    assert depths.value("aztask_queue_up", queue="default") is None


def test_workers_are_counted_by_their_heartbeats(app):
    now = time.time()
    running = (RunningTask("a", "shop.add", "default", now, 0),)
    for name, seen_at, stopped in (("a", now, False), ("b", now - 60, False), ("c", now, True)):
        app.results.heartbeat(
            WorkerRecord(name, now - 90, seen_at, ("default",), 1, 0, stopped, 1, running)
        )
    depths = Depths(app, "default", "other")
    assert depths.value("aztask_queue_workers", queue="default") == 1
    assert depths.value("aztask_queue_running_tasks", queue="default") == 1
    assert depths.value("celery_active_worker_count", queue_name="other") == 0


def answered(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False


def test_the_exporter_serves_its_figures(app):
    app.send("shop.add", [1, 2])
    with exporting(
        app, lambda: ["default"], ("127.0.0.1", 0), interval=60.0, celery_names=False
    ) as url:
        wait_until(lambda: answered(f"{url}/readyz"), 10, "the first turn has ended")
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert 'aztask_queue_messages{queue="default",state="active"} 1.0' in text


def test_the_metrics_of_several_supervisors_keep_them_apart():
    benches = {1: Bench(), 2: Bench()}
    benches[1].feed(*EVENTS)
    benches[2].feed(*EVENTS, *EVENTS, Event("failed", "t", "shop.add", HOSTILE, error_type=HOSTILE))
    texts = {number: generate_latest(bench.registry).decode() for number, bench in benches.items()}
    found = {}
    for family in text_string_to_metric_families(joined({**texts, 3: ""})):
        assert family.name not in found, "a family is one block"
        found[family.name] = family
    up = {
        each.labels["supervisor"]: each.value for each in found.pop("aztask_supervisor_up").samples
    }
    assert up == {"1": 1, "2": 1, "3": 0}
    for number, bench in benches.items():
        expected = {family.name: family for family in text_string_to_metric_families(bench.text())}
        assert found.keys() >= expected.keys()
        for name, family in expected.items():
            assert (found[name].type, found[name].documentation) == (
                family.type,
                family.documentation,
            )
            mine = [
                each._replace(labels={k: v for k, v in each.labels.items() if k != "supervisor"})
                for each in found[name].samples
                if each.labels["supervisor"] == str(number)
            ]
            assert mine == family.samples
