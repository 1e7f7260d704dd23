"""Keys, signatures and tokens against Azurite, and that none of them gets into a log."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import azurite
import pytest
from azure.core.credentials import AccessToken
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.queue import (
    AccountSasPermissions,
    QueueServiceClient,
    ResourceTypes,
    generate_account_sas,
)
from storage import broker_at

from aztask.address.addresses import StorageQueueAddress, TablesAddress
from aztask.errors import ConfigurationError
from aztask.message.envelope import Envelope
from aztask.queues.delivery import Settled
from aztask.queues.storagequeue.broker import MessageSender, StorageQueueBroker
from aztask.queues.storagequeue.delivery import QueueRequests
from aztask.queues.storagequeue.messages import MessagePipeline, QueueMessages
from aztask.settlement import Complete
from aztask.stores.records.base import Finish, Outcome, Owned, RunKey, Start, State
from aztask.stores.records.deadindex import IndexedDeadLetter
from aztask.stores.records.tables.store import TablesResults
from aztask.support.clock import SYSTEM_CLOCK
from aztask.support.display import SecretFilter
from aztask.support.threadpool import ThreadPool


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[azurite.Azurite]:
    with azurite.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


def signature(seconds: float, permission: str = "rwdlacup") -> str:
    return str(
        generate_account_sas(
            azurite.ACCOUNT,
            azurite.KEY,
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions.from_string(permission),
            datetime.now(UTC) + timedelta(seconds=seconds),
        )
    )


def signed(server: azurite.Azurite, token: str) -> str:
    return f"QueueEndpoint={server.endpoint};SharedAccessSignature={token}"


def test_the_sdks_own_transport_carries_the_composed_requests(server: azurite.Azurite) -> None:
    """It is used where the environment asks for an HTTP proxy."""
    transport: RequestsTransport = RequestsTransport()
    service = QueueServiceClient.from_connection_string(
        server.connection_string, transport=transport, retry_total=0
    )
    queue = service.get_queue_client("proxied")
    queue.create_queue()
    messages = QueueMessages(MessagePipeline(service, transport), queue.url)
    messages.put("hello", 0, seconds=5.0)
    (found,), headers = messages.receive(32, 30, seconds=5.0)
    assert (found.text, found.count, "Date" in headers) == ("hello", 1, True)
    token = messages.update(found.position, found.token, 0, None, seconds=5.0)
    messages.delete(found.position, token, seconds=5.0)
    assert messages.put_all([("a", 0), ("b", 0)], connections=2, seconds=5.0) is None
    thread_pool = ThreadPool("proxied", 4)
    sending = MessageSender(QueueRequests("proxied", messages, SYSTEM_CLOCK), thread_pool)
    assert sending.put_all([(str(n), 0.0) for n in range(20)]) == [None] * 20
    thread_pool.close()
    found_texts = {each.text for each in messages.receive(32, 30, seconds=5.0)[0]}
    assert found_texts == {str(n) for n in range(20)}
    assert messages.receive(32, 30, seconds=5.0)[0] == []


def many_round_trips(broker: StorageQueueBroker, queue: str) -> None:
    """Batches, which are exchanged by one thread over several connections."""
    broker.send(queue, [Envelope(b"x" * 20_000, message_id=str(n)) for n in range(60)])
    receiver = broker.receiver(queue, lease=30.0)
    found: set[object] = set()
    while len(found) < 60:
        deliveries = receiver.receive(32, 10.0)
        found |= {each.envelope.message_id for each in deliveries}
        pairs = [(delivery, Complete()) for delivery in deliveries]
        assert receiver.settle(pairs) == [Settled()] * len(pairs)
    receiver.close()
    assert broker.stats(queue).total == 0


def round_trip(broker: StorageQueueBroker, queue: str) -> None:
    broker.declare(queue)
    broker.send(queue, [Envelope(b"x")])
    receiver = broker.receiver(queue, lease=30.0)
    (delivery,) = receiver.receive(1, 5.0)
    receiver.renew([delivery])
    assert receiver.settle([(delivery, Complete())]) == [Settled()]
    receiver.close()
    many_round_trips(broker, queue)


def test_a_signature_is_enough(server):
    broker = broker_at(signed(server, signature(600)))
    round_trip(broker, "signed")
    broker.close()


def test_an_expired_signature_is_told_and_is_no_end(server):
    broker = broker_at(signed(server, signature(600)))
    broker.declare("expired")
    receiver = broker.receiver("expired", lease=30.0)
    assert receiver.receive(1, 0.0) == []
    late = broker_at(signed(server, signature(-60)))
    token = signature(-60).partition("sig=")[2]
    with pytest.raises(ConfigurationError, match="its expiry") as caught:
        late.receiver("expired", lease=30.0).receive(1, 0.0)
    assert token not in str(caught.value)
    with pytest.raises(ConfigurationError, match="its expiry"):
        late.send("expired", [Envelope(b"x")])
    broker.close()
    late.close()


def test_a_signature_never_reaches_a_log(server, caplog):
    token = signature(600)
    secret = token.partition("sig=")[2].partition("&")[0]
    caplog.handler.addFilter(SecretFilter())
    with caplog.at_level(logging.DEBUG):
        broker = broker_at(signed(server, token))
        round_trip(broker, "logged")
        logging.getLogger("urllib3.connectionpool").debug("GET /logged?%s HTTP/1.1", token)
        logging.getLogger("azure.core").info("Request URL: http://host/q?%s", token)
        broker.close()
    assert "logged" in caplog.text
    assert secret not in caplog.text
    assert azurite.KEY not in caplog.text


class StaticCredential:
    """A token as Entra ID would give one; Azurite checks its claims, not its signature."""

    def __init__(self, audience: str = "https://storage.azure.com") -> None:
        self.asked = 0
        now = int(time.time())
        claims = {
            "aud": audience,
            "iss": "https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/",
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + 3600,
        }
        parts = [{"alg": "RS256", "typ": "JWT"}, claims]
        text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        self._token = AccessToken(f"{text}.{_base64(b'signature')}", now + 3600)

    def get_token(self, *scopes: str, **options: object) -> AccessToken:
        self.asked += 1
        return self._token


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate of this test")
    folder = tmp_path_factory.mktemp("tls")
    pem, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(pem)),
        ],
        check=True,
        capture_output=True,
    )
    return pem, key


def test_entra_id_over_tls(certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate[0]))
    with azurite.running(tmp_path, certificate=certificate, oauth=True) as server:
        credential = StaticCredential()
        address = StorageQueueAddress(azurite.ACCOUNT, server.endpoint)
        broker = StorageQueueBroker(address, credential=credential)
        round_trip(broker, "entra")
        assert credential.asked == 3, "once each for the client, one message and many; then kept"
        broker.close()
        wrong = StorageQueueBroker(address, credential=StaticCredential("https://example.org"))
        with pytest.raises(ConfigurationError, match="refused the credential"):
            wrong.send("entra", [Envelope(b"x")])
        wrong.close()


def test_results_by_entra_id_over_tls(certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate[0]))
    with azurite.storing(tmp_path, certificate=certificate, oauth=True) as (table, blob):
        address = TablesAddress(azurite.ACCOUNT, table.endpoint, blob.endpoint)
        credential = StaticCredential()
        store = TablesResults(address, credential=credential)
        store.create()
        store.check()
        key = RunKey("a")
        assert store.start([Start(key, "task", "queue", 1, "me", "worker", 1.0)]) == [Owned(1)]
        outcome = Outcome(State.SUCCEEDED, Complete(), b"x" * 100_000, at=5.0)
        assert store.record([Finish(key, "me", outcome)]) == [True]
        assert store.history("a")[0].outcome == outcome
        note = IndexedDeadLetter("queue", Envelope(b"x", message_id="m"), "r", "d", 1.0, 1)
        store.dead_index.note([note])
        assert len(list(store.dead_index.notes("queue"))) == 1
        assert credential.asked <= 4, "tokens are used again"
        store.close()
        wrong = TablesResults(address, credential=StaticCredential("https://example.org"))
        with pytest.raises(ConfigurationError, match="assign the role Storage Table Data Contr"):
            wrong.get("a")
        wrong.close()


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate, tmp_path):
    with azurite.running(tmp_path, certificate=certificate) as server:
        broker = broker_at(server.connection_string)
        with pytest.raises(Exception, match="certificate verify failed"):
            broker.stats("any-queue")
        broker.close()
