"""``examples/shop``: the commands of its README, on each of the three brokers."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from harness import ROOT

from aztask.queues.servicebus.admin import ADMIN_VARIABLE

BROKERS = ("local", "servicebus", "storagequeue")


@pytest.fixture(params=BROKERS)
def broker(request):
    """(name, environment) of a broker; the README's own lines name its usual ports."""
    if request.param == "local":
        return request.param, {"AZTASK_BROKER": "local://"}
    if request.param == "storagequeue":
        return request.param, {
            "AZTASK_BROKER": request.getfixturevalue("azurite").connection_string
        }
    bus = request.getfixturevalue("bus")
    return request.param, {
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
    }


def run(folder, commands, environment):
    """Run commands in one shell; returns their output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
    shell = [f'{name}() {{ {sys.executable} {start}"$@"; }}' for name, start in STARTS.items()]
    with (folder.parent / "shown").open("w+") as shown:
        process = subprocess.Popen(
            ["bash", "-c", "\n".join([*shell, "set -e", *commands])],
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), "AZTASK_RESULTS": "local://", **environment},
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            shown.seek(0)
            text = shown.read()
    assert code == 0, text
    return text


STARTS = {"aztask": "-m aztask ", "python": ""}


def test_the_commands_of_its_readme(broker, tmp_path):
    name, environment = broker
    folder = tmp_path / "shop"
    shutil.copytree(ROOT / "examples" / "shop", folder)
    blocks = re.findall(r"```console\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert all(block.startswith("$ export AZTASK_BROKER=") for block in blocks[:-1])
    commands = [line.removeprefix("$ ") for line in blocks[-1].splitlines()]
    shown = run(folder, commands, environment)
    assert "mails: 12 sent, 6 tasks" in shown
    attempts = int(re.search(r"mails: 6 delivered in (\d+) attempts", shown)[1])
    assert attempts > 6, "some mails were refused at first"
    assert "pictures: 8 thumbnails" in shown
    assert (folder / "pictures" / "picture-0.small.ppm").read_bytes().startswith(b"P6 60 40 255\n")
    assert "catalogue: 1000 rows, the last run began at row 500" in shown
    assert int(re.search(r"prices: 200, (\d+) calls at once", shown)[1]) > 20
    orders = 3 if name == "storagequeue" else 12
    assert re.search(rf"orders: \d+ sent, {orders} tasks", shown)
    for customer in ("ann", "bob", "cem"):
        assert f"orders: {', '.join(f'{customer}-{n}' for n in range(1, 5))}\n" in shown
