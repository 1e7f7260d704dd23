"""``aztask azure verify`` on the emulator and Azurite: green, exact about faults, and clean."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from azurite import Azurite
from harness import ROOT
from test_doctor import RULES, Shop

from aztask.operate.verify import CHECKS, PREFIX
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator, emulator

KEY = "main-key-of-this-test"
APP = "from aztask import App\napp = App('shop', lease=30, results='local://')\n"


def on(folder: Path, broker: str, admin: str = "") -> Shop:
    (folder / "shop.py").write_text(APP)
    return Shop(folder, {"AZTASK_BROKER": broker, ADMIN_VARIABLE: admin})


def proofs(run: Shop, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = run("azure", "verify", "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}


def names(run: Shop) -> list[str]:
    done = run("queues", "list", "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["queue"] for line in done.stdout.splitlines()]


def test_each_check_names_a_rule_that_there_is() -> None:
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    rules = set(re.findall(r"(?m)^\| (\d+) \|", text)) | set(
        re.findall(r"(?m)^\| ([a-z ]+) \| ", text)
    )
    assert {rule for rule, _ in CHECKS.values()} <= rules


def test_on_the_emulator_everything_is_green(bus: RunningEmulator, tmp_path: Path) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
    assert run("queues", "create", "mine").returncode == 0
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    found = proofs(run, "--html", str(page), "--report", str(file))
    assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(CHECKS, "passed")
    assert names(run) == ["mine"]
    report = json.loads(file.read_text())
    assert report["proofs"] == list(found.values())
    for text in (page.read_text(), file.read_text()):
        assert bus.connection_string not in text and "127.0.0.1" not in text and "mine" not in text
        assert all(check in text for check in CHECKS)
    assert page.read_text().count("<tr>") == len(CHECKS) + 1


def test_on_azurite_what_it_has_is_green_and_the_rest_is_skipped(
    azurite: Azurite, tmp_path: Path
) -> None:
    run = on(tmp_path, azurite.connection_string)
    found = proofs(run)
    skipped = {name for name, each in found.items() if each["state"] == "skipped"}
    assert skipped == {"sessions", "deferral", "duplicates"}
    assert {each["state"] for name, each in found.items() if name not in skipped} == {"passed"}
    assert names(run) == []


def test_a_missing_permission_is_named(tmp_path: Path) -> None:
    with emulator(shared_access_key=KEY, rules=RULES) as bus:
        policy = f"SharedAccessKeyName=worker;SharedAccessKey={RULES['worker'].key}"
        found = []
        for text in (bus.connection_string, bus.admin_connection_string):
            found.append(re.sub(r"SharedAccessKeyName=[^;]+;SharedAccessKey=[^;]+", policy, text))
        run = on(tmp_path, *found)
        (proof,) = proofs(run, "--check", "lock", code=1).values()
    assert proof["state"] == "failed"
    assert "Manage" in proof["text"] or "permission" in proof["text"]


def test_a_skewed_clock_is_named_and_schedules_hold(tmp_path: Path) -> None:
    with emulator(clock_offset=3600.0) as bus:
        run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
        found = proofs(run, "--check", "clock", "--check", "scheduled", code=1)
    assert (found["clock"]["state"], found["scheduled"]["state"]) == ("failed", "passed")
    assert "+3600" in found["clock"]["text"] or "+3599" in found["clock"]["text"]


def test_a_killed_run_is_cleaned_and_nothing_else_is(bus: RunningEmulator, tmp_path: Path) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
    for name in ("mine", "aztask-verified"):
        assert run("queues", "create", name).returncode == 0
    started = subprocess.Popen(
        [sys.executable, "-m", "aztask", "azure", "verify"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AZTASK_APP": "shop:app", **run.environment},
        stdout=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not any(name.startswith(PREFIX) for name in names(run)):
        assert time.monotonic() < until
    started.send_signal(signal.SIGKILL)
    started.wait()
    done = run("azure", "verify", "--clean")
    assert done.returncode == 0
    assert re.fullmatch(rf"deleted queue {PREFIX}[0-9a-f]{{8}}-[a-z-]+\n", done.stdout)
    assert set(names(run)) >= {"mine", "aztask-verified"}
    assert not [name for name in names(run) if name.startswith(PREFIX)]


def test_a_local_file_is_no_service(tmp_path: Path) -> None:
    done = on(tmp_path, "local://:memory:")("azure", "verify")
    assert done.returncode == 4
    assert "is no service" in done.stderr
