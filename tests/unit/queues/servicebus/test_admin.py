"""Managing queues, on the emulator."""

import pytest

from aztask.address.urls import parse_broker
from aztask.errors import BrokerUnavailable, ConfigurationError, QueueNotFound
from aztask.queues.base import QueueOptions
from aztask.queues.servicebus import admin as admin_module
from aztask.queues.servicebus.admin import ADMIN_VARIABLE, DELIVERY_LIMIT, Administration
from aztask.testing import emulator


@pytest.fixture(scope="module")
def bus():
    with emulator() as running:
        yield running


@pytest.fixture
def admin(bus):
    made = Administration(parse_broker(bus.connection_string), admin=bus.admin_connection_string)
    yield made
    made.close()
    for queue in made.queues():
        made.delete(queue)
    made.close()


def test_a_queue_has_a_high_delivery_limit_and_keeps_what_expires(admin):
    admin.declare("q", QueueOptions(lease=30.0, duplicate_window=60.0))
    found = admin.properties("q")
    assert found.max_delivery_count == DELIVERY_LIMIT
    assert found.dead_lettering_on_message_expiration
    assert found.requires_duplicate_detection and not found.requires_session
    assert admin.lock_seconds("q") == 30.0


def test_declaring_it_again_changes_only_what_is_asked_for(admin):
    admin.declare("q", QueueOptions(lease=30.0))
    admin.declare("q", QueueOptions(lease=60.0, implied=frozenset({"lease"})))
    assert admin.lock_seconds("q") == 30.0
    admin.declare("q", QueueOptions(lease=60.0))
    assert admin.lock_seconds("q") == 60.0


@pytest.mark.parametrize("options", [{"sessions": True}, {"duplicate_window": 60.0}])
def test_what_the_service_cannot_change_is_refused(admin, options):
    admin.declare("q", QueueOptions())
    with pytest.raises(ConfigurationError, match="exists with requires_"):
        admin.declare("q", QueueOptions(**options))


@pytest.mark.parametrize("window", [19.0, 8 * 86400.0])
def test_a_duplicate_window_that_cannot_be_is_refused(admin, window):
    with pytest.raises(ConfigurationError, match="20 s to 7 days"):
        admin.declare("q", QueueOptions(duplicate_window=window))


def test_a_queue_that_is_not_there(admin):
    for call in (admin.delete, admin.properties, admin.stats, admin.recent):
        with pytest.raises(QueueNotFound):
            call("missing")
    assert admin.lock_seconds("missing") is None


CLOSED = (
    "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey=YQ==;"
    "UseDevelopmentEmulator=true"
)


def test_an_administration_that_is_elsewhere_names_the_variable_that_says_where(bus, monkeypatch):
    monkeypatch.setenv(ADMIN_VARIABLE, CLOSED)
    admin = Administration(parse_broker(bus.connection_string))
    calls = (admin.tier, admin.queues, lambda: admin.declare("q", QueueOptions()))
    for call in (*calls, lambda: admin.stats("q")):
        with pytest.raises(BrokerUnavailable, match=f"is where {ADMIN_VARIABLE} says$"):
            call()
    monkeypatch.delenv(ADMIN_VARIABLE)
    assert f"another port than 5300, set {ADMIN_VARIABLE} as aztask emulator" in admin.hint()
    admin.close()
    assert Administration(parse_broker("servicebus://shop-prod")).hint() == ""


def test_the_settings_are_remembered_for_a_moment(admin, monkeypatch):
    admin.declare("q", QueueOptions(lease=30.0))
    first = admin.recent("q")
    assert admin.recent("q") is first
    admin.properties("q")
    assert admin.lock_seconds("q", anew=True) == 30.0
    assert admin.recent("q") is not first
    monkeypatch.setattr(admin_module, "RECENT_SECONDS", -1.0)
    second = admin.recent("q")
    assert admin.recent("q") is not second


def test_an_administration_that_does_not_answer_is_asked_once(monkeypatch, bus):
    admin = Administration(parse_broker(bus.connection_string))
    asked = []

    def unavailable(queue):
        asked.append(queue)
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(admin, "properties", unavailable)
    assert [admin.lock_seconds(each) for each in ("a", "b", "a")] == [None] * 3
    assert asked == ["a"]


def test_the_emulators_port_is_taken_from_the_environment(bus, monkeypatch):
    monkeypatch.setenv(ADMIN_VARIABLE, bus.admin_connection_string)
    admin = Administration(parse_broker(bus.connection_string))
    assert isinstance(admin.queues(), list)
    admin.close()
