"""The options of ``aztask emulator``; `tests/emulator` runs it as a process."""

import json
from types import SimpleNamespace

import pytest

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


def emulator(certificate):
    return SimpleNamespace(
        connection_string=lambda: "Endpoint=sb://127.0.0.1",
        admin_connection_string=lambda: "Endpoint=sb://127.0.0.1:5300",
        options=SimpleNamespace(host="127.0.0.1", data=None, shared_access_key=None),
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


def test_a_certificate_is_named():
    lines = in_words(emulator("/tmp/c.pem")).splitlines()
    assert lines[2] == "clients must trust this certificate: /tmp/c.pem"


def test_the_ready_line_as_json():
    record = json.loads(json.dumps(_ready(emulator(None), show_key=False)))
    assert (record["event"], record["port"], record["certificate"]) == ("ready", 5672, None)
