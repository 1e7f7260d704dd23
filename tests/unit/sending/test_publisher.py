"""The publisher's two ways give the broker equal envelopes."""

from dataclasses import replace

from aztask import App
from aztask.sending.publisher import Publisher


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
