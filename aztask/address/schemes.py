"""The table of brokers: the module that each scheme of an address belongs to.

Adding a broker adds a row here, and a package that has such a module. It is imported when an
address of its scheme is read, so it must not need the SDK of its service.
"""

from __future__ import annotations

from typing import Final

SCHEMES: Final[dict[str, str]] = {
    "local": "aztask.queues.local.kind",
    "servicebus": "aztask.queues.servicebus.kind",
    "storagequeue": "aztask.queues.storagequeue.kind",
}
"""Each module has a `aztask.queues.kinds.BrokerKind` as its ``KIND``."""
