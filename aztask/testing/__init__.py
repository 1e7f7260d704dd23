"""Test your tasks: run them inline, on a real worker, or against a local Service Bus.

::

    def test_orders():
        with app.inline() as inline:             # `aztask.testing.Inline`
            assert order.delay(7).get() == "ordered"
            inline.assert_sent(invoice, 7)

The fixtures for pytest are in `aztask.testing.plugin`, which pytest finds by itself. Names are
imported when you first use them (PEP 562): the plugin must not slow other tests down.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aztask.emulator.broker.access import Rule
    from aztask.emulator.broker.entra import EntraTokens, Right
    from aztask.emulator.faults import Faults
    from aztask.queues.servicebus.admin import administration_client
    from aztask.sending.sent import Sent
    from aztask.testing.inline import Inline, task_context
    from aztask.testing.servicebus import RunningEmulator, emulator
    from aztask.testing.worker import BackgroundWorker, background_worker

__all__ = [
    "EntraTokens",
    "Faults",
    "Inline",
    "Sent",
    "BackgroundWorker",
    "background_worker",
    "Right",
    "Rule",
    "RunningEmulator",
    "administration_client",
    "emulator",
    "task_context",
]

_HOMES = {
    "Inline": "aztask.testing.inline",
    "Sent": "aztask.sending.sent",
    "BackgroundWorker": "aztask.testing.worker",
    "background_worker": "aztask.testing.worker",
    "Faults": "aztask.emulator.faults",
    "EntraTokens": "aztask.emulator.broker.entra",
    "Right": "aztask.emulator.broker.entra",
    "Rule": "aztask.emulator.broker.access",
    "RunningEmulator": "aztask.testing.servicebus",
    "administration_client": "aztask.queues.servicebus.admin",
    "emulator": "aztask.testing.servicebus",
    "task_context": "aztask.testing.inline",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'aztask.testing' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
