"""The publisher's two ways give the broker equal envelopes."""

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from aztask import App
from aztask.sending import send
from aztask.sending.publisher import Publisher
from aztask.support import clock


def test_one_by_one_and_as_a_batch_are_the_same_bytes():
    app = App("shop", broker="local://:memory:")
    app.send("shop.add", [1], {"b": "ü"}, task_id="a", expires=3600, queue="first")
    (sent,) = app.broker.peek("first", limit=1)
    message = app.codec.from_envelope(sent.envelope, "first")
    publisher = Publisher(app.broker, app.codec)
    publisher.publish("one", replace(message, queue="one"))
    publisher.publish_many("one", [replace(message, queue="one")])
    single, batch = (each.envelope for each in app.broker.peek("one", limit=2))
    assert single == batch
    assert app.codec.from_envelope(single, "one").expires == message.expires
    publisher.close()
    app.close()


def test_a_delay_is_the_brokers():
    app = App("shop", broker="local://:memory:")
    app.send("shop.add", [1], queue="first")
    (sent,) = app.broker.peek("first", limit=1)
    publisher = Publisher(app.broker, app.codec)
    publisher.publish("later", app.codec.from_envelope(sent.envelope, "later"), delay=60.0)
    assert app.broker.stats("later").active == 0
    assert app.broker.stats("later").scheduled == 1
    publisher.close()
    app.close()


ROWS = [
    ("plain", 1),
    ("ü\N{GRINNING FACE}\0", [1.5, None, {"deep": [True, {"er": "x"}]}]),
    (datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.50")),
    ("long" * 5000, 2**40),
]


@pytest.mark.parametrize("serializer", ["msgpack", "json"])
@pytest.mark.parametrize("keys", [[], ["a key of sixteen bytes"]], ids=["unsigned", "signed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"delay": 60.0}, {"expires": 3600.0}, {"delay": 5.0, "expires": 60.0}, {"session": "s"}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_map_stores_the_same_bytes_as_delay(serializer, keys, options, monkeypatch):
    """The payloads in the queue file: body, headers, properties, and all else that travels."""

    def stored(how):
        app = App("shop", broker="local://:memory:", serializer=serializer, signing_keys=keys)
        app.queue("default", sessions="session" in options)

        @app.task(name="shop.add")
        def add(left, right):
            pass

        @app.around_send
        def tenant(sending):
            sending.headers["shop-tenant"] = ["a", {"b": b"c"}]
            yield

        numbers = iter(range(100))
        monkeypatch.setattr(send, "new_id", lambda: f"id-{next(numbers)}")
        monkeypatch.setattr(send, "new_ids", lambda n: [f"id-{next(numbers)}" for _ in range(n)])
        with clock.replaced(clock.Clock(wall=lambda: 1_800_000_000.0)):
            how(add.with_options(**options))
        with app.broker.engine.database.read() as connection:
            sql = "SELECT message_id, session, payload FROM messages ORDER BY seq"
            found = connection.execute(sql).fetchall()
        app.close()
        return found

    one_by_one = stored(lambda task: [task.delay(*row) for row in ROWS])
    batch = stored(lambda task: task.map(ROWS))
    assert len(batch) == len(ROWS)
    assert batch == one_by_one
