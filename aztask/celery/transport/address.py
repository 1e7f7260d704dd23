"""Finds the broker's address in a Kombu connection, and reports it without secrets.

    aztask+local:///var/lib/app/queues.db     aztask+servicebus://NAMESPACE
    aztask+storagequeue://ACCOUNT             aztask://   (the address is in AZTASK_BROKER)

Rules
1. Behind ``aztask+`` stands any URL of a broker, as in ``App(broker=...)``. A connection string is
   no URL: it goes into AZTASK_BROKER or the transport option ``broker``.
2. The transport option ``broker`` is used with ``aztask://`` only; a second address is refused.
3. After a failover Kombu has taken the URL apart; it is put together again here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aztask.config import mask
from aztask.errors import ConfigurationError
from aztask.queues.kinds import kind_named

ALIAS: Final = "aztask"
VARIABLE: Final = "AZTASK_BROKER"

_PREFIX: Final = f"{ALIAS}+"
_EMPTY: Final = f"{ALIAS}://"


def address_of(client: Any) -> str | None:
    """The address in the URL of a Kombu connection; None for ``aztask://``.

    * `client`: a `kombu.Connection`.

    Raises ConfigurationError if a name follows ``aztask://``: it does not say which service it
    belongs to.
    """
    hostname = client.hostname or ""
    if "://" in hostname:
        address = hostname.removeprefix(_PREFIX)
        if not address.startswith(_EMPTY):
            return str(address)
        if address == _EMPTY:
            return None
        name = address.removeprefix(_EMPTY)
        raise ConfigurationError(
            f"{mask(address)} does not say which service it means; write"
            f" aztask+servicebus://{mask(name)} or aztask+storagequeue://{mask(name)}"
        )
    transport = client.transport_cls
    kind = transport.removeprefix(_PREFIX) if isinstance(transport, str) else ""
    if not kind or kind == transport:
        return None
    path = (client.virtual_host or "").lstrip("/") if _has_path(kind) else ""
    name = hostname.removeprefix(_PREFIX)
    return f"{kind}://{name}/{path}" if path else f"{kind}://{name}"


def _has_path(scheme: str) -> bool:
    kind = kind_named(scheme)
    return kind is not None and kind.capabilities.path_in_url


def broker_of(client: Any, environ: Mapping[str, str]) -> Any:
    """What names the broker: the URL's address, the option ``broker``, or AZTASK_BROKER.

    Raises ConfigurationError if the URL and the option both name one.
    """
    address, given = address_of(client), client.transport_options.get("broker")
    if address is not None and given is not None and given != address:
        raise ConfigurationError(
            f"the URL names the broker {mask(address)}, and the transport option broker another"
            " one; remove the option, or write aztask:// as the URL"
        )
    if address is not None or given is not None:
        return given if address is None else address
    return environ.get(VARIABLE) or None


def shown(client: Any) -> str:
    """The URL of a connection with its secrets masked, for banners and logs."""
    hostname = client if isinstance(client, str) else client.hostname or ""
    address = hostname.removeprefix(_PREFIX)
    if "://" not in address or address.startswith(_EMPTY):
        return _EMPTY
    return f"{_PREFIX}{mask(address)}"
