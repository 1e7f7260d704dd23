"""Signatures that no Celery writes: launching them ends at once, or raises a CodecError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aztask.celery.embedded.launch import Launch, read_embedded
from aztask.errors import CodecError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage

CODEC = Codec()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "task",
                    "args",
                    "kwargs",
                    "options",
                    "subtask_type",
                    "tasks",
                    "header",
                    "body",
                    "link",
                ]
            )
            | st.sampled_from(
                ["task_id", "group_id", "chord", "countdown", "eta", "queue", "headers"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
SIGNATURES = st.fixed_dictionaries(
    {"task": st.just("t")},
    optional={
        "args": st.lists(VALUES, max_size=2),
        "kwargs": st.dictionaries(st.sampled_from(["tasks", "header", "body", "x"]), VALUES),
        "options": st.dictionaries(
            st.sampled_from(
                ["task_id", "queue", "link", "link_error", "chord", "group_id", "group_index"]
            )
            | st.sampled_from(["countdown", "eta", "expires", "headers", "time_limit", "reply_to"]),
            VALUES,
        ),
        "subtask_type": st.sampled_from([None, "chain", "group", "chord", "starmap"]),
        "immutable": st.booleans(),
    },
)


def message(embed: Any) -> TaskMessage:
    body = json.dumps([[], {}, embed]).encode()
    return TaskMessage("p", "t", "q", body, "application/json")


@given(VALUES)
def test_any_embed_is_read_or_refused(embed: Any) -> None:
    try:
        read_embedded(CODEC, message(embed))
    except CodecError as error:
        assert "\n" not in str(error)


@given(SIGNATURES, st.lists(SIGNATURES, max_size=2))
@example({"task": "t", "subtask_type": "chain", "kwargs": {"tasks": {"kwargs": 1}}}, [])
@example({"task": "t", "subtask_type": "chord", "kwargs": {"header": {"kwargs": True}}}, [])
def test_any_signature_is_launched_or_refused(sig: Any, chain: Any) -> None:
    launch = Launch(CODEC, message({}), lambda task: None, 1_000_000.0)
    try:
        launch.follow(sig, [1], "seed", chain)
        for sent in launch.messages:
            CODEC.to_envelope(sent.message, delay=sent.delay)
    except CodecError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("count", [1, 2000])
def test_a_wide_group_is_as_many_messages(count: int) -> None:
    member = {"task": "t", "args": [1], "kwargs": {}, "options": {}}
    launch = Launch(CODEC, message({}), lambda task: None, 0.0)
    group = {"task": "celery.group", "kwargs": {"tasks": [member] * count}, "subtask_type": "group"}
    launch.follow(group, [1], "seed")
    assert len({sent.message.id for sent in launch.messages}) == count
