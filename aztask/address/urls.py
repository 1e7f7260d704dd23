"""Read broker and result URLs into the values of `aztask.address.addresses`.

* Brokers: ``local://`` (file ``.aztask/queues.db`` under the working directory),
  ``local:///absolute/path.db`` (on Windows ``local:///C:/path.db``), ``local://:memory:``, each
  with ``?durable=full`` if it must survive power loss, and ``?group=NAME`` if the users of a group
  share it;
  ``servicebus://NAMESPACE`` or a full host name (Entra ID);
  ``storagequeue://ACCOUNT`` or a full host name (Entra ID); an Azure connection string
  (`aztask.address.connection_strings`).
* Results: ``local://...``, ``tables://ACCOUNT``, a storage connection string.
* Containers: ``blob://ACCOUNT/CONTAINER`` (Entra ID), or ``CONTAINER`` together with a storage
  connection string; ``/FOLDER`` may follow.

Rules
1. Parsing does no I/O and finds every mistake that can be found without asking the service.
2. A mistake is a ConfigurationError of one line: what is wrong, what to write instead, no secret.

Source of the rules for names: Azure's naming rules for namespaces and storage accounts.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from aztask.address import connection_strings
from aztask.address.addresses import (
    MEMORY,
    BlobAddress,
    BrokerAddress,
    LocalAddress,
    ResultsAddress,
    ServiceBusAddress,
    StorageQueueAddress,
    TablesAddress,
)
from aztask.address.connection_strings import STORAGE_SUFFIX, check_host, check_port, quoted, wrong
from aztask.address.schemes import SCHEMES
from aztask.errors import ConfigurationError, did_you_mean
from aztask.support.checks import shown
from aztask.support.display import Secret, printable

DEFAULT_FILE = ".aztask/queues.db"
WINDOWS = os.name == "nt"
SERVICE_BUS_SUFFIX = "servicebus.windows.net"

_BROKER_FORMS = (
    "local://, servicebus://NAMESPACE, storagequeue://ACCOUNT or an Azure connection string"
)
_RESULTS_FORMS = "local://, tables://ACCOUNT or a storage connection string"
_CONTAINER_FORMS = "blob://ACCOUNT/CONTAINER, or CONTAINER beside a storage connection string"
_ACCOUNT_FORMS = "a storage connection string"
_HINTS = {
    "sb": "servicebus://NAMESPACE",
    "amqps": "servicebus://NAMESPACE",
    "azureservicebus": "servicebus://NAMESPACE",
    "azurestoragequeues": "storagequeue://ACCOUNT",
    "https": "storagequeue://ACCOUNT or servicebus://NAMESPACE",
    "sqlite": "local:///absolute/path.db",
    "file": "local:///absolute/path.db",
    "memory": "local://:memory:",
}
_BETWEEN = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*(?:://|=)|\Z)")
"""Between two addresses: an address begins with a scheme, or with the key of its first part."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_NAMESPACE = re.compile(r"[A-Za-z][A-Za-z0-9-]{4,48}[A-Za-z0-9]")
_CONTAINER = re.compile(r"(?=.{3,63}\Z)[a-z0-9]+(-[a-z0-9]+)*")
_PREFIX = re.compile(r"[A-Za-z0-9=-][A-Za-z0-9_=.-]*(/[A-Za-z0-9=-][A-Za-z0-9_=.-]*)*")
_LONGEST_PREFIX = 500
_LOCAL_OPTIONS = ("durable", "group")
_DRIVE = re.compile(r"/[A-Za-z]:[/\\]")
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,62}\$?")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")


def parse_broker(text: str) -> BrokerAddress:
    """The broker that `text` names. Raises ConfigurationError, which says what to write instead."""
    text = _checked(text, "broker", _BROKER_FORMS)
    if _BETWEEN.search(text):
        raise wrong(
            "several broker addresses are given where one is used",
            "name one; App(broker=[...]) and the AZTASK_BROKER of an app take several",
        )
    scheme, rest = _scheme_of(text)
    if scheme is None:
        parts = _parts_of(text, "broker", _BROKER_FORMS)
        if connection_strings.is_service_bus(parts):
            return connection_strings.service_bus(parts)
        return connection_strings.storage_queue(parts)
    if scheme in SCHEMES:
        address: BrokerAddress = importlib.import_module(SCHEMES[scheme]).KIND.parse(rest)
        return address
    if scheme == "tables":
        raise wrong("tables:// is a result store, not a broker", "write storagequeue://ACCOUNT")
    raise _unknown_scheme(scheme, "broker", tuple(SCHEMES), _BROKER_FORMS)


def split_brokers(given: Any) -> list[str] | None:
    """The addresses that a list, or a text with commas between them, names; None for one broker.

    A comma at the end makes a list of one. Raises ConfigurationError for an empty list.
    """
    if isinstance(given, str):
        if not _BETWEEN.search(given):
            return None
        return [each for each in _BETWEEN.split(given) if each]
    if not isinstance(given, list | tuple):
        return None
    if not given:
        raise wrong("the list of broker addresses is empty", "name at least one, or leave it out")
    return [found for each in given for found in split_brokers(each) or [each]]


def parse_brokers(given: Sequence[str]) -> list[BrokerAddress]:
    """The addresses of one app, which are of one kind. Raises ConfigurationError."""
    found = [parse_broker(each) for each in given]
    schemes = sorted({each.scheme for each in found})
    if len(schemes) > 1:
        raise wrong(
            f"the app has broker addresses of several kinds: {', '.join(schemes)}",
            "give all of one kind, or make an app for each",
        )
    if any(isinstance(each, LocalAddress) and each.in_memory for each in found):
        raise wrong("local://:memory: cannot be one of several addresses", "name a file")
    return found


def parse_results(text: str) -> ResultsAddress:
    """The result store that `text` names. Raises ConfigurationError like `parse_broker`."""
    text = _checked(text, "result store", _RESULTS_FORMS)
    scheme, rest = _scheme_of(text)
    if scheme is None:
        parts = _parts_of(text, "result store", _RESULTS_FORMS)
        if connection_strings.is_service_bus(parts):
            raise wrong("Service Bus stores no results", f"use {_RESULTS_FORMS}")
        return connection_strings.tables(parts)
    if scheme == "local":
        return local_address(rest)
    if scheme == "tables":
        host = _azure_host(rest, scheme, _ACCOUNT, f"table.{STORAGE_SUFFIX}")
        blob_host = host.replace(".table.", ".blob.", 1)
        return TablesAddress(host.partition(".")[0], f"https://{host}", f"https://{blob_host}")
    if scheme in SCHEMES:
        raise wrong(f"{scheme}:// is a broker and stores no results", f"use {_RESULTS_FORMS}")
    raise _unknown_scheme(scheme, "result store", ("local", "tables"), _RESULTS_FORMS)


def parse_container(text: str, account: str | None = None) -> BlobAddress:
    """The blob container that `text` names. Raises ConfigurationError like `parse_broker`.

    * `account`: the connection string of its storage account; None for Entra ID.
    """
    text = _checked(text, "container", _CONTAINER_FORMS)
    scheme, rest = _scheme_of(text)
    if scheme not in (None, "blob"):
        raise _unknown_scheme(scheme or "", "container", ("blob",), _CONTAINER_FORMS)
    if scheme is None and account is None:
        raise wrong(
            f"the container {quoted(text)} has no account",
            "write blob://ACCOUNT/CONTAINER to use Entra ID, or give the storage connection string",
        )
    host, path = rest.partition("/")[::2] if scheme else ("", rest)
    container, _, prefix = path.rstrip("/").partition("/")
    if not _CONTAINER.fullmatch(container):
        raise wrong(
            f"{quoted(container)} is not a name of a blob container",
            "a name has 3 to 63 lower-case letters, digits and single hyphens",
        )
    if prefix and not (len(prefix) <= _LONGEST_PREFIX and _PREFIX.fullmatch(prefix)):
        raise wrong(
            f"the folder {quoted(prefix)} in the container is not plain",
            "use letters, digits, '-', '_', '=' and '.', and begin no part with '.' or '_'",
        )
    if scheme is None:
        parts = _parts_of(_checked(account, "account", _ACCOUNT_FORMS), "account", _ACCOUNT_FORMS)
        return connection_strings.blobs(parts, container, prefix)
    if account is not None:
        raise wrong(
            "blob://ACCOUNT means Entra ID, and a connection string is given as well",
            f"write {container} alone for the container, or leave the connection string out",
        )
    host = _azure_host(host, "blob", _ACCOUNT, f"blob.{STORAGE_SUFFIX}")
    return BlobAddress(host.partition(".")[0], f"https://{host}", container, prefix)


def parse_payloads(payloads: str | None, account: Secret | None) -> BlobAddress | str | None:
    """The container or the directory that the setting `payloads` names; None for neither.

    Raises ConfigurationError.
    """
    if payloads is None or payloads == "off":
        return None
    if account is not None or payloads.startswith("blob://"):
        return parse_container(payloads, account.reveal() if account else None)
    if "://" in payloads or not {"/", os.sep}.intersection(payloads):
        raise ConfigurationError(
            f"payloads is {shown(payloads)}; write blob://ACCOUNT/CONTAINER, CONTAINER together "
            "with payloads_account, a directory such as ./payloads, or off"
        )
    return payloads


def _checked(text: object, what: str, forms: str) -> str:
    """Return `text` if it is one line without control characters. Raises ConfigurationError."""
    if not isinstance(text, str):
        raise wrong(f"a {what} is given as text, not as {type(text).__name__}", f"use {forms}")
    if not text.strip():
        raise wrong(f"the {what} is empty", f"use {forms}")
    if _CONTROL.search(text):
        raise wrong(
            f"the {what} contains a line break, NUL or another control character",
            "remove it (a file read as a whole often ends with a line break)",
        )
    if text != text.strip():
        raise wrong(f"the {what} begins or ends with a space", "remove it")
    return text


def _scheme_of(text: str) -> tuple[str | None, str]:
    match = _SCHEME.fullmatch(text)
    return (match[1].lower(), match[2]) if match else (None, text)


def _parts_of(text: str, what: str, forms: str) -> Mapping[str, str]:
    if "=" not in text:
        raise wrong(
            f"the {what} is {quoted(text)}, neither a URL nor a connection string",
            _meant(text) or f"use {forms}",
        )
    return connection_strings.split(text)


def _meant(text: str) -> str:
    """The URL to write instead of a host name or of ``local``; "" if that is not known."""
    scheme, colon, rest = text.partition(":")
    if scheme.lower() == "local":
        path = rest if rest.startswith("/") else ""
        return f"write local://{path if _CONTROL.search(path) is None else ''}"
    if not colon and text.lower().endswith(f".{SERVICE_BUS_SUFFIX}"):
        return "write servicebus:// before the host name"
    if not colon and text.lower().endswith(STORAGE_SUFFIX):
        return "write storagequeue://ACCOUNT, or tables://ACCOUNT for results"
    return ""


def _unknown_scheme(
    scheme: str, what: str, known: tuple[str, ...], forms: str
) -> ConfigurationError:
    hint = f" Did you mean {_HINTS[scheme]}?" if scheme in _HINTS else did_you_mean(scheme, known)
    return ConfigurationError(
        f"there is no {what} of the kind {quoted(scheme)}.{hint} Use {forms}."
    )


def service_bus_address(rest: str) -> ServiceBusAddress:
    """The namespace in ``servicebus://rest``. Raises ConfigurationError."""
    return ServiceBusAddress(_azure_host(rest, "servicebus", _NAMESPACE, SERVICE_BUS_SUFFIX))


def storage_queue_address(rest: str) -> StorageQueueAddress:
    """The storage account in ``storagequeue://rest``. Raises ConfigurationError."""
    host = _azure_host(rest, "storagequeue", _ACCOUNT, f"queue.{STORAGE_SUFFIX}")
    return StorageQueueAddress(host.partition(".")[0], f"https://{host}")


def local_address(rest: str) -> LocalAddress:
    """The file in ``local://rest``. Raises ConfigurationError."""
    location, _, query = rest.partition("?")
    if "#" in rest:
        raise wrong("a local:// URL has no '#' part", "write %23 for a # in the file name")
    path = _unquoted(location)
    if WINDOWS and _DRIVE.match(path):
        path = path.removeprefix("/")
    if path == "":
        path = str(Path.cwd() / DEFAULT_FILE)
    elif path != MEMORY:
        if not (path.startswith("/") or (WINDOWS and _DRIVE.match(f"/{path}"))):
            raise wrong(
                f"local:// takes an absolute path, not {printable(path)}",
                "write local:///absolute/path.db with three slashes, or local:// for "
                f"{DEFAULT_FILE} under the working directory",
            )
        if path.endswith("/") or _CONTROL.search(path):
            raise wrong(f"{printable(path)} is not a file name", "write local:///absolute/path.db")
    return LocalAddress(path, *_local_options(query))


def _unquoted(location: str) -> str:
    try:
        return unquote(location, errors="strict")
    except UnicodeDecodeError:
        raise wrong(
            f"the %-escapes in {printable(location)} are not UTF-8", "write the path as it is"
        ) from None


def _local_options(query: str) -> tuple[bool, str | None]:
    """(whether every commit is synced, the group that a new file is shared with)."""
    pairs = parse_qsl(query, keep_blank_values=True)
    if not pairs and query:
        pairs = [(query, "")]
    options = dict(pairs)
    if len(options) < len(pairs):
        raise wrong("a local:// URL has an option twice", "write each option once")
    for name in options:
        if name not in _LOCAL_OPTIONS:
            hint = did_you_mean(name, _LOCAL_OPTIONS)
            raise ConfigurationError(
                f"local:// has no option {printable(name)}.{hint} Write ?durable=full, ?group=NAME "
                "or nothing."
            )
    durable, group = options.get("durable", "normal"), options.get("group")
    if durable not in ("full", "normal"):
        raise wrong(
            f"durable={printable(durable)} is not known",
            "write ?durable=full (survives power loss) or ?durable=normal (the default)",
        )
    if group is not None and not _GROUP.fullmatch(group):
        raise wrong(f"group={printable(group)} is not a group's name", "write ?group=NAME")
    return durable == "full", group


def _azure_host(rest: str, scheme: str, name: re.Pattern[str], suffix: str) -> str:
    """The full host name in ``scheme://rest``, where `rest` is a bare name or a host name."""
    form = f"{scheme}://{'NAMESPACE' if scheme == 'servicebus' else 'ACCOUNT'}"
    if "@" in rest:
        raise wrong(
            f"a {scheme}:// URL holds no user name and no key",
            f"write {form} for Entra ID, or give the connection string that the portal shows",
        )
    host, _, path = rest.partition("/")
    if not host:
        raise wrong(f"{scheme}:// names nothing", f"write {form}")
    if path or "?" in rest or "#" in rest:
        raise wrong(
            f"a {scheme}:// URL ends after the name",
            f"write {form}; queues and options are given elsewhere, "
            "signatures in a connection string",
        )
    bare, colon, port = host.partition(":")
    if colon:
        check_port(port, f"the {scheme}:// URL")
        raise wrong(f"a {scheme}:// URL has no port", f"write {form}")
    if "." in bare:
        check_host(bare, f"the {scheme}:// URL")
        return bare.lower()
    if not name.fullmatch(bare):
        rule = (
            "6 to 50 letters, digits and hyphens, a letter first"
            if scheme == "servicebus"
            else "3 to 24 lower-case letters and digits"
        )
        raise wrong(f"{quoted(bare)} is not a name of this service", f"a name has {rule}")
    return f"{bare.lower()}.{suffix}"
