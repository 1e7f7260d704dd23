"""Each role by itself on the app's own result table and containers: what it may do, and may not.

Rules
1. Roles are assigned on the app's own table and containers, so no table of the run could show them.
   Each check puts a row and two blobs there whose names tell the run, and removes them.
2. The app's credential makes and removes them; the role's credential only tries.
3. What a role may do is read from `aztask.operate.provision.roles`. One that may do more fails the
   check, like one that may do less.
4. A refusal counts only from a service that knows the credential: a wrong secret proves nothing.
5. No text has the name of a table, a container or an account: they are yours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from aztask.address import connection_strings
from aztask.address.addresses import BlobAddress, TablesAddress
from aztask.address.urls import parse_payloads
from aztask.app import App
from aztask.errors import ConfigurationError, QueueNotFound
from aztask.operate.provision.plan import RESULTS_CONTAINER, RESULTS_TABLE
from aztask.operate.provision.roles import (
    ACTIONS,
    On,
    actions_of,
    named,
    roles_of,
)
from aztask.operate.verifybench import (
    MADE,
    PREFIX,
    Bench,
    Leftover,
    Refuted,
    Skipped,
    late_module,
    tables_of_app,
)
from aztask.operate.verifyroles import ENTRA, VARIABLES
from aztask.support.display import Secret

STORE_VARIABLES: Final = {name: f"{variable}_STORES" for name, variable in VARIABLES.items()}
"""The variables with credentials for the storage account, in the forms of `VARIABLES`. They are
needed only where those of `VARIABLES` are connection strings of Service Bus."""

IN_WORDS: Final[Mapping[On, str]] = {
    "table": "the result table",
    "results": "the container of large results",
    "payloads": "the container of payloads",
    "events": "the container of events",
}

ANY_SERVICE: Final = "servicebus"
"""The roles on table and containers are the same for both services."""

KEPT: Final = "kept"
ADDED: Final = "added"

_KNOWN: Final = re.compile("Authorization(?:Permission|Service|ResourceType)Mismatch")
"""The codes with which a service refuses one that it knows. An unknown or expired credential gets
AuthenticationFailed, one that the account's network rules keep out AuthorizationFailure. (Source:
"Common REST API error codes" of the service. Azurite says AuthorizationFailure for both.)"""


class Stand(NamedTuple):
    """A table or container of the app, and what it is for: two uses may share a container."""

    uses: tuple[On, ...]
    address: TablesAddress | BlobAddress

    def __str__(self) -> str:
        return ", which is also ".join(IN_WORDS[use] for use in self.uses)


class Trial(Protocol):
    """The rows or blobs of one run in one place, under one credential.

    Every method raises ConfigurationError if it is refused, QueueNotFound without the table or
    container, BrokerUnavailable if nothing answers.
    """

    def read(self, key: str) -> None: ...

    def add(self, key: str) -> None: ...

    def update(self, key: str) -> None: ...

    def delete(self, key: str) -> None: ...

    def list(self) -> list[str]: ...

    def close(self) -> None: ...


class _Rows:
    """The rows of one partition, which has the run's name. See `Trial`."""

    def __init__(self, address: TablesAddress, name: str, credential: Any) -> None:
        self._client = late_module("stores.tables.client", "tables")
        self._requests = self._client.TableRequests(address, RESULTS_TABLE, credential)
        self._name = name

    def _row(self, key: str) -> dict[str, str]:
        return {"PartitionKey": self._name, "RowKey": key}

    def read(self, key: str) -> None:
        self._requests.read(self._client.TimeBudget(), self._name, key)

    def add(self, key: str) -> None:
        self._requests.insert(self._client.TimeBudget(), self._row(key))

    def update(self, key: str) -> None:
        self._requests.add(self._client.TimeBudget(), {**self._row(key), "of": "the role"})

    def delete(self, key: str) -> None:
        self._requests.delete(self._client.TimeBudget(), self._name, key, again=True)

    def list(self) -> list[str]:
        """The rows of all runs, each as PARTITION/KEY."""
        found = self._requests.query(
            self._client.TimeBudget(),
            "PartitionKey ge @first and PartitionKey lt @last",
            {"first": PREFIX, "last": f"{PREFIX}~"},
            self._client.PAGE,
            ("PartitionKey", "RowKey"),
        )
        return [f"{each['PartitionKey']}/{each['RowKey']}" for each in found]

    def close(self) -> None:
        self._requests.close()


class _Blobs:
    """The blobs whose names begin with the run's. See `Trial`."""

    def __init__(self, address: BlobAddress, name: str, credential: Any) -> None:
        trials = late_module("azure.trials", "blob")
        self._container = trials.TrialContainer(replace(address, prefix=""), given=credential)
        self._address = address
        self._name = name

    def _of(self, key: str) -> str:
        return self._address.name_of(f"{self._name}/{key}")

    def read(self, key: str) -> None:
        self._container.read(self._of(key))

    def add(self, key: str) -> None:
        self._container.write(self._of(key), b"of the run", new=True)

    def update(self, key: str) -> None:
        self._container.write(self._of(key), b"of the role", new=False)

    def delete(self, key: str) -> None:
        self._container.remove(self._of(key))

    def list(self) -> list[str]:
        """The blobs of all runs, each as RUN/KEY."""
        start = self._address.name_of("")
        found = self._container.names(f"{start}{PREFIX}")
        return [str(each).removeprefix(start) for each in found]

    def close(self) -> None:
        self._container.close()


def stands_of(app: App) -> list[Stand]:
    """The result table and the containers that the app names, each once."""
    found: list[Stand] = []
    tables = tables_of_app(app)
    if tables is not None:
        found.append(Stand(("table",), tables))
    of_results = tables and BlobAddress(
        *(tables.account, tables.blob_endpoint, RESULTS_CONTAINER, ""),
        *(tables.key, tables.signature),
    )
    settings = app.settings
    uses: dict[On, Any] = {
        "results": of_results,
        "payloads": parse_payloads(settings.payloads, settings.payloads_account),
        "events": settings.events_target,
    }
    containers: dict[tuple[str, str], Stand] = {}
    for use, address in uses.items():
        if isinstance(address, BlobAddress):
            place = (address.endpoint, address.container)
            before = containers.get(place, Stand((), address))
            containers[place] = Stand((*before.uses, use), before.address)
    return [*found, *containers.values()]


def _trial(stand: Stand, name: str, credential: _Credential | None = None) -> Trial:
    """Rows or blobs under a role's credential, or, without one, under the app's."""
    address, token = stand.address, None
    if credential is not None:
        token = credential.token
        address = replace(address, key=credential.key, signature=credential.signature)
    if isinstance(address, TablesAddress):
        return _Rows(address, name, token)
    return _Blobs(address, name, token)


# -- the credential of a role ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Credential:
    """What a role's requests are signed with: exactly one field is set."""

    token: Any = None
    key: Secret | None = None
    signature: Secret | None = None


def _credential_of(role: str) -> _Credential:
    """The credential of a role. Raises Skipped without one, ConfigurationError, Refuted."""
    variable = STORE_VARIABLES[role]
    given = os.environ.get(variable, "") or os.environ.get(VARIABLES[role], "")
    if not given:
        raise Skipped(f"no credential of this role: {VARIABLES[role]} may hold it")
    if given.startswith(ENTRA):
        access = late_module("azure.access", "identity")
        token = access.named_credential(given.removeprefix(ENTRA))
        if (trouble := access.storage_trouble(token)) is not None:
            raise Refuted(f"there is no token of this identity: {trouble}")
        return _Credential(token)
    parts = connection_strings.split(given)
    if connection_strings.is_service_bus(parts):
        raise Skipped(
            f"{VARIABLES[role]} is of Service Bus: {variable} may hold a credential for the "
            "storage account"
        )
    if "SharedAccessSignature" in parts:
        return _Credential(signature=Secret(parts["SharedAccessSignature"]))
    if "AccountKey" in parts:
        return _Credential(key=Secret(parts["AccountKey"]))
    raise ConfigurationError("the role's connection string has neither a key nor a signature")


# -- the check -------------------------------------------------------------------------------------

Reasons: TypeAlias = dict[str, str | None]
"""{action: why it was refused; None if it was done}"""


def store_check(name: str) -> Callable[[Bench], str]:
    """The check of one role."""
    return partial(_stores, name)


def _stores(role: str, bench: Bench) -> str:
    stands = stands_of(bench.app)
    if not stands:
        raise Skipped(
            "the app has no results in Azure Tables and no container: see AZTASK_RESULTS, "
            "payloads, events_container"
        )
    credential = _credential_of(role)
    seen: dict[Stand, Reasons | None] = {
        stand: _tried(stand, credential, bench) for stand in stands
    }
    found = {stand: reasons for stand, reasons in seen.items() if reasons is not None}
    if not found:
        raise Skipped("none of the app's table and containers exists yet")
    _require_known(found.values())
    wrong = [text for each in found.items() for text in _differences(role, *each)]
    if wrong:
        raise Refuted("; ".join(wrong))
    there = [f"{stand}: {', '.join(_allowed(role, stand)) or 'nothing'}" for stand in found]
    missing = [str(stand) for stand in seen if stand not in found]
    absent = f"; not there yet: {', '.join(missing)}" if missing else ""
    return f"may do in {'; in '.join(there)}; was refused all else{absent}"


def _tried(stand: Stand, credential: _Credential, bench: Bench) -> Reasons | None:
    """What the role's credential did; None if the table or container does not exist."""
    marks = [_left(stand, f"{bench.name}/{key}") for key in (KEPT, ADDED)]
    bench.others += marks
    with closing(_trial(stand, bench.name)) as own:
        try:
            own.add(KEPT)
        except QueueNotFound:
            return None
        except ConfigurationError as error:
            del bench.others[-len(marks) :]
            raise Refuted(f"the app's own credential may not add to {stand}") from error
    with closing(_trial(stand, bench.name, credential)) as tried:
        attempts: dict[str, Callable[[], object]] = {
            "read": partial(tried.read, KEPT),
            "list": tried.list,
            "add": partial(tried.add, ADDED),
            "update": partial(tried.update, KEPT),
            "delete": partial(tried.delete, KEPT),
        }
        return {action: _refusal(attempts[action]) for action in ACTIONS[stand.uses[0]]}


def _refusal(attempt: Callable[[], object]) -> str | None:
    """Why the service refused it; None if it did not. Raises BrokerUnavailable."""
    try:
        attempt()
    except ConfigurationError as error:
        return str(error)
    return None


def _require_known(found: Iterable[Reasons]) -> None:
    """Raise Refuted if all was refused, and some of it not for want of a role (rule 4)."""
    answers = [reason for reasons in found for reason in reasons.values()]
    refused = [reason for reason in answers if reason is not None]
    if len(refused) == len(answers) and not all(map(_KNOWN.search, refused)):
        raise Refuted(
            "the service does not know this credential, so that no refusal is one of its role: "
            "check the key or signature, its expiry, and the account's network rules"
        )


def _allowed(role: str, stand: Stand) -> tuple[str, ...]:
    return actions_of(role, ANY_SERVICE, *stand.uses)


def _differences(role: str, stand: Stand, reasons: Reasons) -> Iterator[str]:
    """What a role may do too little and too much in one place."""
    needed = _allowed(role, stand)
    assigned = named(roles_of(role, ANY_SERVICE, *stand.uses))
    lacks = [action for action in needed if reasons[action] is not None]
    beyond = [action for action in reasons if reasons[action] is None and action not in needed]
    if lacks:
        yield f"may not {', '.join(lacks)} in {stand}, which it needs: assign it {assigned} there"
    if beyond:
        yield (
            f"may {', '.join(beyond)} in {stand}, which it does not need: it has more than "
            f"{assigned or 'no role'} there"
        )


# -- what is left ----------------------------------------------------------------------------------


def _left(stand: Stand, name: str) -> Leftover:
    """A row or blob of a run, as RUN/KEY; deleted with the app's credential."""
    run, _, key = name.partition("/")

    def delete() -> None:
        with closing(_trial(stand, run)) as own:
            own.delete(key)

    return Leftover("row" if stand.uses == ("table",) else "blob", name, delete)


def marks_left(app: App) -> Iterator[Leftover]:
    """The rows and blobs that runs have left in the app's own table and containers."""
    for stand in stands_of(app):
        with suppress(Skipped, QueueNotFound), closing(_trial(stand, PREFIX)) as own:
            for name in own.list():
                if MADE.fullmatch(name.partition("/")[0]):
                    yield _left(stand, name)
