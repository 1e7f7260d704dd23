"""Encryption keys that a key of Azure Key Vault has wrapped.

Rules
1. A key in the settings is ``https://VAULT.vault.azure.net/keys/NAME/VERSION#WRAPPED``: a data key
   that only the vault can unwrap (envelope encryption). The text is no secret.
2. The vault is asked once in each process, which keeps the data key in memory. So no message costs
   a request, and while the vault is unreachable, running processes go on.
3. The text has the version of the vault's key. So a vault that rotates its key still unwraps it, as
   long as that version is enabled.
4. What failed is not asked again for `PAUSE` seconds: each message may need the key.
"""

from __future__ import annotations

import importlib
import json
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final

from azure.core.exceptions import AzureError

from aztask.azure.access import default_credential, filter_secrets, quiet_sdk
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.support import clock
from aztask.support.display import safe_str
from aztask.support.late import install_command
from aztask.version import __version__

PAUSE: Final = 5.0
_KEY_BYTES: Final = 32
_ALGORITHM: Final = "RSA-OAEP-256"
_FORM: Final = re.compile(
    r"https://(?P<host>[A-Za-z0-9.:-]+)/keys/(?P<name>[A-Za-z0-9-]+)/(?P<version>[0-9A-Za-z]+)"
)
_WRAPPED: Final = re.compile(r"([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2,4})")
_WAYS: Final = {
    401: "the vault does not know the program's identity",
    403: "give the program's identity the role Key Vault Crypto Service Encryption User, and allow"
    " its network",
    404: "the key or its version was deleted",
}


class VaultKey:
    """A data key that a key of the vault has wrapped. Any thread may call."""

    __slots__ = ("_again", "_credential", "_data", "_id", "_trouble", "_wrapped", "what")

    def __init__(self, text: str, credential: Any = None) -> None:
        """Raises ConfigurationError for another form than that of rule 1.

        * `credential`: a token credential; `default_credential` without one.
        """
        key_id, _, wrapped = text.partition("#")
        found = _FORM.fullmatch(key_id)
        if found is None or not _WRAPPED.fullmatch(wrapped):
            raise ConfigurationError(
                "an encryption key of a vault is https://VAULT.vault.azure.net/keys/NAME/VERSION#..."
                " as aztask.azure.vaultkeys.new_key(...) makes it"
            )
        self._id, self._credential = key_id, credential
        self._wrapped = urlsafe_b64decode(wrapped + "=" * (-len(wrapped) % 4))
        self.what = f"the key {found['name']}/{found['version']} of {found['host']}"
        self._data = b""
        self._trouble, self._again = "", 0.0

    def __repr__(self) -> str:
        return f"<VaultKey: {self.what}>"

    def unwrapped(self) -> bytes:
        """The data key. Raises BrokerUnavailable, with one line that says what to do.

        If the process dies here, the next one asks anew: nothing is written anywhere.
        """
        if self._data:
            return self._data
        if clock.monotonic() < self._again:
            raise BrokerUnavailable(self._trouble)
        try:
            with _client(self._id, self._credential) as client:
                data: bytes = client.unwrap_key(_ALGORITHM, self._wrapped).key
        except (AzureError, ValueError) as error:  # ValueError: the host is no vault
            self._trouble = f"{self.what} {_told(error)}"
            self._again = clock.monotonic() + PAUSE
            raise BrokerUnavailable(self._trouble) from None
        if len(data) < _KEY_BYTES:
            raise ConfigurationError(f"{self.what} unwraps {len(data)} bytes, not {_KEY_BYTES}")
        self._data = data
        return data


def new_key(key_id: str, credential: Any = None) -> str:
    """A new data key for ``encryption_keys``, wrapped with the RSA key of a vault.

    * `key_id`: ``https://VAULT.vault.azure.net/keys/NAME``, or with a version; else the newest.
    * `credential`: a token credential; `default_credential` without one.

    It needs the permissions to get the key and to wrap with it. The data key is never shown:
    if the text is lost, what it has encrypted is lost. Raises ConfigurationError and
    BrokerUnavailable.
    """
    try:
        with _client(key_id, credential) as client:
            made = client.wrap_key(_ALGORITHM, secrets.token_bytes(_KEY_BYTES))
    except (AzureError, ValueError) as error:
        raise BrokerUnavailable(f"the key {safe_str(key_id)} {_told(error)}") from None
    text = f"{made.key_id}#{urlsafe_b64encode(made.encrypted_key).decode().rstrip('=')}"
    VaultKey(text)
    return text


def _client(key_id: str, credential: Any) -> Any:
    """The SDK's client of one key. Raises ConfigurationError without the extra ``keyvault``."""
    try:
        crypto = importlib.import_module("azure.keyvault.keys.crypto")
    except ImportError:
        raise ConfigurationError(
            f"keys of a vault need azure-keyvault-keys; install it with: "
            f"{install_command('keyvault')}"
        ) from None
    filter_secrets()
    quiet_sdk("azure.keyvault")
    return crypto.CryptographyClient(
        key_id,
        credential or default_credential(),
        connection_timeout=5.0,
        read_timeout=15.0,
        retry_total=0,
        user_agent=f"aztask/{__version__}",
    )


def _told(error: Exception) -> str:
    """What a failed request means, on one line, without the SDK's text of many lines."""
    if isinstance(error, ValueError):
        return "was not asked for: its host answers for another domain, so it is no vault"
    status = getattr(error, "status_code", None)
    if status is None or status >= 500 or status in (408, 429):
        shown = f"answers {status}" if status else safe_str(error, 160)
        return f"cannot be reached ({type(error).__name__}: {shown}): it is asked again"
    code = _code(error)
    if code == "KeyDisabled":
        return f"is disabled ({status}): enable this version again, or take the key out"
    way = _WAYS.get(status, "is the text after # complete, and of this key?")
    return f"was refused ({status} {code}): {way}"


def _code(error: Any) -> str:
    """The innermost error code of an answer of the vault; a proxy's page has none."""
    try:
        answer = json.loads(error.response.text())
    except ValueError:
        answer = None
    found = answer.get("error") if isinstance(answer, dict) else None
    code = None
    while isinstance(found, dict):
        code, found = found.get("code", code), found.get("innererror")
    return safe_str(code, 60) if isinstance(code, str) else "without a code"
