"""Workers, jobs and the dashboard on Container Apps; on Kubernetes they run the same commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from aztask.operate.provision.plan import (
    EVENTS_CONTAINER,
    PAYLOADS_CONTAINER,
    AzurePlan,
    PlannedQueue,
)
from aztask.operate.provision.tree import (
    LOCATION,
    SUFFIX,
    TENANT,
    Concat,
    Note,
    Of,
    Param,
    Resource,
    container_address,
    diagnostics,
)

VERSION: Final = "2025-01-01"
MESSAGES_FOR_EACH: Final = 20
SHUTDOWN_SECONDS: Final = 90
GRACE_SECONDS: Final = SHUTDOWN_SECONDS + 30
MOST_REPLICAS: Final = 20
CONCURRENCY: Final = 4


def worker_command(spec: str, queues: tuple[PlannedQueue, ...], *, job: bool = False) -> list[str]:
    """The command line of a worker, without a shell, so that SIGTERM reaches it."""
    command = ["aztask", "worker", "-A", spec, "-Q", ",".join(each.name for each in queues)]
    if job:  # ends when the queue is empty, and takes no message that it does not run
        command += ["-c", "1", "--prefetch", "0", "--burst", "--max-lease", "6h"]
    else:
        command += ["-c", str(CONCURRENCY)]
    command += ["--shutdown-timeout", f"{SHUTDOWN_SECONDS}s", "--log-format", "json"]
    return [*command, "--http", ":9465"]


def trigger(plan: AzurePlan, queue: PlannedQueue, most: int) -> tuple[str, dict[str, str]]:
    """KEDA's trigger for a queue, without namespace or account: its type and its metadata.

    Locked and invisible messages count, so that no worker is removed while it works.
    """
    if plan.service == "servicebus":
        return "azure-servicebus", {"queueName": queue.name, "messageCount": str(most)}
    return "azure-queue", {
        "queueName": queue.name,
        "queueLength": str(most),
        "queueLengthStrategy": "all",
    }


def _scale_rule(plan: AzurePlan, queue: PlannedQueue, number: int, most: int) -> dict[str, Any]:
    kind, metadata = trigger(plan, queue, most)
    place = "namespace" if plan.service == "servicebus" else "accountName"
    value = Param("namespace" if plan.service == "servicebus" else "account")
    return {
        "name": f"queue-{number}",
        "type": kind,
        "metadata": {place: value, **metadata},
        "identity": Of("scalerIdentity"),
    }


def _identity_of(*names: str) -> dict[str, Any]:
    """The identities of an app; the first is the one that its code uses."""
    assigned = tuple(Of(f"{name}Identity") for name in names)
    return {"type": "UserAssigned", "userAssignedIdentities": assigned}


def _environment(plan: AzurePlan, who: str) -> list[dict[str, Any]]:
    broker: Any = Concat(("storagequeue://", Param("account")))
    if plan.service == "servicebus":
        broker = Concat(("servicebus://", Param("namespace")))
    values: dict[str, Any] = {
        "AZTASK_BROKER": broker,
        "AZTASK_RESULTS": Concat(("tables://", Param("account"))),
        "AZTASK_PAYLOADS": container_address(PAYLOADS_CONTAINER),
        "AZURE_CLIENT_ID": Of(f"{who}Identity", "properties.clientId"),
    }
    if plan.events and who == "worker":
        values["AZTASK_EVENTS"] = "/tmp/aztask-events"  # noqa: S108  # in the container alone
        values["AZTASK_EVENTS_CONTAINER"] = container_address(EVENTS_CONTAINER)
    return [{"name": name, "value": value} for name, value in values.items()]


def _registries(who: str) -> list[dict[str, Any]]:
    return [{"server": Of("registry", "properties.loginServer"), "identity": Of(f"{who}Identity")}]


def apps(plan: AzurePlan) -> Iterator[Resource]:
    yield Resource(
        "appEnvironment",
        "Microsoft.App/managedEnvironments",
        VERSION,
        Concat(("cae-", SUFFIX)),
        "Where workers run. It costs nothing while nothing runs.",
        {
            "location": LOCATION,
            "properties": {
                "appLogsConfiguration": Note(
                    "Through diagnostic settings, which need no key of the workspace.",
                    {"destination": "azure-monitor"},
                )
            },
        },
    )
    logs = ("ContainerAppConsoleLogs", "ContainerAppSystemLogs")
    yield diagnostics("environmentLogs", "appEnvironment", logs)
    if plan.served:
        yield _worker_app(plan)
    for number, queue in enumerate(plan.queues, 1):
        if queue.long:
            yield _job(plan, queue, number)
    yield _dashboard(plan)


def _container(
    name: str, command: list[Any], environment: list[dict[str, Any]], cpu: float
) -> dict[str, Any]:
    """A container with 2 GiB of memory for each core, as Container Apps wants it."""
    return {
        "name": name,
        "image": Param("image"),
        "command": command,
        "env": environment,
        "resources": {"cpu": cpu, "memory": f"{2 * cpu:g}Gi"},
    }


def _probe(kind: str, path: str, period: int) -> dict[str, Any]:
    get = {"path": path, "port": 9465}
    return {"type": kind, "httpGet": get, "periodSeconds": period, "failureThreshold": 3}


SCALER_ONLY: Final = [{"identity": Of("scalerIdentity"), "lifecycle": "None"}]
"""The scaler's identity is for the scale rules: code cannot get its tokens."""


def _app(
    symbol: str, name: str, comment: str, properties: dict[str, Any], *needs: str, **how: Any
) -> Resource:
    """how: `job` if it is one, `identities` that it has."""
    kind = "Microsoft.App/jobs" if how.get("job") else "Microsoft.App/containerApps"
    body = {
        "location": LOCATION,
        "identity": _identity_of(*how["identities"]),
        "properties": {"environmentId": Of("appEnvironment"), **properties},
    }
    return Resource(symbol, kind, VERSION, name, comment, body, needs=("image", *needs))


def _worker_app(plan: AzurePlan) -> Resource:
    container = _container(
        "worker", worker_command(plan.spec, plan.served), _environment(plan, "worker"), 0.5
    )
    container["probes"] = [_probe("Liveness", "/healthz", 20), _probe("Readiness", "/readyz", 5)]
    rules = [_scale_rule(plan, each, n, MESSAGES_FOR_EACH) for n, each in enumerate(plan.served, 1)]
    properties = {
        "configuration": {
            "activeRevisionsMode": "Single",
            "identitySettings": Note("Code cannot get the scaler's tokens.", SCALER_ONLY),
            "registries": _registries("worker"),
        },
        "template": {
            "terminationGracePeriodSeconds": Note(
                "Longer than --shutdown-timeout, so that a worker ends by itself.", GRACE_SECONDS
            ),
            "containers": [container],
            "scale": {
                "minReplicas": 0,
                "maxReplicas": MOST_REPLICAS,
                # what is KEDA's is one level deeper than in a job
                "rules": [{"name": each.pop("name"), "custom": each} for each in rules],
            },
        },
    }
    comment = "Workers, one for each twenty messages. Nothing reaches them: there is no ingress."
    return _app("workerApp", "worker", comment, properties, identities=("worker", "scaler"))


def _job(plan: AzurePlan, queue: PlannedQueue, number: int) -> Resource:
    command = worker_command(plan.spec, (queue,), job=True)
    scale = {
        "minExecutions": 0,
        "maxExecutions": 10,
        "pollingInterval": 30,
        "rules": [_scale_rule(plan, queue, number, 1)],
    }
    event = {"parallelism": 1, "replicaCompletionCount": 1, "scale": scale}
    properties = {
        "configuration": {
            "triggerType": "Event",
            "replicaTimeout": 6 * 3600 + GRACE_SECONDS,
            "replicaRetryLimit": 0,
            "eventTriggerConfig": event,
            "identitySettings": SCALER_ONLY,
            "registries": _registries("worker"),
        },
        "template": {
            "containers": [_container("worker", command, _environment(plan, "worker"), 0.5)]
        },
    }
    comment = "One execution for each message, for tasks of hours: nothing scales it down."
    both = ("worker", "scaler")
    return _app(f"job{number}", f"job-{number}", comment, properties, job=True, identities=both)


def _dashboard(plan: AzurePlan) -> Resource:
    host = Concat(("dashboard.", Of("appEnvironment", "properties.defaultDomain")))
    command = ["aztask", "dashboard", "-A", plan.spec, "--http", "0.0.0.0:9467", "--host", host]
    command += ["--entra-tenant", TENANT, "--entra-client", Param("entraClientId")]
    secret = {"name": "AZTASK_DASHBOARD_ENTRA_SECRET", "secretRef": "entra"}
    environment = [*_environment(plan, "operator"), secret]
    properties = {
        "configuration": {
            "activeRevisionsMode": "Single",
            "ingress": {
                "external": True,
                "targetPort": 9467,
                "transport": "http",
                "allowInsecure": False,
            },
            "registries": _registries("operator"),
            "secrets": [{"name": "entra", "value": Param("entraClientSecret")}],
        },
        "template": {
            "containers": [_container("dashboard", command, environment, 0.25)],
            "scale": {"minReplicas": 1, "maxReplicas": 1},
        },
    }
    comment = "The dashboard, for people who log in with Entra ID."
    needs, who = "entraClientId", ("operator",)
    return _app("dashboardApp", "dashboard", comment, properties, needs, identities=who)
