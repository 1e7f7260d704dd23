"""The alert rules and the Grafana board in ``examples/monitoring``, with the real programs."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error as urllib_error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Site, site_in, wait_until
from ledger_app import flaky
from prometheus_client import CollectorRegistry

from aztask import App
from aztask.telemetry.labels import TaskLabels
from aztask.telemetry.prometheus.exporter import QueueDepths
from aztask.telemetry.prometheus.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
BOARD = json.loads((FOLDER / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
ADDED = {"aztask_part_failing", "aztask_broker_up", "aztask_result_store_up", "aztask_worker_ready"}
"""Metrics of the probes, which a registry alone does not have."""


def promtool(programs: Path, *arguments: str) -> str:
    done = subprocess.run(
        [programs / "promtool", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_valid_and_fire_when_they_should(programs: Path) -> None:
    assert f"{len(RULES)} rules found" in promtool(programs, "check", "rules", "alerts.yaml")
    promtool(programs, "check", "config", "prometheus.yaml")
    assert "SUCCESS" in promtool(programs, "test", "rules", "alerts_test.yaml")


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    tested = (FOLDER / "alerts_test.yaml").read_text()
    page = (ROOT / "docs/how-to/production/alerts.md").read_text()
    for rule in RULES:
        assert rule["alert"] in tested
        assert f"`{rule['alert']}`" in page, "and the page says why"
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_every_metric_that_is_asked_for_exists(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    app = App("shop", broker=f"local://{tmp_path}/q.db")
    WorkerMetrics(registry, TaskLabels(app.tasks), "w")
    QueueDepths(app, list, registry)
    known = ADDED | {name for names in registry._collector_to_names.values() for name in names}
    asked = " ".join([*(rule["expr"] for rule in RULES), *QUERIES])
    assert set(re.findall(r"\baztask_\w+", asked)) <= known
    app.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def asked(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib_error.HTTPError as error:
        if error.code == 503:  # it is starting
            return None
        pytest.fail(f"{query}: {error.read().decode()}")
    except OSError:
        return None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path / "site") as made:
        yield made


@pytest.fixture
def prometheus(programs: Path, site: Site, tmp_path: Path) -> Iterator[int]:
    """The port of a Prometheus with the example's rules, a worker and an exporter."""
    ports = {"127.0.0.1:9465": free_port(), "127.0.0.1:9466": free_port()}
    config = (FOLDER / "prometheus.yaml").read_text().replace("15s", "1s")
    for address, port in ports.items():
        config = config.replace(address, f"127.0.0.1:{port}")
    (tmp_path / "prometheus.yaml").write_text(config)
    (tmp_path / "alerts.yaml").write_text((FOLDER / "alerts.yaml").read_text())
    worker_port, exporter_port = ports.values()
    site.worker("-Q", "default", "--http", f"127.0.0.1:{worker_port}")
    exporter = [sys.executable, "-m", "aztask", "-A", "ledger_app", "exporter"]
    port = free_port()
    server = [
        str(programs / "prometheus"),
        f"--config.file={tmp_path}/prometheus.yaml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    started = []
    with (tmp_path / "log").open("wb") as log:
        for command in (
            [*exporter, "--http", f"127.0.0.1:{exporter_port}", "--interval", "1s"],
            server,
        ):
            started.append(
                subprocess.Popen(
                    command, cwd=site.folder, env=site.environment, stdout=log, stderr=log
                )
            )
        yield port
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


def test_a_real_prometheus_loads_rules_and_board(prometheus: int, site: Site) -> None:
    site.app().send(flaky.name, ["a", 1])

    def healthy() -> bool:
        found = asked(prometheus, "targets")
        return (
            found is not None
            and [target["health"] for target in found["activeTargets"]] == ["up"] * 2
        )

    wait_until(healthy, 30, "both targets are scraped")

    def evaluated() -> bool:
        rules = [rule for group in asked(prometheus, "rules")["groups"] for rule in group["rules"]]
        return len(rules) == len(RULES) and all(rule["health"] == "ok" for rule in rules)

    wait_until(evaluated, 30, "every rule is evaluated without an error")
    runs = 'aztask_tasks_total{outcome="succeeded"}'
    wait_until(lambda: asked(prometheus, "query", query=runs)["result"], 30, "a run is counted")
    for query in QUERIES:
        text = query.replace("$__rate_interval", "1m").replace("$queue", ".*")
        asked(prometheus, "query", query=text)
    length = asked(prometheus, "query", query="aztask_queue_length")["result"]
    assert [each["metric"]["queue"] for each in length] == ["default"]
