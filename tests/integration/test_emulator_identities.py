"""Workload identity, a managed identity and a secret against ``aztask emulator --entra-keys``.

The token service is that of ``examples/entra``; each program is a process with its environment, and
asks for tokens with azure-identity's real code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import ROOT

PAGE = ROOT / "docs" / "how-to" / "production" / "try-identities.md"
TOKENS = ROOT / "examples" / "entra" / "tokens.py"
WAYS = ("managed", "workload", "secret")
GRANTS = ("--entra-grant", "shop-sender=send", "--entra-grant", "shop-worker=send,listen")
SENDS = """
import sys
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.address.urls import parse_broker
from aztask.errors import AztaskError
from aztask.message.envelope import Envelope
from aztask.settlement import Complete

broker = ServiceBusBroker(parse_broker("servicebus://emulator"))
try:
    if "send" in sys.argv:
        broker.send("default", [Envelope(b"x", message_id="m")])
        print("sent")
    if "receive" in sys.argv:
        receiver = broker.receiver("default", lease=60.0)
        (delivery,) = receiver.receive(1, 15.0)
        print(receiver.settle([(delivery, Complete())]))
except AztaskError as error:
    print("refused:", error)
broker.close()
"""
SDK = """
import os
from azure.identity import DefaultAzureCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage

with ServiceBusClient(
    "emulator.servicebus.windows.net",
    DefaultAzureCredential(),
    custom_endpoint_address=f"sb://{os.environ['AZTASK_SERVICEBUS_ENDPOINT']}",
    connection_verify=os.environ["REQUESTS_CA_BUNDLE"],
    retry_total=0,
) as client:
    client.get_queue_sender("default").send_messages(ServiceBusMessage("hello"))
    with client.get_queue_receiver("default") as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=15)
        receiver.complete_message(message)
        print(message)
"""


@contextmanager
def started(*command: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program that runs, and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@dataclass
class Here:
    """The folder of the token service, and where the emulator is."""

    folder: Path
    endpoint: str

    def environment(self, way: str, client: str) -> dict[str, str]:
        lines = (self.folder / f"{way}.env").read_text().splitlines()
        given = dict(re.findall(r"export (\w+)='(.*)'", "\n".join(lines)))
        assert len(given) == len(lines)
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),
            "AZURE_CLIENT_ID": client,
            "AZTASK_SERVICEBUS_ENDPOINT": self.endpoint,
            **given,
        }

    def run(self, script: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        return done.stdout.strip() or done.stderr


def emulator_in(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        *("-m", "aztask", "emulator", "--json", "--port", "0", "--admin-port", "0"),
        *("--tls", "--certificate-dir", str(folder), "--queue", "default"),
        *("--entra-keys", str(folder / "keys.json"), *GRANTS, *more),
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("identities") / "local"
    with started(str(TOKENS), str(folder)) as (_, line):
        assert line.startswith("tokens at https://localhost:")
        yield folder


@pytest.fixture(scope="module")
def here(tokens: Path) -> Iterator[Here]:
    with started(*emulator_in(tokens)) as (_, line):
        record = json.loads(line)
        assert record["namespace"] == "servicebus://emulator"
        assert record["connection_string"] is None and record["admin_connection_string"] is None
        yield Here(tokens, record["endpoint"])


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_a_token_sends_and_receives(here: Here, way: str) -> None:
    found = here.run(SENDS, "send", "receive", **here.environment(way, "shop-worker"))
    assert found == "sent\n[Settled()]"


def test_a_program_of_the_sdk_alone_does_so_too(here: Here) -> None:
    assert here.run(SDK, **here.environment("workload", "shop-worker")) == "hello"


def test_what_an_identity_is_not_granted_is_refused_and_so_is_one_without_a_grant(
    here: Here,
) -> None:
    found = here.run(SENDS, "receive", **here.environment("managed", "shop-sender"))
    assert found.startswith("refused: ") and "'Listen' claim is required" in found
    found = here.run(SENDS, "send", **here.environment("managed", "stranger"))
    assert found.startswith("refused: ") and "the identity 'stranger' has no role here" in found


def test_a_wrong_secret_is_refused_by_the_token_service(here: Here) -> None:
    environment = here.environment("secret", "shop-worker")
    environment["AZURE_CLIENT_SECRET"] = "wrong"
    environment["AZURE_TOKEN_CREDENTIALS"] = "prod"
    found = here.run(SENDS, "send", **environment)
    assert found.startswith("refused: ") and "AADSTS7000215" in found


def test_a_clock_that_is_ahead_has_let_the_token_expire(tokens: Path) -> None:
    with started(*emulator_in(tokens, "--clock-offset", "2h")) as (_, line):
        here = Here(tokens, json.loads(line)["endpoint"])
        found = here.run(SENDS, "send", **here.environment("workload", "shop-worker"))
    assert found.startswith("refused: ") and "expired" in found


def test_with_a_key_both_count(tokens: Path) -> None:
    key = {"AZTASK_EMULATOR_SHARED_ACCESS_KEY": "a key of this test"}
    with started(*emulator_in(tokens, "--show-key"), **key) as (_, line):
        record = json.loads(line)
        assert "a key of this test" in record["connection_string"]
        here = Here(tokens, record["endpoint"])
        found = here.run(SENDS, "send", **here.environment("managed", "shop-sender"))
    assert found == "sent"


def test_the_page_says_what_the_programs_do() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for way in WAYS:
        (row,) = re.findall(rf"(?m)^\| `{way}\.env` \| .+ \| (.+) \|$", page)
        names = set(re.findall(r"`(\w+)`", row))
        source = TOKENS.read_text(encoding="utf-8")
        assert names and all(f'"{name}"' in source for name in names)
    for words in ("'Listen' claim is required", "the identity 'stranger' has no role here"):
        assert words in page
    assert all(grant in page for grant in GRANTS[1::2])
