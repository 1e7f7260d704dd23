"""The page for people who debug with the emulator."""

from __future__ import annotations

import base64
import html
from html.parser import HTMLParser

import pytest
from emulatorbench import Bench, message

from aztask.emulator.admin import page
from aztask.emulator.admin.http import HttpRequest
from aztask.emulator.admin.routes import AdminServer
from aztask.emulator.broker.entities import EntityKind, SubscriptionRule
from aztask.emulator.broker.filters import CorrelationFilter, RuleAction, SqlFilter

EVIL = "<script>alert('1')</script>\"&"
TAGS = {
    *("html", "head", "meta", "title", "link", "body", "header", "a", "main", "h1", "h2", "p"),
    *("div", "table", "thead", "tbody", "tr", "th", "td", "pre"),
}


class Tags(HTMLParser):
    """The tags and attributes of a document."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.names = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}


def seen(bench, path):
    text = page.render(bench.broker, [], path)
    assert text is not None
    found = Tags(text)
    assert found.tags <= TAGS
    assert not {name for name in found.names if name.startswith("on")}
    return text


def test_an_entity_with_its_messages(bench):
    bench.create("q/a b".replace(" ", "-"), max_deliveries=7)
    path = "q/a-b"
    bench.put(path, message(b"hello \xe2\x98\x83", message_id="first", n=5))
    bench.put(path, message(b"\xff\x00binary"), message(b"x" * 5000), message(b"dead"))
    (lease,) = bench.engine.receive(path, 1, 30.0)
    leased = bench.engine.receive(path, 3)
    bench.engine.abandon(path, [(each.seq, each.token) for each in leased[:2]])
    bench.engine.dead_letter(path, [(leased[2].seq, leased[2].token)], "bad", "very bad")
    text = seen(bench, "/$entity/q%2Fa-b")
    for part in ("hello ☃", "n: 5", "first", "30 s", "leased", "ff 00 62", "... 5000 bytes"):
        assert part in text
    assert "very bad" in text
    assert lease.message_id == "first"
    assert seen(bench, "/").count("/$entity/q%2Fa-b") == 1


def test_rules_and_connections(bench):
    bench.create("t", kind=EntityKind.TOPIC)
    rules = (
        SubscriptionRule("a", SqlFilter("n < @p", {"@p": 5}), action=RuleAction("SET n = 1")),
        SubscriptionRule("b", CorrelationFilter({"Label": EVIL})),
    )
    bench.create("t/Subscriptions/s", kind=EntityKind.SUBSCRIPTION, rules=rules)
    text = seen(bench, "/$entity/t%2FSubscriptions%2Fs")
    assert "n &lt; @p" in text
    assert "SET n = 1" in text
    assert "t/Subscriptions/s" in seen(bench, "/$entity/t")
    client = bench.client()
    client.attach(receive=False, address="t")
    client.attach(receive=True, handle=1, address="t/Subscriptions/s", name="m")
    assert client.handler.addresses() == ["from t/Subscriptions/s", "to t"]


def test_every_value_of_a_client_is_escaped(bench):
    bench.create("q", sessions=True)
    raw = message(EVIL.encode(), message_id=EVIL, session=EVIL, **{EVIL: EVIL})
    bench.put("q", raw, raw)
    session = bench.engine.accept_session("q", EVIL)
    (lease,) = bench.engine.receive("q", 1, session=session)
    bench.engine.dead_letter("q", [(lease.seq, lease.token)], EVIL, EVIL)
    text = seen(bench, "/$entity/q")
    assert "<script" not in text
    assert text.count(html.escape(EVIL)) >= 10


def test_an_unknown_entity_has_no_page(bench):
    assert page.render(bench.broker, [], "/$entity/none") is None
    assert page.render(bench.broker, [], "/$entity/") is None


def ask(bench, path="/", method="GET", **headers):
    server = AdminServer(bench.broker, bench.emulator.server)
    headers = {"host": "localhost:5300", **headers}
    return server.answer(HttpRequest(method, path, {}, headers, b""))


@pytest.mark.parametrize("path", ["/", page.STYLE_PATH])
def test_the_headers_allow_no_script(bench, path):
    answer = ask(bench, path)
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "headers",
    [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}],
    ids=str,
)
def test_other_hosts_and_origins_are_refused_without_a_key(bench, headers):
    for path in ("/", page.STYLE_PATH, "/$entity/q"):
        assert ask(bench, path, **headers).status == 421


def test_it_is_for_reading(bench):
    assert ask(bench, method="POST").status == 405


def test_with_a_key_the_browser_must_show_it():
    bench = Bench(shared_access_key="secret")
    basic = {
        key: "Basic " + base64.b64encode(f"me:{key}".encode()).decode()
        for key in ("secret", "wrong")
    }
    for given in ({}, {"authorization": basic["wrong"]}, {"authorization": "Basic !"}):
        answer = ask(bench, **given)
        assert (answer.status, "entity" in answer.body.lower()) == (401, False)
        assert answer.headers["WWW-Authenticate"].startswith("Basic")
    assert ask(bench, authorization=basic["secret"], host="emulator").status == 200
    bench.emulator.database.close()


def test_a_body_that_is_cut_inside_a_character_is_still_text(bench):
    bench.create("q")
    bench.put("q", message(("x" + "é" * 10_000).encode()))
    text = page.render(bench.broker, [], "/$entity/q") or ""
    assert "xéé" in text
