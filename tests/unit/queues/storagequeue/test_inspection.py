"""What the inspector says of permissions and of a signature's expiry, by hand-made answers."""

import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from azure.core.exceptions import ServiceRequestError
from queueservice import missing, refused

from aztask.address.addresses import StorageQueueAddress
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.queues.storagequeue.inspection import StorageInspector
from aztask.support.display import Secret

URL = "https://shop.queue.core.windows.net"
KEY = Secret("a2V5")


class Queue:
    """Raises `error` whatever it is asked."""

    def __init__(self, error):
        self._error = error

    def _raise(self, *arguments, **options):
        raise self._error

    update_message = delete_message = get_queue_properties = _raise


def inspector(error=None, **options):
    client = SimpleNamespace(
        address=StorageQueueAddress("shop", URL, **options),
        queue=lambda name: Queue(error or missing()),
        offset=3.0,
    )
    return StorageInspector(client)


def rights(made):
    return {each.name: (each.known, each.error is None) for each in made.rights("orders")}


def test_a_key_may_do_everything():
    granted = (True, True)
    assert rights(inspector(key=KEY)) == dict.fromkeys(("get", "add", "update", "delete"), granted)


def test_a_signature_says_what_it_allows():
    found = rights(inspector(signature=Secret("sp=pu&sig=x")))
    assert found["get"] == (True, True)
    assert found["add"] == (True, False)


def test_without_a_key_getting_and_adding_cannot_be_tried():
    found = rights(inspector())
    assert found["get"] == found["add"] == (False, True)
    assert found["update"] == found["delete"] == (True, True)


def test_a_refused_credential_is_an_answer_and_an_unreachable_service_is_not():
    found = rights(inspector(refused(403, "AuthorizationPermissionMismatch")))
    assert found["update"] == found["delete"] == (True, False)
    with pytest.raises(BrokerUnavailable):
        inspector(ServiceRequestError("down")).rights("orders")


def test_a_queue_that_is_not_there_and_one_that_may_not_be_read():
    assert inspector(refused(404, "QueueNotFound")).facts("orders").exists is False
    unread = inspector(refused(403, "AuthorizationFailure")).facts("orders")
    assert (unread.exists, bool(unread.unread)) == (None, True)


def expiring(seconds):
    at = datetime.fromtimestamp(time.time() + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    (finding,) = inspector(signature=Secret(f"se={at}&sig=x")).surroundings()
    return finding


def test_a_signature_that_ends():
    assert expiring(30 * 86400).level.name == "OK"
    assert expiring(86400).level.name == "WARNING"
    ended = expiring(-60)
    assert isinstance(ended.error, ConfigurationError)


def test_a_signature_that_says_no_time_or_a_strange_one():
    assert inspector(key=KEY).surroundings() == []
    assert inspector(signature=Secret("se=tomorrow")).surroundings() == []


def test_the_clock_is_unknown_before_an_answer():
    assert inspector(key=KEY).clock_offset("orders") is None
