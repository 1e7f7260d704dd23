"""The real store of payloads in blobs, over the modelled service."""

from __future__ import annotations

from typing import Any, Final, cast

from aztask import App
from aztask.address.addresses import BlobAddress
from aztask.stores.payloads.blob import BlobPayloads
from aztask.support.display import Secret

from .blobs import Blobs, ModelContainer
from .inline import InlinePool
from .wire import Line

URL: Final = "blob://simulated/payloads"
"""What an app's setting ``payloads`` says, so that it stores large arguments and values apart."""

ADDRESS: Final = BlobAddress(
    "simulated", "https://simulated-blobs", "payloads", "", Secret("a2V5a2V5a2V5")
)


class InlinePayloads(BlobPayloads):
    """A worker removes payloads of remote stores on a thread of its own, of others at once."""

    remote = False


def blob_payloads(service: Blobs, line: Line) -> BlobPayloads:
    """The payloads of one program. The container is made with the first one."""
    store = InlinePayloads(ADDRESS)
    store._container.close()
    store._container = cast("Any", ModelContainer(service, line, ADDRESS.container))
    return store


def keep_payloads(app: App, service: Blobs, line: Line) -> None:
    """Let this app, which was made with ``payloads=URL``, keep them in the modelled service."""
    if app.payloads is None:
        raise ValueError(f"make the app with payloads={URL!r}")
    app.payloads.replace(blob_payloads(service, line))
    app.payloads._threads = InlinePool("payloads")
