"""What a heartbeat says of a worker and of its running tasks."""

from types import SimpleNamespace

import pytest
from runtimes import make_runtime
from still import Still

from aztask import App
from aztask.message.message import TaskMessage
from aztask.worker.upkeep.heartbeat import MOST_PROGRESS, MOST_TASKS, Heartbeat


class Bench:
    def __init__(self, count):
        self.time = Still()
        self.app = App("shop", broker="local://:memory:")
        self.runtime = make_runtime(self.app, clock=self.time, name="w7", queues=("a", "b"))
        self.running = [(self.item(number), self.time.now - number) for number in range(count)]
        self.heartbeat = Heartbeat(self.runtime, SimpleNamespace(running=lambda: self.running))

    def item(self, number):
        self.app.send("shop.add", [1], task_id=f"id-{number}")
        receiver = self.app.broker.receiver("default", lease=30.0)
        (delivery,) = receiver.receive(1, 0.0)
        item = self.runtime.deliveries.add("default", receiver, delivery)
        item.open(TaskMessage(f"id-{number}", "shop.add", "default", b"", resubmit_count=2), None)
        return item

    def close(self):
        self.app.close()
        self.runtime.mailbox.close()


@pytest.fixture
def make():
    made = []

    def bench(count):
        made.append(Bench(count))
        return made[-1]

    yield bench
    for each in made:
        each.close()


def test_the_longest_running_task_comes_first(make):
    bench = make(3)
    bench.runtime.deliveries.finished = 5
    record = bench.heartbeat.record()
    assert [task.task_id for task in record.tasks] == ["id-2", "id-1", "id-0"]
    assert record.tasks[0].started_at == bench.time.now - 2
    assert record.tasks[0].retries == 2
    assert (record.name, record.queues) == ("w7", ("a", "b"))
    assert (record.running, record.finished, record.leased, record.stopped) == (3, 5, 3, False)


def test_the_last_checkpoint_is_reported_unless_it_is_long(make):
    bench = make(1)
    item = bench.running[0][0]
    for saved, reported in ((b"7", b"7"), (b"8", b"8"), (b"x" * (MOST_PROGRESS + 1), None)):
        item.rewrite(saved=saved)
        assert bench.heartbeat.record().tasks[0].progress == reported


def test_a_checkpoint_is_news_until_it_was_reported(make):
    bench = make(2)
    heartbeat, (first, second) = bench.heartbeat, [item for item, _ in bench.running]
    assert not heartbeat.news()
    first.rewrite(saved=b"7")
    assert heartbeat.news()
    heartbeat.record()
    assert not heartbeat.news()
    second.rewrite(saved=b"x" * (MOST_PROGRESS + 1))
    assert not heartbeat.news(), "a long one is not reported"
    first.rewrite(saved=b"8")
    assert heartbeat.news()
    bench.running.clear()
    assert not heartbeat.news()


def test_it_keeps_its_start_and_moves_its_time(make):
    bench = make(0)
    born = bench.time.now
    bench.time.now += 60.0
    record = bench.heartbeat.record(stopped=True)
    assert (record.started_at, record.seen_at, record.stopped) == (born, born + 60.0, True)


def test_the_number_of_tasks_is_bounded_but_not_their_count(make):
    bench = make(MOST_TASKS + 2)
    record = bench.heartbeat.record()
    assert (len(record.tasks), record.running) == (MOST_TASKS, MOST_TASKS + 2)
    assert f"id-{MOST_TASKS + 1}" == record.tasks[0].task_id


def test_the_ids_of_all_running_tasks(make):
    assert make(2).heartbeat.running_ids() == ["id-0", "id-1"]
