"""The runtime API over HTTP: messages between programs that have only HTTP, and the SDK."""

from __future__ import annotations

import json
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from urllib.parse import quote, urlsplit

import jwt
import pytest
from azure.servicebus import ServiceBusMessage
from cryptography.hazmat.primitives.asymmetric import rsa

from aztask.emulator.broker.access import Rule, sign
from aztask.emulator.broker.entities import Status
from aztask.emulator.broker.entra import AUDIENCE, EntraTokens, Right
from aztask.testing import Faults, emulator

BATCH = {"Content-Type": "application/vnd.microsoft.servicebus.json"}
TAKE = "messages/head?timeout=0"


class Client:
    """One connection of a program that has only HTTP."""

    def __init__(self, bus):
        self._connection = HTTPConnection(bus.host, bus.admin_port, timeout=20)

    def __call__(self, method, path, body=b"", **headers):
        named = {name.replace("__", "-"): value for name, value in headers.items()}
        self._connection.request(method, quote(path, safe="/?=%$"), body, named)
        answer = self._connection.getresponse()
        answer.content = answer.read()
        return answer

    def close(self):
        self._connection.close()


@pytest.fixture
def http(bus):
    client = Client(bus)
    yield client
    client.close()


def broker_of(answer):
    return json.loads(answer.headers["BrokerProperties"])


def status_and_text(answer):
    return answer.status, answer.content.decode()


# -- the way of a message --------------------------------------------------------------------------


def test_a_message_from_http_to_the_sdk_and_back(http, queue, link):
    name = queue()
    sender, receiver = link(name)
    sent = http(
        "POST",
        f"/{name}/messages",
        b'{"a": 1}',
        Content__Type="application/json",
        BrokerProperties='{"MessageId": "m1", "Label": "shop.resize", "TimeToLive": 90}',
        task='"shop.resize"',
        size="42",
        share="0.5",
        urgent="true",
        day='"Sun, 06 Nov 1994 08:49:37 GMT"',
    )
    assert (sent.status, sent.headers["Content-Type"], sent.content) == (
        *(201, "application/xml; charset=utf-8"),
        b"",
    )
    (message,) = receiver.receive_messages(1, max_wait_time=5)
    assert b"".join(message.body) == b'{"a": 1}'
    assert (message.content_type, message.message_id) == ("application/json", "m1")
    assert (message.subject, message.time_to_live) == ("shop.resize", timedelta(seconds=90))
    assert message.application_properties == {
        b"task": b"shop.resize",
        b"size": 42,
        b"share": 0.5,
        b"urgent": True,
        b"day": 784111777000,
    }
    receiver.complete_message(message)
    sender.send_messages(
        ServiceBusMessage(
            "back",
            content_type="text/plain",
            correlation_id="m1",
            application_properties={"task": 'a "b"', "size": 42},
        )
    )
    got = http("DELETE", f"/{name}/messages/head?timeout=5")
    assert (got.status, got.content, got.headers["Content-Type"]) == (200, b"back", "text/plain")
    assert (got.headers["task"], got.headers["size"]) == ('"a \\"b\\""', "42")
    assert broker_of(got)["CorrelationId"] == "m1"
    assert http("DELETE", f"/{name}/{TAKE}").status == 204


def test_the_life_of_a_lock(http, bus, queue):
    name = queue(lock_seconds=30)
    http("POST", f"/{name}/messages", b"work", BrokerProperties='{"MessageId": "an/id"}')
    locked = http("POST", f"/{name}/messages/head?timeout=5")
    assert (locked.status, locked.content) == (201, b"work")
    broker = broker_of(locked)
    assert (broker["DeliveryCount"], broker["SequenceNumber"]) == (1, 1)
    place = urlsplit(locked.headers["Location"])
    assert place.netloc == f"{bus.host}:{bus.admin_port}"
    assert place.path == f"/{name}/messages/1/{broker['LockToken']}"
    assert http("DELETE", f"/{name}/{TAKE}").status == 204
    assert http("POST", place.path).status == 200  # renewed
    by_id = f"/{name}/messages/{quote('an/id', safe='')}/{broker['LockToken']}"
    assert http("PUT", by_id).status == 200  # unlocked
    again = http("POST", f"/{name}/messages/head?timeout=5")
    assert broker_of(again)["DeliveryCount"] == 2
    for method in ("PUT", "POST", "DELETE"):
        assert status_and_text(http(method, place.path))[0] == 404, "its lock was given back"
    new = urlsplit(again.headers["Location"]).path
    token = broker_of(again)["LockToken"]
    for wrong in (f"2/{token}", f"other/{token}", f"1/{uuid.uuid4()}"):
        assert http("DELETE", f"/{name}/messages/{wrong}").status == 404
    assert http("DELETE", f"/{queue()}/messages/1/{token}").status == 404
    assert http("DELETE", new).status == 200
    assert http("DELETE", new).status == 404
    assert http("DELETE", f"/{name}/{TAKE}").status == 204


def test_a_lock_that_expired_is_lost(http, queue):
    name = queue(lock_seconds=0.2)
    http("POST", f"/{name}/messages", b"late")
    first = urlsplit(http("POST", f"/{name}/messages/head?timeout=5").headers["Location"]).path
    again = http("POST", f"/{name}/messages/head?timeout=5")
    assert (again.status, broker_of(again)["DeliveryCount"]) == (201, 2)
    assert http("DELETE", first).status == 404


def test_a_receiver_waits_for_a_message(http, bus, queue):
    name = queue()
    other = Client(bus)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(other, "DELETE", f"/{name}/messages/head?timeout=15")
        time.sleep(0.5)  # it is the server's waiting that is tested
        http("POST", f"/{name}/messages", b"here")
        assert waiting.result().content == b"here"
        assert 0.4 < time.monotonic() - began < 10
    began = time.monotonic()
    assert other("POST", f"/{name}/messages/head?timeout=0.5").status == 204
    assert 0.4 < time.monotonic() - began < 5
    other.close()


def test_receivers_take_turns_and_none_gets_the_message_of_another(bus, queue):
    name = queue()

    def receive(_):
        client = Client(bus)
        got = client("DELETE", f"/{name}/messages/head?timeout=15").content
        client.close()
        return got

    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(receive, number) for number in range(20)]
        sender = Client(bus)
        items = [{"Body": str(number)} for number in range(20)]
        assert sender("POST", f"/{name}/messages", json.dumps(items), **BATCH).status == 201
        got = sorted(int(each.result()) for each in waiting)
        sender.close()
    assert got == list(range(20))


def test_a_client_that_left_while_it_waited_takes_no_message(http, bus, queue):
    name = queue()
    with socket.create_connection((bus.host, bus.admin_port)) as gone:
        gone.sendall(f"DELETE /{name}/messages/head?timeout=60 HTTP/1.1\r\n\r\n".encode())
        time.sleep(0.3)  # until it waits
    time.sleep(0.3)
    http("POST", f"/{name}/messages", b"kept")
    assert http("DELETE", f"/{name}/{TAKE}").content == b"kept"


def test_topics_subscriptions_and_dead_letters(http, bus, client):
    with bus.administration_client() as admin:
        admin.create_topic("http-news")
        admin.create_subscription("http-news", "all", max_delivery_count=1)
    assert http("POST", "/http-news/messages", b"n", kind='"a"').status == 201
    below = "/http-news/subscriptions/all"
    locked = http("POST", f"{below}/messages/head?timeout=5")
    assert (locked.status, locked.headers["kind"]) == (201, '"a"')
    place = urlsplit(locked.headers["Location"]).path
    assert place.startswith(f"{below}/messages/1/")
    assert http("PUT", place).status == 200
    dead = http("POST", f"{below}/$DeadLetterQueue/messages/head?timeout=5")
    assert dead.headers["DeadLetterReason"] == '"MaxDeliveryCountExceeded"'
    place = urlsplit(dead.headers["Location"]).path.lower()
    assert place.startswith(f"{below}/$deadletterqueue/messages/1/")
    assert http("DELETE", place).status == 200
    assert http("DELETE", f"{below}/$deadletterqueue/{TAKE}").status == 204
    assert http("POST", f"{below}/messages", b"n").status == 400
    assert http("POST", f"{below}/$deadletterqueue/messages", b"n").status == 400
    assert http("DELETE", f"/http-news/{TAKE}").status == 400
    assert http("DELETE", f"{below}/$transfer/$deadletterqueue/{TAKE}").status == 204


def test_schedules_duplicates_and_a_batch_that_is_all_or_nothing(http, queue):
    name = queue(duplicate_window=60.0, max_message_bytes=4096)
    due = (datetime.now(UTC) + timedelta(seconds=0.6)).isoformat()
    later = json.dumps({"MessageId": "later", "ScheduledEnqueueTimeUtc": due})
    http("POST", f"/{name}/messages", b"later", BrokerProperties=later)
    for _ in range(2):
        http("POST", f"/{name}/messages", b"once", BrokerProperties='{"MessageId": "one"}')
    assert http("DELETE", f"/{name}/{TAKE}").content == b"once"
    assert http("DELETE", f"/{name}/{TAKE}").status == 204
    assert http("DELETE", f"/{name}/messages/head?timeout=5").content == b"later"
    items = [{"Body": "small"}, {"Body": "x" * 5000}]
    assert http("POST", f"/{name}/messages", json.dumps(items), **BATCH).status == 403
    assert http("DELETE", f"/{name}/{TAKE}").status == 204


# -- refusals --------------------------------------------------------------------------------------


def test_what_is_refused_is_one_line_with_the_documented_status(http, bus, queue):
    name, sessions = queue(), queue(sessions=True)
    closed = queue(status=Status.DISABLED)
    for method, path, headers, status, text in (
        ("POST", "/missing/messages", {}, 410, "'missing' could not be found"),
        ("DELETE", "/missing/messages/head", {}, 410, "'missing' could not be found"),
        ("DELETE", f"/missing/messages/1/{uuid.uuid4()}", {}, 410, "could not be found"),
        ("POST", f"/{name}/$management/messages", {}, 410, "for AMQP alone"),
        ("POST", f"/{closed}/messages", {}, 403, "is Disabled"),
        ("POST", f"/{closed}/messages/head", {}, 403, "is Disabled"),
        ("POST", f"/{sessions}/messages", {}, 400, "set the message's session id"),
        ("POST", f"/{sessions}/messages/head", {}, 400, "requires sessions"),
        ("POST", f"/{name}/messages/head?timeout=soon", {}, 400, "no number of seconds"),
        ("POST", f"/{name}/messages", {"BrokerProperties": "{"}, 400, "must be JSON"),
        ("POST", f"/{name}/messages", BATCH, 400, "must be JSON"),
    ):
        answer = http(method, path, **headers)
        assert answer.status == status, path
        assert text in answer.content.decode()
        assert b"\n" not in answer.content
    assert (
        http("POST", f"/{sessions}/messages", BrokerProperties='{"SessionId": "s"}').status == 201
    )
    assert http("GET", f"/{name}/messages").status == 404  # of the administration
    assert http("POST", f"/{name}/messages/1/no-uuid").status == 405


@pytest.mark.parametrize("size", [1_100_000, 9_000_000])
def test_a_message_that_is_too_large_gets_its_answer(http, queue, size):
    """Also a client that is still sending when the answer is written."""
    name = queue()
    answer = http("POST", f"/{name}/messages", b"x" * size)
    assert answer.status == 403
    assert "at most 1048576" in answer.content.decode()
    large = queue(max_message_bytes=20 * 2**20)
    http.close()
    assert http("POST", f"/{large}/messages", b"x" * size).status == 201
    assert len(http("DELETE", f"/{large}/{TAKE}").content) == size


def test_an_entity_that_ends_while_a_client_waits(bus, queue):
    name = queue()
    client = Client(bus)
    with ThreadPoolExecutor(1) as pool, bus.administration_client() as admin:
        waiting = pool.submit(client, "DELETE", f"/{name}/messages/head?timeout=15")
        time.sleep(0.3)
        admin.delete_queue(name)
        assert waiting.result().status == 410
    client.close()


def test_a_malformed_request_harms_no_other(bus, http, queue):
    name = queue()
    for head in (
        f"POST /{name}/messages HTTP/1.1\r\nContent-Length: {'9' * 5000}\r\n\r\n",
        f"POST /{name}/messages HTTP/1.1\r\n: x\r\nBrokerProperties: \xff\x00\r\n\r\n",
        f"POST /{name}%00%ff/messages HTTP/1.1\r\n\r\n",
        "POST /%/messages/head HTTP/1.1\r\nHost: [\r\n\r\n",
        "DELETE //messages/head?timeout=-1 HTTP/1.1\r\n\r\n",
        f"PUT /{name}/messages/%/{uuid.uuid4()} HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((bus.host, bus.admin_port), 5) as one:
            one.sendall(head.encode("latin-1"))
            one.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda one=one: one.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 4"), answer
    assert http("POST", f"/{name}/messages", b"well").status == 201


def test_a_page_of_another_site_cannot_send(http, queue):
    name = queue()
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        assert http("POST", f"/{name}/messages", b"x", **headers).status == 421
    assert http("POST", f"/{name}/messages", b"x", Origin="http://localhost:3000").status == 201


# -- keys, tokens, faults --------------------------------------------------------------------------


def sas(key, resource, name="RootManageSharedAccessKey", expires=None):
    """A token as Microsoft's pages make it."""
    signed = f"{quote(resource, safe='')}\n{expires or int(time.time()) + 60}"
    encoded, expiry = signed.split("\n")
    signature = quote(sign(key, signed), safe="")
    return f"SharedAccessSignature sr={encoded}&sig={signature}&se={expiry}&skn={name}"


def test_keys_allow_what_they_allow_over_amqp():
    rules = {
        "sender": Rule("s", frozenset({Right.SEND})),
        "listener": Rule("l", frozenset({Right.LISTEN})),
    }
    with emulator(queues=["q", "other"], shared_access_key="main", rules=rules) as bus:
        http = Client(bus)
        base = f"http://{bus.host}:{bus.admin_port}"

        def statuses(token):
            return (
                http("POST", "/q/messages", b"x", Authorization=token).status,
                http("DELETE", f"/q/{TAKE}", Authorization=token).status,
            )

        assert http("POST", "/q/messages", b"x").status == 401
        assert statuses(sas("main", f"{base}/q")) == (201, 200)
        assert statuses(sas("main", f"sb://{bus.host}/")) == (201, 200)
        assert statuses(sas("main", f"{bus.host}:{bus.admin_port}/q")) == (201, 200)
        assert statuses(sas("s", f"{base}/q", "sender")) == (201, 401)
        assert statuses(sas("l", f"{base}/q", "listener")) == (401, 200)
        assert statuses(sas("main", f"{base}/other")) == (401, 401)
        assert statuses(sas("wrong", f"{base}/q")) == (401, 401)
        assert statuses(sas("main", f"{base}/q", expires=int(time.time()) - 5)) == (401, 401)
        locked = sas("s", f"{base}/q", "sender")
        refused = http("POST", "/q/messages/head", Authorization=locked)
        forged = {"Authorization": sas("main", "other"), "Host": "other"}
        assert http("POST", "/q/messages", b"x", **forged).status == 401
        assert "'Listen' claim is required" in refused.content.decode()
        http.close()


def test_tokens_of_entra_id_count_with_their_grants():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": "k"}
    grants = {"app": frozenset({Right.SEND})}
    claims = {"aud": AUDIENCE, "oid": "app", "exp": time.time() + 60}
    token = jwt.encode(claims, key, algorithm="RS256", headers={"kid": "k"})
    with emulator(queues=["q"], entra=EntraTokens([public], grants)) as bus:
        http = Client(bus)
        named = {"Authorization": f"Bearer {token}"}
        assert http("POST", "/q/messages", b"x", **named).status == 201
        assert http("DELETE", f"/q/{TAKE}", **named).status == 401
        assert http("POST", "/q/messages", b"x", Authorization=f"Bearer {token}x").status == 401
        http.close()


def test_faults_meet_http_as_well():
    with emulator(queues=["q"], faults=Faults(busy=1.0)) as bus:
        http = Client(bus)
        assert http("POST", "/q/messages", b"x").status == 503
        http.close()
    with emulator(queues=["q"], faults=Faults(drop=1.0)) as bus:
        http = Client(bus)
        with pytest.raises(ConnectionError):
            http("POST", "/q/messages", b"x")
        http.close()
        with bus.administration_client() as admin:  # the work was done, its answer was lost
            assert admin.get_queue_runtime_properties("q").active_message_count == 1


def test_a_restart_keeps_what_was_confirmed(tmp_path):
    data = str(tmp_path / "bus.db")
    with emulator(queues=["q"], data=data) as bus:
        http = Client(bus)
        assert http("POST", "/q/messages", b"kept", size="1").status == 201
        http.close()
    with emulator(data=data) as bus:
        http = Client(bus)
        got = http("DELETE", f"/q/{TAKE}")
        assert (got.content, got.headers["size"]) == (b"kept", "1")
        http.close()


def test_receivers_that_wait_lock_no_other_out(bus, queue):
    """More of them than there is room for: the oldest make room for a new client."""
    name = queue()
    waiting = []
    for _ in range(230):
        one = socket.create_connection((bus.host, bus.admin_port), 5)
        one.sendall(f"POST /{name}/messages/head?timeout=60 HTTP/1.1\r\n\r\n".encode())
        waiting.append(one)
    http = Client(bus)
    assert http("POST", f"/{name}/messages", b"x").status == 201
    for one in waiting:
        one.close()
    http.close()
