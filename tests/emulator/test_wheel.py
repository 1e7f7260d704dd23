"""The emulator's own wheel: it serves without aztask, Kombu and the SDKs of Azure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from rawclient import RawClient

SCRIPT = Path(__file__).parents[2] / "release" / "emulatorwheel.py"
# What runs it refuses the packages that its environment must not need.
RUN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("aztask", "kombu", "azure", "celery"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv.pop(1))
from aztask_emulator.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def builder():
    spec = importlib.util.spec_from_file_location("emulatorwheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(builder, tmp_path_factory):
    return builder.build(tmp_path_factory.mktemp("wheel"))


def test_two_builds_are_the_same(builder, wheel, tmp_path):
    assert builder.build(tmp_path).read_bytes() == wheel.read_bytes()


def test_it_needs_click_alone(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        required = [
            line
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist:") and "extra ==" not in line
        ]
        sources = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
    assert required == ["Requires-Dist: click>=8.4"]
    assert {name.split("/")[0] for name in sources} == {"aztask_emulator"}
    lines = [line.strip() for text in sources.values() for line in text.splitlines()]
    assert not [line for line in lines if line.startswith(("from aztask.", "import aztask"))]
    assert not any("celery" in name or "servicebus" in name for name in sources)


def run(wheel, *arguments):
    return [sys.executable, "-I", "-c", RUN, str(wheel), *arguments]


def test_it_serves(wheel):
    command = run(wheel, "--port", "0", "--admin-port", "0", "--queue", "q", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ready = json.loads(process.stdout.readline())
        client = RawClient(ready["port"])
        client.attach("q")
        (answer,) = client.send([b"x"])
        assert answer.state.descriptor == 0x24
        client.socket.close()
        process.terminate()


def test_an_error_is_one_line(wheel):
    done = subprocess.run(
        run(wheel, "--host", "0.0.0.0"), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("aztask-emulator: listening on '0.0.0.0'")
    assert done.stderr.count("\n") == 1
