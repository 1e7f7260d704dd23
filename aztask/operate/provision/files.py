"""All files of a plan: the templates, azd's, and the manifests of Kubernetes, with a page on them.

Rules
1. What a plan does not need is in no file.
2. Names that only a deployment knows are written ``${NAME}``, for ``envsubst`` and azd.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from aztask.operate.provision.apps import (
    CONCURRENCY,
    GRACE_SECONDS,
    MESSAGES_FOR_EACH,
    MOST_REPLICAS,
    trigger,
    worker_command,
)
from aztask.operate.provision.plan import AzurePlan, PlannedQueue
from aztask.operate.provision.resources import tree_of
from aztask.operate.provision.templates import templates_of
from aztask.operate.provision.tree import Note
from aztask.support.display import plural

NOT_TRIED: Final = "Not tried on Azure; docs/how-to/production/make-the-resources.md says what was."

README: Final = """\
# {app} on Azure

`aztask azure init` wrote these files from the app `{spec}`: {queues}. Run it again with `--force`
when the queues change, and look at `aztask azure diff` first. **They were not tried on Azure.**

| file | for |
|---|---|
| `main.bicep`, `main.parameters.json`, `azure.yaml` | `az deployment group create`, or azd |
| `azuredeploy.json` | the same as an ARM template |
| `main.tf` | the same with Terraform and its provider azapi |
| `kubernetes.yaml` | workers on AKS with workload identity and KEDA, instead of Container Apps |

Use one of the first three.

```sh
az group create --name GROUP --location REGION
az deployment group create --group GROUP --template-file main.bicep
az acr build --registry REGISTRY --image {slug}:1 ..          # your Dockerfile
az deployment group create --group GROUP --template-file main.bicep \\
    --parameters image=REGISTRY.azurecr.io/{slug}:1 alertEmail=you@example.com
```

The first deployment makes queues, stores, identities and roles; the second one, with an image, the
workers. Assigning roles needs Owner, or Contributor and User Access Administrator. `main.bicep` has
the parameters.

Then check it, as a person who has the operator's roles:

```sh
export AZTASK_BROKER=...  AZTASK_RESULTS=...                # the outputs of the deployment
aztask -A {spec} azure diff
aztask -A {spec} doctor
```

Kubernetes, with the outputs of a deployment that had `oidcIssuer` in the environment:

```sh
export NAMESPACE=... ACCOUNT=... IMAGE=... WORKER_CLIENT_ID=... SCALER_CLIENT_ID=...
envsubst < kubernetes.yaml | kubectl apply -f -
```
"""


def files_of(plan: AzurePlan) -> dict[str, str]:
    """{name: text} of all files."""
    title = f"{json.dumps(plan.app)} on Azure, by aztask azure init. {NOT_TRIED}"
    tree = tree_of(plan)
    templates = templates_of(tree, title)
    parameters = {
        each.name: {"value": f"${{{_variable(each.name)}={each.default}}}"}
        if isinstance(each.default, str)
        else {"value": f"${{AZURE_{each.name.upper()}}}"}
        for each in tree.parameters
    }
    schema = "https://schema.management.azure.com/schemas/2019-04-01/deploymentParameters.json#"
    given = {"$schema": schema, "contentVersion": "1.0.0.0", "parameters": parameters}
    azd = {
        "name": plan.slug,
        "infra": Note("the templates are beside this file", {"provider": "bicep", "path": "."}),
    }
    return {
        "README.md": README.format(
            app=_one_line(plan.app),
            spec=_one_line(plan.spec),
            slug=plan.slug,
            queues=plural(len(plan.queues), "queue"),
        ),
        "azure.yaml": f"# {title}\n{yaml(azd)}",
        "azuredeploy.json": templates.arm,
        "kubernetes.yaml": f"# {title}\n" + "---\n".join(map(yaml, _manifests(plan))),
        "main.bicep": templates.bicep,
        "main.parameters.json": json.dumps(given, indent=2, ensure_ascii=False) + "\n",
        "main.tf": templates.terraform,
    }


def _one_line(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _variable(name: str) -> str:
    """The variable of azd for a parameter: ``alertEmail`` is AZTASK_ALERT_EMAIL."""
    letters = "".join(f"_{each}" if each.isupper() else each for each in name)
    return f"AZTASK_AZURE_{letters.upper()}"


# -- YAML ------------------------------------------------------------------------------------------


def yaml(value: Mapping[str, Any]) -> str:
    """Plain data as YAML: texts in quotes, as JSON has them, and notes as comments."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            inner = each
            if isinstance(each, Note):
                yield f"# {each.text}"
                inner = each.value
            key = name if name.isidentifier() else json.dumps(name)
            if isinstance(inner, Mapping | list) and inner and not _flat(inner):
                yield f"{key}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{key}: {_scalar(inner)}"
    else:
        for each in value:
            if isinstance(each, Mapping | list) and each:
                first, *rest = _lines(each)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
            else:
                yield f"- {_scalar(each)}"


def _flat(value: Any) -> bool:
    """A list of texts, such as a command: on one line."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# -- Kubernetes ------------------------------------------------------------------------------------


def _manifests(plan: AzurePlan) -> Iterator[dict[str, Any]]:
    labels = {"app": "aztask-worker"}
    yield {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": "aztask-worker",
            "annotations": {"azure.workload.identity/client-id": "${WORKER_CLIENT_ID}"},
        },
    }
    yield {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": {"name": "aztask"},
        "spec": {
            "podIdentity": Note(
                "KEDA counts messages as an identity of its own, which workers do not have",
                {"provider": "azure-workload", "identityId": "${SCALER_CLIENT_ID}"},
            )
        },
    }
    if plan.served:
        command = worker_command(plan.spec, plan.served)
        pod = _pod(plan, command, plan.served)
        pod["containers"][0]["readinessProbe"] = Note(
            "a rollout goes on when the new worker reaches broker and results",
            _probe("/readyz", 5, 1),
        )
        yield {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "aztask-worker"},
            "spec": {
                "selector": Note(
                    "no replicas: KEDA decides, and an apply would set them back",
                    {"matchLabels": labels},
                ),
                "template": {"metadata": {"labels": _labels(labels)}, "spec": pod},
            },
        }
        yield {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": "aztask-worker"},
            "spec": {
                "scaleTargetRef": {"name": "aztask-worker"},
                "minReplicaCount": 0,
                "maxReplicaCount": MOST_REPLICAS,
                "pollingInterval": 15,
                "cooldownPeriod": 300,
                "triggers": [_trigger(plan, each, MESSAGES_FOR_EACH) for each in plan.served],
            },
        }
    for number, queue in enumerate(plan.queues, 1):
        if queue.long:
            yield _scaled_job(plan, queue, f"aztask-job-{number}")


def _scaled_job(plan: AzurePlan, queue: PlannedQueue, name: str) -> dict[str, Any]:
    pod = _pod(plan, worker_command(plan.spec, (queue,), job=True), (queue,))
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledJob",
        "metadata": {"name": name},
        "spec": {
            "minReplicaCount": 0,
            "maxReplicaCount": 10,
            "pollingInterval": 30,
            "rollout": Note(
                "a change of this file leaves running jobs alone", {"strategy": "gradual"}
            ),
            "jobTargetRef": {
                "backoffLimit": 0,
                "template": {
                    "metadata": {"labels": _labels({"app": name})},
                    "spec": {"restartPolicy": "Never", **pod},
                },
            },
            "triggers": [_trigger(plan, queue, 1)],
        },
    }


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {**labels, "azure.workload.identity/use": "true"}


def _probe(path: str, period: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": 9465}
    return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures}


def _pod(plan: AzurePlan, command: list[str], queues: tuple[PlannedQueue, ...]) -> dict[str, Any]:
    bus = plan.service == "servicebus"
    environment = {
        "AZTASK_BROKER": "servicebus://${NAMESPACE}" if bus else "storagequeue://${ACCOUNT}",
        "AZTASK_RESULTS": "tables://${ACCOUNT}",
        "AZTASK_PAYLOADS": "blob://${ACCOUNT}/aztask-payloads",
    }
    values = [{"name": name, "value": value} for name, value in environment.items()]
    names = ",".join(each.name for each in queues)
    return {
        "serviceAccountName": "aztask-worker",
        "terminationGracePeriodSeconds": Note(
            "longer than --shutdown-timeout, so that a worker ends by itself", GRACE_SECONDS
        ),
        "initContainers": Note(
            "wrong settings end the rollout here, with a line for each",
            [
                {
                    "name": "doctor",
                    "image": "${IMAGE}",
                    "command": ["aztask", "doctor", "-A", plan.spec, "-Q", names],
                    "env": values,
                }
            ],
        ),
        "containers": [
            {
                "name": "worker",
                "image": "${IMAGE}",
                "command": command,
                "env": values,
                "ports": [{"name": "metrics", "containerPort": 9465}],
                "livenessProbe": _probe("/healthz", 20, 3),
                "resources": {
                    "requests": {"cpu": "500m", "memory": "256Mi"},
                    "limits": {"memory": f"{128 * (1 + CONCURRENCY)}Mi"},
                },
            }
        ],
    }


def _trigger(plan: AzurePlan, queue: PlannedQueue, most: int) -> dict[str, Any]:
    kind, metadata = trigger(plan, queue, most)
    bus = plan.service == "servicebus"
    place = {"namespace": "${NAMESPACE}"} if bus else {"accountName": "${ACCOUNT}"}
    return {
        "type": kind,
        "authenticationRef": {"name": "aztask"},
        "metadata": {**place, **metadata},
    }
