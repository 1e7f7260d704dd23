"""Tasks that another language sends: ``examples/clients``, and the schema of a message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import azurite
import pytest
from jsonschema import Draft202012Validator, ValidationError
from programs import need_node

from aztask import App
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.queues.servicebus.admin import ADMIN_VARIABLE

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).parent / "node"
CLIENT = ROOT / "examples" / "clients" / "javascript" / "send.js"
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


@pytest.fixture(scope="module")
def node() -> str:
    program = str(need_node())
    if not (PACKAGES / "node_modules" / "@msgpack").exists():
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(
            command, cwd=PACKAGES, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"npm ci failed: {done.stderr[-500:]}"
    return program


def send(node: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NODE_PATH": str(PACKAGES / "node_modules")}
    command = [node, str(CLIENT), *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def runs_what_it_sends(node: str, folder: Path, broker: Mapping[str, str], queue: str) -> None:
    """Send one task, and one twice; a worker runs each once."""
    (folder / "shop.py").write_text(SHOP.format(folder=folder, queue=queue))
    address = broker["AZTASK_BROKER"]
    ids = [
        send(node, address, queue, "shop.resize", *ARGUMENTS, *task_id)
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
    app = App("shop", broker=address, results=f"local://{folder}/results.db")
    for each in {each.stdout.strip() for each in ids}:
        assert app.result(each).get(timeout=5) == SHOWN
    app.close()


def test_over_service_bus(node: str, bus, queue, tmp_path: Path) -> None:
    broker = {
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
    }
    runs_what_it_sends(node, tmp_path, broker, queue(duplicate_window=600.0))


def test_over_a_storage_queue(node: str, tmp_path: Path) -> None:
    with azurite.running(tmp_path / "azurite", service="queue") as service:
        broker = {"AZTASK_BROKER": service.connection_string}
        app = App("shop", broker=service.connection_string)
        app.broker.declare("clients")
        app.close()
        runs_what_it_sends(node, tmp_path, broker, "clients")


def test_what_it_cannot_send_is_one_line(node: str) -> None:
    nowhere = send(node, "Endpoint=sb://127.0.0.1;SharedAccessKeyName=a", "q", "shop.resize")
    assert nowhere.returncode == 1
    assert len(nowhere.stderr.splitlines()) == 1
    assert send(node).returncode == 2


def test_the_schema_is_true_of_javascript_and_of_python(node: str) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    validator = Draft202012Validator(SCHEMA)
    print_message = "console.log(JSON.stringify(require(process.argv[1]).taskMessage('a', [1])))"
    done = subprocess.run(
        [node, "-e", print_message, str(CLIENT)], capture_output=True, text=True, check=True
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
