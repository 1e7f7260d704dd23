"""The table of brokers: the module that each scheme of an address belongs to.

Adding a broker adds a row here, and a package that has such a module. It is imported when an
address of its scheme is read, so it must not need the SDK of its service.
"""

from __future__ import annotations

from typing import Final

SCHEMES: Final[dict[str, str]] = {
    "local": "aztask.brokers.local.kind",
    "servicebus": "aztask.brokers.servicebus.kind",
    "storagequeue": "aztask.brokers.storagequeue.kind",
}
"""Each module has a `aztask.brokers.kinds.BrokerKind` as its ``KIND``."""
