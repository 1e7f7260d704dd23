"""What a broker is before it is opened: its addresses, its names, what it can do and has.

Nothing here asks a service, or imports an SDK: `BrokerKind.open` does.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from aztask.address.addresses import BlobAddress, LocalAddress
from aztask.address.schemes import SCHEMES
from aztask.queues.base import Broker, Capabilities
from aztask.queues.engine import Database


class Opening(Protocol):
    """What a broker may use of the process that opens it.

    * `poll_ceiling`: the longest pause in seconds between two polls of an empty queue.
    """

    @property
    def poll_ceiling(self) -> float: ...

    def database(self, address: LocalAddress) -> Database:
        """The database of a file; a result store in the same file shares it."""
        ...


class BrokerKind(ABC):
    """One kind of broker, as the ``KIND`` of a module that `SCHEMES` names.

    * `capabilities`: what every broker of the kind can do and has, unless it says otherwise itself.
    """

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def parse(self, rest: str) -> Any:
        """The address in ``SCHEME://rest``: a value whose class has the ``scheme``.

        Raises ConfigurationError.
        """

    @abstractmethod
    def check_name(self, queue: str) -> None:
        """Raise InvalidQueueName unless the service allows the name."""

    @abstractmethod
    def open(self, address: Any, opening: Opening) -> Broker:
        """A broker of this address."""

    def identity(self, address: Any) -> str | None:
        """The broker's name for `aztask.address.owner`; None if only the open broker knows it."""
        return None

    def advice_place(self, address: Any, text: str, container: str) -> Path | BlobAddress | None:
        """Where lease advice lies by itself: beside a file, in a container, or nowhere.

        * `text`: what the address was read from.
        * `container`: the name of the container, where it is one.
        """
        return None


def kind_named(scheme: str) -> BrokerKind | None:
    """The kind of broker that a scheme belongs to; None if there is none."""
    module = SCHEMES.get(scheme)
    if module is None:
        return None
    kind: BrokerKind = importlib.import_module(module).KIND
    return kind


def kind_of(address: object) -> BrokerKind | None:
    """The kind of broker that an address is for; None for anything else."""
    return kind_named(getattr(type(address), "scheme", ""))
