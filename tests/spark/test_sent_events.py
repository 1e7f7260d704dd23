"""The event ``enqueued`` is written for what the broker accepted, and for nothing else.

On a real Storage queue, through a proxy that loses answers; without Spark.
"""

import os
from itertools import count

import pyarrow as pa
import pytest
from azurite import running
from proxy import Proxy

from aztask import App
from aztask.errors import BrokerError
from aztask.spark.submission.send import send_partition
from aztask.spark.submission.submission import Submission, task_id
from aztask.stores.events.sink import read_events

ROWS = 20
_names = count(1)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    with running(tmp_path_factory.mktemp("azurite")) as server:
        yield server


class Site:
    """A queue behind a proxy, and the events of those who send to it."""

    def __init__(self, azurite, proxy, folder):
        self.proxy = proxy
        self.queue = f"sent-{next(_names)}"
        self._folder = folder
        self._direct = App("direct", broker=azurite.connection_string)
        self._direct.broker.declare(self.queue)

    def send(self, texts, **options):
        """Submit rows with these texts, keyed by their numbers."""
        given = {"broker_env": "SENT_BROKER", "queue": self.queue, **options}
        plan = Submission("t", "key", "s", columns=(("text", "text"),), **given)
        keys = pa.array(range(len(texts)), pa.int32())
        batch = pa.RecordBatch.from_arrays([keys, texts], names=["key", "text"])
        return send_partition(plan, [batch], partition=0)

    def events(self, kind):
        return sorted(each.task_id for each in read_events(self._folder) if each.event == kind)

    def stored(self):
        """How many messages the queue holds."""
        return self._direct.broker.stats(self.queue).total


@pytest.fixture
def site(azurite, tmp_path, monkeypatch):
    proxy = Proxy(azurite.port)
    monkeypatch.setenv("SENT_BROKER", azurite.connection_string_at(proxy.port))
    monkeypatch.setenv("AZTASK_EVENTS", str(tmp_path / "events"))
    yield Site(azurite, proxy, tmp_path / "events")
    proxy.close()


def ids(numbers):
    return sorted(task_id("s", number) for number in numbers)


def test_a_row_that_is_too_large_has_no_event_and_its_neighbours_are_sent_at_once(site):
    texts = ["x" * (70_000 if number in (3, 11) else 10) for number in range(ROWS)]
    report = site.send(pa.array(texts))
    assert (report.rows, report.sent, report.failed, report.retried) == (ROWS, ROWS - 2, 2, 0)
    assert "bytes on the wire" in report.errors
    assert [line.partition(":")[0] for line in report.errors.splitlines()] == ["key 3", "key 11"]
    assert site.events("enqueued") == ids(set(range(ROWS)) - {3, 11})
    assert site.events("send_unconfirmed") == []
    assert site.stored() == site.proxy.counts["POST"] == ROWS - 2


def not_utf8(number):
    """Texts, of which one is no UTF-8: Spark makes such ones by casting from binary."""
    texts = pa.array([b"x" if each != number else b"\xff" for each in range(ROWS)], pa.binary())
    return pa.Array.from_buffers(pa.string(), ROWS, texts.buffers())


def test_a_row_whose_value_python_cannot_hold_fails_alone(site):
    report = site.send(not_utf8(4))
    assert (report.rows, report.sent, report.failed) == (ROWS, ROWS - 1, 1)
    assert report.errors.startswith("key 4: column 'text': Python cannot hold the value")
    assert site.events("enqueued") == ids(set(range(ROWS)) - {4})
    late = pa.array([0, 10**9, *range(ROWS - 2)], pa.int32()).cast(pa.date32())
    assert site.send(late).failed == 1


def test_a_row_that_cannot_be_encoded_fails_alone(site, tmp_path, monkeypatch):
    (tmp_path / "json_app.py").write_text(
        "import os\nfrom aztask import App\n"
        "app = App('j', broker=os.environ['SENT_BROKER'], serializer='json')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    numbers = pa.array([float("nan") if each == 7 else 1.0 for each in range(ROWS)])
    report = site.send(numbers, app="json_app", broker_env=None)
    assert (report.sent, report.failed) == (ROWS - 1, 1)
    assert site.events("enqueued") == ids(set(range(ROWS)) - {7})


def test_a_send_that_is_repeated_is_one_event(site):
    site.proxy.hook = lambda line, number: "drop-reply" if number in (2, 9) else None
    report = site.send(pa.array(["x"] * ROWS))
    assert (report.sent, report.retried, report.failed) == (ROWS, 2, 0)
    assert site.stored() == ROWS + 2
    assert site.events("enqueued") == ids(range(ROWS))
    assert site.events("send_unconfirmed") == []


def test_a_send_that_stays_unconfirmed_is_told_as_such(site):
    """Twelve answers arrive, then none."""
    site.proxy.hook = lambda line, number: "drop-reply" if number > 12 else None
    with pytest.raises(BrokerError, match=r"with 12 rows .* sent, 8 more may be stored or not"):
        site.send(pa.array(["x"] * ROWS), patience=0.3)
    enqueued, doubtful = site.events("enqueued"), site.events("send_unconfirmed")
    assert (len(enqueued), len(doubtful)) == (12, 8)
    assert sorted(enqueued + doubtful) == ids(range(ROWS))


def test_map_tells_the_same(site, monkeypatch):
    site.proxy.hook = lambda line, number: "drop-reply" if number == 5 else None
    app = App("shop", broker=os.environ["SENT_BROKER"])
    task = app.task(lambda number: None, name="t", queue=site.queue)
    with pytest.raises(BrokerError, match="1 of 20"):
        task.map([(number,) for number in range(ROWS)])
    app.close()
    assert (len(site.events("enqueued")), len(site.events("send_unconfirmed"))) == (ROWS - 1, 1)
    assert site.stored() == ROWS
