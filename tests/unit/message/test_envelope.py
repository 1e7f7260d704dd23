"""The envelope: what it holds where nothing was said is part of the wire."""

import dataclasses

from aztask.message.envelope import NO_PROPERTIES, Envelope


def test_an_envelope_of_nothing_but_a_body():
    assert dataclasses.asdict(Envelope(b"x")) == {
        "body": b"x",
        "headers": {},
        "message_id": "",
        "content_type": "application/x-msgpack",
        "content_encoding": "binary",
        "subject": None,
        "correlation_id": None,
        "session": None,
        "partition_key": None,
        "delay": 0.0,
        "expires_at": None,
        "properties": {},
        "problem": "",
    }
    assert NO_PROPERTIES == {}
