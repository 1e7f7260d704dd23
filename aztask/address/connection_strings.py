"""Read Azure connection strings into the values of `aztask.address.addresses`.

Rules
1. No error shows a key, a signature or a part of either: it names a part of the connection string
   by its position, or by a key name from our list, and never quotes it.
2. Nothing is guessed: a missing, duplicate or unknown key is an error. The SDKs let the last
   duplicate win and ignore unknown keys, which hides a wrongly pasted secret.

Source of the key names: the strings that the Azure portal shows, and what azure-servicebus 7.15 and
azure-storage-queue 12.18 read; of the development account: the Azurite documentation.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from aztask.address.addresses import (
    BlobAddress,
    ServiceBusAddress,
    StorageQueueAddress,
    TablesAddress,
)
from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.display import Secret, printable

STORAGE_SUFFIX = "core.windows.net"

_SERVICE_BUS_KEYS = (
    "Endpoint",
    "SharedAccessKeyName",
    "SharedAccessKey",
    "SharedAccessSignature",
    "EntityPath",
    "UseDevelopmentEmulator",
)
_STORAGE_KEYS = (
    "DefaultEndpointsProtocol",
    "AccountName",
    "AccountKey",
    "EndpointSuffix",
    "SharedAccessSignature",
    "QueueEndpoint",
    "TableEndpoint",
    "BlobEndpoint",
    "FileEndpoint",
    "QueueSecondaryEndpoint",
    "TableSecondaryEndpoint",
    "BlobSecondaryEndpoint",
    "FileSecondaryEndpoint",
    "UseDevelopmentStorage",
)
_DEVELOPMENT_ACCOUNT = "devstoreaccount1"
# Azurite's well-known key: published, the same everywhere, and good for 127.0.0.1 alone.
_DEVELOPMENT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_DEVELOPMENT_PORTS = {"blob": 10000, "queue": 10001, "table": 10002}

_LONGEST_SHOWN = 24
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def wrong(what: str, instead: str) -> ConfigurationError:
    """The error, in the form that all have here: what is wrong; what to write instead."""
    return ConfigurationError(f"{what}; {instead}")


def quoted(name: str) -> str:
    """`name` for an error: shown only if it is short, because a long one may be a pasted key."""
    return printable(name) if len(name) <= _LONGEST_SHOWN else f"a text of {len(name)} characters"


def split(text: str) -> dict[str, str]:
    """The ``Key=value`` parts, in order; known keys get their usual spelling.

    Raises ConfigurationError for a part without ``=``, an empty value, a duplicate or unknown key.
    """
    spelling = {name.lower(): name for name in (*_SERVICE_BUS_KEYS, *_STORAGE_KEYS)}
    parts: dict[str, str] = {}
    for number, part in enumerate(text.rstrip(";").split(";"), start=1):
        where = f"part {number} of the connection string"
        name, equals, value = part.partition("=")
        if not equals:
            raise wrong(f"{where} has no '='", "paste it as the portal shows it, all on one line")
        known = spelling.get(name.strip().lower())
        if known is None:
            hint = did_you_mean(name, list(spelling.values()))
            raise ConfigurationError(
                f"the key name in {where} is not known.{hint} Paste it as the portal shows it."
            )
        if known in parts:
            raise wrong(f"the connection string has {known} twice", "keep one of them")
        if not value.strip():
            raise wrong(f"{known} in the connection string is empty", "paste the whole string")
        parts[known] = value.strip()
    return parts


def is_service_bus(parts: Mapping[str, str]) -> bool:
    """True for Service Bus, False for a storage account."""
    return "Endpoint" in parts or not any(name in _STORAGE_KEYS for name in parts)


def service_bus(parts: Mapping[str, str]) -> ServiceBusAddress:
    """The address in a Service Bus connection string, which must be complete."""
    _only(parts, _SERVICE_BUS_KEYS, "Service Bus")
    if "Endpoint" not in parts:
        raise wrong("the connection string has no Endpoint", "begin with Endpoint=sb://HOST/")
    host, port = service_bus_endpoint(parts["Endpoint"])
    emulator = _flag(parts, "UseDevelopmentEmulator")
    key, signature = parts.get("SharedAccessKey"), parts.get("SharedAccessSignature")
    if key is not None and signature is not None:
        raise wrong(
            "the connection string has both SharedAccessKey and SharedAccessSignature",
            "keep one of them",
        )
    if key is None and signature is None:
        raise wrong(
            "the connection string has no SharedAccessKey",
            "add it, or write servicebus://NAMESPACE to use Entra ID",
        )
    if key is not None and "SharedAccessKeyName" not in parts:
        raise wrong("the connection string has no SharedAccessKeyName", "add the policy's name")
    if key is not None and not emulator:  # the emulator takes any text
        _check_key(key, "SharedAccessKey")
    return ServiceBusAddress(
        host,
        port,
        parts.get("SharedAccessKeyName"),
        Secret(key) if key is not None else None,
        Secret(signature) if signature is not None else None,
        emulator,
        parts.get("EntityPath"),
    )


def storage_queue(parts: Mapping[str, str]) -> StorageQueueAddress:
    """The queues of the account in a storage connection string."""
    account = _storage(parts)
    return StorageQueueAddress(
        account.name, account.endpoint("queue"), account.key, account.signature
    )


def tables(parts: Mapping[str, str]) -> TablesAddress:
    """The tables and blobs of the account in a storage connection string."""
    account = _storage(parts)
    return TablesAddress(
        account.name,
        account.endpoint("table"),
        account.endpoint("blob"),
        account.key,
        account.signature,
    )


def blobs(parts: Mapping[str, str], container: str, prefix: str) -> BlobAddress:
    """A container of the account in a storage connection string."""
    account = _storage(parts)
    return BlobAddress(
        account.name, account.endpoint("blob"), container, prefix, account.key, account.signature
    )


@dataclass(frozen=True, slots=True)
class _Account:
    """A storage account: its name, its credential and the URLs of its services."""

    name: str
    parts: Mapping[str, str]
    key: Secret | None
    signature: Secret | None

    def endpoint(self, service: str) -> str:
        """The URL of ``"queue"``, ``"table"`` or ``"blob"``: as given, or as the SDK forms it."""
        given = f"{service.capitalize()}Endpoint"
        if given in self.parts:
            return _checked_url(self.parts[given], given)
        if "AccountName" not in self.parts:
            raise wrong(f"the connection string has no {given}", f"add {given} or AccountName")
        suffix = check_host(self.parts.get("EndpointSuffix", STORAGE_SUFFIX), "EndpointSuffix")
        protocol = self.parts.get("DefaultEndpointsProtocol", "https")
        return f"{protocol}://{self.name}.{service}.{suffix}"


def _storage(parts: Mapping[str, str]) -> _Account:
    _only(parts, _STORAGE_KEYS, "storage")
    if _flag(parts, "UseDevelopmentStorage"):
        _only(parts, ("UseDevelopmentStorage",), "UseDevelopmentStorage=true")
        return _Account(
            _DEVELOPMENT_ACCOUNT, _DEVELOPMENT_ENDPOINTS, Secret(_DEVELOPMENT_KEY), None
        )
    if parts.get("DefaultEndpointsProtocol", "https").lower() not in ("http", "https"):
        raise wrong("DefaultEndpointsProtocol is neither http nor https", "write https")
    key, signature = parts.get("AccountKey"), parts.get("SharedAccessSignature")
    if key is not None and signature is not None:
        raise wrong(
            "the connection string has both AccountKey and SharedAccessSignature",
            "keep one of them",
        )
    if key is None and signature is None:
        raise wrong(
            "the connection string has neither AccountKey nor SharedAccessSignature",
            "add one, or write storagequeue://ACCOUNT or tables://ACCOUNT to use Entra ID",
        )
    if key is not None:
        if "AccountName" not in parts:
            raise wrong("the connection string has no AccountName", "add it")
        _check_key(key, "AccountKey")
    return _Account(
        _account_name(parts),
        parts,
        Secret(key) if key is not None else None,
        Secret(_checked_signature(signature)) if signature is not None else None,
    )


_DEVELOPMENT_ENDPOINTS = {
    f"{service.capitalize()}Endpoint": f"http://127.0.0.1:{port}/{_DEVELOPMENT_ACCOUNT}"
    for service, port in _DEVELOPMENT_PORTS.items()
}


def _account_name(parts: Mapping[str, str]) -> str:
    """The given name, or that in the first endpoint's host (only for strings with a signature)."""
    name = parts.get("AccountName")
    if name is None:
        endpoints = [parts[key] for key in parts if key.endswith("Endpoint")]
        if not endpoints:
            raise wrong("the connection string has neither AccountName nor an endpoint", "add one")
        name = (urlsplit(_checked_url(endpoints[0], "the endpoint")).hostname or "").split(".")[0]
    elif not re.fullmatch(r"[a-z0-9]{3,24}", name):
        raise wrong(
            f"AccountName is {quoted(name)}, which is not a name of a storage account",
            "a name has 3 to 24 lower-case letters and digits",
        )
    return name


def _only(parts: Mapping[str, str], allowed: Sequence[str], kind: str) -> None:
    for name in parts:
        if name not in allowed:
            raise wrong(f"{name} does not belong in a connection string of {kind}", "remove it")


def _flag(parts: Mapping[str, str], name: str) -> bool:
    value = parts.get(name, "false").lower()
    if value not in ("true", "false"):
        raise wrong(f"{name} is neither true nor false", f"write {name}=true")
    return value == "true"


def _check_key(key: str, name: str) -> None:
    """Refuse a key that is not base64: it was cut short or pasted from the wrong place."""
    try:
        base64.b64decode(key.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        # "from None": the cause's text might quote the key in some Python version.
        raise wrong(
            f"{name} in the connection string is not base64",
            "copy the whole key again, including the = at its end",
        ) from None


def _checked_signature(signature: str) -> str:
    """A shared access signature without a leading ``?``; it must have a ``sig`` field."""
    token = signature.removeprefix("?")
    if "sig" not in dict(parse_qsl(token, keep_blank_values=True)):
        raise wrong(
            "SharedAccessSignature in the connection string has no sig= field",
            "copy the whole signature again",
        )
    return token


def service_bus_endpoint(text: str) -> tuple[str, int | None]:
    """The host and port of ``sb://HOST[:PORT]/``. Raises ConfigurationError."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in ("sb", "amqp", "amqps"):
        raise wrong("Endpoint does not begin with sb://", "write Endpoint=sb://HOST/")
    netloc, _, path = rest.partition("/")
    if path or "?" in netloc or "#" in netloc:
        raise wrong("Endpoint has something after the host name", "write Endpoint=sb://HOST/")
    return host_and_port(netloc, "Endpoint")


def _checked_url(text: str, name: str) -> str:
    """An http(s) URL of a storage service, without its last slash."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise wrong(f"{name} does not begin with https://", f"write {name}=https://HOST/")
    if "?" in rest or "#" in rest:
        raise wrong(
            f"{name} has something after the path", "put a signature in SharedAccessSignature="
        )
    host_and_port(rest.partition("/")[0], name)
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def host_and_port(netloc: str, name: str) -> tuple[str, int | None]:
    """The host in lower case, and the port or None, of ``HOST[:PORT]``.

    * `name`: where it was written, for the error.

    Raises ConfigurationError.
    """
    if "@" in netloc:
        raise wrong(f"{name} holds a user name", "write the host name alone")
    bracketed = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\])(?::(.*))?", netloc)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise wrong(f"{name} has a bad IPv6 address", "write [::1]") from None
    else:
        host, colon, digits = netloc.partition(":")
        port = digits if colon else None
        check_host(host, name)
    return host.lower(), check_port(port, name)


def check_port(text: str | None, name: str) -> int | None:
    """The port as a number, or None if there is none. Raises ConfigurationError."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise wrong(f"the port in {name} is not a number from 1 to 65535", "correct it")
    return int(text)


def check_host(text: str, name: str) -> str:
    """`text` in lower case if it is a valid host name. Raises ConfigurationError otherwise."""
    labels = text.split(".")
    if not 0 < len(text) <= 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise wrong(f"the host name in {name} is not valid", "letters, digits, hyphens and dots")
    return text.lower()
