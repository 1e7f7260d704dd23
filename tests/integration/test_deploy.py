"""The manifests in ``examples/deploy``: held against the schemas of Kubernetes and KEDA.

Each document is written down as a TypeScript value of its kind, so that unknown, missing and
wrongly typed fields are errors of the compiler, and is validated by the schema at run time as well.
No cluster is involved: what a cluster makes of them is not shown here.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT
from programs import need_node

from aztask.operate.cli.main import cli
from aztask.support.durations import parse_duration

FOLDER = ROOT / "tests" / "deploy"
MANIFESTS = sorted((ROOT / "examples" / "deploy").glob("*.yaml"))
KINDS = {
    "v1/ServiceAccount": "kubernetes-models/v1/ServiceAccount",
    "apps/v1/Deployment": "kubernetes-models/apps/v1/Deployment",
    "keda.sh/v1alpha1/ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
    "keda.sh/v1alpha1/ScaledJob": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledJob",
    "keda.sh/v1alpha1/TriggerAuthentication": (
        "@kubernetes-models/keda/keda.sh/v1alpha1/TriggerAuthentication"
    ),
}
METADATA = {
    "azure-servicebus": {"namespace", "queueName", "messageCount"},
    "azure-queue": {"accountName", "queueName", "queueLength", "queueLengthStrategy"},
}
COMPILER = ("--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")


@pytest.fixture(scope="module")
def node() -> str:
    node = need_node()
    with (FOLDER / ".install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (FOLDER / "node_modules" / "typescript").exists():
            command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
            subprocess.run([*command, "--ignore-scripts"], cwd=FOLDER, check=True, timeout=300)
    return node


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def problems(node: str, folder: Path, found: list[dict[str, Any]]) -> str:
    """What compiler and schemas have against these documents, "" for nothing."""
    lines, checks = [], []
    for number, document in enumerate(found):
        module = KINDS[f"{document['apiVersion']}/{document['kind']}"]
        kind = module.rsplit("/", 1)[-1]
        lines.append(f'import type {{ I{kind} as T{number} }} from "{module}";')
        lines.append(f"export const d{number}: T{number} = {json.dumps(document)};")
        checks.append(f'import {{ {kind} as K{number} }} from "{module}";')
        checks.append(f"new K{number}({json.dumps(document)}).validate();")
    (folder / "node_modules").symlink_to(FOLDER / "node_modules")
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "manifest.ts").write_text("\n".join(lines))
    (folder / "validate.js").write_text("\n".join(checks))
    compiler = str(FOLDER / "node_modules" / "typescript" / "bin" / "tsc")
    said = ""
    for command in ([compiler, *COMPILER, "manifest.ts"], ["validate.js"]):
        done = subprocess.run(
            [node, *command], cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            said += done.stdout + done.stderr
    return said


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_its_schemas(node: str, path: Path, tmp_path: Path) -> None:
    assert problems(node, tmp_path, documents(path)) == ""


def rename(spec: dict[str, Any]) -> None:
    spec["maxReplicas"] = spec.pop("maxReplicaCount")


def retype(spec: dict[str, Any]) -> None:
    spec["triggers"][0]["metadata"]["messageCount"] = 20


def omit(spec: dict[str, Any]) -> None:
    del spec["scaleTargetRef"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rename, '"maxReplicas"\' does not exist'),
        (retype, "messageCount"),
        (omit, '"scaleTargetRef"\' is missing'),
    ],
)
def test_the_check_finds_what_is_wrong(
    node: str, tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    scaled = documents(ROOT / "examples" / "deploy" / "servicebus.yaml")[-1]
    assert scaled["kind"] == "ScaledObject"
    change(scaled["spec"])
    assert says in problems(node, tmp_path, [scaled])


def pods(path: Path) -> list[dict[str, Any]]:
    """The pod specs of a manifest."""
    found = []
    for document in documents(path):
        spec = document.get("spec", {})
        template = spec.get("template") or spec.get("jobTargetRef", {}).get("template")
        if template:
            found.append(template["spec"])
    return found


def worker_of(pod: dict[str, Any]) -> dict[str, Any]:
    """The parsed options of the pod's worker: what the command line would refuse fails here."""
    (container,) = pod["containers"]
    program, name, *arguments = container["command"]
    assert (program, name) == ("aztask", "worker")
    command = cli.get_command(cli.make_context("aztask", [], resilient_parsing=True), name)
    assert command is not None
    return command.make_context(name, arguments).params


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_ends_after_its_worker(path: Path) -> None:
    """SIGKILL comes after the worker's own end: nothing has to wait for its lease to lapse."""
    (pod,) = pods(path)
    timeout = worker_of(pod)["shutdown_timeout"]
    assert timeout > parse_duration("30s"), "the default is for short tasks"
    assert pod["terminationGracePeriodSeconds"] >= timeout + 20


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_scaler_counts_the_workers_queue(path: Path) -> None:
    (pod,) = pods(path)
    params = worker_of(pod)
    (trigger,) = next(
        document["spec"]["triggers"]
        for document in documents(path)
        if "triggers" in document.get("spec", {})
    )
    metadata = trigger["metadata"]
    assert set(metadata) <= METADATA[trigger["type"]]
    assert params["queues"] == ((metadata["queueName"],),)
    share = int(metadata.get("messageCount") or metadata["queueLength"])
    assert share >= params["concurrency"], "a worker that is busy is not one too many"
    (broker,) = [
        each["value"] for each in pod["containers"][0]["env"] if each["name"] == "AZTASK_BROKER"
    ]
    assert broker.endswith(f"//{metadata.get('namespace') or metadata['accountName']}")
    assert "Not tried on a cluster" in path.read_text()


def probed(container: dict[str, Any]) -> dict[str, str]:
    """{kind of probe: its path}, for probes of the port that the worker serves."""
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
    listed = {each["type"].lower(): each for each in container.get("probes", ())}
    named = {kind: container.get(f"{kind}Probe") for kind in ("liveness", "readiness", "startup")}
    found = {}
    for kind, probe in {**named, **listed}.items():
        if probe:
            port = probe["httpGet"]["port"]
            assert ports.get(port, port) == 9465
            found[kind] = probe["httpGet"]["path"]
    return found


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_probes_ask_the_worker(path: Path) -> None:
    (pod,) = pods(path)
    assert worker_of(pod)["http"] == ("0.0.0.0", 9465), "the kubelet asks from outside"
    probes = probed(pod["containers"][0])
    if "job" not in path.name:
        assert probes.pop("readiness") == "/readyz"
    assert probes == {"liveness": "/healthz"}


def test_a_container_app_uses_the_probes() -> None:
    path = ROOT / "examples" / "deploy" / "containerapps" / "worker.yaml"
    (app,) = documents(path)
    template = app["properties"]["template"]
    params = worker_of(template)
    assert params["http"] == ("0.0.0.0", 9465)
    assert probed(template["containers"][0]) == {"liveness": "/healthz", "readiness": "/readyz"}
    assert 600 >= template["terminationGracePeriodSeconds"] >= params["shutdown_timeout"] + 20
    (rule,) = template["scale"]["rules"]
    assert set(rule["custom"]["metadata"]) <= METADATA[rule["custom"]["type"]]
    assert params["queues"] == ((rule["custom"]["metadata"]["queueName"],),)
    assert "Not tried on Azure" in path.read_text()
