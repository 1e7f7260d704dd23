"""The options of ``aztask emulator``; `tests/emulator` runs it as a process."""

import json
from types import SimpleNamespace

import pytest

from aztask.emulator.broker.entra import Right, parse_grants
from aztask.operate.cli.emulator import _in_words, _offset, _ready


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0.0), ("1h", 3600.0), ("-30s", -30.0), (" +5m ", 300.0)]
)
def test_clock_offsets(text, seconds):
    assert _offset(None, None, text) == seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--clock-offset", "soon"], "is not a duration"),
        (["--port", "65536"], "is not in the range"),
        (["--admin-port", "x"], "is not a whole number"),
        (["--config", "nosuch.json"], "does not exist"),
        (["--shared-access-key", "SECRET"], "other processes can read the command line"),
    ],
)
def test_wrong_options_are_one_line(cli, given, words):
    ended = cli("emulator", *given)
    assert ended.code == 2
    assert words in ended.error
    assert "SECRET" not in ended.err


def emulator(certificate, entra=None):
    return SimpleNamespace(
        connection_string=lambda: "Endpoint=sb://127.0.0.1",
        admin_connection_string=lambda: "Endpoint=sb://127.0.0.1:5300",
        options=SimpleNamespace(host="127.0.0.1", data=None, shared_access_key=None, entra=entra),
        port=5672,
        admin_port=5300,
        certificate=certificate,
    )


def in_words(made):
    return _in_words(made, _ready(made, show_key=False))


def test_the_ready_lines_can_be_pasted_into_a_shell():
    assert in_words(emulator(None)).splitlines() == [
        "AZTASK_BROKER='Endpoint=sb://127.0.0.1'",
        "AZTASK_SERVICEBUS_ADMIN='Endpoint=sb://127.0.0.1:5300'",
    ]


def test_with_tokens_the_lines_name_a_namespace_and_where_it_is():
    lines = in_words(emulator("certificates/c.pem", entra=object())).splitlines()
    assert lines == [
        "AZTASK_BROKER='servicebus://emulator'",
        "AZTASK_SERVICEBUS_ENDPOINT='localhost:5672'",
        "clients must trust this certificate: certificates/c.pem",
    ]
    record = _ready(emulator(None, entra=object()), show_key=False)
    assert (record["connection_string"], record["endpoint"]) == (None, "localhost:5672")


KEY = {"kty": "RSA", "kid": "a", "n": "AQAB", "e": "AQAB"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--entra-grant", "a=send"], "give --entra-keys FILE"),
        (["--entra-keys", "keys.json", "--tls"], "give --entra-grant IDENTITY=send,listen"),
        (["--entra-keys", "keys.json", "--entra-grant", "a=send"], "add --tls"),
        (["--entra-keys", "nosuch.json", "--tls"], "does not exist"),
    ],
)
def test_options_of_entra_that_do_not_belong_together_are_one_line(
    cli, given, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [KEY]}))
    ended = cli("emulator", *given)
    assert ended.code == 2
    assert words in ended.error


@pytest.mark.parametrize(
    ("keys", "grant", "words"),
    [
        ("{", "a=send", "cannot be read as JSON"),
        ("[]", "a=send", "is no JWKS document"),
        ('{"keys": []}', "a=send", "has no RSA key with kid, n and e"),
        (json.dumps({"keys": [{**KEY, "kid": ""}, {**KEY, "use": "enc"}]}), "a=send", "no RSA key"),
        (json.dumps({"keys": [{**KEY, "n": "é"}]}), "a=send", "no RSA key"),
        (json.dumps({"keys": [KEY]}), "a=fly", "'a=fly' grants nothing: write IDENTITY=send,"),
        (json.dumps({"keys": [KEY]}), "a=", "'a=' grants nothing"),
        (json.dumps({"keys": [KEY]}), "=send", "'=send' grants nothing"),
    ],
)
def test_a_file_of_keys_and_a_grant_that_are_wrong_are_one_line(cli, keys, grant, words, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(keys)
    ended = cli("emulator", "--tls", "--entra-keys", str(path), "--entra-grant", grant)
    assert ended.code == 4
    assert words in ended.error


def test_an_identity_that_is_granted_twice_is_an_error(cli, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [KEY]}))
    given = ("--entra-grant", "a=send", "--entra-grant", "a=listen")
    ended = cli("emulator", "--tls", "--entra-keys", str(path), *given)
    assert (ended.code, "'a' is granted twice" in ended.error) == (4, True)


def test_grants_are_read():
    assert parse_grants(["a=send,listen", "b = Manage"]) == {
        "a": {Right.SEND, Right.LISTEN},
        "b": {Right.MANAGE},
    }


def test_a_certificate_is_named():
    lines = in_words(emulator("certificates/c.pem")).splitlines()
    assert lines[2] == "clients must trust this certificate: certificates/c.pem"


def test_the_ready_line_as_json():
    record = json.loads(json.dumps(_ready(emulator(None), show_key=False)))
    assert (record["event"], record["port"], record["certificate"]) == ("ready", 5672, None)
