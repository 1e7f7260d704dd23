"""The ids of clones follow from each other, and clones of different messages share none."""

from aztask.message.envelope import Envelope
from aztask.message.message import next_link


def test_the_links_of_a_chain_have_ids_that_follow_from_each_other():
    seen = ["m"]
    for _ in range(12):
        seen.append(next_link(Envelope(b"", message_id=seen[-1])))
    assert seen[:3] == ["m", "m~1", "m~2"]
    assert seen[-1] == "m~12"
    assert next_link(Envelope(b"", message_id="a~b")) == "a~b~1"
    long = {next_link(Envelope(b"", message_id="x" * 127 + last)) for last in "ab"}
    assert len(long) == 2
    assert all(len(link) <= 128 for link in long)


def test_a_message_without_an_id_stays_without():
    """A shared id would make duplicate detection drop the clone of another message."""
    assert next_link(Envelope(b"")) == ""
