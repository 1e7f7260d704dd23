"""Who a stored row belongs to: the broker whose messages it is about, and the app that declares it.

Several apps may share one result store, each with a broker of its own. A worker acts only on rows
of its own owner: it sends, repairs and deletes no others.

Rules
1. What is sent or settled belongs to the *broker* alone, whatever the app is called: workflows,
   held calls, dead letters, pauses, cancellations, runs. So commands without an app, and senders
   under another app's name, act on it.
2. What code declares under a name belongs to the broker and the *app*: schedules, limits, breakers.
3. A broker's name is made from its address without credentials: Entra ID and a connection string
   give the same. ``App(owner=...)`` replaces it where the address does not fit, for example behind
   a private host name.
4. A row without an owner was written by a release before 0.2, or by a program without a broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Final, Protocol, runtime_checkable

from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress

_DEFAULT_PORTS: Final = (None, 443, 5671)
_MARK_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a stored row.

    * `broker`: the broker's name, such as ``servicebus://shop.servicebus.windows.net``; "" if the
      owner is not known.
    * `app`: the app's name; "" for rows that belong to the broker alone (rule 1).
    """

    broker: str = ""
    app: str = ""

    @property
    def known(self) -> bool:
        """True if there is an owner."""
        return bool(self.broker)

    @property
    def of_broker(self) -> Owner:
        """The owner of what is sent or settled: the broker alone."""
        return Owner(self.broker)

    @property
    def mark(self) -> str:
        """A short text for keys of rows: 16 hexadecimal digits; "" if the owner is not known.

        Two owners never share one in practice (64 bits of SHA-256).
        """
        return _mark_of(self.broker, self.app) if self.broker else ""

    def __str__(self) -> str:
        if not self.broker:
            return "no owner"
        return f"{self.app} on {self.broker}" if self.app else self.broker


@lru_cache(maxsize=256)
def _mark_of(broker: str, app: str) -> str:
    """The mark of an owner; the keys of every row and every query have it."""
    text = f"{broker}\0{app}".encode("utf-8", "surrogatepass")
    return sha256(text).hexdigest()[:_MARK_DIGITS]


NO_OWNER: Final = Owner()
"""The owner of rows that were written before rows had owners."""


@runtime_checkable
class Identified(Protocol):
    """A broker that knows its own name, for `Owner.broker`."""

    @property
    def identity(self) -> str:
        """The broker's name, without credentials; equal for all who use the same queues."""
        ...


def service_name(address: ServiceBusAddress | StorageQueueAddress) -> str:
    """The name of the broker at an address, in lower case and without credentials (rule 3).

    A port is a part of it only if it is not the service's own: two emulators of one machine differ.
    """
    if isinstance(address, ServiceBusAddress):
        port = "" if address.port in _DEFAULT_PORTS else f":{address.port}"
        return f"servicebus://{address.host.lower()}{port}"
    place = address.endpoint.partition("://")[2].rstrip("/").lower()
    host, _, path = place.partition("/")
    host = host.removesuffix(":443")
    account = address.account.lower()
    prefix = f"{account}.queue."
    if host.startswith(prefix):
        return f"storagequeue://{account}.{host.removeprefix(prefix)}"
    return f"storagequeue://{host}/{path}" if path else f"storagequeue://{account}@{host}"


def file_name(identity: str) -> str:
    """The name of a local broker, from the id that its file holds."""
    return f"local://{identity}"
