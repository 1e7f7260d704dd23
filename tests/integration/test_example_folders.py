"""The examples that come with a README: its commands do what it says."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from webexample import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = {"aztask": f"{sys.executable} -m aztask", "python": sys.executable}
ENDS = {
    "addresses": ["sent 100 orders", "100 succeeded", "messages go to 8 shards", "c.db (new)"],
    "async": ["200 succeeded", "200 pages, from /page-0 to /page-199"],
    "django": ["2 x tea {'status': 'SUCCESSFUL'", "an anvil does not fit into a parcel"],
    "chat": ["5 passed", "Your question 1 has 4 words", "end streams do how"],
    "fastapi": ["5 passed", "11 of 11 succeeded 10 pages"],
    "eventgrid": ["cat-1.png, 524288 bytes", "cat-2.png, 524288 bytes"],
    "foreign": ["order 3: spoon", "undecodable"],
    "limits": ["sent 30 calls", "30 calls, at most "],
    "quickstart": ["shop.count_words", "succeeded", "6"],
    "strategies": ["abandon        tried again after 0.", "lease-timeout  tried again after"],
    "sessions": ["carol: 1, 3, 6, 10, 15", "0 failed"],
    "schedules": ["tick of ", "0 2 * * * Europe/Berlin", "eu: 2026-01-02"],
    "workflow": ["chord of 100", "shipped, 100 images: order-1/0.png, order-1/1.png"],
    "adaptive": ["240 succeeded, 0 failed", "lowered: 1.5 x the p99"],
    "approval": [
        "signal approved, until",
        "parcel for o-1",
        "refunded charge-o-2",
        "start orders.ship",
        "5 passed",
    ],
    "sentry": ["error CardDeclined: order 7", "error TaskKilled: the time limit of 0.5 s"],
    "structlog": ['"attempt": 2', '"request_id": "r-3"'],
    "payloads": ["2 succeeded", "20,000,000 bytes became 10,000,000", "removed 0 payloads"],
    "testing": ["5 passed"],
    "deadletters": ["Hello -> Analytical Engine Street 1", "purged 1 dead letter"],
}


@pytest.mark.parametrize("name", sorted(ENDS))
def test_the_commands_of_its_readme(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, folder)
    text = (folder / "README.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    programs = [f'{name}() {{ {start} "$@"; }}' for name, start in PROGRAMS.items()]
    script = [*programs, "set -e", *commands]
    with (tmp_path / "shown").open("w+") as shown:
        process = subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PORT": str(free_port())},
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(60)
        finally:
            with suppress(ProcessLookupError):  # else a worker that the README leaves running
                os.killpg(process.pid, signal.SIGKILL)
        text = Path(shown.name).read_text()
    assert code == 0, text
    for word in ENDS[name]:
        assert word in text
    if name == "limits":  # a busy machine may start fewer than the limits allow
        assert int(re.search(r"30 calls, at most (\d+) starts", text)[1]) <= 10
        together = re.findall(r"^\w+: at most (\d+) at a time$", text, re.MULTILINE)
        assert len(together) == 3
        assert all(1 <= int(each) <= 2 for each in together)
