"""Queues of other programs are told apart by their names."""

from aztask.errors import InvalidQueueName
from aztask.queues.base import Listing
from aztask.queues.skeleton import listing


def short(name):
    if len(name) > 3:
        raise InvalidQueueName(name)


def test_names_are_sorted_and_foreign_ones_are_kept_apart():
    found = listing(["long-one", "b", "a", "another"], short)
    assert found == Listing(("a", "b"), ("another", "long-one"))


def test_no_queues_at_all():
    assert listing([], short) == Listing(())
