"""The table of brokers: a row and a package are all that another broker needs."""

import ast
from pathlib import Path

import memorybroker
import pytest
from kombu import Connection

import aztask_kombu
from aztask import App
from aztask.address.schemes import SCHEMES
from aztask.address.urls import parse_broker
from aztask.celery.transport import ALIASES
from aztask.celery.transport.options import broker_of
from aztask.errors import ConfigurationError, InvalidQueueName
from aztask.queues.base import Capabilities
from aztask.queues.kinds import kind_named, kind_of

PACKAGE = Path(__file__).parents[3] / "aztask"
SERVICES = ("servicebus", "storagequeue")
OF_A_SERVICE = ("queues/", "address/", "emulator/", "testing/", "operate/provision/")
"""Folders that are about one service, or write what each has: its resources on Azure."""
URLS = {
    "local": "local:///tmp/queues.db",
    "servicebus": "servicebus://namespace",
    "storagequeue": "storagequeue://account",
}


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setitem(SCHEMES, "memory", "memorybroker")
    monkeypatch.setattr(memorybroker.KIND, "shelves", {})


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_each_row_is_a_kind_whose_addresses_lead_back_to_it(scheme):
    address = parse_broker(URLS[scheme])
    assert address.scheme == scheme
    assert kind_of(address) is kind_named(scheme)
    assert kind_of(address).capabilities.name == scheme


def test_what_is_no_address_has_no_kind():
    assert kind_of("local://") is None
    assert kind_of(None) is None


def test_the_aliases_of_kombu_are_those_of_the_table():
    """Kombu loads `aztask_kombu` while it is imported itself, so that one repeats them."""
    assert {*aztask_kombu.ALIASES} == {*ALIASES} == {"aztask", *(f"aztask+{s}" for s in SCHEMES)}


def test_another_broker_needs_a_row_only(memory):
    app = App("shop", broker="memory://counter", default_queue="orders")
    app.broker.declare("orders")
    app.send("shop.work", [1])
    assert memorybroker.KIND.shelves["counter"].messages("orders")
    with app.receive("orders", wait=5) as lease:
        lease.complete()
    assert app.broker.stats("orders").living == 0
    with pytest.raises(InvalidQueueName):
        app.queue("No Such Name")
    with pytest.raises(InvalidQueueName):
        App("shop", broker="memory://counter", default_queue="No Such Name")


def test_kombu_reaches_it_by_its_url(memory):
    with Connection("aztask+memory://counter") as connection:
        assert broker_of(connection, {}) == "memory://counter"


def test_without_the_row_its_scheme_is_unknown():
    with pytest.raises(ConfigurationError, match="no broker of the kind 'memory'"):
        parse_broker("memory://counter")


def test_only_a_brokers_own_folder_asks_which_service_it_is():
    """What differs between services is in `Capabilities`; names of services are for texts."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(OF_A_SERVICE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and any(
                isinstance(each, ast.Constant) and each.value in SERVICES
                for each in (node.left, *node.comparators)
            ):
                found.append(place)
    assert sorted(found) == ["telemetry/otel/attributes.py"]  # its SDK's own span links


def test_a_capability_that_is_not_named_is_careful():
    nothing = Capabilities("other")
    assert nothing.inline_bytes == 32 * 1024
    assert nothing.port == 443
    assert not (nothing.sessions or nothing.defer or nothing.update or nothing.own_limits)
