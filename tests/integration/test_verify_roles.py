"""The roles of ``aztask azure verify``: credentials with their permissions, and with others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from azure.storage.queue import AccountSasPermissions, ResourceTypes, generate_account_sas
from azurite import ACCOUNT, KEY, Azurite
from test_doctor import RULES

from aztask import App
from aztask.operate.provision.plan import plan_for_azure
from aztask.operate.provision.resources import tree_of
from aztask.operate.provision.roles import (
    BUS_OWNER,
    QUEUE_CONTRIBUTOR,
    QUEUE_READER,
    QUEUE_SENDER,
    RECEIVER,
    ROLES,
    SENDER,
)
from aztask.operate.verify import Proof, verify
from aztask.operate.verifyroles import ASSIGNED, MAY, VARIABLES
from aztask.queues.servicebus.admin import ADMIN_VARIABLE
from aztask.testing import Right, Rule, RunningEmulator, emulator

MAIN = "main-key-of-this-test"
GRANTED = {
    "sender": {Right.SEND},
    "worker": {Right.SEND, Right.LISTEN},
    "operator": set(Right),
    "scaler": set(Right),
}
SIGNED = {"sender": "a", "worker": "aup", "operator": "rwdlacup", "scaler": "r"}
"""Permissions of a shared access signature: add, update, process, read and so on."""


@pytest.fixture(scope="module")
def bus() -> Iterator[RunningEmulator]:
    rules = {name: Rule(f"key-of-{name}", frozenset(rights)) for name, rights in GRANTED.items()}
    with emulator(shared_access_key=MAIN, rules={**RULES, **rules}) as running:
        yield running


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def with_key(text: str, name: str) -> str:
    policy = f"SharedAccessKeyName={name};SharedAccessKey=key-of-{name}"
    return re.sub(r"SharedAccessKeyName=[^;]+;SharedAccessKey=[^;]+", policy, text)


def on_the_bus(bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch, **given: str) -> list[Proof]:
    """given: the rule that each role's credential has."""
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    for role, rule in given.items():
        monkeypatch.setenv(VARIABLES[role], with_key(bus.connection_string, rule))
    with closing(App("shop", broker=bus.connection_string)) as app:
        found = list(verify(app, [f"role-{name}" for name in VARIABLES]))
        assert app.broker.queues() == []
    return found


def signature(permissions: str) -> str:
    return str(
        generate_account_sas(
            ACCOUNT,
            KEY,
            ResourceTypes(service=True, container=True, object=True),
            AccountSasPermissions.from_string(permissions),
            datetime.now(UTC) + timedelta(hours=1),
        )
    )


def on_azurite(azurite: Azurite, monkeypatch: pytest.MonkeyPatch, **given: str) -> list[Proof]:
    """given: the permissions of each role's signature."""
    for role, permissions in given.items():
        text = f"QueueEndpoint={azurite.endpoint};SharedAccessSignature={signature(permissions)}"
        monkeypatch.setenv(VARIABLES[role], text)
    with closing(App("shop", broker=azurite.connection_string)) as app:
        found = list(verify(app, [f"role-{name}" for name in VARIABLES]))
        assert app.broker.queues() == []
    return found


def test_each_role_of_service_bus_may_do_its_own_and_is_refused_the_rest(
    bus: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_the_bus(bus, monkeypatch, **{name: name for name in GRANTED})
    assert {each.check: (each.state, each.text) for each in found} == {
        "role-sender": ("passed", "may send; was refused: receive, manage"),
        "role-worker": ("passed", "may send, receive; was refused: manage"),
        "role-operator": ("passed", "may send, receive, manage; was refused: nothing"),
        "role-scaler": ("passed", "may send, receive, manage; was refused: nothing"),
    }


def test_each_role_of_storage_queues_may_do_its_own_and_is_refused_the_rest(
    azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_azurite(azurite, monkeypatch, **SIGNED)
    assert {each.check: (each.state, each.text) for each in found} == {
        "role-sender": ("passed", "may send; was refused: receive, count, manage"),
        "role-worker": ("passed", "may send, receive; was refused: count, manage"),
        "role-operator": ("passed", "may send, receive, count, manage; was refused: nothing"),
        "role-scaler": ("passed", "may count; was refused: send, receive, manage"),
    }


def test_a_role_with_too_little_and_one_with_too_much_fail_and_the_others_are_skipped(
    bus: RunningEmulator, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = on_the_bus(bus, monkeypatch, sender="worker", worker="sender")
    assert [each.state for each in found] == ["failed", "failed", "skipped", "skipped"]
    assert found[0].text == (
        "may receive, which it does not need: it has more than Azure Service Bus Data Sender"
    )
    assert found[1].text == (
        "may not receive, which it needs: assign it Azure Service Bus Data Receiver and Azure "
        "Service Bus Data Sender"
    )
    found = on_azurite(azurite, monkeypatch, sender="rwdlacup", worker="ap")
    assert [each.state for each in found[:2]] == ["failed", "failed"]
    assert "may receive, which it does not need" in found[0].text
    assert "may receive, but a renewal was answered with Unknown" in found[1].text
    assert "AuthorizationPermissionMismatch" in found[1].text


def test_a_credential_of_another_service_is_no_role(
    bus: RunningEmulator, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLES["worker"], azurite.connection_string)
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    with closing(App("shop", broker=bus.connection_string)) as app:
        (proof,) = verify(app, ["role-worker"])
    assert (proof.state, proof.text) == (
        "failed",
        "the role's connection string is of another kind of service",
    )


@pytest.mark.parametrize("service", ["servicebus", "storagequeue"])
def test_the_roles_are_those_that_init_assigns(service: str) -> None:
    names = {
        "servicebus": {
            "sender": {SENDER},
            "worker": {SENDER, RECEIVER},
            "operator": {BUS_OWNER},
            "scaler": {BUS_OWNER},
        },
        "storagequeue": {
            "sender": {QUEUE_SENDER},
            "worker": set(),
            "operator": {QUEUE_CONTRIBUTOR},
            "scaler": {QUEUE_READER},
        },
    }[service]
    with closing(App("shop", broker="local://:memory:")) as app:
        tree = tree_of(plan_for_azure(app, "shop:app", service=service))
    scope = "bus" if service == "servicebus" else "storage"
    assigned: dict[str, set[str]] = {name: set() for name in names}
    for resource in tree.resources:
        if resource.scope == scope and resource.kind.endswith("roleAssignments"):
            who, _, role = resource.comment.partition(": ")
            assigned[who] |= {guid for guid, name in ROLES.items() if name == role.rstrip(".")}
    assert assigned == names
    for role, guids in names.items():
        assert all(ROLES[guid] in ASSIGNED[service][role] for guid in guids)
    assert MAY[service].keys() == ASSIGNED[service].keys() == VARIABLES.keys()
