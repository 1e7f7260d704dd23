"""Without telemetry no process imports its libraries, so having them installed costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bus import bus_site
from harness import HERE, ROOT, Site, site_in

from aztask.queues.base import QueueOptions
from aztask.testing import emulator

RECORDER = """
import os, sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("opentelemetry", "prometheus_client", "recorded"):
            with open(os.environ["RECORD"], "a") as file:
                file.write(name + "\\n")

sys.meta_path.insert(0, Recorder())
"""
SEND = "from ledger_app import work; work.delay('a'); work.map([('b',), ('c',)])"


def nothing_is_imported(site: Site, folder: Path, *arguments: str) -> None:
    (folder / "sitecustomize.py").write_text(RECORDER)
    record = folder / "record"
    site.extra["RECORD"] = str(record)
    site.extra["PYTHONPATH"] = f"{folder}:{ROOT}:{HERE}:{HERE.parent}"
    program = [sys.executable, "-c", f"{SEND}\ntry: import recorded\nexcept ImportError: pass"]
    subprocess.run(program, env=site.environment, cwd=site.folder, check=True, timeout=60)
    worker = site.worker("-c", "2", "--burst", *arguments)
    assert worker.wait(60) == 0, worker.log
    assert site.counts("end") == {"a": 1, "b": 1, "c": 1}
    assert record.read_text() == "recorded\n", "only what the sender imported on purpose"


@pytest.mark.parametrize("pool", ["processes", "threads"])
def test_on_local_files(pool: str, tmp_path: Path) -> None:
    with site_in(tmp_path / "site", joint=False) as site:
        nothing_is_imported(site, tmp_path, "--pool", pool)


def test_on_service_bus(tmp_path: Path) -> None:
    with emulator() as bus, bus_site(tmp_path / "site", bus, QueueOptions(lease=5.0)) as site:
        nothing_is_imported(site, tmp_path, "--lease", "5s")
