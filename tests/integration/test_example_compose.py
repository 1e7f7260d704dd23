"""The example `compose/` and the development container, as far as one can go without containers.

The Compose file is held against its schema, the Dockerfiles are linted, and the
commands of the file run as processes, with its addresses on free ports.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from azurite import Azurite, running
from waiting import wait_until
from webexample import free_port

from aztask.support.durations import parse_duration

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "compose"
MONITORING = ROOT / "examples" / "monitoring"
DOCKERFILES = [
    EXAMPLE / "Dockerfile",
    ROOT / ".devcontainer" / "Dockerfile",
    ROOT / "examples" / "emulator" / "Dockerfile",
]
TOOLS = Path(sys.executable).parent


def services() -> dict[str, dict[str, Any]]:
    file = yaml.safe_load((EXAMPLE / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = file["services"]
    return found


def schema_problems(path: Path, schema: str) -> str:
    command = [str(TOOLS / "check-jsonschema"), "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_file_fits_the_compose_schema(tmp_path: Path) -> None:
    assert schema_problems(EXAMPLE / "compose.yaml", "vendor.compose-spec") == ""
    wrong = tmp_path / "compose.yaml"
    text = (EXAMPLE / "compose.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("depends_on", "depend_on"))
    assert "depend_on" in schema_problems(wrong, "vendor.compose-spec")


def linted(path: Path) -> subprocess.CompletedProcess[str]:
    # DL3013: the newest release is what a reader of an example wants.
    options = ("--ignore", "DL3013", "--failure-threshold", "warning")
    command = [str(TOOLS / "hadolint"), *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_dockerfile_passes_its_linter(path: Path) -> None:
    done = linted(path)
    assert done.returncode == 0, done.stdout


def test_the_linter_refuses_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && sudo ls\n")
    assert "DL3006" in linted(tmp_path / "Dockerfile").stdout


def test_what_was_not_built_says_so() -> None:
    for path in [*DOCKERFILES, EXAMPLE / "compose.yaml"]:
        assert re.match(r"# NOT (BUILT HERE|TRIED)", path.read_text(encoding="utf-8")), path
    assert "**Not built here**" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


def test_the_files_refer_to_what_exists() -> None:
    found = services()
    targets = re.findall(r"(?m)^FROM \S+ AS (\w+)", (EXAMPLE / "Dockerfile").read_text("utf-8"))
    for name, service in found.items():
        if "build" in service:
            assert service["build"]["target"] in targets, name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source == "azurite" or (EXAMPLE / source).exists(), source
        assert set(service.get("depends_on", [])) <= set(found)
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "no port of a laptop is open to others"
    scraped = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in scraped["scrape_configs"]}
    usual = yaml.safe_load((MONITORING / "prometheus.yaml").read_text(encoding="utf-8"))
    assert jobs.keys() == {job["job_name"] for job in usual["scrape_configs"]}
    assert jobs["aztask-worker"]["dns_sd_configs"][0]["names"] == ["worker"]
    assert jobs["aztask-exporter"]["static_configs"][0]["targets"] == ["exporter:9466"]
    board = (EXAMPLE / "grafana/provisioning/dashboards/aztask.yaml").read_text(encoding="utf-8")
    folder = yaml.safe_load(board)["providers"][0]["options"]["path"]
    assert any(f":{folder}/" in volume for volume in found["grafana"]["volumes"])
    # --shutdown-timeout, and twice --shutdown-grace, by default
    assert parse_duration(found["worker"]["stop_grace_period"]) > 30 + 2 * 10


def test_the_development_container_refers_to_what_exists() -> None:
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    dockerfile = (folder / container["build"]["dockerfile"]).read_text(encoding="utf-8")
    assert f"USER {container['remoteUser']}" in dockerfile
    extras = re.search(r"\.\[([\w,]+)\]", container["postCreateCommand"])
    assert extras is not None
    known = re.findall(r"(?m)^(\w+) =$", (ROOT / "setup.cfg").read_text(encoding="utf-8"))
    assert set(extras[1].split(",")) <= set(known)


class Processes:
    """The services of the file as processes: its commands and addresses, on other ports."""

    def __init__(self, folder: Path, stores: list[Azurite]) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in (5672, 5300, 9465, 9466)}
        self.stores = stores
        self.started: list[subprocess.Popen[bytes]] = []

    def here(self, text: str) -> str:
        """A command or an address of the file, for this machine."""
        text = text.replace("0.0.0.0", "127.0.0.1")
        text = text.replace("//emulator;", f"//127.0.0.1:{self.ports[5672]};")
        for port in (9465, 9466):
            text = text.replace(f":{port}", f":{self.ports[port]}")
        if "AccountName=" in text:
            for store in self.stores:
                kind = f"{store.service.capitalize()}Endpoint="
                text, count = re.subn(f"{kind}[^;]+", f"{kind}{store.endpoint}", text)
                assert count == 1
        return text

    def environment(self, name: str) -> dict[str, str]:
        given = {key: self.here(value) for key, value in services()[name]["environment"].items()}
        own = {key: value for key, value in os.environ.items() if not key.startswith("AZTASK_")}
        broker = given.get("AZTASK_BROKER", "")
        # In the file the administration has its usual port.
        admin = broker.replace(str(self.ports[5672]), str(self.ports[5300]))
        extra = {"PYTHONPATH": str(ROOT), "AZTASK_SERVICEBUS_ADMIN": admin}
        extra |= {"AZTASK_EMULATOR_PORT": str(self.ports[5672])}
        return {**own, **extra, "AZTASK_EMULATOR_ADMIN_PORT": str(self.ports[5300]), **given}

    def command(self, name: str, *instead: str) -> list[str]:
        program, *rest = instead or services()[name]["command"]
        assert program == "aztask"
        return [sys.executable, "-m", "aztask", *map(self.here, rest)]

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                self.command(name), cwd=EXAMPLE, env=self.environment(name), stdout=log, stderr=log
            )
        self.started.append(process)

    def run(self, name: str, *instead: str) -> str:
        done = subprocess.run(
            self.command(name, *instead),
            cwd=EXAMPLE,
            env=self.environment(name),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answers(self, port: int, path: str) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[port]}{path}").is_success
        except httpx.HTTPError:
            return False


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with (
        running(tmp_path / "tables", service="table") as tables,
        running(tmp_path / "blobs", service="blob") as blobs,
    ):
        started = Processes(tmp_path, [tables, blobs])
        try:
            yield started
        finally:
            for process in started.started:
                process.send_signal(signal.SIGTERM)
            for process in started.started:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def test_its_commands_run_a_task_and_serve_metrics(processes: Processes) -> None:
    processes.start("emulator")
    wait_until(lambda: processes.answers(5300, "/health"), 30, "the emulator answers")
    assert "default" in processes.run("setup")
    processes.start("worker")
    processes.start("exporter")
    sent = ("aztask", "send", "shop.resize", "--args", '["a.png", 200]', "--wait")
    assert processes.run("worker", *sent).strip() == '"a.png at 200 pixels"'
    wait_until(lambda: processes.answers(9465, "/readyz"), 30, "the worker is ready")
    wait_until(lambda: processes.answers(9466, "/metrics"), 30, "the exporter serves metrics")
