"""The skeleton of the brokers: every call of every adapter is refused where it must be.

The brokers are found among the subjects of the contract, the calls by code.
"""

import inspect
import os

import memorybroker
import pytest

from aztask.address.addresses import ServiceBusAddress, StorageQueueAddress
from aztask.errors import BrokerError, CapabilityError, ConfigurationError, InvalidQueueName
from aztask.message.envelope import Envelope
from aztask.queues.base import QueueOptions
from aztask.queues.engine import Database
from aztask.queues.local.broker import LocalBroker
from aztask.queues.servicebus.broker import ServiceBusBroker
from aztask.queues.skeleton import BrokerSkeleton
from aztask.queues.storagequeue.broker import StorageQueueBroker
from aztask.support.display import Secret

KEY = Secret("c2VjcmV0")
MAKERS = {
    "local": lambda: LocalBroker(Database(":memory:")),
    "example": lambda: memorybroker.MemoryBroker(memorybroker.Shelf()),
    "storagequeue": lambda: StorageQueueBroker(
        StorageQueueAddress("shop", "https://shop.queue.core.windows.net", KEY)
    ),
    "servicebus": lambda: ServiceBusBroker(
        ServiceBusAddress("shop.servicebus.windows.net", None, "name", KEY)
    ),
}
ARGUMENTS = {
    "declare": ("orders",),
    "delete": ("orders",),
    "listing": (),
    "queues": (),
    "stats": ("orders",),
    "peek": ("orders",),
    "purge": ("orders",),
    "send": ("orders", [Envelope(b"x")]),
    "cancel_scheduled": ("orders", ["m"]),
    "send_timer": ("orders", Envelope(b"x")),
    "cancel_timer": ("orders", 1),
    "receiver": ("orders",),
    "mailboxes": (),
    "inspector": (),
}
TIMERS = {"send_timer", "cancel_timer"}
NO_SERVICE = {"check", "check_name", "close"}
"""They ask the service nothing."""

OPTIONS = {"receiver": {"lease": 30.0}}
HARMLESS = {"identity", "server", "capabilities", "transaction_key", "transaction", "wakeup"}


@pytest.fixture(params=sorted(MAKERS))
def broker(request):
    made = MAKERS[request.param]()
    yield made
    made.close()


def calls(broker):
    """The broker's calls that may ask its service, by code."""
    for name, _ in inspect.getmembers(type(broker), inspect.isfunction):
        if not name.startswith("_") and name not in NO_SERVICE | HARMLESS:
            if name == "cancel_scheduled" and not broker.capabilities.cancel_scheduled:
                continue  # refused before, as a missing capability
            if name in TIMERS and not broker.capabilities.timer_numbers:
                continue
            yield name


def refusals(broker):
    """What each call says."""
    said = {}
    for name in calls(broker):
        try:
            getattr(broker, name)(*ARGUMENTS[name], **OPTIONS.get(name, {}))
        except BrokerError as error:
            said[name] = str(error)
        else:
            said[name] = "nothing"
    return said


def test_a_closed_broker_refuses_every_call(broker):
    broker.close()
    said = refusals(broker)
    assert len(said) >= 9
    assert {text for text in said.values() if "was closed; make another one" not in text} == set()
    broker.close()


def test_a_forked_child_refuses_every_call_and_closes_nothing(broker, monkeypatch):
    """The child is a process of its own, so that nothing of it is left in this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(type(broker), "_close", lambda self: os.write(writer, b"closed! "))
            said = refusals(broker)
            wrong = [n for n, text in said.items() if "belongs to the parent process" not in text]
            broker.close()
            os.write(writer, f"{len(said)} calls, wrong: {wrong}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answers:
        text = answers.read()
    assert text.endswith("calls, wrong: []"), text
    assert "closed!" not in text
    assert int(text.split()[0]) >= 9


def test_a_name_that_is_not_allowed_is_refused_by_every_call(broker):
    for name in calls(broker):
        first, *rest = ARGUMENTS[name] or (None,)
        if first == "orders":
            with pytest.raises(InvalidQueueName):
                getattr(broker, name)("no such name!", *rest, **OPTIONS.get(name, {}))


@pytest.mark.parametrize(
    ("option", "capability"),
    [
        (QueueOptions(sessions=True), "sessions"),
        (QueueOptions(duplicate_window=60.0), "duplicate_detection"),
        (QueueOptions(max_deliveries=5), "own_limits"),
        (QueueOptions(time_to_live=60.0), "own_limits"),
    ],
    ids=["sessions", "duplicates", "deliveries", "time to live"],
)
@pytest.mark.parametrize("name", ["example", "storagequeue"])
def test_an_option_that_the_service_lacks_is_refused(name, option, capability):
    broker = MAKERS[name]()
    assert not getattr(broker.capabilities, capability)
    with pytest.raises(CapabilityError, match=r"do not have .*; remove the setting for 'orders'"):
        broker.declare("orders", option)


@pytest.mark.parametrize("lease", [0.0, -1.0, float("nan"), 1e9])
def test_a_lease_that_cannot_be_is_refused_by_every_broker(broker, lease):
    with pytest.raises(ConfigurationError, match="is not possible here"):
        broker.receiver("orders", lease=lease)


def test_a_capability_without_its_step_is_noticed():
    class Half(memorybroker.MemoryBroker):
        pass

    broker = Half(memorybroker.Shelf())
    broker._capabilities = MAKERS["local"]().capabilities
    with pytest.raises(NotImplementedError, match="Half has the capability and not the step"):
        broker.cancel_scheduled("orders", ["m"])


def test_every_adapter_is_built_on_the_skeleton():
    for make in MAKERS.values():
        assert isinstance(make(), BrokerSkeleton)
