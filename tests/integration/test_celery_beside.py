"""What a Celery application sees on Redis and on our addresses: the table in the documentation.

``BESIDE_WRITE=1 tox -e celery-redis -- -k beside`` writes the table anew.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import azurite
import pytest

from aztask import App
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import emulator
from tests.celerysuite.redis import redis_server

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from-celery.md"
BEGIN, END = "<!-- beside Redis -->\n", "<!-- end of beside Redis -->\n"
BEAT = {"BEAT": "aztask.celery:Scheduler"}
OURS = {"local": "a local file", "storagequeue": "Azure Storage", "servicebus": "Service Bus"}
SECONDS = 900.0
BEFORE = """
from beside_app import *
add.apply_async((1, 2), task_id="revoked-before")
app.control.revoke("revoked-before")
"""


def seen(folder: Path, **address: str) -> dict[str, str]:
    """What the script sees on a broker and a backend, with one worker."""
    folder.mkdir()
    environment = {
        **os.environ,
        "OPTIONS": "{}",
        "RESULT_OPTIONS": "{}",
        "QUEUE": "beside",
        "ERRBACKS": str(folder / "errbacks"),
        "NOTES": str(folder / "notes"),
        "C_FORCE_ROOT": "1",  # as root, Celery refuses a worker that accepts pickle
        "FOUND": str(folder / "found"),
        "SITE": str(folder / "site.sqlite3"),
        "BEAT": "celery.beat:PersistentScheduler",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
        **address,
    }
    with (folder / "log").open("wb") as log, ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(ended, process)
            return process

        before = start("-c", BEFORE)
        assert before.wait(60) == 0, (folder / "log").read_text()
        worker = ("-m", "celery", "-A", "beside_app", "worker", "-l", "INFO")
        start(*worker, "-c", "2", "-Q", "beside,beside-routed", "-n", "main@%h")
        start(*worker, "-c", "1", "-Q", "beside-small", "-n", "small@%h", "--max-tasks-per-child=1")
        most = "--max-memory-per-child=200000"  # KiB
        start(*worker, "-c", "1", "-Q", "beside-memory", "-n", "memory@%h", most)
        assert start("-m", "beside_site", "migrate").wait(60) == 0, (folder / "log").read_text()
        start("-m", "celery", "-A", "beside_site.celery", "worker", "-c", "1", "-n", "site@%h")
        client = start("-m", "beside_app")
        assert client.wait(SECONDS) == 0, (folder / "log").read_text()[-6000:]
    found: dict[str, str] = json.loads((folder / "found").read_text())
    return found


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, str]]]:
    if not (
        shutil.which("redis-server") and find_spec("redis") and find_spec("django_celery_beat")
    ):
        pytest.skip("needs redis-server (apt-get install redis-server) and tox -e celery-redis")
    folder = tmp_path_factory.mktemp("services")
    with (
        redis_server(folder) as port,
        azurite.storing(folder / "azurite") as services,
        azurite.running(folder / "queues", service="queue") as queues,
        emulator() as bus,
    ):
        account = azurite.account_of(*services)
        setup = App("setup", broker=f"local://{folder}/setup.db", results=account)
        setup.results.create()  # type: ignore[union-attr]
        setup.close()
        redis = f"redis://127.0.0.1:{port}"
        tables = {"BACKEND_URL": "aztask://", "RESULT_OPTIONS": json.dumps({"results": account})}
        yield {
            "redis": {"BROKER_URL": f"{redis}/0", "BACKEND_URL": f"{redis}/1"},
            "local": {
                "BROKER_URL": f"aztask+local://{folder}/queues.db",
                "BACKEND_URL": f"aztask+local://{folder}/results.db",
                **BEAT,
            },
            "storagequeue": {
                "BROKER_URL": "aztask://",
                "OPTIONS": json.dumps({"broker": queues.connection_string}),
                **tables,
                **BEAT,
            },
            "servicebus": {
                "BROKER_URL": "aztask://",
                "OPTIONS": json.dumps({"broker": bus.connection_string}),
                ADMIN_VARIABLE: bus.admin_connection_string,
                # The scripts clean up results: each needs a store of its own.
                "BACKEND_URL": f"aztask+local://{folder}/bus-results.db",
                **BEAT,
            },
        }


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """The table: one text for our addresses if they agree."""
    lines = ["| | Redis | aztask |", "|---|---|---|"]
    for name, theirs in found["redis"].items():
        ours = {found[each][name] for each in OURS}
        text = ours.pop() if len(ours) == 1 else _each({each: found[each][name] for each in OURS})
        lines.append(f"| {name} | {theirs} | {'the same' if text == theirs else text} |")
    return "\n".join(lines) + "\n"


def _each(found: Mapping[str, str]) -> str:
    return "; ".join(f"{OURS[name]}: {text}" for name, text in found.items())


@pytest.mark.timeout(2 * SECONDS)
def test_the_table_of_the_documentation_is_what_a_script_sees_beside_redis(
    addresses: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    def one(named: tuple[str, dict[str, str]]) -> tuple[str, Any]:
        return named[0], seen(tmp_path / named[0], **named[1])

    with ThreadPoolExecutor(2) as threads:
        found = dict(threads.map(one, addresses.items()))
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    written, _, tail = rest.partition(END)
    if os.environ.get("BESIDE_WRITE"):
        PAGE.write_text(f"{head}{BEGIN}{table(found)}{END}{tail}")
    assert "the same" in table(found)
    assert os.environ.get("BESIDE_WRITE") or written == table(found)
