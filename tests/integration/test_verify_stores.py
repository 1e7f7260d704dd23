"""The roles of ``aztask azure verify`` on tables and containers, as ``azure init`` assigns them.

Azurite knows no roles. `tests/rolesfront.py` stands before it and refuses by identity, from the
role assignments in the template of ``aztask azure init``. Signatures are Azurite's own to refuse.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.data.tables import TableServiceClient
from azure.storage.blob import (
    AccountSasPermissions,
    BlobServiceClient,
    ResourceTypes,
    generate_account_sas,
)
from azurite import ACCOUNT, KEY, Azurite, account_of, storing
from identityservice import SECRET, TENANT, IdentityService
from rolesfront import (
    BLOB_CONTRIBUTOR,
    BLOB_READER,
    TABLE_CONTRIBUTOR,
    TABLE_READER,
    RolesFront,
)
from test_doctor import Shop
from tokenservice import new_key

from aztask import App
from aztask.emulator.emulator import KEY_FILE
from aztask.operate.provision.plan import plan_for_azure
from aztask.operate.provision.resources import tree_of
from aztask.operate.provision.roles import ROLES, STORES, actions_of, grants_of
from aztask.operate.verify import Proof, verify
from aztask.operate.verifybench import PREFIX
from aztask.operate.verifyroles import VARIABLES
from aztask.operate.verifystores import STORE_VARIABLES

TABLE, RESULTS = "aztaskresults", "aztask-results"
PAYLOADS, EVENTS = "aztask-payloads", "aztask-events"
NOTHING = "nothing"
ROWS = "read, add, update, delete"
BLOBS = "read, list, add, update, delete"
CLIENTS = {
    name: f"{number}{number}666666-7777-4888-8999-aaaaaaaaaaaa"
    for number, name in enumerate(VARIABLES, 1)
}
Assigned = dict[tuple[str, str], set[str]]


def of_the_template() -> Assigned:
    """{(identity, table or container): ids of roles} in the template of ``aztask azure init``."""
    options = {"events": "events", "events_container": "blob://shop/events"}
    with closing(App("shop", broker="local://:memory:", **options)) as app:
        tree = tree_of(plan_for_azure(app, "shop:app", service="servicebus"))
    found: Assigned = {}
    for each in tree.resources:
        if each.kind.endswith("roleAssignments") and each.scope not in ("bus", "registry"):
            properties = each.body["properties"]
            who = properties["principalId"].symbol.removesuffix("Identity")
            place = found.setdefault((who, str(tree[each.scope].name)), set())
            place.add(properties["roleDefinitionId"].guid)
    return found


@dataclass
class Account:
    """An account whose roles are those of the template, unless a test changes them."""

    tables: RolesFront
    blobs: RolesFront
    azurites: tuple[Azurite, Azurite]
    identity: IdentityService
    assigned: dict[tuple[str, str], set[str]]

    @property
    def text(self) -> str:
        return (
            f"DefaultEndpointsProtocol=https;AccountName={ACCOUNT};AccountKey={KEY};"
            f"TableEndpoint={self.tables.endpoint};BlobEndpoint={self.blobs.endpoint}"
        )

    def assign(self, who: str, place: str, *roles: str) -> None:
        self.assigned[who, place] = set(roles)

    def verified(self, queues: Azurite, *roles: str, **options: Any) -> dict[str, Proof]:
        """The checks of these roles; {role: proof}."""
        chosen = {
            "results": self.text,
            "payloads": PAYLOADS,
            "payloads_account": self.text,
            "events": "events",
            "events_container": EVENTS,
            "events_account": self.text,
            **options,
        }
        with closing(App("shop", broker=queues.connection_string, **chosen)) as app:
            found = verify(app, [f"stores-{name}" for name in roles or VARIABLES])
            return {each.check.removeprefix("stores-"): each for each in found}

    def left(self) -> list[str]:
        """The rows and blobs of the account."""
        direct = account_of(*self.azurites)
        with (
            TableServiceClient.from_connection_string(direct) as tables,
            BlobServiceClient.from_connection_string(direct) as blobs,
        ):
            rows = [
                f"{row['PartitionKey']}/{row['RowKey']}"
                for each in tables.list_tables()
                for row in tables.get_table_client(each.name).list_entities()
            ]
            return rows + [
                blob.name
                for each in blobs.list_containers()
                for blob in blobs.get_container_client(each.name).list_blobs()
            ]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("account")
    identity = IdentityService(folder, new_key())
    identity.applications = {client: f"oid-of-{name}" for name, client in CLIENTS.items()}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.certificate.with_name(KEY_FILE))
    assigned: Assigned = {}
    with storing(folder) as azurites:
        fronts = [RolesFront(each, identity, context, assigned) for each in azurites]
        try:
            direct = account_of(*azurites)
            with TableServiceClient.from_connection_string(direct) as tables:
                tables.create_table(TABLE)
            with BlobServiceClient.from_connection_string(direct) as blobs:
                for name in (RESULTS, PAYLOADS, EVENTS):
                    blobs.create_container(name)
            yield Account(*fronts, azurites, identity, assigned)
        finally:
            for front in fronts:
                front.close()
            identity.close()


@pytest.fixture
def account(made: Account, monkeypatch: pytest.MonkeyPatch) -> Account:
    """With a credential of each role in the environment."""
    made.assigned.clear()
    for (who, place), roles in of_the_template().items():
        made.assign(f"oid-of-{who}", place, *roles)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.identity.certificate))
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", made.identity.authority)
    for name, client in CLIENTS.items():
        monkeypatch.delenv(STORE_VARIABLES[name], raising=False)
        monkeypatch.setenv(VARIABLES[name], f"entra:{TENANT}/{client}/{SECRET}")
    return made


def texts(found: dict[str, Proof]) -> dict[str, tuple[str, str]]:
    return {name: (each.state, each.text) for name, each in found.items()}


def done(*allowed: str) -> tuple[str, str]:
    """The proof of a role that may do this in the table and in the three containers."""
    places = (
        *("the result table", "the container of large results"),
        *("the container of payloads", "the container of events"),
    )
    there = "; in ".join(f"{place}: {what}" for place, what in zip(places, allowed, strict=True))
    return "passed", f"may do in {there}; was refused all else"


def test_with_the_roles_of_the_template_each_may_do_its_own_and_is_refused_the_rest(
    account: Account, azurite: Azurite
) -> None:
    found = account.verified(azurite)
    assert texts(found) == {
        "sender": done(NOTHING, NOTHING, BLOBS, BLOBS),
        "worker": done(ROWS, BLOBS, BLOBS, BLOBS),
        "operator": done(ROWS, BLOBS, BLOBS, NOTHING),
        "scaler": done(NOTHING, NOTHING, NOTHING, NOTHING),
    }
    refused = {(who, name) for who, _, name in account.tables.refused + account.blobs.refused}
    assert ("oid-of-scaler", PAYLOADS) in refused and ("oid-of-operator", EVENTS) in refused
    assert account.left() == []


def test_the_template_assigns_what_is_tried() -> None:
    names = {"table": TABLE, "results": RESULTS, "payloads": PAYLOADS, "events": EVENTS}
    granted: Assigned = {}
    for who, role, on in grants_of("servicebus", events=True):
        if on in STORES:
            granted.setdefault((who, names[on]), set()).add(role)
    assert granted == of_the_template()
    for who in VARIABLES:
        for on in STORES:
            assert bool(actions_of(who, "servicebus", on)) == ((who, names[on]) in granted)


def test_a_role_that_is_missing_is_named_with_its_place(account: Account, azurite: Azurite) -> None:
    account.assign("oid-of-worker", PAYLOADS)
    account.assign("oid-of-operator", TABLE)
    found = account.verified(azurite, "worker", "operator")
    assert texts(found) == {
        "worker": (
            "failed",
            f"may not {BLOBS} in the container of payloads, which it needs: assign it "
            "Storage Blob Data Contributor there",
        ),
        "operator": (
            "failed",
            f"may not {ROWS} in the result table, which it needs: assign it "
            "Storage Table Data Contributor there",
        ),
    }
    assert account.left() == []


def test_a_role_that_is_too_small_is_named_with_what_it_lacks(
    account: Account, azurite: Azurite
) -> None:
    account.assign("oid-of-worker", TABLE, TABLE_READER)
    account.assign("oid-of-worker", EVENTS, BLOB_READER)
    (proof,) = account.verified(azurite, "worker").values()
    assert (proof.state, proof.text.split("; ")) == (
        "failed",
        [
            "may not add, update, delete in the result table, which it needs: assign it Storage "
            "Table Data Contributor there",
            "may not add, update, delete in the container of events, which it needs: assign it "
            "Storage Blob Data Contributor there",
        ],
    )


def test_a_role_that_is_too_wide_is_named_with_what_it_has_too_much(
    account: Account, azurite: Azurite
) -> None:
    account.assign("oid-of-sender", TABLE, TABLE_READER)
    account.assign("oid-of-operator", EVENTS, BLOB_CONTRIBUTOR)
    account.assign("oid-of-scaler", RESULTS, BLOB_READER)
    found = account.verified(azurite, "sender", "operator", "scaler")
    ending = "which it does not need: it has more than no role there"
    assert texts(found) == {
        "sender": ("failed", f"may read in the result table, {ending}"),
        "operator": ("failed", f"may {BLOBS} in the container of events, {ending}"),
        "scaler": ("failed", f"may read, list in the container of large results, {ending}"),
    }
    assert account.left() == []


def test_one_container_with_two_uses_needs_the_roles_of_both(
    account: Account, azurite: Azurite
) -> None:
    options = {"events_container": f"{PAYLOADS}/events"}
    found = account.verified(azurite, "operator", "scaler", **options)
    both = "the container of payloads, which is also the container of events"
    assert found["operator"].text.endswith(f"in {both}: {BLOBS}; was refused all else")
    assert found["operator"].state == found["scaler"].state == "passed"
    assert account.left() == []


def test_a_wrong_secret_proves_nothing(
    account: Account, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scaler is refused everything: so is a credential that no one knows."""
    client = CLIENTS["scaler"]
    monkeypatch.setenv(VARIABLES["scaler"], f"entra:{TENANT}/{client}/wrong")
    (proof,) = account.verified(azurite, "scaler").values()
    assert proof.state == "failed"
    assert proof.text.startswith("there is no token of this identity: ")
    assert "AADSTS7000215" in proof.text
    monkeypatch.setenv(VARIABLES["scaler"], signed("r", seconds=-3600))
    (proof,) = account.verified(azurite, "scaler").values()
    assert (proof.state, proof.text) == (
        "failed",
        "the service does not know this credential, so that no refusal is one of its role: check "
        "the key or signature, its expiry, and the account's network rules",
    )


def signed(permissions: str, seconds: float = 3600) -> str:
    token = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions.from_string(permissions),
        datetime.now(UTC) + timedelta(seconds=seconds),
    )
    return f"BlobEndpoint=https://127.0.0.1/{ACCOUNT};SharedAccessSignature={token}"


def test_signatures_are_tried_on_containers(
    account: Account, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azurite refuses what the signature lacks. It is of blobs alone, so the table is refused."""
    monkeypatch.setenv(STORE_VARIABLES["worker"], signed("rl"))
    monkeypatch.setenv(STORE_VARIABLES["scaler"], signed("l"))
    found = account.verified(
        *(azurite, "worker", "scaler"),
        events_container=None,
        events_account=None,
        events=None,
    )
    lacks = "may not add, update, delete in the container of"
    ending = "which it needs: assign it Storage Blob Data Contributor there"
    assert found["worker"].text == (
        f"may not {ROWS} in the result table, which it needs: assign it Storage Table Data "
        f"Contributor there; {lacks} large results, {ending}; {lacks} payloads, {ending}"
    )
    assert found["scaler"].text.startswith("may list in the container of large results, ")


def test_what_is_not_there_yet_is_said_and_a_key_of_service_bus_is_none_of_the_account(
    account: Account, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        VARIABLES["sender"], "Endpoint=sb://a.example/;SharedAccessKeyName=a;SharedAccessKey=YQ=="
    )
    monkeypatch.delenv(VARIABLES["operator"])
    account.assign("oid-of-worker", "not-there", BLOB_CONTRIBUTOR)
    found = account.verified(azurite, payloads="not-there")
    assert found["worker"].state == "passed"
    assert found["worker"].text.endswith("; not there yet: the container of payloads")
    assert texts(found)["sender"] == (
        "skipped",
        "AZTASK_VERIFY_SENDER is of Service Bus: AZTASK_VERIFY_SENDER_STORES may hold a credential "
        "for the storage account",
    )
    assert texts(found)["operator"] == (
        "skipped",
        "no credential of this role: AZTASK_VERIFY_OPERATOR may hold it",
    )
    with closing(App("shop", broker=azurite.connection_string)) as app:
        (proof,) = verify(app, ["stores-worker"])
    assert proof.state == "skipped"
    assert "no results in Azure Tables and no container" in proof.text
    assert account.left() == []


def test_an_own_credential_that_may_not_add_is_said(
    account: Account, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"payloads": "aztask-payloads", "payloads_account": f"{signed('rl')}"}
    options["payloads_account"] = options["payloads_account"].replace(
        f"https://127.0.0.1/{ACCOUNT}", account.blobs.endpoint
    )
    (proof,) = account.verified(azurite, "worker", **options).values()
    assert (proof.state, proof.text) == (
        "failed",
        "the app's own credential may not add to the container of payloads",
    )
    assert account.left() == []


def test_rows_and_blobs_of_a_killed_run_are_cleaned_and_nothing_else_is(
    account: Account, azurite: Azurite, tmp_path: Path
) -> None:
    direct = account_of(*account.azurites)
    run = f"{PREFIX}01234567-stores-worker"
    mine = [f"{PREFIX}mine/kept", "events/mine"]
    with (
        TableServiceClient.from_connection_string(direct) as tables,
        BlobServiceClient.from_connection_string(direct) as blobs,
    ):
        rows, container = tables.get_table_client(TABLE), blobs.get_container_client(EVENTS)
        for partition in (run, f"{PREFIX}mine"):
            rows.create_entity({"PartitionKey": partition, "RowKey": "kept"})
        for name in (f"events/{run}/added", *mine):
            container.upload_blob(name, b"x")
        (tmp_path / "shop.py").write_text("from aztask import App\napp = App('shop')\n")
        names = {
            "AZTASK_BROKER": azurite.connection_string,
            "AZTASK_RESULTS": account.text,
            "AZTASK_EVENTS": "events",
            "AZTASK_EVENTS_CONTAINER": f"{EVENTS}/events",
            "AZTASK_EVENTS_ACCOUNT": account.text,
        }
        cleaned = Shop(tmp_path, names)("azure", "verify", "--clean")
        assert (cleaned.returncode, cleaned.stdout.splitlines()) == (
            0,
            [f"deleted row {run}/kept", f"deleted blob {run}/added"],
        ), cleaned.stderr
        assert sorted(account.left()) == sorted([*mine, f"{PREFIX}mine/kept"])
        rows.delete_entity(f"{PREFIX}mine", "kept")
        for name in mine:
            container.delete_blob(name)


def test_every_role_has_a_name_and_its_data_actions_here() -> None:
    assert {TABLE_CONTRIBUTOR, BLOB_CONTRIBUTOR} <= ROLES.keys()
    assert {role for roles in of_the_template().values() for role in roles} == {
        TABLE_CONTRIBUTOR,
        BLOB_CONTRIBUTOR,
    }
