"""Foreign hosts and origins are refused, and each answer carries its headers."""

import pytest
from dashboardshop import PASSWORD, token_of
from starlette.routing import Route

from aztask.dashboard.guard import is_public
from aztask.dashboard.server import Dashboard, Listening

OURS = {"origin": "http://testserver"}
GIVEN = {"name": "read", "password": PASSWORD}


@pytest.mark.parametrize("host", ["evil.example", "testserver.evil.example", "testserver:81", ""])
def test_a_foreign_host_is_refused(shop, host):
    client = shop.client()
    for path in ("/", "/login", "/static/dash.css", "/healthz"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "shop" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://testserver.evil.example"},
        {"origin": "http://testserver:81"},
        {"origin": ""},
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_form_of_another_origin_is_refused(shop, headers):
    client = shop.as_("read")
    given = {"csrf": token_of(client)}
    assert client.post("/logout", data=given, headers=headers).status_code == 403
    assert client.post("/login", data=GIVEN, headers=headers).status_code == 403
    assert client.get("/").status_code == 200


def test_every_form_needs_the_token_of_its_visitor(shop):
    client, other = shop.as_("configure"), shop.as_("configure")
    token = token_of(client)
    assert token != token_of(other)
    routes = Dashboard(shop.site, shop.access).routes()
    paths = [each.path for each in routes if isinstance(each, Route) and "POST" in each.methods]
    checked = [path for path in paths if not is_public(path)]
    assert "/logout" in checked
    for path in checked:
        for wrong in (
            {},
            {"csrf": ""},
            {"csrf": token[:-1]},
            {"csrf": "é"},
            {"csrf": token_of(other)},
        ):
            answer = client.post(path, data=wrong, headers=OURS)
            assert answer.status_code == 403 and "Nothing was done" in answer.text, path
    assert client.get("/").status_code == 200
    assert client.post("/logout", data={"csrf": token}, headers=OURS).status_code == 303


def test_a_script_of_another_origin_reads_nothing_and_a_link_may_be_followed(shop):
    client = shop.as_("read")
    assert client.get("/", headers={"origin": "https://evil.example"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert client.get("/", headers=OURS).status_code == 200


def test_a_form_that_is_too_large_or_has_no_length_is_refused(shop):
    client = shop.client()
    large = {"name": "x" * 300_000, "password": "y"}
    assert client.post("/login", data=large, headers=OURS).status_code == 413

    def pieces():
        yield b"name=read"

    assert client.post("/login", content=pieces(), headers=OURS).status_code == 411


def test_every_answer_has_the_headers(shop):
    client = shop.as_("read")
    for path in ("/", "/nothing", "/login", "/static/dash.js", "/healthz"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        wanted = "public, max-age=3600" if path.startswith("/static") else "no-store"
        assert headers["cache-control"] == wanted


@pytest.mark.parametrize(
    ("listening", "right", "wrong"),
    [
        (Listening(), "localhost:9467", "localhost"),
        (Listening(), "[::1]:9467", "0.0.0.0:9467"),
        (Listening("10.0.0.7", 80, names=("ops.example",)), "ops.example", "localhost:80"),
        (Listening("10.0.0.7", 9000, names=("ops.example",)), "ops.example:9000", "10.0.0.7"),
        (Listening("::1", 9000), "[::1]:9000", "::1"),
    ],
)
def test_the_names_that_a_server_answers_to(listening, right, wrong):
    assert right in listening.hosts()
    assert wrong not in listening.hosts()
