"""The same key always gets the same task id."""

import uuid
from datetime import date

import pytest

from aztask.spark.submission.submission import NAMESPACE, id_maker, task_id


@pytest.mark.parametrize("key", ["a.png", "", "ключ", 42, -1, 2**62, date(2026, 1, 2)])
def test_an_id_is_the_uuid5_of_the_key(key):
    namespace = uuid.uuid5(NAMESPACE, "nightly")
    assert task_id("nightly", key) == str(uuid.uuid5(namespace, str(key)))


def test_ids_stay_what_they_are():
    """Another id for an old key would run its task again."""
    assert task_id("nightly", "a.png") == "518e432c-4fc8-51fd-9730-3b7e5af48223"


def test_submissions_and_keys_are_told_apart():
    make = id_maker("one")
    found = {make(key) for key in ("a", "b", 1, 11)} | {task_id("two", "a")}
    assert len(found) == 5
    assert make("a") == make("a") == task_id("one", "a")
