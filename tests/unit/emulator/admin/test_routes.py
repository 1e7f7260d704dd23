"""Administration requests without a socket."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from emulatorbench import Bench

from aztask.emulator.admin.descriptions import CONNECT, INSTANCE, children, local
from aztask.emulator.admin.http import HttpRequest
from aztask.emulator.admin.routes import Routes


def described(kind, inner=""):
    return f'<{kind} xmlns="{CONNECT}" xmlns:i="{INSTANCE}">{inner}</{kind}>'.encode()


QUEUE, TOPIC = described("QueueDescription"), described("TopicDescription")
SUBSCRIPTION, RULE = described("SubscriptionDescription"), described("RuleDescription")
UPDATE = {"if-match": "*"}


class Admin:
    """Sends requests and remembers which entities were reported as deleted."""

    def __init__(self, bench):
        self.deleted = []
        self._routes = Routes(bench.broker, self.deleted.append, secure=False)

    def __call__(self, method, path, body=b"", headers=None, **query):
        headers = {"host": "localhost:5300", **(headers or {})}
        named = {f"${name}": value for name, value in query.items()}
        return self.answer(HttpRequest(method, path, named, headers, body))

    def answer(self, request):
        return self._routes.answer(request)


@pytest.fixture
def admin(bench):
    return Admin(bench)


def titles(response):
    root = ElementTree.fromstring(response.body)
    return [children(each)["title"].text for each in root if local(each) == "entry"]


def test_anybody_may_ask_for_the_health(admin):
    """As images and Testcontainers do, also by the name of a container."""
    answer = admin("GET", "/health", headers={"host": "emulator:5300"})
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert json.loads(answer.body) == {"status": "healthy", "message": "Service is healthy."}


def test_a_queue_may_be_called_health(admin):
    query = {"api-version": "2021-05"}
    request = HttpRequest("PUT", "/health", query, {"host": "localhost:5300"}, QUEUE)
    assert admin.answer(request).status == 201
    request = HttpRequest("GET", "/health", query, {"host": "localhost:5300"}, b"")
    assert admin.answer(request).content_type.startswith("application/atom+xml")


def test_the_life_of_a_queue(admin, bench):
    assert admin("PUT", "/q", QUEUE).status == 201
    assert admin("PUT", "/q", QUEUE).status == 409
    got = admin("GET", "/q")
    assert (got.status, got.content_type.split(";")[1]) == (200, "type=entry")
    change = described("QueueDescription", "<MaxDeliveryCount>3</MaxDeliveryCount>")
    assert admin("PUT", "/q", change, UPDATE).status == 200
    assert bench.namespace.get("q").max_deliveries == 3
    assert admin("DELETE", "/q").status == 200
    assert admin.deleted == ["q"]
    assert admin("GET", "/q").status == 404


def test_topics_subscriptions_and_rules(admin):
    assert admin("PUT", "/t", TOPIC).status == 201
    assert admin("PUT", "/t/Subscriptions/s", SUBSCRIPTION).status == 201
    assert admin("PUT", "/t/subscriptions/s/rules/r", RULE).status == 201
    assert admin("PUT", "/t/Subscriptions/s/Rules/r", RULE).status == 409
    assert admin("PUT", "/t/Subscriptions/s/Rules/r", RULE, UPDATE).status == 200
    assert titles(admin("GET", "/t/Subscriptions")) == ["s"]
    assert titles(admin("GET", "/t/Subscriptions/s/Rules")) == ["$Default", "r"]
    assert admin("DELETE", "/t/Subscriptions/s/Rules/R").status == 200
    assert admin("GET", "/t/Subscriptions/s/Rules/r").status == 404
    assert admin("DELETE", "/t").status == 200
    assert admin.deleted == ["t", "t/Subscriptions/s"]


def test_lists_are_paged(admin, bench):
    for name in "abc":
        bench.create(name)
    first = admin("GET", "/$Resources/queues", skip="0", top="2")
    assert titles(first) == ["a", "b"]
    assert "$skip=2&amp;$top=2" in first.body
    last = admin("GET", "/$Resources/queues", skip="2", top="2")
    assert (titles(last), 'rel="next"' in last.body) == (["c"], False)
    assert titles(admin("GET", "/$Resources/topics")) == []


def test_the_namespace_has_a_description(admin):
    assert "<MessagingSKU>Premium</MessagingSKU>" in admin("GET", "/$namespaceinfo").body


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/missing", b"", 404),
        ("DELETE", "/missing", b"", 404),
        ("PATCH", "/q", b"", 405),
        ("PUT", "/$Resources/queues", QUEUE, 405),
        ("PUT", "/q", b"garbage", 400),
        ("PUT", "/bad name", QUEUE, 400),
        ("GET", "/t/Subscriptions/s/Elsewhere", b"", 404),
    ],
)
def test_errors_have_a_status_and_a_document(admin, method, path, body, status):
    response = admin(method, path, body)
    assert response.status == status
    assert children(ElementTree.fromstring(response.body))["Code"].text == str(status)


def test_with_a_key_requests_need_a_token():
    bench = Bench(shared_access_key="key")
    assert Admin(bench)("GET", "/$Resources/queues").status == 401
    bench.emulator.database.close()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:5300", 200),
        ("LOCALHOST", 200),
        ("[::1]:5300", 200),
        ("attacker.example:5300", 421),
        ("127.0.0.1.attacker.example", 421),
        ("localhost@attacker.example", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_web_page_whose_name_points_here_is_refused(admin, host, status):
    assert admin("GET", "/$Resources/queues", headers={"host": host}).status == status
    assert admin("PUT", "/q", QUEUE, {"host": host}).status == (201 if status == 200 else 421)


def test_with_a_key_any_name_is_served():
    bench = Bench(shared_access_key="key")
    response = Admin(bench)("GET", "/$Resources/queues", headers={"host": "bus.example"})
    assert response.status == 401
    bench.emulator.database.close()
