"""The files of ``aztask azure init`` pass every checker that there is, and ``azure diff`` is exact.

Each resource is held against the model of its type in Microsoft's own management SDK. The Bicep and
the Terraform are parsed, and must say what the ARM template says. No Azure is involved.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hcl2
import pycep
import pytest
import yaml
from azurite import Azurite, account_of, storing
from harness import ROOT
from test_deploy import FOLDER, node, problems
from test_doctor import Shop

from aztask.operate.provision.templates import templates_of
from aztask.operate.provision.tree import Concat, Param, Parameter, Resource, Tree
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import RunningEmulator

__all__ = ["node"]  # a fixture

PAGE = ROOT / "docs" / "how-to" / "production" / "make-the-resources.md"
FILES = {
    "README.md",
    "azure.yaml",
    "azuredeploy.json",
    "kubernetes.yaml",
    "main.bicep",
    "main.parameters.json",
    "main.tf",
}
STORAGE = "Microsoft.Storage/storageAccounts"
IDENTITIES = "Microsoft.ManagedIdentity/userAssignedIdentities"
# {type: (package, model, the name of its API version there)}
MODELS = {
    "Microsoft.ServiceBus/namespaces": ("arm-servicebus", "SBNamespace", "apiVersion"),
    "Microsoft.ServiceBus/namespaces/queues": ("arm-servicebus", "SBQueue", "apiVersion"),
    STORAGE: ("arm-storage", "StorageAccountCreateParameters", "apiVersion"),
    f"{STORAGE}/blobServices/containers": ("arm-storage", "BlobContainer", "apiVersion"),
    f"{STORAGE}/queueServices/queues": ("arm-storage", "StorageQueue", "apiVersion"),
    f"{STORAGE}/tableServices/tables": ("arm-storage", "Table", "apiVersion"),
    IDENTITIES: ("arm-msi", "Identity", "apiVersion"),
    f"{IDENTITIES}/federatedIdentityCredentials": (
        *("arm-msi", "FederatedIdentityCredential", "apiVersion"),
    ),
    "Microsoft.OperationalInsights/workspaces": (
        *("arm-operationalinsights", "Workspace", "apiVersion3"),
    ),
    "Microsoft.ContainerRegistry/registries": ("arm-containerregistry", "Registry", "apiVersion"),
    "Microsoft.Insights/diagnosticSettings": (
        *("arm-monitor", "DiagnosticSettingsResource", "apiVersion2"),
    ),
    "Microsoft.Insights/actionGroups": ("arm-monitor", "ActionGroupResource", "apiVersion3"),
    "Microsoft.Insights/metricAlerts": ("arm-monitor", "MetricAlertResource", "apiVersion6"),
    "Microsoft.Authorization/roleAssignments": (
        *("arm-authorization", "RoleAssignmentCreateParameters", "apiVersion1"),
    ),
    "Microsoft.Authorization/roleDefinitions": (
        *("arm-authorization", "RoleDefinition", "apiVersion1"),
    ),
    "Microsoft.App/managedEnvironments": ("arm-appcontainers", "ManagedEnvironment", "apiVersion"),
    "Microsoft.App/containerApps": ("arm-appcontainers", "ContainerApp", "apiVersion"),
    "Microsoft.App/jobs": ("arm-appcontainers", "Job", "apiVersion"),
}
AROUND = {"type", "apiVersion", "name", "scope", "condition", "comments", "dependsOn"}
"""What a template says about a resource, beside the resource itself."""

APP = """
from aztask import App

app = App({name!r}, broker="local://", results="local://", lease=45)
app.queue("orders"{orders})
app.queue("mail", priorities={{"high": 4, "low": 1}})

@app.task(queue="orders")
def ship(order: int) -> int:
    return order

@app.task(queue="reports", time_limit=7200)
def report() -> None: ...
{more}
"""
NASTY = "O'Neil's [shop] ${x} %{y} \"q\" \\ `z`"


# -- the checker -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdks(node: str) -> dict[str, Any]:
    packages = sorted({package for package, _, _ in MODELS.values()})
    command = [node, "--no-warnings", "models.mjs", *packages]
    done = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def wrong_scalar(value: Any, mapper: Mapping[str, Any], place: str) -> Iterator[str]:
    kind, limits = mapper["type"], mapper.get("constraints", {})
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind["name"]:
        case "Enum" if value not in kind["allowedValues"]:
            yield f"{place}: {value!r} is not among {kind['allowedValues']}"
        case "String" | "Uuid" | "DateTime" if not isinstance(value, str):
            yield f"{place}: {value!r} is no text"
        case "TimeSpan" if not re.fullmatch(r"P(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?", str(value)):
            yield f"{place}: {value!r} is no duration"
        case "Boolean" if not isinstance(value, bool):
            yield f"{place}: {value!r} is no boolean"
        case "Number" if not number:
            yield f"{place}: {value!r} is no number"
    if number and not (
        limits.get("InclusiveMinimum", value) <= value <= limits.get("InclusiveMaximum", value)
    ):
        yield f"{place}: {value} is out of range"


class Checker:
    """Says what is wrong with a value, by the models of one SDK."""

    def __init__(self, sdk: Mapping[str, Any]) -> None:
        self.models, self.discriminators = sdk["models"], sdk["discriminators"]

    def properties(self, kind: Mapping[str, Any]) -> dict[str, Any]:
        model = self.models[kind["className"]]["type"] if "className" in kind else kind
        found = dict(model.get("modelProperties", {}))
        if "uberParent" in kind and kind["uberParent"] != kind["className"]:
            parent = self.models[kind["uberParent"]]["type"]
            found = {**parent.get("modelProperties", {}), **found}
        return found

    def wrong(self, value: Any, mapper: Mapping[str, Any], place: str) -> Iterator[str]:
        kind = mapper["type"]
        if isinstance(value, str) and value[:1] == "[":
            return  # an expression
        match kind["name"]:
            case "Composite" if isinstance(value, dict):
                yield from self.wrong_object(value, kind, place)
            case "Sequence" if isinstance(value, list):
                for number, each in enumerate(value):
                    yield from self.wrong(each, kind["element"], f"{place}[{number}]")
            case "Dictionary" if isinstance(value, dict):
                for name, each in value.items():
                    yield from self.wrong(each, kind["value"], f"{place}.{name}")
            case "Composite" | "Sequence" | "Dictionary":
                yield f"{place}: {value!r} is of another shape"
            case _:
                yield from wrong_scalar(value, mapper, place)

    def wrong_object(self, value: Any, kind: Mapping[str, Any], place: str) -> Iterator[str]:
        kind = self.models[kind["className"]]["type"]
        if "polymorphicDiscriminator" in kind:
            by = kind["polymorphicDiscriminator"]["serializedName"].replace("\\", "")
            chosen = value.get(by)
            base = kind.get("uberParent") or kind["className"]
            found = self.discriminators.get(f"{base}.{chosen}")
            if found is None:
                yield f"{place}: there is no {base} {chosen!r}"
                return
            kind = found["type"]
        known: dict[str, Any] = {}
        for mapper in self.properties(kind).values():
            # "properties.lockDuration" is flattened in the SDK, and nested on the wire
            *path, last = re.split(r"(?<!\\)\.", mapper.get("serializedName", ""))
            inner = known
            for each in path:
                inner = inner.setdefault(each, {})
            inner[last.replace("\\", "")] = mapper
        yield from self.wrong_members(value, known, place, open="additionalProperties" in kind)

    def wrong_members(
        self, value: dict[str, Any], known: dict[str, Any], place: str, *, open: bool = False
    ) -> Iterator[str]:
        for name, each in value.items():
            at = f"{place}.{name}"
            if name not in known:
                if not open:
                    yield f"{at}: unknown"
            elif "type" not in known[name] or "serializedName" not in known[name]:
                yield from self.wrong_members(each, known[name], at)
            elif known[name].get("readOnly"):
                yield f"{at}: read only"
            else:
                yield from self.wrong(each, known[name], at)
        for name, mapper in known.items():
            required = mapper.get("required") and not mapper.get("isConstant")
            if required and "serializedName" in mapper and name not in value:
                yield f"{place}.{name}: missing"


def wrong_resources(template: Mapping[str, Any], sdks: Mapping[str, Any]) -> list[str]:
    """What the models have against the resources of a template."""
    found = []
    for each in template["resources"]:
        if each["type"] not in MODELS:
            found.append(f"{each['type']}: no checker has seen it")
            continue
        package, model, version = MODELS[each["type"]]
        sdk = sdks[package]
        if each["apiVersion"] != sdk["versions"][version]:
            found.append(f"{each['type']}: the model is that of {sdk['versions'][version]}")
        body = {name: value for name, value in each.items() if name not in AROUND}
        # the name of a role's properties is a matter of the wire alone
        found += Checker(sdk).wrong(body, {"type": sdk["models"][model]["type"]}, each["type"])
    return found


# -- the files -------------------------------------------------------------------------------------


def shop(folder: Path, name: str = "shop", orders: str = "", more: str = "") -> Shop:
    folder.mkdir(exist_ok=True)
    text = APP.format(name=name, orders=orders, more=more)
    (folder / "shop.py").write_text(text, encoding="utf-8")
    return Shop(folder, {})


def written(run: Shop, *arguments: str) -> dict[str, str]:
    done = run("azure", "init", *arguments)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_text() for path in (run.folder / "azure").iterdir()}


CASES = {
    "service bus": (),
    "storage queues": ("--service", "storagequeue"),
    "partitioned, a job": ("--partitioned", "--job", "orders"),
}


@pytest.fixture(scope="module", params=CASES)
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    run = shop(tmp_path_factory.mktemp("shop"), NASTY)
    return written(run, *CASES[request.param])


@pytest.fixture(scope="module")
def arm(files: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files["azuredeploy.json"])
    return found


def test_every_resource_fits_the_model_of_its_type(
    arm: dict[str, Any], sdks: dict[str, Any]
) -> None:
    assert files is not None
    assert wrong_resources(arm, sdks) == []
    assert len(arm["resources"]) > 30


def test_what_no_checker_has_seen_is_found(arm: dict[str, Any], sdks: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(arm))
    (storage,) = (each for each in changed["resources"] if each["type"] == STORAGE)
    storage["properties"]["minimumTlsVersion"] = 12
    storage["properties"]["allowSharedKeys"] = False
    del storage["kind"]
    changed["resources"].append({"type": "Microsoft.Nothing/new", "apiVersion": "1"})
    found = wrong_resources(changed, sdks)
    assert found == [
        f"{STORAGE}.properties.minimumTlsVersion: 12 is no text",
        f"{STORAGE}.properties.allowSharedKeys: unknown",
        f"{STORAGE}.kind: missing",
        "Microsoft.Nothing/new: no checker has seen it",
    ]


def test_expressions_name_what_the_template_has(arm: dict[str, Any]) -> None:
    text = json.dumps(arm["resources"]) + json.dumps(arm["outputs"])
    assert set(re.findall(r"parameters\('(\w+)'\)", text)) <= set(arm["parameters"])
    assert set(re.findall(r"variables\('(\w+)'\)", text)) <= set(arm["variables"])
    made = {f"resourceId('{each['type']}'" for each in arm["resources"]}
    for each in arm["resources"]:
        for other in each.get("dependsOn", ()):
            assert other[1:].partition(",")[0] in made
    for expression in re.findall(r'"\[(.*?)\]"', text):
        assert expression.count("(") == expression.count(")"), expression


def test_no_name_is_given_twice(arm: dict[str, Any]) -> None:
    names = [(each["type"], each["name"], each.get("scope")) for each in arm["resources"]]
    assert len(names) == len(set(names))


def same(there: Any, arm: Any, place: str) -> Iterator[str]:
    """Where a parsed value differs from that of the ARM template; expressions are not compared."""
    if isinstance(arm, str) and arm[:1] == "[" and arm[:2] != "[[":
        return
    if isinstance(arm, dict):
        if not isinstance(there, dict):
            yield f"{place}: {there!r}"
        elif not any(name[:1] == "[" for name in arm):
            there = {name.strip("'"): each for name, each in there.items()}
            if there.keys() != arm.keys():
                yield f"{place}: {sorted(there)} and {sorted(arm)}"
            for name in there.keys() & arm.keys():
                yield from same(there[name], arm[name], f"{place}.{name}")
    elif isinstance(arm, list):
        if not isinstance(there, list) or len(there) != len(arm):
            yield f"{place}: {there!r}"
            return
        for number, each in enumerate(arm):
            yield from same(there[number], each, f"{place}[{number}]")
    elif isinstance(arm, float):
        if str(arm) not in str(there):
            yield f"{place}: {there!r}"
    elif there != arm:
        yield f"{place}: {there!r} and {arm!r}"


def bodies(arm: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(type with version, the resource) in order."""
    return [
        (
            f"{each['type']}@{each['apiVersion']}",
            {name: value for name, value in each.items() if name not in AROUND},
        )
        for each in arm["resources"]
    ]


def test_the_bicep_says_what_the_arm_template_says(
    files: dict[str, str], arm: dict[str, Any]
) -> None:
    parsed = pycep.BicepParser().parse(text=files["main.bicep"])
    found = [each for each in parsed["resources"].values() if not each["existing"]]
    assert parsed["parameters"].keys() == arm["parameters"].keys()
    assert parsed["variables"].keys() == arm["variables"].keys()
    assert parsed["outputs"].keys() == arm["outputs"].keys()
    for each, (kind, body) in zip(found, bodies(arm), strict=True):
        assert f"{each['type']}@{each['api_version']}" == kind
        config = each["config"].get("config", each["config"])
        config = {k: v for k, v in config.items() if k not in {"parent", "scope", "name"}}
        assert list(same(config, body, kind)) == []


def unquoted(value: Any) -> Any:
    """What hcl2 parsed, as plain data."""
    if isinstance(value, dict):
        return {unquoted(name): unquoted(each) for name, each in value.items() if name[:2] != "__"}
    if isinstance(value, list):
        return [unquoted(each) for each in value]
    if isinstance(value, str) and value[:1] == value[-1:] == '"' and len(value) > 1:
        return json.loads(value.replace("$${", "${").replace("%%{", "%{"))
    return value


def test_the_terraform_says_what_the_arm_template_says(
    files: dict[str, str], arm: dict[str, Any]
) -> None:
    parsed = unquoted(hcl2.loads(files["main.tf"]))
    found = [each for block in parsed["resource"] for each in block["azapi_resource"].values()]
    assert len({name for block in parsed["variable"] for name in block}) == 1 + len(
        arm["parameters"]
    )
    for each, (kind, body) in zip(found, bodies(arm), strict=True):
        assert each["type"] == kind
        assert ("location" in each) == ("location" in body)
        assert ("identity" in each) == ("identity" in body)
        rest = {k: v for k, v in body.items() if k not in {"location", "identity"}}
        assert list(same(each["body"], rest, kind)) == []


TEXTS = [
    NASTY,
    "[a]",
    "'",
    "\\",
    "a\nb\tc",
    "${a}",
    "$${a}",
    "%{ if a }",
    "\\${a}",
    "é",
    "[concat('a')]",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_a_text(text: str) -> None:
    """Alone, within an expression, and as the default of a parameter."""
    body = {"properties": {"alone": text, "within": Concat((Param("x"), text))}}
    resource = Resource("one", "A.B/c", "1", "one", "a comment", body)
    tree = Tree((Parameter("x", text, text),), {}, (resource,), {})
    found = templates_of(tree, "a title")
    template = json.loads(found.arm)
    alone = template["resources"][0]["properties"]["alone"]
    starts = text[:1] == "[" and text[-1:] == "]"  # which is how an expression is told
    assert alone == template["parameters"]["x"]["defaultValue"] == ("[" if starts else "") + text
    quoted = text.replace("'", "''")
    assert (
        template["resources"][0]["properties"]["within"] == f"[concat(parameters('x'), '{quoted}')]"
    )

    line = next(each for each in found.bicep.splitlines() if "alone: " in each)
    assert bicep_text(line.partition("alone: ")[2]) == text
    if "\\" not in found.bicep:  # a text that ends with an escape is too much for this parser
        parsed = pycep.BicepParser().parse(text=found.bicep)
        assert parsed["resources"]["one"]["config"]["properties"].keys() == {"alone", "within"}

    (block,) = hcl2.loads(found.terraform)["resource"]
    ((_, made),) = block['"azapi_resource"'].items()
    assert unquoted(unquoted(made)["body"])["properties"]["alone"] == text


def bicep_text(literal: str) -> str:
    """The text of a literal in single quotes, by the language's own list of escapes."""
    assert literal[0] == literal[-1] == "'"
    known = {"\\": "\\", "'": "'", "n": "\n", "r": "\r", "t": "\t", "$": "$"}
    assert not re.search(r"(?<!\\)(?:\\\\)*\$\{", literal), "an expression"
    return re.sub(r"\\(.)", lambda found: known[found[1]], literal[1:-1])


def test_the_terraform_is_formatted(files: dict[str, str], tmp_path: Path) -> None:
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("there is no terraform on the PATH")
    (tmp_path / "main.tf").write_text(files["main.tf"])
    done = subprocess.run(
        [terraform, "fmt", "-check", "-diff", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_manifests_fit_the_schemas_of_kubernetes_and_keda(
    node: str, files: dict[str, str], tmp_path: Path
) -> None:
    documents = list(yaml.safe_load_all(files["kubernetes.yaml"]))
    assert len(documents) >= 5
    assert problems(node, tmp_path, documents) == ""


def test_azd_gets_its_parameters(files: dict[str, str], arm: dict[str, Any]) -> None:
    found = yaml.safe_load(files["azure.yaml"])
    assert found["infra"] == {"provider": "bicep", "path": "."}
    assert re.fullmatch(r"[a-z][a-z0-9-]*", found["name"])
    parameters = json.loads(files["main.parameters.json"])["parameters"]
    assert parameters.keys() == arm["parameters"].keys()


def test_the_page_lists_every_type_and_what_was_not_tried(arm: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {each["type"] for each in arm["resources"]} <= set(re.findall(r"`([\w./]+)`", text))
    assert "not tried on Azure" in text


def test_the_plan_is_what_queues_create_makes(files: dict[str, str], arm: dict[str, Any]) -> None:
    assert files.keys() == FILES
    queues = {
        each["name"].split("'/', '")[-1].removesuffix("')]"): each["properties"]
        for each in arm["resources"]
        if each["type"] == "Microsoft.ServiceBus/namespaces/queues"
    }
    if queues:
        assert queues.keys() == {"orders", "mail", "mail-high", "mail-low", "reports"}
        assert {each["lockDuration"] for each in queues.values()} == {"PT45S"}


def test_the_same_app_gives_the_same_bytes_and_nothing_is_overwritten(tmp_path: Path) -> None:
    run = shop(tmp_path)
    first = written(run)
    done = run("azure", "init")
    assert done.returncode == 1
    assert "--force replaces them" in done.stderr
    assert written(run, "--force") == first


# -- the differences -------------------------------------------------------------------------------


def diff(run: Shop, *arguments: str) -> list[dict[str, Any]]:
    done = run("azure", "diff", "--json", *arguments)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == (1 if found else 0), done.stderr
    return found


def complaints(run: Shop) -> set[str]:
    """The subjects of which the doctor says more than that they are fine."""
    done = run("doctor", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        each["subject"]
        for each in found
        if each["level"] != "ok" and each["check"] not in {"permissions", "events", "results"}
    }


def test_a_new_queue_is_an_addition_and_sessions_are_a_replacement(
    bus: RunningEmulator, tmp_path: Path
) -> None:
    start = subprocess.run(
        [sys.executable, "-m", "aztask", "init", "shop"], cwd=tmp_path, check=True, text=True
    )
    assert start.returncode == 0
    folder = tmp_path / "shop"
    environment = {
        "AZTASK_APP": "shop.app:app",
        "AZTASK_BROKER": bus.connection_string,
        ADMIN_VARIABLE: bus.admin_connection_string,
        "AZTASK_RESULTS": f"local://{folder}/results.db",
    }
    run = Shop(folder, environment)
    assert written(run).keys() == FILES
    (only,) = diff(run)
    assert (only["kind"], only["subject"]) == ("add", "queue default")
    assert complaints(run) == {"queue default"}

    for line in only["commands"]:
        assert run(*line.split()[1:]).returncode == 0
    assert diff(run) == []
    assert complaints(run) == set()

    source = folder / "shop" / "app.py"
    plain = source.read_text()
    source.write_text(plain + '\napp.queue("orders")\n')
    (added,) = diff(run)
    assert (added["kind"], added["subject"]) == ("add", "queue orders")
    assert complaints(run) == {"queue orders"}
    assert run("queues", "create", "orders").returncode == 0
    assert diff(run) == []

    source.write_text(plain + '\napp.queue("orders", sessions=True)\n')
    (replaced,) = diff(run)
    assert (replaced["kind"], replaced["subject"]) == ("replace", "queue orders")
    assert replaced["settings"] == {"sessions": [False, True]}
    assert "aztask queues create orders-2" in replaced["commands"]
    assert replaced["commands"][-1] == "aztask queues delete orders"
    assert complaints(run) == {"queue orders"}

    source.write_text(plain + '\napp.queue("orders", lease=30)\n')
    (changed,) = diff(run)
    assert (changed["kind"], changed["settings"]["lock"]) == ("change", [60.0, 30.0])
    assert complaints(run) == {"queue orders"}
    assert run(*changed["commands"][0].split()[1:]).returncode == 0
    assert diff(run) == []
    (parted, *_) = diff(run, "--partitioned")
    assert (parted["kind"], parted["settings"]) == ("replace", {"partitioned": [False, True]})


def test_on_azurite_queues_and_results_are_additions(azurite: Azurite, tmp_path: Path) -> None:
    run = shop(tmp_path)
    source = tmp_path / "shop.py"
    source.write_text(source.read_text().replace('broker="local://", results="local://", ', ""))
    with storing(tmp_path / "results") as (table, blob):
        run.environment["AZTASK_BROKER"] = azurite.connection_string
        run.environment["AZTASK_RESULTS"] = account_of(table, blob)
        found = {each["subject"]: each["kind"] for each in diff(run)}
        queues = {"mail", "mail-high", "mail-low", "orders", "reports"}
        assert found.keys() == {f"queue {name}" for name in queues} | {"results"}
        assert set(found.values()) == {"add"}
        assert run("queues", "create", "--all").returncode == 0
        assert diff(run) == []
