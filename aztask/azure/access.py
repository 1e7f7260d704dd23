"""Helpers of all Azure adapters: the default credential, and logs without secrets."""

from __future__ import annotations

import importlib
import logging
from typing import Final

from azure.core.credentials import TokenCredential

from aztask.errors import ConfigurationError
from aztask.support.display import safe_str
from aztask.support.late import install_command
from aztask.support.masking import SecretFilter

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


def default_credential() -> TokenCredential:
    """The credential that azure-identity finds in the environment.

    Raises ConfigurationError if azure-identity is not installed, or if a variable that it reads is
    malformed.
    """
    try:
        identity = importlib.import_module("azure.identity")  # an extra, and slow to import
    except ImportError:
        raise ConfigurationError(
            f"Entra ID needs azure-identity; install it with: {install_command('identity')}, or "
            "give a connection string"
        ) from None
    quiet_sdk("azure.identity")  # its errors hold the same long text that it logs
    try:
        credential: TokenCredential = identity.DefaultAzureCredential()
    except (
        Exception
    ) as error:  # each credential in the chain reads its own variables, and may raise anything
        raise ConfigurationError(
            f"azure-identity cannot use its environment variables: {safe_str(error)}; check "
            "AZURE_AUTHORITY_HOST, AZURE_TENANT_ID and the other AZURE_, IDENTITY_ and MSI_ ones"
        ) from error
    return credential


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
