"""Queue names that a service refuses are translated, and exactly translated back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.celery.transport.names import original_name, translated_name
from aztask.errors import InvalidQueueName
from aztask.queues.local.kind import KIND as LOCAL
from aztask.queues.storagequeue.kind import KIND as STORAGE


@pytest.mark.parametrize("name", ["orders", "a-b", "x9"])
def test_a_name_that_is_allowed_stays(name):
    assert translated_name(name, LOCAL.check_name) == name
    assert original_name(name) == name


@pytest.mark.parametrize(
    ("name", "translated"),
    [
        ("Invoices.EU", "enc-x49nvoicesx2ex45x55"),
        ("tax", "tax"),
        ("tax_1", "enc-tax78x5f1"),
        ("grün", "enc-grxc3xbcn"),
        ("enc-a", "enc-encx2da"),
    ],
)
def test_the_translation(name, translated):
    assert translated_name(name, STORAGE.check_name) == translated
    assert original_name(translated) == name


@given(st.text(min_size=1, max_size=4))
def test_every_name_comes_back(name):
    translated = translated_name(name, LOCAL.check_name)
    LOCAL.check_name(translated)
    assert original_name(translated) == name


def test_two_names_never_become_one():
    names = ["A", "a", "x41", "enc-x41", "a.b", "a-b", "a--b", "a_b", "A-"]
    assert len({translated_name(name, LOCAL.check_name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["A" * 30, "\ud800"])
def test_a_name_that_cannot_be_translated_is_refused(name):
    with pytest.raises(InvalidQueueName):
        translated_name(name, STORAGE.check_name)


def test_a_name_that_only_looks_translated_stays():
    assert original_name("enc-xff") == "enc-xff"
