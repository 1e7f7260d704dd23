"""Atom entries and feeds."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from aztask.emulator.admin import descriptions
from aztask.errors import ConfigurationError


def test_an_entry_is_well_formed_whatever_its_name():
    text = descriptions.entry("http://h/a&b", 'a&<"b', (0.0, 1.5), descriptions.tag("X", "<&>"))
    root = ElementTree.fromstring(text)
    parts = descriptions.children(root)
    assert parts["title"].text == 'a&<"b'
    assert parts["published"].text == "1970-01-01T00:00:00.000000Z"
    assert parts["updated"].text == "1970-01-01T00:00:01.500000Z"
    assert parts["link"].get("href") == "http://h/a&b"
    assert descriptions.children(parts["content"])["X"].text == "<&>"


def test_a_feed_names_its_next_page():
    entries = [descriptions.entry("u", "t", (0, 0), "")] * 2
    root = ElementTree.fromstring(
        descriptions.feed("http://h/q", "q", 0, entries, "http://h/q?$skip=2")
    )
    links = [each for each in root if descriptions.local(each) == "link"]
    assert {each.get("rel"): each.get("href") for each in links} == {
        "self": "http://h/q",
        "next": "http://h/q?$skip=2",
    }
    assert [descriptions.local(each) for each in root].count("entry") == 2
    assert "next" not in descriptions.feed("u", "q", 0, [], None)


def test_errors_have_code_and_detail():
    parts = descriptions.children(ElementTree.fromstring(descriptions.error(404, "no <queue>")))
    assert (parts["Code"].text, parts["Detail"].text) == ("404", "no <queue>")


def test_a_description_is_found_inside_its_entry_and_alone():
    inner = f'<QueueDescription xmlns="{descriptions.CONNECT}"/>'
    for body in (inner, descriptions.entry("u", "t", (0, 0), inner)):
        assert (
            descriptions.local(descriptions.description(body.encode(), "QueueDescription"))
            == "QueueDescription"
        )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<a", "not XML"),
        (b"<a/>", "no QueueDescription"),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "declare"),
    ],
)
def test_bad_requests_are_explained(body, said):
    with pytest.raises(ConfigurationError, match=said):
        descriptions.description(body, "QueueDescription")
