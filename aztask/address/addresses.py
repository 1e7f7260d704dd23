"""Addresses of brokers and result stores, as values: comparable, and shown without their secrets.

`aztask.address.urls` makes them from text. An adapter is given its service's address and nothing
else, so it contains everything needed to connect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from aztask.errors import ConfigurationError
from aztask.support.display import Secret

MEMORY = ":memory:"


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """The embedded engine.

    * `path`: an absolute file name, or ``:memory:`` (this process only).
    * `full_durability`: every commit reaches the disk before it is confirmed.
    * `group`: the group that a new file is shared with; None: only the user may read it.
    """

    scheme: ClassVar[str] = "local"

    path: str
    full_durability: bool = False
    group: str | None = None

    @property
    def in_memory(self) -> bool:
        """True if nothing is written to disk."""
        return self.path == MEMORY

    def __str__(self) -> str:
        options = ["durable=full"] if self.full_durability else []
        options += [f"group={self.group}"] if self.group else []
        return f"local://{self.path}{'?' if options else ''}{'&'.join(options)}"


@dataclass(frozen=True, slots=True)
class ServiceBusAddress:
    """A Service Bus namespace. Entra ID is used if there is neither a key nor a signature.

    * `host`: the fully qualified host name.
    * `port`: None unless one was given.
    * `emulator`: plain AMQP, without TLS.
    * `entity`: the only queue that the connection string is valid for, if it names one.
    """

    scheme: ClassVar[str] = "servicebus"

    host: str
    port: int | None = None
    key_name: str | None = None
    key: Secret | None = None
    signature: Secret | None = None
    emulator: bool = False
    entity: str | None = None

    @property
    def uses_entra(self) -> bool:
        """True if the credential comes from azure-identity."""
        return self.key is None and self.signature is None

    def connection_string(self) -> Secret:
        """The text for the SDK's ``from_connection_string``. Not for Entra ID."""
        netloc = self.host if self.port is None else f"{self.host}:{self.port}"
        parts = {"Endpoint": f"sb://{netloc}/"}
        if self.key is not None:
            parts["SharedAccessKeyName"] = self.key_name or ""
            parts["SharedAccessKey"] = self.key.reveal()
        if self.signature is not None:
            parts["SharedAccessSignature"] = self.signature.reveal()
        if self.entity:
            parts["EntityPath"] = self.entity
        if self.emulator:
            # The SDK accepts exactly lower-case "true", and no path after the port.
            parts |= {"Endpoint": f"sb://{netloc}", "UseDevelopmentEmulator": "true"}
        return Secret(";".join(f"{name}={value}" for name, value in parts.items()))

    def check_entity(self, queue: str) -> None:
        """Raise ConfigurationError if the connection string is for another queue only."""
        if self.entity and queue.casefold() != self.entity.casefold():
            raise ConfigurationError(
                f"the connection string is for queue {self.entity!r} only (EntityPath), and this "
                f"is queue {queue!r}: use {self.entity!r}, or a connection string without "
                "EntityPath, with a key of the namespace"
            )

    def __str__(self) -> str:
        return f"servicebus://{self.host}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class StorageQueueAddress:
    """The queues of a storage account. Entra ID is used if there is neither a key nor a signature.

    * `endpoint`: the URL of the queues, without a signature.
    """

    scheme: ClassVar[str] = "storagequeue"

    account: str
    endpoint: str
    key: Secret | None = None
    signature: Secret | None = None

    @property
    def uses_entra(self) -> bool:
        """True if the credential comes from azure-identity."""
        return self.key is None and self.signature is None

    def __str__(self) -> str:
        return f"storagequeue://{self.account}"


@dataclass(frozen=True, slots=True)
class TablesAddress:
    """The tables of a storage account, and its blobs for values that do not fit a row.

    * `endpoint`, `blob_endpoint`: their URLs, without a signature.
    """

    account: str
    endpoint: str
    blob_endpoint: str
    key: Secret | None = None
    signature: Secret | None = None

    @property
    def uses_entra(self) -> bool:
        """True if the credential comes from azure-identity."""
        return self.key is None and self.signature is None

    def __str__(self) -> str:
        return f"tables://{self.account}"


@dataclass(frozen=True, slots=True)
class BlobAddress:
    """A container of a storage account, or a folder in it.

    Entra ID is used if there is neither a key nor a signature.

    * `endpoint`: the account's blob URL.
    * `prefix`: the start of every blob's name, without a slash at its end; "" for none.
    """

    account: str
    endpoint: str
    container: str
    prefix: str = ""
    key: Secret | None = None
    signature: Secret | None = None

    @property
    def uses_entra(self) -> bool:
        """True if the credential comes from azure-identity."""
        return self.key is None and self.signature is None

    def name_of(self, name: str) -> str:
        """The full name of the blob `name` in this folder."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"blob://{self.account}/{self.name_of_container()}"

    def name_of_container(self) -> str:
        """The container, or CONTAINER/PREFIX if there is a prefix."""
        return f"{self.container}/{self.prefix}" if self.prefix else self.container


BrokerAddress: TypeAlias = LocalAddress | ServiceBusAddress | StorageQueueAddress
ResultsAddress: TypeAlias = LocalAddress | TablesAddress
