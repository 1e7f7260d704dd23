"""Every page shows what the store has, as text, to visitors who are logged in, and to no others."""

import re
import time
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from dashboardshop import PAYLOAD, start_schedules
from recordedruns import record_run
from starlette.routing import Route

from aztask import App
from aztask.dashboard import render, site
from aztask.dashboard.guard import ENTRA, ENTRA_BACK, PUBLIC, is_public
from aztask.dashboard.pages import MENU, PAGES
from aztask.dashboard.render import Live
from aztask.dashboard.server import Dashboard
from aztask.operate import search
from aztask.operate.requests import Role
from aztask.operate.search import RunFilter, find_runs
from aztask.settlement import Complete, DeadLetter
from aztask.stores.records.base import RunKey, Start, State

ADDRESSES = {
    "/queue": "/queue?name=default",
    "/task": f"/task?id={quote('run-1 ' + PAYLOAD)}",
    "/workflow": "/workflow?id=w",
    "/schedule": "/schedule?name=nightly",
    "/letters": "/letters?queue=default",
    "/search": f"/search?q={quote(PAYLOAD)}",
}
VOID = {"meta", "link", "input", "img", "br", "rect", "path"}


class Elements(HTMLParser):
    """The elements of a page with their attributes; checks that each is closed."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            closed = self.open.pop()
            if closed != tag:  # options and list items may stay open in HTML; ours do not
                raise AssertionError(f"{closed} is closed by {tag}")


def checked(text):
    """The elements of a page in which nothing of the attack became markup."""
    elements = Elements(text).found
    for tag, attributes in elements:
        assert tag != "img"
        assert "style" not in attributes and tag != "style"
        assert not any(name.startswith("on") for name in attributes), attributes
        if tag == "script":
            assert attributes["src"].startswith("/static/")
        for name in ("href", "src", "action", "hx-get"):
            assert attributes.get(name, "/").startswith(("/", "#")), attributes
    assert "\x1b" not in text and "\u202e" not in text
    return elements


@pytest.mark.parametrize("path", sorted(PAGES))
def test_each_page_shows_hostile_values_as_text(full, path):
    answer = full.as_("configure").get(ADDRESSES.get(path, path))
    assert answer.status_code == 200, answer.text
    checked(answer.text)
    if path not in (
        "/leases",
        "/limits",
        "/schedule",
        "/workflow",
        "/workflows",
        "/schedules",
        "/queues",
        "/tasks",
    ):
        assert "&lt;script&gt;" in answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", sorted(PAGES))
def test_each_page_of_an_empty_app_is_whole(shop, path):
    answer = shop.as_("read").get(ADDRESSES.get(path, path))
    assert answer.status_code == (404 if path in ("/task", "/workflow", "/schedule") else 200)
    checked(answer.text)


def test_a_schedule_shows_its_times_and_occurrences(shop):
    assert ">new<" in shop.as_("read").get("/schedules").text
    start_schedules(shop.app)
    shop.app.schedules.trigger("nightly")
    shop.site.forget()
    client = shop.as_("read")
    assert ">active<" in client.get("/schedules").text
    assert "trigger" in client.get("/schedule?name=nightly").text


def test_the_menu_has_a_page_for_each_entry():
    assert {path for path, _ in MENU} <= PAGES.keys()


def test_every_route_is_closed_without_a_login(full):
    """Whatever route exists: a new one is closed unless it is public."""
    client = full.client()
    routes = [
        each for each in Dashboard(full.site, full.access).routes() if isinstance(each, Route)
    ]
    assert len(routes) > len(PAGES)
    opened = set()
    for route in routes:
        path = route.path.replace("{name}", "dash.css")
        if is_public(path):
            opened.add(route.path)
            continue
        for method in route.methods:
            headers = {"origin": "http://testserver", "accept": "text/html"}
            address = ADDRESSES.get(path, path)
            answer = client.request(method, address, headers=headers)
            if method in ("GET", "HEAD"):
                assert answer.status_code == 303, route
                assert answer.headers["location"].startswith("/login?next=%2F")
            else:
                assert answer.status_code == 401, route
            assert "dead-1" not in answer.text and "default" not in answer.text
            answer = client.request(method, address, headers={"origin": "http://testserver"})
            assert answer.status_code == 401
    # What is open is listed twice, so that a route is not opened by mistake.
    assert opened == {"/login", ENTRA, ENTRA_BACK, "/healthz", "/static/{name}"}
    assert opened - {"/static/{name}"} == PUBLIC
    for path in (*(f"{each}/more" for each in PUBLIC), "/login/else", "/static", "/loginx"):
        assert client.get(path).status_code == 401, path


def test_public_routes_say_nothing_about_the_app(full):
    client = full.client()
    for path in (*PUBLIC, "/static/dash.css", "/static/htmx.min.js"):
        answer = client.get(path)
        assert answer.status_code == (404 if path in (ENTRA, ENTRA_BACK) else 200)
        assert "shop" not in answer.text and "default.db" not in answer.text
    assert client.get("/static/../server.py").status_code in (401, 404)
    assert client.get("/static/server.py").status_code == 404


def test_arguments_are_shown_to_those_who_may_see_them(full):
    for address in (
        "/queue?name=default",
        "/letters?queue=default",
        "/running",
        f"/task?id={quote('run-0 ' + PAYLOAD)}",
    ):
        hidden = full.as_("read").get(address).text
        assert "hidden from your role" in hidden.lower(), address
        seen = full.as_("act").get(address).text
        assert "hidden from your role" not in seen.lower(), address
    assert "[1, 2]" in full.as_("act").get("/queue?name=default").text


@pytest.mark.parametrize("path", sorted(PAGES))
def test_what_is_written_for_one_role_is_for_no_other(full, monkeypatch, path):
    """Visitors share what was written for their role, and see what they would see alone."""
    still = SimpleNamespace(**vars(time))  # pages that are asked for later would show other ages
    still.time = lambda wall=time.time(): wall
    still.monotonic = lambda at=time.monotonic(): at
    for module in (render, site):
        monkeypatch.setattr(module, "time", still)
    address = ADDRESSES.get(path, path)
    visitors = [full.as_(role) for role in ("configure", "act", "read", "act", "configure")]
    shared = [each.get(address).text for each in visitors]
    monkeypatch.setattr(Live, "text", lambda self, visitor, caller: caller())
    assert shared == [each.get(address).text for each in visitors]


def test_many_viewers_cost_one_writing_for_each_role(full, monkeypatch):
    written, plain = [], Live.text
    monkeypatch.setattr(
        Live,
        "text",
        lambda self, visitor, caller: plain(
            self, visitor, lambda: written.append(visitor.role) or caller()
        ),
    )
    for role in ("act", "configure", "act", "act", "configure", "act"):
        assert full.as_(role).get("/workers").status_code == 200
    assert sorted(written) == [Role.ACT, Role.CONFIGURE]
    full.site.forget()
    full.as_("act").get("/workers")
    assert len(written) == 3, "what is made anew is written anew"


def test_secrets_in_errors_are_masked(shop):
    shop.app.send("shop.add", [1, 2], task_id="a")
    receiver = shop.app.broker.receiver("default", lease=30.0)
    (found,) = receiver.receive(1, 1.0)
    text = "failed: Endpoint=sb://x/;SharedAccessKey=c2VjcmV0c2VjcmV0"
    receiver.settle([(found, DeadLetter("rejected", text))])
    receiver.close()
    page = shop.as_("read").get("/letters?queue=default").text
    assert "SharedAccessKey=****" in page and "c2VjcmV0" not in page


def test_a_page_that_does_not_exist_is_404_and_one_that_fails_says_why(shop, monkeypatch):
    client = shop.as_("read")
    assert client.get("/nothing").status_code == 404
    assert client.get("/queue?name=nothing").status_code == 503
    assert client.get("/queue").status_code == 404
    assert client.get("/runs?state=nothing").status_code == 404
    assert client.get("/runs?after=nothing").status_code == 503

    def fails(*_, **__):
        raise RuntimeError("<b>the SDK broke</b>")

    monkeypatch.setattr(shop.app.results, "workers", fails)
    answer = client.get("/workers")
    assert answer.status_code == 500 and "&lt;b&gt;the SDK broke" in answer.text
    overview = client.get("/")
    assert overview.status_code == 500 or "the SDK broke" in overview.text


# -- paging --------------------------------------------------------------------------------------


def ids_of(text):
    return re.findall(r'/task\?id=([^"]+)"', text)


def test_runs_of_another_owner_are_named_and_not_verified(shop, tmp_path):
    keys, place = ["a-key-that-no-attacker-knows-0123456789"], f"local://{tmp_path}/queues.db"
    other = App(
        "other", broker="local://:memory:", results=place, owner="theirs", signing_keys=keys
    )
    record_run(other, RunKey("signed"), State.SUCCEEDED, Complete())
    record_run(shop.app, RunKey("own"), State.SUCCEEDED, Complete())
    other.close()
    page = shop.as_("read").get("/runs").text
    rows = {
        name: line
        for line in page.split("<tr>")
        for name in ("signed", "own")
        if f">{name}<" in line
    }
    assert "not verified" in rows["signed"] and "of theirs" in rows["signed"]
    assert "not verified" not in rows["own"] and "of " not in rows["own"]


def test_runs_page_by_key_and_a_new_run_moves_nothing(shop):
    for number in range(7):
        record_run(shop.app, RunKey(f"run~{number}"), State.SUCCEEDED, Complete())
    first = find_runs(shop.app, RunFilter(), limit=3)
    record_run(shop.app, RunKey("run~new"), State.FAILED, Complete())
    second = find_runs(shop.app, RunFilter(state="succeeded"), limit=3, after=first.next)
    third = find_runs(shop.app, RunFilter(), limit=3, after=second.next)
    seen = [each.key.task_id for page in (first, second, third) for each in page.runs]
    assert [each for each in seen if each != "run~new"] == [f"run~{each}" for each in range(7)]
    assert (bool(second.next), first.stopped) == (True, False)


def test_a_search_that_comes_to_its_bound_says_so_and_goes_on(shop, monkeypatch):
    monkeypatch.setattr(search, "MOST_LOOKED", 100)
    shop.app.results.start(
        [Start(RunKey(f"r{n}"), "shop.add", "default", n, f"o{n}", "w", 1e9) for n in range(2100)]
    )
    client = shop.as_("read")
    page = client.get("/runs?text=r0")
    assert page.status_code == 200 and "Searched" not in page.text
    assert "2,000 runs looked at, back to" in page.text and not ids_of(page.text)
    (following,) = re.findall(r'rel="next" href="([^"]+)">Search older runs', page.text)
    assert ids_of(client.get(following.replace("&amp;", "&")).text) == ["r0"]
    for path in ("/runs", "/runs?worker=w"):
        full_page = client.get(path).text
        assert "Older runs</a>" in full_page and "Search older runs" not in full_page
    found = client.get("/search?q=r0").text
    (following,) = re.findall(r'rel="next" href="([^"]+)">Search older runs', found)
    assert ids_of(client.get(following.replace("&amp;", "&")).text) == ["r0"]


def test_dead_letters_page_by_position(shop):
    for number in range(120):
        shop.app.send("shop.add", [1, 2], task_id=f"d-{number:03}")
    receiver = shop.app.broker.receiver("default", lease=30.0)
    found = []
    while len(found) < 120:
        found += receiver.receive(120, 1.0)
    receiver.settle([(each, DeadLetter("rejected", "no stock")) for each in found])
    receiver.close()
    client = shop.as_("read")
    address, seen = "/letters?queue=default&error=no+stock", []
    while address:
        page = client.get(address).text
        seen += ids_of(page)
        following = re.search(r'rel="next" href="([^"]+)"', page)
        address = following[1].replace("&amp;", "&") if following else None
    assert seen == [f"d-{number:03}" for number in range(120)]
    groups = client.get("/dead").text
    assert "120 dead letters in 1 group" in groups


def test_search_finds_ids_names_and_errors(full):
    client = full.as_("read")
    for text, kind in (("w", "workflow"), ("default", "queue"), ("shop.add", "name")):
        assert f"<td>{kind}</td>" in client.get(f"/search?q={text}").text
    assert "run-1" in client.get(f"/search?q={quote('onerror=alert')}").text
    assert "Nothing was found" in client.get("/search?q=nothing-of-this-name").text


def test_one_reading_serves_many_viewers(full, monkeypatch):
    asked = []
    workers = full.app.results.workers
    monkeypatch.setattr(full.app.results, "workers", lambda **k: asked.append(1) or workers(**k))
    clients = [full.as_("read") for _ in range(3)]
    texts = {client.get("/running").text.split("csrf")[1][:0] for client in clients}
    assert texts == {""} and len(asked) == 1
