"""Logins with Entra ID: MSAL's client over HTTPS, against a token service that the test starts."""

import logging
import re
import time
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from click.testing import CliRunner
from dashboardshop import PASSWORD, token_of
from starlette.testclient import TestClient
from tokenservice import CLIENT, SECRET, TENANT, TokenService, new_key

from aztask.dashboard import entra as module
from aztask.dashboard import server
from aztask.dashboard.access import COOKIE, LOGIN_COOKIE
from aztask.dashboard.entra import EntraLogin, EntraSettings
from aztask.dashboard.guard import ENTRA, ENTRA_BACK
from aztask.dashboard.server import Dashboard
from aztask.errors import ConfigurationError
from aztask.operate.cli import dashboard
from aztask.operate.cli.dashboard import ENTRA_SECRET
from aztask.operate.requests import Role
from aztask.support import clock
from aztask.support.display import Secret

OURS = {"origin": "http://testserver"}
HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def key():
    return new_key()


@pytest.fixture
def service(tmp_path, key):
    found = TokenService(tmp_path, key)
    yield found
    found.close()


def settings(service, **changes):
    given = EntraSettings(TENANT, CLIENT, Secret(SECRET), authority=service.authority, known=False)
    return replace(given, **changes)


@pytest.fixture
def session(service):
    """A client that trusts the service's certificate."""
    with requests.Session() as found:
        found.trust_env = False
        found.verify = str(service.certificate)
        yield found


@pytest.fixture
def entra(service, session, shop):
    shop.entra = EntraLogin(settings(service), session)
    return shop.entra


def sent(client, address=ENTRA):
    """Where a browser is sent that begins a login."""
    answer = client.get(address)
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def authorized(session, address):
    """The query with which the service sends the browser back, once the person has agreed."""
    answer = session.get(address, allow_redirects=False, timeout=10)
    assert answer.status_code == 302, answer.text
    back = urlsplit(answer.headers["location"])
    assert f"{back.scheme}://{back.netloc}{back.path}" == f"https://testserver{ENTRA_BACK}"
    return {name: values[0] for name, values in parse_qs(back.query).items()}


def logged_in(client, session, address=ENTRA):
    """The answer to a whole login."""
    return client.get(ENTRA_BACK, params=authorized(session, sent(client, address)))


def refused(answer, status, text):
    """A login that leads nowhere, with one line, and without a session."""
    assert answer.status_code == status, answer.text
    problem = re.search(r'role="alert">([^<]*)</p>', answer.text)[1]
    assert text in problem, problem
    assert "Traceback" not in answer.text and SECRET not in answer.text
    assert COOKIE not in answer.cookies


@pytest.mark.parametrize(
    ("roles", "role"),
    [(["read"], "read"), (["act"], "act"), (["other", "configure", "read"], "configure")],
)
def test_app_roles_become_roles(shop, service, session, entra, roles, role):
    service.claims["roles"] = roles
    client = shop.client()
    assert "Log in with Entra ID" in client.get("/login").text
    answer = logged_in(client, session, f"{ENTRA}?next=/queues%3Fa%3D1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/queues?a=1")
    cookies = answer.headers.get_list("set-cookie")
    (made,) = (each for each in cookies if each.startswith(COOKIE))
    assert "HttpOnly" in made and "SameSite=lax" in made
    assert any(each.startswith(f'{LOGIN_COOKIE}=""') for each in cookies)
    assert f"ann@example.com, {role}" in client.get("/queues").text
    asked = service.asked[-1]
    assert asked["prompt"] == "select_account" and asked["redirect_uri"].startswith("https://")


def test_a_logout_ends_the_session_and_the_next_login_chooses_an_account(
    shop, service, session, entra
):
    client = shop.client()
    logged_in(client, session)
    given = {"csrf": token_of(client)}
    assert client.post("/logout", data={}, headers=OURS).status_code == 403
    assert client.post("/logout", data=given, headers=OURS).headers["location"] == "/login"
    assert client.get("/").status_code == 401
    assert "prompt=select_account" in sent(client)


def test_roles_may_have_other_names(shop, service, session):
    own = settings(service, roles={"Operators": Role.ACT})
    shop.entra = EntraLogin(own, session)
    service.claims["roles"] = ["Operators", "configure"]
    client = shop.client()
    logged_in(client, session)
    assert "ann@example.com, act" in client.get("/").text
    assert own.most is Role.ACT


@pytest.mark.parametrize("roles", [None, [], ["other"], "configure", {"act": 1}, [["act"]]])
def test_a_person_without_a_role_is_refused(shop, service, session, entra, roles):
    service.claims["roles"] = roles
    client = shop.client()
    answer = logged_in(client, session)
    refused(answer, 403, "ann@example.com has no role here: ask for one of the app roles read")
    assert client.get("/").status_code == 401


def test_the_name_of_a_person_is_text(shop, service, session, entra):
    service.claims["preferred_username"] = "<script>alert(1)</script>" + "x" * 1000
    service.claims["roles"] = []
    answer = logged_in(shop.client(), session)
    assert answer.status_code == 403 and "&lt;script&gt;" in answer.text
    assert "<script>alert" not in answer.text and "x" * 300 not in answer.text


# -- what does not belong together -----------------------------------------------------------


def test_an_answer_with_another_state_is_refused_and_ends_the_login(shop, session, entra):
    for wrong in ("wrong", "", "é", None):
        client = shop.client()
        given = authorized(session, sent(client))
        asked = {**given, "state": wrong}
        answer = client.get(
            ENTRA_BACK, params={name: each for name, each in asked.items() if each is not None}
        )
        refused(answer, 400, "began in another browser")
        refused(client.get(ENTRA_BACK, params=given), 400, "was used already")


def test_an_answer_in_another_browser_is_refused(shop, service, session, entra):
    client, other = shop.client(), shop.client()
    given = authorized(session, sent(client))
    before = len(service.served)
    refused(other.get(ENTRA_BACK, params=given), 400, "began in another browser")
    sent(other)
    refused(other.get(ENTRA_BACK, params=given), 400, "began in another browser")
    assert len(service.served) == before  # the code was not sent anywhere
    assert client.get(ENTRA_BACK, params=given).status_code == 303


def test_a_code_counts_once(shop, session, entra):
    client = shop.client()
    given = authorized(session, sent(client))
    cookie = client.cookies.get(LOGIN_COOKIE)
    assert client.get(ENTRA_BACK, params=given).status_code == 303
    # The same answer, in a browser that kept its cookie.
    other = shop.client()
    other.cookies.set(LOGIN_COOKIE, cookie)
    refused(other.get(ENTRA_BACK, params=given), 400, "was used already")
    # The same code in a login of its own.
    other = shop.client()
    state = authorized(session, sent(other))["state"]
    answer = other.get(ENTRA_BACK, params={"code": given["code"], "state": state})
    refused(answer, 401, "Entra ID refused the login: invalid_grant AADSTS54005.")


def test_a_code_of_another_login_is_refused_by_pkce(shop, session, entra):
    stolen = authorized(session, sent(shop.client()))["code"]
    client = shop.client()
    state = authorized(session, sent(client))["state"]
    answer = client.get(ENTRA_BACK, params={"code": stolen, "state": state})
    refused(answer, 401, "invalid_grant AADSTS501481")


def test_a_login_that_took_too_long_is_refused_and_forgotten(shop, session, entra, monkeypatch):
    client = shop.client()
    given = authorized(session, sent(client))
    late = clock.monotonic() + module.LOGIN_SECONDS + 1
    monkeypatch.setattr(module.clock, "monotonic", lambda: late)
    refused(client.get(ENTRA_BACK, params=given), 400, "is too old")
    sent(shop.client())
    monkeypatch.setattr(module.clock, "monotonic", lambda: late + 2 * module.LOGIN_SECONDS)
    sent(shop.client())
    assert len(entra._open) == 1


def test_logins_that_wait_have_a_bound(shop, session, entra, monkeypatch):
    monkeypatch.setattr(module, "MOST_LOGINS", 3)
    clients = [shop.client() for _ in range(4)]
    answers = [authorized(session, sent(each)) for each in clients]
    assert len(entra._open) == 3
    first, *others = (
        client.get(ENTRA_BACK, params=given) for client, given in zip(clients, answers, strict=True)
    )
    assert first.status_code == 400
    assert {each.status_code for each in others} == {303}


@pytest.mark.parametrize("address", ["//evil.example", "https://evil.example", "/\\evil.example"])
def test_a_login_leads_to_this_server_only(shop, session, entra, address):
    client = shop.client()
    where = client.get(ENTRA, params={"next": address}).headers["location"]
    answer = client.get(ENTRA_BACK, params=authorized(session, where))
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    # Nor does a host that the server does not answer to reach the redirect address.
    assert client.get(ENTRA, headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize(
    ("host", "headers", "back"),
    [
        ("localhost:9467", {}, "http://localhost:9467"),
        ("[::1]:9467", {}, "http://[::1]:9467"),
        ("127.0.0.1", {"x-forwarded-proto": "https"}, "https://127.0.0.1"),
        ("ops.example", {}, "https://ops.example"),
        ("ops.example:8443", {}, "https://ops.example:8443"),
    ],
)
def test_the_address_of_the_answer_is_the_servers_own(shop, entra, host, headers, back):
    application = Dashboard(shop.site, shop.access, entra=entra).application([host])
    with TestClient(application, base_url=f"http://{host}", follow_redirects=False) as client:
        where = client.get(ENTRA, headers=headers).headers["location"]
    assert parse_qs(urlsplit(where).query)["redirect_uri"] == [back + ENTRA_BACK]


# -- tokens that are not for us, now ---------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "status", "text"),
    [
        ({"nonce": "another"}, 502, "cannot be checked"),
        ({"nonce": None}, 502, "cannot be checked"),
        ({"aud": "99999999-7777-4888-8999-aaaaaaaaaaaa"}, 403, "another application or tenant"),
        ({"tid": "99999999-2222-4333-8444-555555555555"}, 403, "another application or tenant"),
        ({"iss": "https://login.microsoftonline.com/x/v2.0"}, 403, "another application"),
        ({"exp": 1_700_000_000}, 401, "has expired"),
        ({"nbf": 9_700_000_000}, 401, "not valid yet"),
        ({"exp": None}, 502, "cannot be checked"),
        ({"tid": None}, 502, "cannot be checked"),
    ],
)
def test_a_token_that_is_not_for_this_login_is_refused(
    shop, service, session, entra, claims, status, text
):
    service.claims |= claims
    client = shop.client()
    refused(logged_in(client, session), status, text)
    assert client.get("/").status_code == 401


def test_a_token_with_another_signature_is_refused(shop, service, session, entra):
    for wrong in (new_key(), None):
        service.key = wrong
        refused(logged_in(shop.client(), session), 502, "cannot be checked")


def test_new_keys_are_asked_for_once_a_minute(shop, service, session, entra, key, monkeypatch):
    assert logged_in(shop.client(), session).status_code == 303
    service.kid = "key-2"
    for _ in range(3):
        refused(logged_in(shop.client(), session), 502, "cannot be checked")
    asked = f"/{TENANT}/discovery/v2.0/keys"
    assert service.served.count(asked) == 1
    late = clock.monotonic() + module.KEYS_EVERY + 1
    monkeypatch.setattr(module.clock, "monotonic", lambda: late)
    service.kid = "key-1"
    entra._service._keys.clear()  # as after a change of keys
    assert logged_in(shop.client(), session).status_code == 303
    assert service.served.count(asked) == 2


# -- a service that is away ------------------------------------------------------------------


def test_a_service_that_is_away_is_one_line(shop, service, session, entra):
    client = shop.client()
    given = authorized(session, sent(client))
    service.close()
    refused(client.get(ENTRA_BACK, params=given), 503, "Entra ID cannot be reached")
    fresh = EntraLogin(settings(service), session)
    shop.entra = fresh
    refused(shop.client().get(ENTRA), 503, "Entra ID cannot be reached")
    # Those with a password still come in.
    assert shop.as_("read").get("/").status_code == 200


def test_the_log_says_why_logins_fail_once_a_minute_for_each_reason(
    shop, service, session, entra, caplog, monkeypatch
):
    def lines() -> list[str]:
        return [each.message for each in caplog.records if each.name == "aztask.dashboard"]

    service.claims |= {"aud": "99999999-7777-4888-8999-aaaaaaaaaaaa"}
    for _ in range(3):
        refused(logged_in(shop.client(), session), 403, "another application")
    other = "a login with Entra ID failed (InvalidAudienceError): "
    assert lines() == [f"{other}{module.OTHERS.text}"]
    service.claims |= {"exp": 1_700_000_000}
    refused(logged_in(shop.client(), session), 401, "has expired")
    assert len(lines()) == 2
    late = clock.monotonic() + module.LINE_EVERY
    monkeypatch.setattr(module.clock, "monotonic", lambda: late)
    refused(logged_in(shop.client(), session), 401, "has expired")
    assert len(lines()) == 3


def test_a_login_works_once_the_service_is_back(shop, service, session, entra):
    document = "/v2.0/.well-known/openid-configuration"
    service.refuses[document] = (503, "{}")
    refused(shop.client().get(ENTRA), 503, "cannot be reached")
    service.refuses[document] = (404, '{"error": "invalid_tenant"}')
    shop.entra = EntraLogin(settings(service), session)
    refused(shop.client().get(ENTRA), 503, "does not know this tenant")
    service.refuses.clear()
    shop.entra = EntraLogin(settings(service), session)
    assert logged_in(shop.client(), session).status_code == 303


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        ((500, "{}"), 503, "cannot be reached"),
        ((200, "id_token=leaked-in-a-page-that-is-no-json"), 502, "cannot be checked"),
        ((200, "{}"), 401, "gives no reason"),
        ((200, '{"id_token": "no.token"}'), 502, "cannot be checked"),
        ((400, '{"error": "<b>", "error_description": "<b>AADSTS1234567</b>"}'), 401, "AADSTS123"),
    ],
)
def test_a_foreign_answer_for_the_code_is_one_line(
    shop, service, session, entra, caplog, answer, status, text
):
    caplog.set_level(logging.INFO)
    service.refuses["/token"] = answer
    found = logged_in(shop.client(), session)
    refused(found, status, text)
    assert "leaked" not in caplog.text + found.text and "<b>" not in found.text


def test_what_entra_id_says_instead_of_a_code_is_one_line(shop, session, entra):
    client = shop.client()
    state = authorized(session, sent(client))["state"]
    given = {"error": "access_denied", "error_description": "AADSTS50105: <i>not assigned</i>"}
    answer = client.get(ENTRA_BACK, params={**given, "state": state})
    refused(answer, 401, "Entra ID refused the login: access_denied AADSTS50105.")
    assert "not assigned" not in answer.text


def test_at_most_so_many_logins_wait_for_the_service(shop, session, entra):
    client = shop.client()
    given = authorized(session, sent(client))
    for _ in range(module.CALLS):
        assert entra._calls.acquire(blocking=False)
    refused(shop.client().get(ENTRA), 503, "Many people log in")
    refused(client.get(ENTRA_BACK, params=given), 503, "Many people log in")


# -- secrets ---------------------------------------------------------------------------------


def test_no_secret_reaches_a_log_or_a_page(shop, service, session, caplog):
    logging.getLogger("msal").setLevel(logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    shop.entra = EntraLogin(settings(service), session)
    texts = [repr(shop.entra.settings)]
    client = shop.client()
    texts.append(logged_in(client, session).text)
    texts.append(client.get("/").text)
    shop.entra = EntraLogin(settings(service, secret=Secret("x" * 40)), session)
    answer = logged_in(shop.client(), session)
    refused(answer, 401, "invalid_client AADSTS7000215")
    ours = [each for each in caplog.records if not each.name.startswith("httpx")]
    texts += [answer.text, *(each.getMessage() for each in ours)]
    code, verifier, token = service.tokens
    asked = [each for each in ours if "/oauth2/v2.0/token" in each.getMessage()]
    assert asked  # urllib3's line of the request, which has no body
    shown = "\n".join(texts)
    for secret in (SECRET, "x" * 40, verifier, token, token.split(".")[2]):
        assert secret not in shown
    # The test's own browser got the code in an address; nothing of the server has it.
    assert code not in shown


def test_no_token_is_kept(shop, service, session, entra):
    assert logged_in(shop.client(), session).status_code == 303
    assert not entra._open
    _, _, token = service.tokens
    cache = entra._service.client.token_cache
    assert isinstance(cache, module._NoCache) and not any(cache._cache.values())
    assert token not in repr(vars(entra._service.client.http_client))


# -- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tenant": "common"}, "--entra-tenant needs the ID"),
        ({"tenant": "example.com"}, "--entra-tenant needs the ID"),
        ({"client": "dashboard"}, "--entra-client needs the ID"),
        ({"secret": Secret("")}, "secret of Entra ID is empty"),
        ({"authority": "http://login.example"}, "https://"),
    ],
)
def test_settings_that_cannot_work_are_named(changes, text):
    right = EntraSettings(TENANT, CLIENT, Secret(SECRET))
    assert right.most is Role.CONFIGURE
    with pytest.raises(ConfigurationError, match=text):
        replace(right, **changes)


ASKED = ("--entra-tenant", TENANT, "--entra-client", CLIENT)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (ASKED, f"set {ENTRA_SECRET}, or give --entra-secret-file"),
        (ASKED[:2], "Entra ID needs --entra-tenant and --entra-client"),
        (("--entra-role", "a=act"), "Entra ID needs --entra-tenant and --entra-client"),
        ((*ASKED, "--entra-secret-file", "secret", "--entra-role", "act"), "needs APP ROLE=ROLE"),
        ((*ASKED, "--entra-secret-file", "secret", "--entra-role", "a=king"), "no role"),
        ((*ASKED, "--entra-secret-file", "short"), "at least 16"),
        ((*ASKED[:3], "mine", "--entra-secret-file", "secret"), "--entra-client needs the ID"),
    ],
)
def test_the_command_names_what_is_missing(tmp_path, monkeypatch, given, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ENTRA_SECRET, raising=False)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "short").write_text("abc")
    found = CliRunner().invoke(dashboard.command, ["-A", "none:app", *given])
    said = f"{found.output} {found.exception}"
    assert found.exit_code != 0 and text in said and SECRET not in said


def test_the_command_reads_the_secret_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    given = {
        "entra_tenant": TENANT,
        "entra_client": CLIENT,
        "entra_secret_file": path,
        "entra_roles": ("Ops=act", "a=b=read"),
        "entra_authority": "https://login.microsoftonline.us/",
    }
    found = dashboard._entra(server, **given).settings
    assert found.secret == Secret(SECRET) and found.authority.endswith(".us") and found.known
    assert found.roles == {"Ops": Role.ACT, "a=b": Role.READ}
    monkeypatch.setenv(ENTRA_SECRET, "from-the-environment")
    found = dashboard._entra(server, **{**given, "entra_secret_file": None, "entra_roles": ()})
    assert found.settings.secret == Secret("from-the-environment")
    assert found.settings.roles == {"read": Role.READ, "act": Role.ACT, "configure": Role.CONFIGURE}


def test_without_entra_id_its_addresses_lead_nowhere(shop):
    client = shop.client()
    assert "Entra ID" not in client.get("/login").text
    for path in (ENTRA, ENTRA_BACK):
        refused(client.get(path, headers=HTML), 404, "no login with Entra ID")
    given = {"name": "read", "password": PASSWORD}
    assert client.post("/login", data=given, headers=OURS).status_code == 303


def test_a_session_lasts_as_long_as_any_other(shop, service, session, entra, monkeypatch):
    client = shop.client()
    logged_in(client, session)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 12 * 3600 + 1)
    assert client.get("/").status_code == 401
