"""Queue names as the service allows them."""

import pytest

from aztask.errors import InvalidQueueName
from aztask.queues.storagequeue.kind import KIND, poison_name


@pytest.mark.parametrize("name", ["abc", "a-b", "orders-2", "0ab", "a" * 56, "poison"])
def test_allowed(name):
    KIND.check_name(name)
    assert len(poison_name(name)) <= 63


@pytest.mark.parametrize(
    "name", ["", "ab", "a" * 57, "Abc", "a_b", "a.b", "-ab", "ab-", "a--b", "äbc", "a\nb", "a b"]
)
def test_refused_with_the_rule(name):
    with pytest.raises(InvalidQueueName, match="3 to 56 characters") as caught:
        KIND.check_name(name)
    assert str(caught.value).isprintable()


def test_a_name_like_that_of_dead_letters_is_refused():
    with pytest.raises(InvalidQueueName, match="dead-letter queue"):
        KIND.check_name("orders-poison")
