"""The resources of a plan: identities with their roles, queues and stores, logs and alerts.

Rules
1. Each resource has a comment that says why it is there. The roles are those of
   `aztask.operate.provision.roles`.
2. A resource type is written with the newest version that `tests/deploy` has the model of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from aztask.operate.provision.apps import apps
from aztask.operate.provision.plan import (
    EVENTS_CONTAINER,
    PAYLOADS_CONTAINER,
    POISON,
    RESULTS_CONTAINER,
    RESULTS_TABLE,
    AzurePlan,
)
from aztask.operate.provision.roles import IDENTITIES, ROLES, grants_of
from aztask.operate.provision.tree import (
    GROUP,
    LOCATION,
    SUFFIX,
    Concat,
    Guid,
    Note,
    Of,
    Param,
    Parameter,
    Resource,
    RoleId,
    Special,
    Tree,
    container_address,
    diagnostics,
)


def tree_of(plan: AzurePlan) -> Tree:
    """The resources of a plan, in an order in which a reader understands them."""
    resources = (
        *_identities(),
        *_observed(),
        *(_service_bus(plan) if plan.service == "servicebus" else ()),
        *_storage(plan),
        *_roles(plan),
        *apps(plan),
        *_alerts(plan),
    )
    broker: Any = Concat(("storagequeue://", Param("account")))
    if plan.service == "servicebus":
        broker = Concat(("servicebus://", Param("namespace")))
    outputs: dict[str, Any] = {
        "AZTASK_BROKER": broker,
        "AZTASK_RESULTS": Concat(("tables://", Param("account"))),
        "AZTASK_PAYLOADS": container_address(PAYLOADS_CONTAINER),
        "REGISTRY": Of("registry", "properties.loginServer"),
        **{
            f"{name.upper()}_CLIENT_ID": Of(f"{name}Identity", "properties.clientId")
            for name in IDENTITIES
        },
    }
    return Tree(_parameters(plan), _names(plan), resources, outputs)


def _parameters(plan: AzurePlan) -> tuple[Parameter, ...]:
    here = Special("resourceGroup().location", "resourceGroup().location", "")
    named = "Name of the Service Bus namespace; empty: a new name"
    bus = Parameter("namespaceName", named, plan.namespace)
    return (
        Parameter("location", "Region of all resources", here),
        *((bus,) if plan.service == "servicebus" else ()),
        Parameter("accountName", "Name of the storage account; empty: a new name", plan.account),
        Parameter("image", "Image of the app; without one, no worker and no dashboard is made"),
        Parameter("alertEmail", "Who gets the alerts; without an address, no alert is made"),
        Parameter("oidcIssuer", "Issuer URL of an AKS cluster whose pods are workers; or empty"),
        Parameter("kubernetesNamespace", "Namespace of these pods", "default"),
        Parameter("entraClientId", "App registration of the dashboard; without one, there is none"),
        Parameter("entraClientSecret", "Secret of that registration", secret=True),
    )


def _names(plan: AzurePlan) -> dict[str, Special]:
    """Local names. Storage accounts have no hyphens, and 24 letters at most."""
    unique = "uniqueString(resourceGroup().id)"
    names = {"suffix": Special(unique, unique, "substr(sha256(var.resource_group_id), 0, 13)")}
    made = {"account": ("accountName", "st"), "namespace": ("namespaceName", f"{plan.slug}-sb-")}
    for name, (given, prefix) in made.items():
        if name == "account" or plan.service == "servicebus":
            names[name] = Special(
                f"if(empty(parameters('{given}')), concat('{prefix}', variables('suffix')), "
                f"parameters('{given}'))",
                f"empty({given}) ? '{prefix}${{suffix}}' : {given}",
                f'var.{given} == "" ? "{prefix}${{local.suffix}}" : var.{given}',
            )
    return names


# -- identities, logs ------------------------------------------------------------------------------


def _identities() -> Iterator[Resource]:
    kind = "Microsoft.ManagedIdentity/userAssignedIdentities"
    for name, text in IDENTITIES.items():
        yield Resource(
            f"{name}Identity",
            kind,
            "2023-01-31",
            Concat(("id-", name, "-", SUFFIX)),
            f"The identity of {text}.",
            {"location": LOCATION},
        )
    for name in ("worker", "scaler"):
        account = "aztask-worker" if name == "worker" else "keda-operator"
        namespace = Param("kubernetesNamespace") if name == "worker" else "keda"
        yield Resource(
            f"{name}Federation",
            f"{kind}/federatedIdentityCredentials",
            "2023-01-31",
            "kubernetes",
            f"Pods with the service account {account} are this identity (workload identity).",
            {
                "properties": {
                    "issuer": Param("oidcIssuer"),
                    "subject": Concat(("system:serviceaccount:", namespace, f":{account}")),
                    "audiences": ["api://AzureADTokenExchange"],
                }
            },
            parent=f"{name}Identity",
            needs=("oidcIssuer",),
        )


def _observed() -> Iterator[Resource]:
    yield Resource(
        "workspace",
        "Microsoft.OperationalInsights/workspaces",
        "2022-10-01",
        Concat(("log-", SUFFIX)),
        "Logs of workers, and of what the services did.",
        {
            "location": LOCATION,
            "properties": {"sku": {"name": "PerGB2018"}, "retentionInDays": 30},
        },
    )
    yield Resource(
        "registry",
        "Microsoft.ContainerRegistry/registries",
        "2022-12-01",
        Concat(("cr", SUFFIX)),
        "Images of the app. Workers pull them with their identity, so it needs no admin user.",
        {
            "location": LOCATION,
            "sku": {"name": "Basic"},
            "properties": {"adminUserEnabled": False},
        },
    )


# -- queues and stores -----------------------------------------------------------------------------


def iso(seconds: float) -> str:
    """ISO 8601 for a number of seconds, as the templates write durations."""
    whole = round(seconds)
    if whole % 86400 == 0 and whole:
        return f"P{whole // 86400}D"
    return f"PT{whole // 60}M" if whole % 60 == 0 and whole else f"PT{whole}S"


def _service_bus(plan: AzurePlan) -> Iterator[Resource]:
    version = "2021-11-01"
    yield Resource(
        "bus",
        "Microsoft.ServiceBus/namespaces",
        version,
        Param("namespace"),
        "The namespace. Standard: Basic has no duplicate detection, sessions and schedules.",
        {
            "location": LOCATION,
            "sku": {"name": "Standard", "tier": "Standard"},
            "properties": {"disableLocalAuth": Note("Entra ID only: no shared keys.", True)},
        },
    )
    for number, queue in enumerate(plan.queues, 1):
        properties: dict[str, Any] = {
            "lockDuration": Note(
                "The lease: workers ask for the same, and renew it.", iso(queue.lock or 60.0)
            ),
            "maxDeliveryCount": Note(
                "Far above aztask's own limit, which gives a better reason.", queue.max_deliveries
            ),
            "deadLetteringOnMessageExpiration": True,
            "requiresSession": Note(
                "Cannot be changed later: `aztask azure diff` says what to do instead.",
                bool(queue.sessions),
            ),
            "requiresDuplicateDetection": bool(queue.duplicate_window),
        }
        if queue.duplicate_window:
            properties["duplicateDetectionHistoryTimeWindow"] = iso(queue.duplicate_window)
        if queue.time_to_live is not None:
            properties["defaultMessageTimeToLive"] = iso(queue.time_to_live)
        if queue.partitioned is not None:
            properties["enablePartitioning"] = queue.partitioned
        yield Resource(
            f"queue{number}",
            "Microsoft.ServiceBus/namespaces/queues",
            version,
            queue.name,
            body={"properties": properties},
            parent="bus",
        )
    yield diagnostics("busLogs", "bus", ("OperationalLogs",))


def _storage(plan: AzurePlan) -> Iterator[Resource]:
    version = "2024-01-01"
    root = "Microsoft.Storage/storageAccounts"
    yield Resource(
        "storage",
        root,
        version,
        Param("account"),
        "Results, and arguments and results that are too large for a message or a row.",
        {
            "location": LOCATION,
            "kind": "StorageV2",
            "sku": {"name": "Standard_ZRS"},
            "properties": {
                "allowBlobPublicAccess": False,
                "allowSharedKeyAccess": Note("Entra ID only: no account keys.", False),
                "minimumTlsVersion": "TLS1_2",
                "supportsHttpsTrafficOnly": True,
            },
        },
    )
    names: dict[str, tuple[tuple[str, ...], str]] = {
        "table": ((RESULTS_TABLE,), "tables"),
        "blob": (plan.containers, "containers"),
        "queue": (plan.storage_queues, "queues"),
    }
    for service, (found, kind) in names.items():
        if found:
            yield Resource(
                f"{service}Service",
                f"{root}/{service}Services",
                version,
                "default",
                parent="storage",
                existing=True,
            )
        for number, name in enumerate(found, 1):
            yield Resource(
                f"{service}{number}",
                f"{root}/{service}Services/{kind}",
                version,
                name,
                "Dead letters of the queue above." if name.endswith(POISON) else "",
                parent=f"{service}Service",
            )


# -- roles -----------------------------------------------------------------------------------------


def _roles(plan: AzurePlan) -> Iterator[Resource]:
    """An assignment for each grant that `aztask.operate.provision.roles` lists."""
    numbers = {name: f"blob{number}" for number, name in enumerate(plan.containers, 1)}
    scopes = {
        "bus": "bus",
        "queues": "storage",
        "table": "table1",
        "results": numbers[RESULTS_CONTAINER],
        "payloads": numbers[PAYLOADS_CONTAINER],
        "events": numbers.get(EVENTS_CONTAINER, ""),
        "registry": "registry",
    }
    if plan.service == "storagequeue":
        yield _worker_role()
    grants = grants_of(plan.service, events=plan.events)
    for number, (who, role, on) in enumerate(grants, 1):
        yield _assignment(number, who, role, scopes[on])


def _assignment(number: int, who: str, role: str, scope: str) -> Resource:
    """role: `QUEUE_WORKER` is made here, by `_worker_role`."""
    identity = f"{who}Identity"
    given: Any = RoleId(role) if role else Of("workerRole")
    return Resource(
        f"role{number}",
        "Microsoft.Authorization/roleAssignments",
        "2022-04-01",
        Guid((Of(scope), Of(identity), role or "worker")),
        f"{who}: {ROLES.get(role, 'the role above')}.",
        {
            "properties": {
                "principalId": Of(identity, "properties.principalId"),
                "principalType": "ServicePrincipal",
                "roleDefinitionId": given,
            }
        },
        scope=scope,
    )


def _worker_role() -> Resource:
    messages = "Microsoft.Storage/storageAccounts/queueServices/queues/messages"
    return Resource(
        "workerRole",
        "Microsoft.Authorization/roleDefinitions",
        "2022-04-01",
        Guid((GROUP, "aztask worker")),
        "What a worker of Storage queues needs. The built-in Message Processor may not update "
        "messages, and so not renew a lease.",
        {
            "properties": {
                "roleName": Concat(("aztask worker ", SUFFIX)),
                "description": "Get, renew, delete and dead-letter messages of Storage queues",
                "type": "CustomRole",
                "assignableScopes": [GROUP],
                "permissions": [
                    {
                        "actions": [],
                        "dataActions": [
                            f"{messages}/process/action",
                            f"{messages}/write",
                            f"{messages}/add/action",
                        ],
                    }
                ],
            }
        },
    )


# -- alerts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Alert:
    name: str
    text: str
    metric: str
    above: int
    window: str = "PT15M"
    how: str = "Total"
    filters: tuple[tuple[str, str], ...] = ()


_BUS_ALERTS: Final = (
    _Alert("deadLetters", "there are dead letters", "DeadletteredMessages", 0, how="Average"),
    _Alert("backlog", "many messages wait", "ActiveMessages", 1000, how="Average"),
    _Alert("throttled", "the namespace throttles", "ThrottledRequests", 10),
    _Alert("serverErrors", "the namespace answers with errors", "ServerErrors", 10),
)
_STORAGE_ALERTS: Final = (
    _Alert(
        "storageErrors",
        "the account answers with errors of its own, or throttles",
        "Transactions",
        10,
        filters=(("ResponseType", "ServerBusyError"), ("ResponseType", "ServerOtherError")),
    ),
)


def _alerts(plan: AzurePlan) -> Iterator[Resource]:
    yield Resource(
        "people",
        "Microsoft.Insights/actionGroups",
        "2021-09-01",
        Concat(("ag-", SUFFIX)),
        "Who gets the alerts.",
        {
            "location": "Global",
            "properties": {
                "enabled": True,
                "groupShortName": "aztask",
                "emailReceivers": [{"name": "operators", "emailAddress": Param("alertEmail")}],
            },
        },
        needs=("alertEmail",),
    )
    bus = _BUS_ALERTS if plan.service == "servicebus" else ()
    for scope, alerts in (("bus", bus), ("storage", _STORAGE_ALERTS)):
        for each in alerts:
            yield _metric_alert(each, scope)


def _metric_alert(alert: _Alert, scope: str) -> Resource:
    dimensions: dict[str, list[str]] = {}
    for name, value in alert.filters:
        dimensions.setdefault(name, []).append(value)
    criterion: dict[str, Any] = {
        "name": alert.name,
        "criterionType": "StaticThresholdCriterion",
        "metricName": alert.metric,
        "operator": "GreaterThan",
        "threshold": alert.above,
        "timeAggregation": alert.how,
    }
    if dimensions:
        criterion["dimensions"] = [
            {"name": name, "operator": "Include", "values": values}
            for name, values in dimensions.items()
        ]
    return Resource(
        f"{alert.name}Alert",
        "Microsoft.Insights/metricAlerts",
        "2018-03-01",
        Concat((f"{alert.name}-", SUFFIX)),
        body={
            "location": "global",
            "properties": {
                "description": f"aztask: {alert.text}",
                "severity": 2,
                "enabled": True,
                "scopes": [Of(scope)],
                "evaluationFrequency": "PT5M",
                "windowSize": alert.window,
                "criteria": {
                    "odata.type": "Microsoft.Azure.Monitor.SingleResourceMultipleMetricCriteria",
                    "allOf": [criterion],
                },
                "actions": [{"actionGroupId": Of("people")}],
            },
        },
        needs=("alertEmail",),
    )
