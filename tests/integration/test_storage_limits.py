"""Storage queues at their limits: sizes to the byte, two leases, very old messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from azurite import Azurite
from harness import HERE, ROOT, site_in, wait_until
from ledger_app import work
from storage import broker_at

from aztask.errors import MessageTooLarge
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Lost, Settled, Unknown
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.settlement import Complete, DeadLetter
from aztask.stores.events.sink import read_events

REASON = "r" * 1024
DESCRIPTION = "d" * 1024


@pytest.fixture
def broker(azurite: Azurite) -> Iterator[StorageQueueBroker]:
    made = broker_at(azurite.connection_string)
    for queue in made.queues():
        made.delete(queue)
    made.declare("default")
    yield made
    made.close()


def largest(broker: StorageQueueBroker) -> int:
    """Bytes of the largest body that is accepted, found by trying."""
    fits, too_large = 0, broker.capabilities.max_message_bytes + 1
    while too_large - fits > 1:
        size = (fits + too_large) // 2
        try:
            broker.send("default", [Envelope(bytes(size))])
            fits = size
        except MessageTooLarge:
            too_large = size
    broker.purge("default")
    return fits


def test_exactly_the_limit_is_carried_and_one_byte_more_is_refused_before_it_is_sent(broker):
    size = largest(broker)
    assert broker.capabilities.max_message_bytes - size < 64
    with pytest.raises(MessageTooLarge):
        broker.send("default", [Envelope(bytes(size + 1))])
    assert broker.stats("default").total == 0
    broker.send("default", [Envelope(b"x" * size)])
    receiver = broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 5.0)
    assert delivery.envelope.body == b"x" * size
    assert receiver.settle([(delivery, DeadLetter(REASON, DESCRIPTION))]) == [Settled()]
    (dead,) = broker.peek("default", dead_letter=True)
    assert dead.envelope.body == b"x" * size
    assert (dead.dead_letter_reason, dead.dead_letter_description) == (REASON, DESCRIPTION)


def test_a_reason_that_would_overflow_the_poison_queue_is_cut_and_the_content_is_not(broker):
    """What fills the service's 64 KiB to the last byte, as it may after a checkpoint."""
    size = largest(broker)
    broker.send("default", [Envelope(bytes(size))])
    receiver = broker.receiver("default", lease=30.0)
    (delivery,) = receiver.receive(1, 5.0)
    grown = size
    for more in (2048, 512, 128, 32, 8, 2, 1):  # as large as an update may be
        while True:
            try:
                receiver.update(delivery, Envelope(bytes(grown + more)))
                grown += more
            except MessageTooLarge:
                break
    assert grown > size + 2048
    assert receiver.settle([(delivery, DeadLetter(REASON, DESCRIPTION))]) == [Settled()]
    (dead,) = broker.peek("default", dead_letter=True)
    assert dead.envelope.body == bytes(grown)
    assert REASON.startswith(dead.dead_letter_reason or "")
    assert len(dead.dead_letter_description or "") < len(DESCRIPTION)
    assert broker.stats("default").total == 0


def test_a_stale_receipt_is_known_by_its_code_and_a_missing_queue_is_no_lost_lease(
    azurite: Azurite, broker: StorageQueueBroker
):
    """Both are 404 where the message is gone, too; only the code tells them apart."""
    broker.send("default", [Envelope(b"a"), Envelope(b"b"), Envelope(b"c")])
    receiver = broker.receiver("default", lease=60.0)
    stale, gone, orphan = receiver.receive(3, 5.0)
    azurite.advance(61.0)
    other = broker.receiver("default", lease=60.0)
    again = {each.envelope.body: each for each in other.receive(3, 5.0)}
    assert other.settle([(again[gone.envelope.body], Complete())]) == [Settled()]
    answers = receiver.settle([(stale, Complete()), (gone, Complete())])
    assert [type(each) for each in answers] == [Lost, Lost]
    codes = [each.reason.partition(":")[0] for each in answers]
    assert codes == ["PopReceiptMismatch", "MessageNotFound"]
    broker.delete("default")
    (answer,) = receiver.settle([(orphan, Complete())])
    assert isinstance(answer, Unknown)
    assert "queues create" in answer.reason


def test_a_worker_on_two_queues_uses_two_leases(azurite: Azurite, tmp_path: Path) -> None:
    (tmp_path / "two_leases.py").write_text(
        "import ledger_app\n"
        "from ledger_app import app\n"
        "app.queue('quick', lease=20.0)\n"
        "app.queue('slow', lease=200.0)\n"
    )
    with site_in(
        tmp_path / "site",
        joint=False,
        broker=azurite.connection_string,
        extra={"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, HERE)))},
    ) as site:
        app = site.app()
        for queue in ("quick", "slow"):
            app.broker.declare(queue)
            app.send(work.name, [queue], queue=queue, task_id=queue)
        worker = site.worker("-A", "two_leases:app", "-Q", "quick,slow", "-c", "2")
        for queue in ("quick", "slow"):
            assert app.result(queue).get(timeout=30) == queue
        assert worker.stop() == 0, worker.log
        started = [each for each in read_events(site.events) if each.event == "started"]
        leases = {each.queue: each.lease_seconds for each in started}
    assert leases == {"quick": 20.0, "slow": 200.0}


def test_an_hour_old_redelivered_message_is_renewed_at_seventy_percent_of_its_lease(
    azurite: Azurite, broker: StorageQueueBroker, tmp_path: Path
) -> None:
    lease = 4.0
    with site_in(tmp_path / "site", joint=False, broker=azurite.connection_string) as site:
        app = site.app()
        app.send(work.name, ["old", 2.5 * lease], task_id="old")
        lost = broker.receiver("default", lease=3000.0)
        assert len(lost.receive(1, 5.0)) == 1  # its worker dies
        azurite.advance(3600.0)
        worker = site.worker("-Q", "default", "-c", "1", "--prefetch", "0", "--lease", f"{lease}s")
        assert app.result("old").get(timeout=40) == "old"
        wait_until(lambda: app.broker.stats("default").total == 0, 10, "it is settled")
        assert worker.stop() == 0
        events = [each for each in read_events(site.events) if each.task_id == "old"]
    (started,) = [each for each in events if each.event == "started"]
    assert started.delivery_count == 2
    assert time.time() - started.ts < 60.0
    renewals = [each for each in events if each.event == "renewed"]
    assert len(renewals) >= 3
    for each in renewals:
        assert each.margin_seconds <= 0.31 * lease
        assert each.margin_seconds >= 0.1 * lease
