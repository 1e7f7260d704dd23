"""``aztask azure verify`` on the emulator and Azurite: green, exact about faults, and clean."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobClient, BlobServiceClient
from azurite import ACCOUNT, Azurite, account_of, running
from harness import ROOT
from test_doctor import RULES, Shop

from aztask import App
from aztask.operate.provision.roles import STORES, actions_of
from aztask.operate.verify import BY_HAND, CHECKS, UNTRIED, verify
from aztask.operate.verifybench import MADE, PREFIX, TABLE_PREFIX
from aztask.operate.verifylong import LONG
from aztask.operate.verifyroles import MAY, VARIABLES
from aztask.operate.verifystores import IN_WORDS
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.stores.tables.store import TablesStore
from aztask.testing import RunningEmulator, emulator

KEY = "main-key-of-this-test"
APP = "from aztask import App\napp = App('shop', lease=30)\n"
ROLES = {f"{kind}-{name}" for kind in ("role", "stores") for name in VARIABLES}
STORAGE = ("transaction", "tags", "event-file", "append")


def on(folder: Path, broker: str, admin: str = "", results: str = "local://") -> Shop:
    (folder / "shop.py").write_text(APP)
    names = {"AZTASK_BROKER": broker, ADMIN_VARIABLE: admin, "AZTASK_RESULTS": results}
    return Shop(folder, names)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tables and blobs of an account."""
    folder = tmp_path_factory.mktemp("account")
    with (
        running(folder / "tables", service="table") as tables,
        running(folder / "blobs", service="blob") as blobs,
    ):
        yield account_of(tables, blobs)


def made(account: str) -> tuple[list[str], list[str]]:
    """The tables and the containers of the account."""
    with (
        TableServiceClient.from_connection_string(account) as tables,
        BlobServiceClient.from_connection_string(account) as blobs,
    ):
        return [each.name for each in tables.list_tables()], [
            each.name for each in blobs.list_containers()
        ]


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
    named = {rule for rule, _ in CHECKS.values()} | {proof.rule for proof in LONG.values()}
    assert named <= rules


def test_everything_that_the_docs_mark_as_not_tried_is_on_the_list() -> None:
    docs, own = ROOT / "docs", "how-to/production/try-on-azure.md"
    marks = {
        path.relative_to(docs).as_posix(): len(
            re.findall(r"(?i)\bnot\s+(?:been\s+)?tried", path.read_text(encoding="utf-8"))
        )
        for path in docs.rglob("*.md")
    }
    assert {page: count for page, count in marks.items() if count and page != own} == {
        page: len(listed) for page, listed in UNTRIED.items()
    }
    by = {name for listed in UNTRIED.values() for _, names in listed for name in names.split(", ")}
    assert by - {BY_HAND} <= CHECKS.keys()


def test_the_page_has_the_list_and_says_which_runs_were_reported() -> None:
    page = (ROOT / "docs/how-to/production/try-on-azure.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \{doc\}`/(\S+)` \| (.+?) \| (.+?) \|$", page)
    assert [(f"{where}.md", what, by.replace("`", "")) for where, what, by in rows] == [
        (where, what, by) for where, listed in UNTRIED.items() for what, by in listed
    ]
    reports = page.partition("| date | service, tier, region |")[2].partition("\n\n")[0]
    (row,) = reports.splitlines()[2:]
    assert row == "| | none so far | | |", "a report that came goes into the table, and here"
    for name, proof in LONG.items():
        assert f"| `{name}` | " in page
        assert f"{name} (rule {proof.rule})" in page
    for role, variable in VARIABLES.items():
        row = re.search(rf"(?m)^\| `{variable}` \| (.+?) \| (.+?) \|$", page)
        assert row is not None
        assert row[1].partition(":")[0].split(", ") == list(MAY["servicebus"][role])
        assert row[2].split(", ") == list(MAY["storagequeue"][role])
    head, rows = page.partition("| on the stores | ")[2].partition("| `stores-sender` ")[::2]
    columns = [each.strip() for each in head.partition("\n")[0].strip("| ").split(" | ")]
    assert columns == [IN_WORDS[on].removeprefix("the ") for on in STORES]
    for role, line in zip(VARIABLES, f"| `stores-sender` {rows}".splitlines(), strict=False):
        first, *cells = line.strip("| ").split(" | ")
        assert first == f"`stores-{role}`"
        allowed = [", ".join(actions_of(role, "servicebus", on)) or "nothing" for on in STORES]
        assert cells == allowed


def test_on_the_emulator_everything_is_green(
    bus: RunningEmulator, account: str, tmp_path: Path
) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string, account)
    for name in ("default", "mine"):
        assert run("queues", "create", name).returncode == 0
    before = made(account)
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    found = proofs(run, "--html", str(page), "--report", str(file))
    assert {name: each["state"] for name, each in found.items()} == {
        name: "skipped" if name in ROLES else "passed" for name in CHECKS
    }
    assert "AZTASK_VERIFY_WORKER may hold it" in found["role-worker"]["text"]
    assert names(run) == ["default", "mine"]
    assert made(account) == before
    report = json.loads(file.read_text())
    assert report["proofs"] == list(found.values())
    for text in (page.read_text(), file.read_text()):
        assert bus.connection_string not in text and "127.0.0.1" not in text and "mine" not in text
        assert ACCOUNT not in text
        assert all(check in text for check in CHECKS)
    assert page.read_text().count("<tr>") == len(CHECKS) + 1


def test_on_azurite_what_it_has_is_green_and_the_rest_is_skipped(
    azurite: Azurite, tmp_path: Path
) -> None:
    run = on(tmp_path, azurite.connection_string)
    found = proofs(run)
    skipped = {name for name, each in found.items() if each["state"] == "skipped"}
    assert skipped == {"sessions", "deferral", "duplicates", "plan", *STORAGE, *ROLES}
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


def test_a_wrong_lock_is_named_with_both_durations(bus: RunningEmulator, tmp_path: Path) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
    assert run("queues", "create", "default", "--lease", "60s").returncode == 0
    (proof,) = proofs(run, "--check", "plan", code=1).values()
    assert proof["state"] == "failed"
    assert "wrong lock" in proof["text"] and "60 s" in proof["text"] and "30 s" in proof["text"]
    assert "default" not in proof["text"]
    assert run("queues", "create", "default", "--lease", "30s").returncode == 0
    (proof,) = proofs(run, "--check", "plan").values()
    assert proof["state"] == "passed"


def test_a_role_that_is_missing_for_tables_and_blobs_is_named(
    bus: RunningEmulator, account: str, tmp_path: Path
) -> None:
    key = base64.b64encode(b"of another account").decode()
    refused = re.sub("AccountKey=[^;]+", f"AccountKey={key}", account)
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string, refused)
    found = proofs(run, "--check", "tags", "--check", "append", code=1)
    assert "Storage Table Data Contributor" in found["tags"]["text"]
    assert "Storage Blob Data Contributor" in found["append"]["text"]


class Faulty:
    """Rows of a service that does not keep a promise: what it changes although it refuses it."""

    def __init__(self, rows: Any, fault: str) -> None:
        self.rows, self.fault = rows, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    def together(self, changes: Any) -> Any:
        if self.fault == "half a group":
            self.rows.write(changes[0])
        return self.rows.together(changes)

    def write(self, change: Any) -> Any:
        if self.fault == "old tags" and change.before is not None:
            (now,) = self.rows.get([change.place])
            change = change._replace(before=now)
        return self.rows.write(change)


@pytest.mark.parametrize(
    ("check", "fault", "text"),
    [
        ("transaction", "half a group", "was refused and left [2, 1, None]"),
        ("tags", "old tags", "replaced under an old tag"),
    ],
)
def test_a_table_that_breaks_its_promise_is_refuted(
    check: str,
    fault: str,
    text: str,
    bus: RunningEmulator,
    account: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = TablesStore.of
    monkeypatch.setattr(TablesStore, "of", lambda self, kind: Faulty(of(self, kind), fault))
    with closing(App("shop", broker=bus.connection_string, results=account)) as app:
        (proof,) = verify(app, [check])
    assert proof.state == "failed"
    assert text in proof.text


def test_a_container_that_appends_anywhere_is_refuted(
    bus: RunningEmulator, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = BlobClient.append_block
    monkeypatch.setattr(
        BlobClient, "append_block", lambda self, data, appendpos_condition: append(self, data)
    )
    with closing(App("shop", broker=bus.connection_string, results=account)) as app:
        (proof,) = verify(app, ["append"])
    assert (proof.state, proof.text) == ("failed", "appending at byte 2 was carried out")


def test_tables_and_containers_of_a_killed_run_are_cleaned(
    bus: RunningEmulator, account: str, tmp_path: Path
) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string, account)
    before = made(account)
    kept = (["aztaskverify2", "mine"], ["aztask-verify-mine", "mine"])
    with (
        TableServiceClient.from_connection_string(account) as tables,
        BlobServiceClient.from_connection_string(account) as blobs,
    ):
        for name in (*kept[0], f"{TABLE_PREFIX}01234567tags"):
            tables.create_table(name)
        for name in (*kept[1], f"{PREFIX}01234567-append"):
            blobs.create_container(name)
    done = run("azure", "verify", "--clean")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"deleted table {TABLE_PREFIX}01234567tags",
        f"deleted container {PREFIX}01234567-append",
    ]
    after = made(account)
    assert [sorted(each) for each in after] == [
        sorted([*there, *names]) for there, names in zip(before, kept, strict=True)
    ]


def test_a_skewed_clock_is_named_and_schedules_hold(tmp_path: Path) -> None:
    with emulator(clock_offset=3600.0) as bus:
        run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
        found = proofs(run, "--check", "clock", "--check", "scheduled", code=1)
    assert (found["clock"]["state"], found["scheduled"]["state"]) == ("failed", "passed")
    assert "+3600" in found["clock"]["text"] or "+3599" in found["clock"]["text"]


def test_a_killed_run_is_cleaned_and_nothing_else_is(bus: RunningEmulator, tmp_path: Path) -> None:
    run = on(tmp_path, bus.connection_string, bus.admin_connection_string)
    for name in ("mine", "aztask-verify-mine"):
        assert run("queues", "create", name).returncode == 0
    started = subprocess.Popen(
        [sys.executable, "-m", "aztask", "azure", "verify"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AZTASK_APP": "shop:app", **run.environment},
        stdout=subprocess.DEVNULL,
    )
    until = time.monotonic() + 60
    while not any(map(MADE.fullmatch, names(run))):
        assert time.monotonic() < until
    started.send_signal(signal.SIGKILL)
    started.wait()
    done = run("azure", "verify", "--clean")
    assert done.returncode == 0
    assert re.fullmatch(rf"deleted queue {PREFIX}[0-9a-f]{{8}}-[a-z-]+\n", done.stdout)
    assert set(names(run)) >= {"mine", "aztask-verify-mine"}
    assert [name for name in names(run) if name.startswith(PREFIX)] == ["aztask-verify-mine"]


def test_a_local_file_is_no_service(tmp_path: Path) -> None:
    done = on(tmp_path, "local://:memory:")("azure", "verify")
    assert done.returncode == 4
    assert "is no service" in done.stderr
