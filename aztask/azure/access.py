"""Helpers of all Azure adapters: credentials, signatures, and logs without secrets."""

from __future__ import annotations

import base64
import importlib
import logging
import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from azure.core.credentials import TokenCredential
from azure.core.exceptions import AzureError

from aztask.errors import ConfigurationError
from aztask.support.display import SecretFilter, mask, one_line, safe_str
from aztask.support.keyed import KeyedDigest
from aztask.support.late import install_command

_LOGGERS: Final = (
    "azure",
    "azure.core.pipeline.policies.http_logging_policy",
    "azure.data.tables",
    "azure.identity",
    "azure.servicebus",
    "azure.storage.blob",
    "azure.storage.queue",
    "urllib3",
    "urllib3.connectionpool",
)


PUBLIC_CLOUDS: Final = (
    *("login.microsoftonline.com", "login.microsoftonline.us"),
    *("login.chinacloudapi.cn", "login.partner.microsoftonline.cn"),
)
"""The hosts of Entra ID (Microsoft's documentation, "National clouds")."""


STORAGE_SCOPE: Final = "https://storage.azure.com/.default"


class SharedKey:
    """Signs requests with the key of a storage account. Any thread may call.

    Why not the SDK's policy: it decodes the key anew for each request, and sorts the headers with a
    table of Unicode weights [measured: 30 µs of CPU time for a delete, 7 µs here].

    Source: the service's documentation, "Authorize with Shared Key".
    """

    def __init__(self, account: str, key: str) -> None:
        """key: as the portal shows it, base64. Raises ValueError if it is not."""
        self._account = account
        self._keyed = KeyedDigest(base64.b64decode(key))

    def authorization(
        self, method: str, url: str, headers: Mapping[str, str], length: int = 0
    ) -> str:
        """The value of the header ``Authorization``.

        * `url`: with the path and the query as they are sent.
        * `headers`: all that are sent, by name. ``Content-Type`` and those that begin with
          ``x-ms-``, in lower case, are signed; more that the service wants signed may not be there.
        * `length`: of the body, in bytes.
        """
        _, slash, after = url.partition("://")[2].partition("/")
        path, _, query = after.partition("?")
        own = sorted(name for name in headers if name.startswith("x-ms-"))
        asked = sorted(each.partition("=") for each in query.split("&") if each)
        lines = [
            *(method, "", "", str(length or ""), "", headers.get("Content-Type", "")),
            *("", "", "", "", "", ""),
            *(f"{name}:{headers[name]}" for name in own),
            f"/{self._account}{slash}{path}",
            *(f"{name.lower()}:{unquote(value)}" for name, _, value in asked),
        ]
        mine = self._keyed.digest("\n".join(lines).encode())
        return f"SharedKey {self._account}:{base64.b64encode(mine).decode()}"


def default_credential() -> TokenCredential:
    """The credential that azure-identity finds in the environment.

    Raises ConfigurationError if azure-identity is not installed, or if a variable that it reads is
    malformed.
    """
    return _made("DefaultAzureCredential", **_discovery())


def named_credential(text: str) -> TokenCredential:
    """The credential of one identity.

    * `text`: ``CLIENT_ID`` of a managed identity, or ``TENANT_ID/CLIENT_ID/SECRET``.

    Raises ConfigurationError as `default_credential` does, and for another form.
    """
    first, *others = text.split("/", 2)
    if not others:
        return _made("ManagedIdentityCredential", client_id=first)
    if len(others) == 1:
        raise ConfigurationError(
            "an identity is CLIENT_ID (a managed one) or TENANT_ID/CLIENT_ID/SECRET"
        )
    return _made("ClientSecretCredential", first, *others, **_discovery())


def storage_trouble(credential: TokenCredential) -> str | None:
    """Why this credential gets no token for a storage account; None if it gets one."""
    try:
        credential.get_token(STORAGE_SCOPE)
    except AzureError as error:
        return token_trouble(str(error.message))
    return None


def _discovery() -> dict[str, bool]:
    """Options for a cloud of one's own, such as Azure Stack: AZURE_AUTHORITY_HOST names it.

    Before it asks such a host, azure-identity would ask login.microsoftonline.com whether it knows
    the host: it does not, and may not even be reachable.
    """
    given = os.environ.get("AZURE_AUTHORITY_HOST", "")
    host = (given.partition("://")[2] or given).partition("/")[0]
    known = not host or host.endswith(PUBLIC_CLOUDS)
    return {} if known else {"disable_instance_discovery": True}


def _made(kind: str, *given: str, **options: Any) -> TokenCredential:
    try:
        identity = importlib.import_module("azure.identity")  # an extra, and slow to import
    except ImportError:
        raise ConfigurationError(
            f"Entra ID needs azure-identity; install it with: {install_command('identity')}, or "
            "give a connection string"
        ) from None
    quiet_sdk("azure.identity")  # its errors hold the same long text that it logs
    try:
        credential: TokenCredential = getattr(identity, kind)(*given, **options)
    except (
        Exception
    ) as error:  # each credential in the chain reads its own variables, and may raise anything
        raise ConfigurationError(
            f"azure-identity cannot use its environment variables: {safe_str(error)}; check "
            "AZURE_AUTHORITY_HOST, AZURE_TENANT_ID and the other AZURE_, IDENTITY_ and MSI_ ones"
        ) from error
    return credential


def token_trouble(text: str) -> str:
    """Why azure-identity has no token: one line of the error of its chain, which has many.

    The chain stops at the first credential that is configured and refused, so the last one that it
    names tells the reason.
    """
    attempts = [line.strip() for line in text.splitlines() if line.startswith("\t")]
    if not attempts:  # of one credential: the first line says it, and pages may follow
        return one_line(mask(text.strip().partition("\n")[0]), TROUBLE_LIMIT)
    last = attempts[-1]
    if all(_ABSENT.search(each) for each in attempts):
        last = f"no credential is configured here; {last}"
    return one_line(mask(last), TROUBLE_LIMIT)


_ABSENT: Final = re.compile("not fully configured|unavailable|not found|not installed|not set up")
TROUBLE_LIMIT: Final = 300


def quiet_sdk(name: str) -> None:
    """Keep an SDK's own lines out of the log, unless you set a level for its logger.

    aztask logs the same facts once, without a traceback for each lost connection.
    """
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


def filter_secrets() -> None:
    """Mask secrets in the logs of the SDKs and urllib3: their debug lines hold whole SAS URLs."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, SecretFilter) for each in logger.filters):
            logger.addFilter(SecretFilter())
