"""What `aztask.testing` offers, on a real emulator."""

import pytest

from aztask import App
from aztask.testing import RunningEmulator, emulator


def test_an_emulator_serves_an_app_inside_the_block():
    with emulator(queues=["orders"]) as running:
        assert isinstance(running, RunningEmulator)
        assert (running.host, running.certificate) == ("127.0.0.1", None)
        running.create_queue("slow", lock_seconds=5)
        app = App("shop", broker=running.connection_string)
        app.send("shop.add", [1, 2], queue="orders")
        app.send("shop.add", [1, 2], queue="slow")
        assert [len(app.broker.peek(name, limit=5)) for name in ("orders", "slow")] == [1, 1]
        app.close()


def test_a_wrong_setting_of_a_queue_is_refused():
    with emulator() as running, pytest.raises(TypeError):
        running.create_queue("orders", no_such_setting=1)
