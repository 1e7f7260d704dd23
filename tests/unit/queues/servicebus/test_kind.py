"""The names that Service Bus allows for queues."""

import pytest

from aztask.errors import InvalidQueueName
from aztask.queues.servicebus.kind import KIND


@pytest.mark.parametrize("name", ["a", "A.b-c_d", "sales/eu/orders", "9", "q" * 260])
def test_names_that_the_service_takes(name):
    KIND.check_name(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a/../b", ".", "-a", "q" * 261, "a\n"])
def test_names_that_it_does_not(name):
    with pytest.raises(InvalidQueueName, match="1 to 260"):
        KIND.check_name(name)
