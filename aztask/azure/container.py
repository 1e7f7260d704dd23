"""Creates clients of blob containers, with the settings that aztask needs.

Rule: the SDK's retries are off. The caller decides about retries, and every request has a time-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from azure.core.credentials import AzureSasCredential, TokenCredential
from azure.core.exceptions import AzureError, ResourceExistsError
from azure.storage.blob import ContainerClient

from aztask.address.addresses import BlobAddress
from aztask.azure.access import default_credential, filter_secrets
from aztask.support.display import mask
from aztask.version import __version__

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 30.0
SINGLE_PUT_BYTES: Final = 256 << 20
"""A file up to this size is one request; event files are closed at 64 MiB."""


def container_client(
    address: BlobAddress, *, given: TokenCredential | None = None, **options: Any
) -> ContainerClient:
    """The SDK's client of a container: no retries, time-outs set, and no secrets in its logs.

    given: replaces `default_credential` if the address has no key and no signature.
    options: override the client's settings.
    """
    filter_secrets()
    credential: Any = None
    if address.key is not None:
        credential = {"account_name": address.account, "account_key": address.key.reveal()}
    elif address.signature is not None:
        credential = AzureSasCredential(address.signature.reveal().lstrip("?"))
    else:
        credential = given or default_credential()
    settings: Mapping[str, Any] = {
        "retry_total": 0,
        "connection_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "max_single_put_size": SINGLE_PUT_BYTES,
        "user_agent": f"aztask/{__version__}",
        **options,
    }
    return ContainerClient(address.endpoint, address.container, credential=credential, **settings)


def create(container: ContainerClient) -> None:
    """Create the container, unless another worker just did. Raises AzureError."""
    try:
        container.create_container()
    except ResourceExistsError:
        return


def reason_of(error: AzureError) -> str:
    """The error's code and first line, masked. The rest of its text is headers and XML."""
    code = getattr(error, "error_code", None)
    lines = (str(error.message) or type(error).__name__).splitlines()
    return mask(f"{getattr(code, 'value', code) or type(error).__name__}: {lines[0]}")[:300]
