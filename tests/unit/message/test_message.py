"""The message: ids that never repeat, and what each kind of clone keeps."""

import dataclasses
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.message.message import (
    COUNTER_LIMIT,
    MESSAGE_DEFAULTS,
    MESSAGE_FIELDS,
    MESSAGE_ID_LIMIT,
    TaskMessage,
)

MESSAGE = TaskMessage(
    id="t1",
    task="shop.resize",
    queue="bulk",
    body=b"\x93\x90\x80\x80",
    root_id="r",
    eta=100.0,
    expires=200.0,
    resubmit_count=2,
    snooze_count=3,
    hop=5,
    generation=1,
    delivery_base=7,
    unknown_since=50.0,
    saved=b"page 7",
    traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    extra={"tenant": "x"},
)


def changes(before: TaskMessage, after: TaskMessage) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(before)
        if getattr(before, field.name) != getattr(after, field.name)
    }


def test_what_a_message_says_of_itself_where_nothing_was_said():
    defaults = {
        "content_type": "application/x-msgpack",
        "content_encoding": "binary",
        **dict.fromkeys(("root_id", "parent_id", "group", "eta", "expires", "time_limit")),
        **dict.fromkeys(("soft_time_limit", "argsrepr", "kwargsrepr", "origin", "reply_to")),
        **dict.fromkeys(("correlation_id", "session", "unknown_since", "saved", "pointer")),
        **dict.fromkeys(("traceparent", "lease_seconds", "workflow", "node", "slots", "payload")),
        "ordered": True,
        "continued": False,
        **dict.fromkeys(("resubmit_count", "snooze_count", "hop"), 0),
        **dict.fromkeys(("generation", "delivery_base", "put_off_count"), 0),
        "extra": {},
    }
    given = {"id": "t", "task": "a.b", "queue": "q", "body": b""}
    assert dataclasses.asdict(TaskMessage(**given)) == given | defaults
    assert defaults == MESSAGE_DEFAULTS
    assert {*given, *defaults} == set(MESSAGE_FIELDS)
    assert list(MESSAGE_FIELDS[:5]) == ["id", "task", "queue", "body", "content_type"]


def test_the_limits_are_those_of_the_services():
    """Service Bus allows 128 characters of an id, AMQP's smaller integers hold 31 bits."""
    assert (MESSAGE_ID_LIMIT, COUNTER_LIMIT) == (128, 2_147_483_647)


def test_an_id_that_is_no_valid_text_is_hashed_all_the_same():
    long = dataclasses.replace(MESSAGE, id="\udcff" * 130)
    digest = sha256(b"\xed\xb3\xbf" * 130).hexdigest()
    assert long.message_id == f"sha256-{digest}:1:5"


def test_a_message_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MESSAGE.hop = 6


def test_the_message_id_names_task_generation_and_hop():
    assert MESSAGE.message_id == "t1:1:5"
    assert MESSAGE.key == ("t1", 1, 5)


def test_a_long_id_is_hashed_and_stays_within_the_limit():
    long = dataclasses.replace(MESSAGE, id="x" * 125)
    assert long.message_id.startswith("sha256-")
    assert long.message_id.endswith(":1:5")
    assert dataclasses.replace(MESSAGE, id="x" * 124).message_id == "x" * 124 + ":1:5"


def test_a_pointer_has_an_id_of_its_own_for_each_deferral_and_nothing_of_the_work():
    first = MESSAGE.pointing(42, counted=True, delivery_base=3)
    assert first.message_id == "t1:1:5:pointer-6"
    assert first.key == MESSAGE.key
    assert (first.pointer, first.body, first.saved, first.eta) == (42, b"", None, None)
    assert (first.resubmit_count, first.snooze_count, first.delivery_base) == (3, 3, 3)
    again = dataclasses.replace(MESSAGE, resubmit_count=3)
    assert again.pointing(42, counted=False, delivery_base=4).message_id == "t1:1:5:pointer-7"
    long = dataclasses.replace(MESSAGE, id="x" * 120)
    assert len(long.message_id) <= MESSAGE_ID_LIMIT
    assert long.pointing(42, counted=True, delivery_base=1).message_id.startswith("sha256-")


ids = st.text(min_size=1, max_size=200)
counters = st.integers(0, 2**31 - 1)


@given(ids, counters, counters)
def test_every_message_id_is_short_and_repeats_exactly(task_id, generation, hop):
    message = dataclasses.replace(MESSAGE, id=task_id, generation=generation, hop=hop)
    assert 0 < len(message.message_id) <= MESSAGE_ID_LIMIT
    assert dataclasses.replace(message).message_id == message.message_id


@given(ids, st.sampled_from(["retry", "snooze", "chain", "replay"]))
def test_no_clone_has_the_id_of_its_original(task_id, kind):
    message = dataclasses.replace(MESSAGE, id=task_id)
    clone = {
        "retry": lambda: message.resubmitted(counted=True),
        "snooze": lambda: message.resubmitted(counted=False),
        "chain": message.chained,
        "replay": message.replayed,
    }[kind]()
    assert clone.message_id != message.message_id
    assert clone.body is message.body


def test_a_retry_counts_and_clears_what_belonged_to_the_last_delivery():
    clone = MESSAGE.resubmitted(counted=True)
    assert (clone.hop, clone.resubmit_count, clone.snooze_count) == (6, 3, 3)
    assert (clone.delivery_base, clone.unknown_since, clone.eta) == (0, None, None)
    assert changes(MESSAGE, clone) == {
        "hop", "resubmit_count", "delivery_base", "unknown_since", "eta",
    }  # fmt: skip


def test_a_snooze_counts_apart_and_takes_what_it_is_given():
    clone = MESSAGE.resubmitted(
        counted=False, saved=b"page 8", delivery_base=9, unknown_since=60.0, eta=300.0
    )
    assert (clone.resubmit_count, clone.snooze_count) == (2, 4)
    assert (clone.saved, clone.delivery_base, clone.unknown_since, clone.eta) == (
        b"page 8", 9, 60.0, 300.0,
    )  # fmt: skip


def test_a_delay_chain_changes_the_hop_alone():
    link = MESSAGE.chained(delivery_base=7)
    assert changes(MESSAGE, link) == {"hop"}
    assert link.hop == 6
    assert MESSAGE.chained().delivery_base == 0
    assert MESSAGE.chained(delivery_base=8).delivery_base == 8


def test_a_replay_starts_over_in_a_new_generation_and_keeps_the_checkpoint():
    again = MESSAGE.replayed()
    assert again.key == ("t1", 2, 0)
    assert (again.resubmit_count, again.snooze_count, again.delivery_base) == (0, 0, 0)
    assert (again.eta, again.expires, again.unknown_since) == (None, None, None)
    assert again.saved == b"page 7"
    assert MESSAGE.replayed(keep_saved=False).saved is None
    assert MESSAGE.replayed(expires=900.0).expires == 900.0


def test_a_message_that_is_put_off_stays_the_same_run():
    once = MESSAGE.put_off()
    assert changes(MESSAGE, once) == {"put_off_count", "delivery_base", "unknown_since"}
    assert (once.unknown_since, MESSAGE.put_off(unknown_since=7.0).unknown_since) == (None, 7.0)
    assert once.key == MESSAGE.key
    assert [MESSAGE.message_id, once.message_id, once.put_off().message_id] == [
        "t1:1:5",
        "t1:1:5:put-1",
        "t1:1:5:put-2",
    ]
    assert MESSAGE.put_off(delivery_base=8).delivery_base == 8


def test_the_next_run_is_not_put_off_yet():
    waited = MESSAGE.put_off().put_off()
    assert waited.resubmitted(counted=True).put_off_count == 0
    assert waited.resubmitted(counted=True).message_id == "t1:1:6"
    assert waited.replayed().message_id == "t1:2:0"


def test_a_pointer_that_is_put_off_has_an_id_of_its_own():
    pointer = MESSAGE.pointing(9, counted=True, delivery_base=0)
    assert pointer.put_off().message_id == f"{pointer.message_id}:put-1"


def test_the_id_of_a_put_off_message_with_a_long_task_id_is_short():
    long = dataclasses.replace(MESSAGE, id="x" * 1000, put_off_count=COUNTER_LIMIT)
    assert len(long.message_id) <= MESSAGE_ID_LIMIT
