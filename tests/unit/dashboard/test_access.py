"""Who comes in: by password, by link, by proxy; and who does not."""

import pytest
from dashboardshop import PASSWORD, token_of

from aztask.dashboard import access as module
from aztask.dashboard.access import (
    COOKIE,
    Account,
    Logins,
    ProxyLogin,
    hash_password,
    read_accounts,
)
from aztask.dashboard.server import Listening, access_of
from aztask.errors import ConfigurationError
from aztask.operate.requests import Role
from aztask.support.display import Secret

OURS = {"origin": "http://testserver"}
HASH = hash_password(PASSWORD)


def options(**changes):
    given = {
        "password_file": None,
        "link_role": "read",
        "proxy_header": None,
        "proxy_peers": (),
        "proxy_secret": None,
        "proxy_role": "read",
        "entra": False,
    }
    return {**given, **changes}


def test_a_password_is_checked_and_a_session_follows(shop):
    client = shop.client()
    for given in (
        {"name": "read", "password": "wrong password"},
        {"name": "unknown", "password": PASSWORD},
        {"name": "", "password": ""},
        {},
    ):
        answer = client.post("/login", data=given, headers=OURS)
        assert answer.status_code == 401 and "set-cookie" not in answer.headers
        assert "The name or the password is wrong" in answer.text
    answer = client.post(
        "/login?next=/queues", data={"name": "read", "password": PASSWORD}, headers=OURS
    )
    assert (answer.status_code, answer.headers["location"]) == (303, "/queues")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert client.get("/queues").status_code == 200
    given = {"csrf": token_of(client)}
    assert client.post("/logout", data=given, headers=OURS).status_code == 303
    assert client.get("/queues").status_code == 401


@pytest.mark.parametrize(
    "address", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"]
)
def test_a_login_leads_to_this_server_only(shop, address):
    given = {"name": "read", "password": PASSWORD}
    client = shop.client()
    answer = client.post("/login", params={"next": address}, data=given, headers=OURS)
    assert answer.headers["location"] == "/"


def test_a_session_is_refused_that_is_changed_expired_or_of_another_process(shop, monkeypatch):
    visitor = shop.access.login("read", PASSWORD)
    cookie = shop.access.session(visitor)
    assert shop.access.by_session(cookie).role is Role.READ
    body, _, signature = cookie.partition(".")
    for wrong in ("", ".", body, f"{body}.", f"{body[:-2]}AA.{signature}", f"{body}.é", "é.é"):
        assert shop.access.by_session(wrong) is None
    assert Logins(shop.access.accounts).by_session(cookie) is None
    client = shop.client()
    client.cookies.set(COOKIE, "x.y")
    assert client.get("/").status_code == 401
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + module.SESSION_SECONDS + 1)
    assert shop.access.by_session(cookie) is None


def test_the_link_lets_in_one_person_with_its_role(shop):
    shop.access = Logins(link_role=Role.ACT)
    client = shop.client()
    assert client.get("/login?key=wrong").status_code == 401
    answer = client.get("/login", params={"key": shop.access.link_key.reveal()})
    assert answer.status_code == 303
    assert "local, act" in client.get("/").text
    without = Logins({"a": Account(Role.READ, HASH)})
    assert without.by_link(without.link_key.reveal()) is None


def test_a_password_file_is_read_and_its_faults_are_named(tmp_path):
    path = tmp_path / "people"
    path.write_text(f"# people\nann:configure:{HASH}\n\nbob:read:\n")
    found = read_accounts(path)
    assert {name: each.role for name, each in found.items()} == {
        "ann": Role.CONFIGURE,
        "bob": Role.READ,
    }
    access = Logins(found)
    assert access.passwords and access.login("ann", PASSWORD).name == "ann"
    assert access.login("bob", "") is None and access.login("bob", PASSWORD) is None
    for text, problem in (
        ("ann:read", "line 1"),
        (f"ann:king:{HASH}", "no role"),
        ("ann:read:plain password", "no hash"),
        (f"ann:read:{HASH}\nann:act:{HASH}", "line 2"),
        (f"ann:read:{HASH.replace('16384', '1')}", "no hash"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=problem):
            read_accounts(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_accounts(tmp_path / "missing")


def test_a_proxys_header_counts_from_the_proxy_alone():
    secret = b"0123456789abcdef"
    proxy = ProxyLogin("x-user", frozenset({"10.0.0.7"}), Secret(secret.decode()))
    access = Logins({"ann": Account(Role.CONFIGURE, "")}, proxy)
    right = {b"x-user": b"ann", module.SECRET_HEADER: secret}
    assert access.by_proxy("10.0.0.7", right).role is Role.CONFIGURE
    assert access.by_proxy("10.0.0.7", {**right, b"x-user": b"bob"}).role is Role.READ
    assert access.by_proxy("10.0.0.8", right) is None
    assert access.by_proxy(None, right) is None
    assert access.by_proxy("10.0.0.7", {**right, module.SECRET_HEADER: b"x"}) is None
    assert access.by_proxy("10.0.0.7", {b"x-user": b"ann"}) is None
    assert access.by_proxy("10.0.0.7", {module.SECRET_HEADER: secret}) is None
    on_socket = Logins({}, ProxyLogin("x-user", role=None))
    assert on_socket.by_proxy(None, {b"x-user": b"bob"}) is None
    assert Logins({}, ProxyLogin("x-user")).by_proxy(None, {b"x-user": b"bob"}).name == "bob"
    assert Logins({}, ProxyLogin("x-user")).by_proxy("10.0.0.7", {b"x-user": b"bob"}) is None


def test_what_would_let_in_everyone_does_not_start(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123\n")
    outside = Listening("0.0.0.0", 9000)
    for listening, changes in (
        (outside, {}),
        (outside, {"proxy_header": "X-User"}),
        (outside, {"proxy_header": "X-User", "proxy_peers": ("10.0.0.7",)}),
        (Listening(), {"proxy_header": "X-User", "proxy_secret": secret}),
    ):
        with pytest.raises(ConfigurationError):
            access_of(listening, **options(**changes))
    whole = {"proxy_header": "X-User", "proxy_peers": ("10.0.0.7",), "proxy_secret": secret}
    found = access_of(outside, **options(**whole))
    assert found.link_role is None and found.proxy.header == "x-user"
    assert access_of(Listening(), **options()).link_role is Role.READ
    assert access_of(outside, **options(entra=True)).link_role is None
    socket = Listening(socket=tmp_path / "s")
    assert access_of(socket, **options(proxy_header="X-User")).proxy.trusts(None, {})
    secret.write_text("short")
    with pytest.raises(ConfigurationError, match="at least 16"):
        access_of(outside, **options(**whole))
