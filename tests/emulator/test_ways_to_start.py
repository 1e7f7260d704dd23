"""Keys, TLS, clocks, configuration files and the command line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import (
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusError,
)
from azure.servicebus.management import ServiceBusAdministrationClient
from click.testing import CliRunner
from emulatorprocess import running, start, stop
from rawclient import RawClient

from aztask.emulator.broker.access import sign
from aztask.emulator.config import Options
from aztask.errors import ConfigurationError
from aztask.operate.cli.main import cli
from aztask.testing import administration_client, emulator
from aztask.testing.servicebus import BackgroundEmulator

KEY = "a-secret-key"
REFUSED = (ServiceBusAuthenticationError, ServiceBusAuthorizationError)


def send_and_receive(connection_string, **options):
    with (
        ServiceBusClient.from_connection_string(
            connection_string, retry_total=0, **options
        ) as client,
        client.get_queue_sender("q") as sender,
        client.get_queue_receiver("q") as receiver,
    ):
        sender.send_messages(ServiceBusMessage("x"))
        (message,) = receiver.receive_messages(1, max_wait_time=5)
        receiver.complete_message(message)
        return message


def sas(bus, key, resource, seconds):
    expiry = str(int(time.time() + seconds))
    quoted = resource.replace(":", "%3A").replace("/", "%2F")
    signature = sign(key, f"{quoted}\n{expiry}").replace("+", "%2B").replace("=", "%3D")
    signature = signature.replace("/", "%2F")
    token = f"SharedAccessSignature sr={quoted}&sig={signature}&se={expiry}&skn=k"
    return (
        f"Endpoint=sb://{bus.host}:{bus.port};SharedAccessSignature={token};"
        "UseDevelopmentEmulator=true"
    )


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        ("sb://127.0.0.1:{port}", ""),
        ("sb://127.0.0.1:{port}/", ";"),
        ("sb://localhost:{port}", ";EntityPath=q"),
        ("sb://localhost:{port}/", ";EntityPath=q;"),
        ("amqp://localhost:{port}", ";"),
    ],
)
def test_connection_strings_in_every_usual_form(bus, endpoint, more):
    """With and without a slash, a last semicolon and an EntityPath, as samples have them."""
    if bus._emulator.namespace.find("q") is None:
        bus.create_queue("q")
    key = "SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE"
    end = f"{key};UseDevelopmentEmulator=true{more}"
    send_and_receive(f"Endpoint={endpoint.format(port=bus.port)};{end}")
    if endpoint.startswith("sb"):
        with administration_client(f"Endpoint={endpoint.format(port=bus.admin_port)};{end}") as it:
            assert it.get_queue("q").name == "q"


@pytest.fixture(scope="module")
def locked():
    with emulator(queues=["q", "other", "tokens"], shared_access_key=KEY) as bus:
        yield bus


def test_the_correct_key_is_accepted(locked):
    assert KEY in locked.connection_string
    send_and_receive(locked.connection_string)
    with locked.administration_client() as admin:
        assert admin.get_queue("q").name == "q"


def test_a_wrong_key_is_refused(locked):
    wrong = locked.connection_string.replace(KEY, "wrong")
    with pytest.raises(REFUSED):
        send_and_receive(wrong)
    with (
        administration_client(locked.admin_connection_string.replace(KEY, "wrong")) as admin,
        pytest.raises(ClientAuthenticationError),
    ):
        admin.get_queue("q")


def test_signature_expiry_and_audience_are_verified(locked):
    entity = f"sb://{locked.host}:{locked.port}/q"
    send_and_receive(sas(locked, KEY, entity, 600))
    for text in (
        sas(locked, KEY, entity, -10),
        sas(locked, KEY, f"sb://{locked.host}:{locked.port}/other", 600),
        sas(locked, "wrong", entity, 600),
    ):
        with pytest.raises(REFUSED):
            send_and_receive(text)


def test_a_link_ends_when_its_token_does(locked):
    text = sas(locked, KEY, f"sb://{locked.host}:{locked.port}/q", 2)
    with (
        ServiceBusClient.from_connection_string(text, retry_total=0) as client,
        client.get_queue_sender("q") as sender,
    ):
        sender.send_messages(ServiceBusMessage("x"))
        time.sleep(3)
        with pytest.raises(ServiceBusError):
            sender.send_messages(ServiceBusMessage("y"))


def test_without_any_token_nothing_is_attached(locked):
    with RawClient(locked.port) as client:
        assert client.attach("q").target is None
        assert client.until("Detach").error.value[0] == "amqp:unauthorized-access"


def test_tokens_of_entra_id_are_accepted_only_without_a_key(locked, bus):
    class Credential:
        def get_token(self, *_scopes, **_options):
            return AccessToken("header.payload.signature", int(time.time()) + 3600)

    def send(to):
        with (
            ServiceBusClient(
                f"{to.host}:{to.port}", Credential(), use_tls=False, retry_total=0
            ) as client,
            client.get_queue_sender("tokens") as sender,
        ):
            sender.send_messages(ServiceBusMessage("x"))

    bus.create_queue("tokens")
    send(bus)
    with pytest.raises(REFUSED):
        send(locked)


def test_other_hosts_need_a_key():
    with pytest.raises(ConfigurationError, match="key"):
        Options(host="0.0.0.0")
    assert Options(host="0.0.0.0", shared_access_key=KEY).host == "0.0.0.0"
    assert KEY not in repr(Options(shared_access_key=KEY))


def test_a_shifted_clock():
    with emulator(queues=["q"], clock_offset=3600) as bus:
        message = send_and_receive(bus.connection_string)
        ahead = message.enqueued_time_utc - datetime.now(UTC)
        assert timedelta(minutes=59) < ahead < timedelta(minutes=61)


def test_tls():
    """SDKs always use port 5671 for TLS, so this test listens on an address of its own."""
    options = Options(host="127.0.0.71", port=5671, admin_port=0, queues=("q",), tls=True)
    with BackgroundEmulator(options) as background:
        running_ = background.emulator
        trusted = {"connection_verify": str(running_.certificate)}
        with ServiceBusAdministrationClient.from_connection_string(
            running_.admin_connection_string(), **trusted
        ) as admin:
            assert [queue.name for queue in admin.list_queues()] == ["q"]
        send_and_receive(running_.connection_string(), **trusted)


CONFIG = {
    "UserConfig": {
        "Namespaces": [
            {
                "Name": "sbemulatorns",
                "Queues": [
                    {
                        "Name": "source",
                        "Properties": {"ForwardDeadLetteredMessagesTo": "q", "ForwardTo": ""},
                    },
                    {
                        "Name": "q",
                        "Properties": {
                            "DeadLetteringOnMessageExpiration": False,
                            "DefaultMessageTimeToLive": "PT1H",
                            "DuplicateDetectionHistoryTimeWindow": "PT20S",
                            "ForwardDeadLetteredMessagesTo": "",
                            "ForwardTo": "",
                            "LockDuration": "PT1M",
                            "MaxDeliveryCount": 3,
                            "RequiresDuplicateDetection": True,
                            "RequiresSession": False,
                        },
                    },
                ],
                "Topics": [
                    {
                        "Name": "t",
                        "Properties": {"DefaultMessageTimeToLive": "PT1H"},
                        "Subscriptions": [
                            {
                                "Name": "s",
                                "Properties": {"MaxDeliveryCount": 4},
                                "Rules": [
                                    {
                                        "Name": "r",
                                        "Properties": {
                                            "FilterType": "Correlation",
                                            "CorrelationFilter": {
                                                "Label": "l",
                                                "Properties": {"p": "v"},
                                            },
                                        },
                                    },
                                    {
                                        "Name": "sql",
                                        "Properties": {
                                            "FilterType": "Sql",
                                            "SqlFilter": {"SqlExpression": "a > 5"},
                                        },
                                    },
                                ],
                            }
                        ],
                    }
                ],
            }
        ],
        "Logging": {"Type": "File"},
    }
}


def test_the_official_configuration_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    with emulator(config=path) as bus, bus.administration_client() as admin:
        queue = admin.get_queue("q")
        assert (queue.max_delivery_count, queue.requires_duplicate_detection) == (3, True)
        assert queue.duplicate_detection_history_time_window == timedelta(seconds=20)
        assert admin.get_queue("source").forward_dead_lettered_messages_to.endswith("/q")
        assert admin.get_subscription("t", "s").max_delivery_count == 4
        assert [rule.name for rule in admin.list_rules("t", "s")] == ["r", "sql"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[]", "UserConfig"),
        ('{"UserConfig": {"Namespaces": []}}', "exactly one"),
        ('{"UserConfig": {"Namespaces": [{"Queues": [{}]}]}}', "Name"),
        (
            '{"UserConfig": {"Namespaces": [{"Queues": [{"Name": "q", "Properties":'
            ' {"LockDuration": "1 minute"}}]}]}}',
            "PT1M",
        ),
    ],
)
def test_wrong_configuration_files_are_explained(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said), emulator(config=path):
        pass


def test_the_command_is_ready_soon_and_stops_on_a_signal(tmp_path):
    process, ready = start("--queue", "q", "--data", str(tmp_path / "bus.db"))
    assert ready["event"] == "ready"
    send_and_receive(ready["connection_string"])
    stats = json.loads(process.stdout.readline())
    assert stats["entities"][0]["name"] == "q"
    assert stop(process) == 0


def test_trace_shows_frames_and_no_secrets(tmp_path):
    log = tmp_path / "trace"
    with log.open("w") as target:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-c",
                    "from aztask.operate.cli.main import cli; cli()",
                    "emulator",
                ),
                *("--port", "0", "--admin-port", "0", "--json", "--queue", "q", "--trace"),
            ],
            stdout=subprocess.PIPE,
            stderr=target,
            text=True,
        )
        ready = json.loads(process.stdout.readline())
        send_and_receive(ready["connection_string"])
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    text = log.read_text()
    for word in ("-> 0 open", "attach", "transfer", "disposition", "accepted", "source("):
        assert word in text
    assert "SharedAccessSignature" not in text


def test_the_key_is_not_taken_from_the_command_line():
    done = CliRunner().invoke(cli, ["emulator", "--shared-access-key", KEY])
    assert done.exit_code == 2
    assert KEY not in done.output


def test_the_key_is_taken_from_the_environment():
    with running("--queue", "q", "--show-key", AZTASK_EMULATOR_SHARED_ACCESS_KEY=KEY) as ready:
        assert KEY in ready["connection_string"]
        send_and_receive(ready["connection_string"])


def test_the_key_is_printed_only_if_you_ask_for_it():
    with running("--queue", "q", AZTASK_EMULATOR_SHARED_ACCESS_KEY=KEY) as ready:
        assert KEY not in json.dumps(ready)
        known = ready["connection_string"].replace("SharedAccessKey=****", f"SharedAccessKey={KEY}")
        send_and_receive(known)


def test_the_key_is_not_in_the_words_for_people_either():
    command = [sys.executable, "-m", "aztask", "emulator", "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "AZTASK_EMULATOR_SHARED_ACCESS_KEY": KEY},
    )
    lines = [process.stdout.readline() for _ in range(3)]  # both variables, then what to know
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert all("SharedAccessKey=****" in line for line in lines[:2])
    assert "--show-key prints it" in lines[2]
    assert KEY not in "".join([*lines, rest])


def test_a_port_in_use_is_explained(bus):
    done = CliRunner().invoke(cli, ["emulator", "--port", str(bus.port), "--admin-port", "0"])
    assert isinstance(done.exception, ConfigurationError)
    assert "--port" in str(done.exception)


def test_a_program_that_reads_the_first_line_only_is_served_on():
    """The pipe is full, as after some minutes with a busy client."""
    reading, writing = os.pipe()
    process = None
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        command = [sys.executable, "-m", "aztask", "emulator", "--queue", "q", "--json"]
        command += ["--port", "0", "--admin-port", "0"]
        process = subprocess.Popen(command, stdout=writing)
        with open(reading, closefd=False) as output:
            ready = json.loads(output.readline())
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 100)
        os.set_blocking(writing, True)
        for _ in range(3):
            send_and_receive(ready["connection_string"])
            time.sleep(1.2)  # counts that changed are due every second
        process.terminate()
        assert process.wait(20) == 0
    finally:
        if process is not None:
            process.kill()
            process.wait()
        os.close(reading)
        os.close(writing)
