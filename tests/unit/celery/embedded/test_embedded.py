"""Reading what a message embeds, and the messages that follow it, without a broker."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from celery import Celery, chain, chord, group

from aztask.celery.embedded.launch import DEPTH, MOST, Embedded, Launch, may_embed, read_embedded
from aztask.errors import CodecError, ContentRefused, DecodeError
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage

CODEC = Codec()
NOW = 1_000_000.0
celery = Celery("shop", set_as_current=False)


@celery.task(name="add", shared=False)
def add(*numbers: int) -> int:
    return sum(numbers)


def message(embed: object, kind: str = "application/json") -> TaskMessage:
    parts = [[1], {}, embed]
    body = json.dumps(parts).encode() if "json" in kind else msgpack.packb(parts)
    return TaskMessage(id="p", task="t", queue="q", body=body, content_type=kind, root_id="r")


def plain(sig: Any) -> dict[str, Any]:
    """A signature as it travels."""
    return json.loads(json.dumps(sig))


def launched(sig: Any, *values: Any, chain: Any = (), parent: TaskMessage | None = None) -> Launch:
    launch = Launch(CODEC, parent or message({}), {"known": "far"}.get, NOW)
    launch.follow(plain(sig), values, "seed", plain(list(chain)))
    return launch


def bodies(launch: Launch) -> list[Any]:
    return [json.loads(each.message.body) for each in launch.messages]


@pytest.mark.parametrize("kind", ["application/json", "application/x-msgpack"])
def test_a_body_that_embeds_nothing_is_not_decoded(kind: str) -> None:
    assert not may_embed(message({}, kind))
    assert not may_embed(TaskMessage(id="a", task="t", queue="q", body=b""))
    nothing = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    assert may_embed(message(nothing, kind))
    assert read_embedded(CODEC, message(nothing, kind)) is None


def test_the_parts_are_read() -> None:
    sig = plain(add.s(1))
    embed = {"callbacks": [sig], "errbacks": sig, "chain": [sig, sig], "chord": sig}
    assert read_embedded(CODEC, message(embed)) == Embedded((sig,), (sig,), (sig, sig), sig)


@pytest.mark.parametrize(
    ("embed", "error"),
    [
        ({"novelty": [1]}, ContentRefused),
        ({"chain": 7}, DecodeError),
        ({"chain": [7]}, DecodeError),
        ({"chain": [{"task": 3}]}, DecodeError),
        ({"chain": [{"task": "t", "args": "x"}]}, DecodeError),
        ({"chord": {"task": "t", "options": [1]}}, DecodeError),
        ([1], DecodeError),
    ],
)
def test_what_celery_does_not_write_is_refused(embed: object, error: type[CodecError]) -> None:
    with pytest.raises(error) as raised:
        read_embedded(CODEC, message(embed))
    assert "\n" not in str(raised.value)


def test_a_task_gets_the_value_first_and_keeps_its_options() -> None:
    sig = add.s(2, k=3).set(countdown=5, expires=60, task_id="x", queue="z", time_limit=9)
    launch = launched(sig.set(headers={"tenant": "a"}), 7)
    [(sent, delay)] = launch.messages
    assert (sent.id, sent.task, sent.queue, delay) == ("x", "add", "z", 5.0)
    assert (sent.parent_id, sent.root_id) == ("p", "r")
    assert (sent.expires, sent.time_limit) == (NOW + 60, 9.0)
    assert sent.extra == {"tenant": "a"}
    assert bodies(launch)[0][:2] == [[7, 2], {"k": 3}]


def test_an_immutable_task_gets_its_own_arguments_alone() -> None:
    assert bodies(launched(add.si(2), 7))[0][0] == [2]


def test_ids_follow_from_the_parent() -> None:
    first, again = launched(add.s(1), 7), launched(add.s(1), 7)
    assert first.messages[0].message.id == again.messages[0].message.id
    other = launched(add.s(1), 7, parent=TaskMessage("o", "t", "q", b"\x80", "application/json"))
    assert other.messages[0].message.id != first.messages[0].message.id


def test_the_queue_is_that_of_the_signature_the_task_or_the_parent() -> None:
    known = celery.signature("known")
    queues = [
        launched(sig, 1).messages[0].message.queue
        for sig in (known.clone().set(queue="named"), known, add.s())
    ]
    assert queues == ["named", "far", "q"]


def test_the_format_is_that_of_the_parent() -> None:
    packed = message({}, "application/x-msgpack")
    sent = launched(add.s(), 1, parent=packed).messages[0].message
    assert sent.content_type == "application/x-msgpack"
    assert msgpack.unpackb(sent.body)[0] == [1]


def test_the_rest_of_a_chain_is_embedded() -> None:
    launch = launched(chain(add.s(1), add.s(2), add.s(3)), 7, chain=[add.s(9)])
    [body] = bodies(launch)
    assert body[0] == [7, 1]
    assert [each["args"] for each in body[2]["chain"]] == [[9], [3], [2]]


def test_a_group_sends_all_members() -> None:
    launch = launched(group(add.s(1), group(add.s(2), add.s(3))), 7)
    assert [body[0] for body in bodies(launch)] == [[7, 1], [7, 2], [7, 3]]
    assert not launch.chords and len({each.message.id for each in launch.messages}) == 3


def test_a_group_before_another_task_is_a_chord() -> None:
    launch = launched(group(add.s(1), add.s(2)), 7, chain=[add.s(9), add.s(8)])
    [chord_] = launch.chords
    assert chord_.size == 2 and chord_.body["args"] == [8]
    assert [each["args"] for each in chord_.body["options"]["chain"]] == [[9]]
    assert [each.message.group for each in launch.messages] == [chord_.group] * 2
    assert [each.message.extra["group_index"] for each in launch.messages] == [0, 1]
    assert all(body[2]["chord"]["args"] == [8] for body in bodies(launch))


def test_a_chord_in_a_chord_joins_with_its_body() -> None:
    inner = chord([add.s(1), add.s(2)], add.s(3))
    launch = launched(chord([inner, add.s(4)], add.s(5)), 7)
    outer = next(each for each in launch.chords if each.body["args"] == [5])
    nested = next(each for each in launch.chords if each.body["args"] == [3])
    assert (outer.size, nested.size) == (2, 2)
    options = nested.body["options"]
    assert (options["group_id"], options["group_index"]) == (outer.group, 0)
    assert options["chord"]["args"] == [5]


def test_a_chain_in_a_chord_joins_with_its_last_task() -> None:
    launch = launched(chord([chain(add.s(1), add.s(2)), add.s(3)], add.s(5)), 7)
    first, second = bodies(launch)
    assert first[2]["chord"] is None and second[2]["chord"]["args"] == [5]
    assert first[2]["chain"][0]["options"]["group_index"] == 0
    assert launch.messages[1].message.extra["group_index"] == 1
    assert launch.chords[0].size == 2


def test_an_empty_header_starts_the_body() -> None:
    launch = launched(chord([], add.s(5), app=celery), 7)
    assert bodies(launch)[0][0] == [[], 5] and not launch.chords


def test_nesting_has_a_limit() -> None:
    sig = plain(add.s(1))
    for _ in range(DEPTH + 5):
        sig = {"task": "celery.chain", "kwargs": {"tasks": [sig]}, "subtask_type": "chain"}
    with pytest.raises(DecodeError, match="nested"):
        launched(sig, 1)
    for _ in range(DEPTH + 5):
        sig = {"task": "celery.group", "kwargs": {"tasks": [sig]}, "subtask_type": "group"}
    with pytest.raises(DecodeError, match="nested"):
        launched(sig, 1)


@pytest.mark.parametrize(
    "options", [{"countdown": "x"}, {"eta": "never"}, {"expires": [1]}, {"time_limit": "x"},
                {"link": 3}, {"headers": [1]}, {"task_id": "a\nb"}],
)  # fmt: skip
def test_wrong_options_are_a_codec_error(options: dict[str, Any]) -> None:
    with pytest.raises(CodecError):
        launch = launched({**plain(add.s(1)), "options": options}, 1)
        for each in launch.messages:
            CODEC.to_envelope(each.message, delay=each.delay)


def nested(count: int, *, deep: bool) -> dict[str, Any]:
    """An embed with so many tasks: beside each other, or in groups, chords and links."""
    sig = plain(add.s(1))
    if not deep:
        return {"callbacks": [sig] * count}
    header = [plain(add.s(1))] * (count - 4)
    linked = {**sig, "options": {"link": [sig], "link_error": sig}}
    body = {"task": "celery.chain", "subtask_type": "chain", "kwargs": {"tasks": [linked]}}
    kwargs = {"header": {"task": "celery.group", "subtask_type": "group",
                         "kwargs": {"tasks": header}}, "body": body}  # fmt: skip
    return {"chain": [{"task": "celery.chord", "subtask_type": "chord", "kwargs": kwargs}, sig]}


@pytest.mark.parametrize("deep", [False, True])
def test_a_message_embeds_so_many_tasks_at_most(deep: bool) -> None:
    assert read_embedded(CODEC, message(nested(MOST, deep=deep))) is not None
    with pytest.raises(ContentRefused, match="embeds more than 10,000 tasks"):
        read_embedded(CODEC, message(nested(MOST + 1, deep=deep)))


def test_the_arguments_of_a_task_are_not_counted() -> None:
    sig = {**plain(add.s(1)), "kwargs": {"tasks": [{"task": "t"}] * (MOST + 1)}}
    assert read_embedded(CODEC, message({"callbacks": [sig]})) is not None
