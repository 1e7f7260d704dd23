"""The example folder runs as its README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from emulatorprocess import running

ROOT = Path(__file__).parents[2]


def test_try_it():
    done = subprocess.run(
        [sys.executable, "try_it.py"],
        cwd=ROOT / "examples" / "emulator",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "dead letter: bad because: not an order" in done.stdout


def test_what_the_image_runs(tmp_path):
    """Its command has no options: everything is in the variables. Ports and folders are ours."""
    folder = ROOT / "examples" / "emulator"
    text = (folder / "Dockerfile").read_text()
    variables = dict(re.findall(r"^ENV (\w+)=(\S+)$", text, re.MULTILINE))
    command = re.search(r"^CMD (.*)$", text, re.MULTILINE)
    assert command is not None
    assert json.loads(command[1]) == ["aztask-emulator"]
    assert f"COPY config.json {variables['AZTASK_EMULATOR_CONFIG']}\n" in text
    variables["AZTASK_EMULATOR_CONFIG"] = str(folder / "config.json")
    variables["AZTASK_EMULATOR_DATA"] = str(tmp_path / "bus.db")
    with running(**variables) as ready:
        asked = Request(f"http://127.0.0.1:{ready['admin_port']}/health")
        asked.add_header("Host", "servicebus-emulator:5300")
        with urlopen(asked, timeout=5) as answer:
            assert json.load(answer)["status"] == "healthy"
        # as in the documentation of Microsoft's emulator
        connection = (
            f"Endpoint=sb://localhost:{ready['port']};SharedAccessKeyName=RootManageSharedAccessKey;"
            "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"
        )
        with (
            ServiceBusClient.from_connection_string(connection, retry_total=0) as client,
            client.get_queue_sender("orders") as sender,
        ):
            sender.send_messages(ServiceBusMessage("x"))
