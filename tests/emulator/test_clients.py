"""Tasks that another language sends: ``examples/clients``, and the schema of a message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import azurite
import pytest
from azure.storage.queue import (
    AccountSasPermissions,
    QueueServiceClient,
    ResourceTypes,
    generate_account_sas,
)
from jsonschema import Draft202012Validator, ValidationError
from programs import need_node, npm_ci

from aztask import App
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).parent / "node"
CLIENT = ROOT / "examples" / "clients" / "javascript" / "send.js"
JAVA_CLIENT = ROOT / "examples" / "clients" / "java" / "Send.java"
NOWHERE = (
    "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"
)
SCHEMA = json.loads((ROOT / "docs" / "static" / "task-message.schema.json").read_text())
SHOP = """
from datetime import date
from aztask import App

app = App("shop", results="local://{folder}/results.db")

@app.task(name="shop.resize", queue="{queue}")
def resize(name: str, *, width: int, day: date) -> str:
    return f"{{name}} is {{width:,}} wide since {{day:%A}}"
"""
ARGUMENTS = (
    '["ä.png"]',
    '{"width": 2000, "day": {"__type__": "date", "__value__": "2026-11-29"}}',
)
SHOWN = "ä.png is 2,000 wide since Sunday"


JAVA = "install a JDK of version 17 or newer (Debian: apt-get install openjdk-17-jdk-headless)"


class Sender:
    """A client as a program: `words` start it, and the arguments follow."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.words = words
        self._environment = environment

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.words, *words],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture(scope="module")
def javascript() -> Sender:
    program = str(need_node())
    npm_ci(PACKAGES)
    return Sender(program, str(CLIENT), NODE_PATH=str(PACKAGES / "node_modules"))


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Sender:
    """The client in Java, compiled once: that takes a second each time it starts from source."""
    program, compiler = shutil.which("java"), shutil.which("javac")
    if program is None or compiler is None:
        pytest.fail(JAVA, pytrace=False)
    folder = tmp_path_factory.mktemp("java")
    command = [compiler, "-Xlint:all", "-Werror", "-d", str(folder), str(JAVA_CLIENT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # C.UTF-8: what the terminal of a person has; it is that of the arguments
    return Sender(program, "-cp", str(folder), "Send", LC_ALL="C.UTF-8")


@pytest.fixture(params=["javascript", "java"])
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def send(language: str, request: pytest.FixtureRequest) -> Sender:
    sender: Sender = request.getfixturevalue(language)
    return sender


def runs_what_it_sends(
    send: Sender, folder: Path, broker: Mapping[str, str], queue: str, address: str
) -> None:
    """Send one task, and one twice; a worker runs each once. address: what the client is given."""
    (folder / "shop.py").write_text(SHOP.format(folder=folder, queue=queue))
    ids = [
        send(address, queue, "shop.resize", *ARGUMENTS, *task_id)
        for task_id in ([], ["order-7"], ["order-7"])
    ]
    assert [each.returncode for each in ids] == [0, 0, 0], ids[0].stderr
    worker = subprocess.run(
        [sys.executable, "-m", "aztask", "-A", "shop:app", "worker", "--burst"],
        cwd=folder,
        env={**os.environ, **broker, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "2 succeeded, 0 failed" in worker.stdout + worker.stderr
    app = App("shop", broker=broker["AZTASK_BROKER"], results=f"local://{folder}/results.db")
    for each in {each.stdout.strip() for each in ids}:
        assert app.result(each).get(timeout=5) == SHOWN
    app.close()


def test_over_service_bus(send: Sender, language: str, bus, queue, tmp_path: Path) -> None:
    broker = {
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
    }
    # Java speaks HTTP, which the emulator does on its other port
    address = bus.admin_connection_string if language == "java" else bus.connection_string
    runs_what_it_sends(send, tmp_path, broker, queue(duplicate_window=600.0), address)


def test_over_a_storage_queue(send: Sender, tmp_path: Path) -> None:
    with azurite.running(tmp_path / "azurite", service="queue") as service:
        broker = {"AZTASK_BROKER": service.connection_string}
        app = App("shop", broker=service.connection_string)
        app.broker.declare("clients")
        app.close()
        runs_what_it_sends(send, tmp_path, broker, "clients", service.connection_string)


def test_what_it_cannot_send_is_one_line(send: Sender) -> None:
    nowhere = send("Endpoint=sb://127.0.0.1;SharedAccessKeyName=a", "q", "shop.resize")
    assert nowhere.returncode == 1
    assert len(nowhere.stderr.splitlines()) == 1
    assert send().returncode == 2


# -- Java alone ------------------------------------------------------------------------------------


def refused(sent: subprocess.CompletedProcess[str]) -> str:
    """The only line that a client printed, which failed."""
    assert (sent.returncode, sent.stdout) == (1, "")
    (line,) = sent.stderr.splitlines()
    return line


def test_the_source_starts_without_a_compilation_of_its_own(java: Sender, bus, queue) -> None:
    """As the page says: ``java Send.java``."""
    source = Sender("java", str(JAVA_CLIENT))
    sent = source(bus.admin_connection_string, queue(), "shop.resize", "[]", "{}", "order-8")
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "order-8\n", "")


def test_without_a_jdk_the_tests_say_what_to_install(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    with pytest.raises(pytest.fail.Exception) as caught:
        java.__wrapped__(folders)  # type: ignore[attr-defined]  # the function of the fixture
    assert str(caught.value) == JAVA


def test_a_wrong_key_a_missing_queue_and_broken_arguments(java: Sender) -> None:
    with emulator(queues=["q"], shared_access_key="key") as bus:
        right = bus.admin_connection_string
        assert java(right, "q", "shop.resize").returncode == 0
        wrong = right.replace("SharedAccessKey=key", "SharedAccessKey=kez")
        assert refused(java(wrong, "q", "t")).startswith("refused with status 401: 401 the token's")
        assert "status 410: 410 the messaging entity" in refused(java(right, "missing", "t"))
    assert "does not answer" in refused(java(right, "q", "t"))
    without = "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=a;UseDevelopmentEmulator=true"
    assert refused(java(without, "q", "t")) == "the connection string has no SharedAccessKey"
    assert refused(java(right, "q", "größe")) == "over HTTP, TASK and TASK_ID must be ASCII"


def test_a_storage_account_refuses_likewise(java: Sender, tmp_path: Path) -> None:
    with azurite.running(tmp_path, service="queue") as service:
        account = QueueServiceClient.from_connection_string(service.connection_string)
        account.create_queue("clients")
        signature = generate_account_sas(
            *(account.account_name, account.credential.account_key, ResourceTypes(object=True)),
            AccountSasPermissions(add=True),
            datetime.now(UTC) + timedelta(minutes=5),
        )
        shared = f"QueueEndpoint={account.url};SharedAccessSignature={signature}"
        assert java(shared, "clients", "shop.resize").returncode == 0
        wrong = service.connection_string.replace("AccountKey=", "AccountKey=AAAA")
        assert refused(java(wrong, "clients", "t")).startswith("refused with status 403: ")
        missing = refused(java(service.connection_string, "missing", "t"))
        assert missing.startswith("refused with status 404: QueueNotFound")
        (message,) = account.get_queue_client("clients").receive_messages()
        assert message.expires_on is not None
        assert message.expires_on.year == 9999, "it waits until a worker comes"
        account.close()


JSON_VALUES = [
    *("[]", " [ ] ", "[1]", "[-0.5e+3, 0, 10]", '["a", "\\u00e4\\n\\"", "ä,]"]', "[[[]], {}]"),
    '[{"a": [true, false, null], "b": {"c": ""}}]',
    "[" + ",".join(["1"] * 20_000) + "]",
    "[" * 300 + "]" * 300,
    '["' + "\\n" * 30_000 + '"]',
]
NO_JSON = [
    *("", "[", "]", "[1,]", "[,1]", "[1 2]", "[01]", "[1.]", "[.5]", "[+1]", "[nul]", "[NaN]"),
    *("['a']", '["a]', '["\\x"]', '["\t"]', "[1]]", "[1] [2]", '[{"a"}]', "[{1: 2}]", "[{a: 1}]"),
    *('[{"a": 1,}]', "[\1]", "[\u00a01]", "1", '"a"', "{}", "[1];"),
]


CHECK = """
class Check {
    public static void main(String[] texts) {
        for (String text : texts) System.out.println(Send.Json.isArray(text));
    }
}
"""


def test_the_check_of_json_is_that_of_python(java: Sender, tmp_path: Path) -> None:
    folder, source = java.words[2], tmp_path / "Check.java"
    source.write_text(CHECK)
    subprocess.run(["javac", "-cp", folder, "-d", folder, str(source)], check=True)
    check = Sender("java", "-cp", folder, "Check", LC_ALL="C.UTF-8")
    answers = check(*JSON_VALUES, *NO_JSON).stdout.split()
    assert answers == ["true"] * len(JSON_VALUES) + ["false"] * len(NO_JSON)
    assert all(isinstance(json.loads(text), list) for text in JSON_VALUES)
    for args, kwargs in (("[1,]", "{}"), ("[1]", "[1]"), ("{}", "{}")):
        said = refused(java(NOWHERE, "q", "t", args, kwargs))
        assert said == "ARGS must be a JSON array such as [1], KWARGS a JSON object"
    assert "does not answer" in refused(java(NOWHERE, "q", "t", JSON_VALUES[-1], ' {"a": 1}'))


def test_the_schema_is_true_of_javascript_and_of_python(javascript: Sender) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    validator = Draft202012Validator(SCHEMA)
    print_message = "console.log(JSON.stringify(require(process.argv[1]).taskMessage('a', [1])))"
    done = subprocess.run(
        ["node", "-e", print_message, str(CLIENT)], capture_output=True, text=True, check=True
    )
    validator.validate(json.loads(done.stdout))
    codec = Codec(serializer="json")
    body, content_type, encoding = codec.encode_arguments(("a.png",), {"width": 200})
    envelope = codec.to_envelope(
        TaskMessage("7d4f", "shop.resize", "q", body, content_type, encoding)
    )
    ours = {
        "body": json.loads(envelope.body),
        "contentType": envelope.content_type,
        "messageId": envelope.message_id,
        "headers": envelope.headers,
    }
    validator.validate(ours)
    without_id = {**ours, "headers": {"task": "shop.resize"}}
    for wrong in (without_id, {**ours, "body": [[], {}]}, {**ours, "messageId": "7d4f"}):
        with pytest.raises(ValidationError):
            validator.validate(wrong)
