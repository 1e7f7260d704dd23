"""Hostile messages, read without a broker: every reader gives a message, a problem or a CodecError.

`tests/integration/test_hostile_stream.py` sends the same messages to real workers.
"""

from __future__ import annotations

import time
from dataclasses import fields

import fuzzing
import pytest
from azure.servicebus import ServiceBusReceivedMessage
from hostileamqp import payload_of
from hostilestream import (
    Hostile,
    HostileStream,
    _covered,
    garbled,
    mark_of,
    packed_local,
    packed_storage,
    sent_mark,
)

from aztask.errors import CodecError, EncodeError
from aztask.message.bounds import MessageLimits
from aztask.message.codec import Codec
from aztask.queues.local.payload import envelope_of as local_envelope
from aztask.queues.local.payload import payload_of as local_payload
from aztask.queues.servicebus.reading import read_message
from aztask.queues.servicebus.wire import ages
from aztask.queues.servicebus.wire import envelope_of as bus_envelope
from aztask.queues.storagequeue.wire import read_text

MESSAGES = 100
KEY = b"k" * 32


def test_no_reader_raises_anything_but_a_codec_error():
    seed, began, number = fuzzing.seed(), time.monotonic(), 0
    print(f"AZTASK_FUZZ_SEED={seed}")
    codecs = [Codec(), Codec(signing_keys=[KEY], id_key=KEY)]
    streams = [HostileStream(codec, "shop.add", f"{seed} unit") for codec in codecs]
    seconds = fuzzing.seconds()
    while number < MESSAGES if seconds is None else time.monotonic() - began < seconds:
        number += 1
        for stream in streams:
            made, dice = stream.next(), stream.dice
            received = ServiceBusReceivedMessage(
                read_message(payload_of(made, dice)), receiver=None
            )
            ages(received)
            payload = packed_local(made.fields)
            envelopes = [
                bus_envelope(received),
                local_envelope(payload),
                local_envelope(garbled(dice, payload)),
                read_text(packed_storage(made.fields)).envelope,
            ]
            for envelope in envelopes:
                for codec in codecs:
                    read(codec, envelope)


def read(codec, envelope):
    try:
        message = codec.from_envelope(envelope, "default")
        codec.decode_arguments(message)
        codec.to_envelope(message.resubmitted(counted=True))
    except CodecError as error:
        assert "\n" not in str(error)


def test_what_a_storage_queue_is_read_as_can_be_noted_as_a_dead_letter():
    """The index has the local format: what that refuses would be missing in the list."""
    stream = HostileStream(Codec(), "shop.add", f"{fuzzing.seed()} notes")
    noted = 0
    for _ in range(10 * MESSAGES):
        envelope = read_text(packed_storage(stream.next().fields)).envelope
        try:
            payload = local_payload(envelope)
        except EncodeError:
            continue
        noted += 1
        found = local_envelope(payload, MessageLimits())
        assert repr(found) == repr(envelope), "a header may be NaN"
    assert noted > 5 * MESSAGES


def test_what_is_forged_is_judged_by_the_bytes_that_are_sent():
    codec = Codec(signing_keys=[KEY])
    stream = HostileStream(codec, "shop.add", "forged")
    original = stream.original()
    plain = {each.name: getattr(original, each.name) for each in fields(original)}
    untouched = packed_local(plain | {"properties": {}})
    changed = packed_local(plain | {"properties": {"reply_to": "x"}})
    undone = changed.replace(b"reply_to", b"repny_to")
    made = Hostile("", plain, signed=_covered(plain))

    assert [made.forged_in(each) for each in (untouched, changed, undone)] == [False, True, False]
    assert made.forged_in(changed + b"junk")
    assert made.forged_in(b"\xff")
    for payload in (untouched, undone):
        assert codec.from_envelope(local_envelope(payload), "default").reply_to is None


def test_no_changed_message_is_accepted_with_a_key():
    seed = fuzzing.seed()
    codec = Codec(signing_keys=[KEY], id_key=KEY)
    stream = HostileStream(codec, "shop.add", f"{seed} forged")
    forged = 0
    for _ in range(20 * MESSAGES):
        made = stream.next()
        payload = packed_local(made.fields)
        payload = garbled(stream.dice, payload) if stream.dice.random() < 0.5 else payload
        if made.forged_in(payload):
            forged += 1
            with pytest.raises(CodecError):
                codec.from_envelope(local_envelope(payload), "default")
    assert forged > MESSAGES


def test_a_damaged_mark_is_that_of_its_own_message():
    stream = HostileStream(Codec(), "shop.add", fuzzing.seed())
    sent = {stream.next().mark for _ in range(MESSAGES)}
    assert len(sent) == MESSAGES
    for mark in sent:
        for at, bit in ((at, bit) for at in range(len(mark)) for bit in range(7)):
            damaged = bytearray(mark.encode())
            damaged[at] ^= 1 << bit
            assert sent_mark(mark_of(bytes(damaged)), sent) in (mark, "")
