"""What the setting ``payloads`` names: a container, a directory, or nothing."""

from __future__ import annotations

import os

from aztask.address.addresses import BlobAddress
from aztask.address.urls import parse_container
from aztask.errors import ConfigurationError
from aztask.support.checks import shown
from aztask.support.display import Secret


def place_of(payloads: str | None, account: Secret | None) -> BlobAddress | str | None:
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
