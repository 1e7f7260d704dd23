"""Reading rows that may be damaged: a value, or a reason that never shows one."""

import msgpack
import pytest

from aztask.settlement import Complete, to_record
from aztask.stores.records.base import State
from aztask.stores.records.damage import (
    Columns,
    Damaged,
    check_ends,
    check_owner,
    check_position,
    unpacked,
)

ROW = Columns(
    {
        "task": "shop.add",
        "starts": 2,
        "stopped": False,
        "at": 1.5,
        "body": b"x",
        "queues": ["a", "b"],
        "position": 7,
        "state": "started",
        "settlement": msgpack.packb(to_record(Complete())),
        "packed": msgpack.packb([1]),
        "nothing": None,
    }
)


def test_what_a_store_writes_is_read():
    assert (ROW.text("task"), ROW.count("starts"), ROW.flag("stopped")) == ("shop.add", 2, False)
    assert (ROW.time("at"), ROW.optional_time("nothing"), ROW.data("body")) == (1.5, None, b"x")
    assert (ROW.texts("queues"), ROW.unpacked("packed")) == (("a", "b"), [1])
    assert (ROW.state(), ROW.settlement()) == (State.STARTED, Complete())
    assert (ROW.text("absent", missing="-"), ROW.count("absent", missing=3)) == ("-", 3)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda row: row.text("absent"), "its absent is missing"),
        (lambda row: row.text("starts"), "its starts is int, not"),
        (lambda row: row.count("task"), "its task is str, not a whole number"),
        (lambda row: row.count("starts", most=1), "its starts is out of range"),
        (lambda row: row.flag("starts"), "its starts is int, not true or false"),
        (lambda row: row.time("task"), "its task is str"),
        (lambda row: row.texts("task"), "its task is str, not a list of texts"),
        (lambda row: row.state("task"), "its state 'shop.add' is unknown"),
        (lambda row: row.settlement("packed"), "its packed is unknown or wrong"),
        (lambda row: row.unpacked("body2"), None),
    ],
)
def test_anything_else_names_the_column_and_the_type(read, reason):
    if reason is None:
        assert read(ROW) is None
        return
    with pytest.raises(Damaged) as caught:
        read(ROW)
    assert caught.value.reason.startswith(reason)


def test_bytes_that_cannot_be_decoded_are_counted_not_shown():
    with pytest.raises(Damaged, match=r"its value cannot be decoded \(1 bytes\)"):
        unpacked(b"\xc1", "value")


def test_columns_that_contradict_each_other():
    check_ends(State.STARTED, None, None)
    check_ends(State.SUCCEEDED, 1.0, Complete())
    for state, ended_at, settlement in [
        (State.STARTED, 1.0, None),
        (State.SUCCEEDED, None, None),
        (State.PENDING, None, Complete()),
    ]:
        with pytest.raises(Damaged, match="its state is"):
            check_ends(state, ended_at, settlement)
    with pytest.raises(Damaged, match="an owner, but no position"):
        check_owner("w1", None)
    check_position(1, 2)
    with pytest.raises(Damaged):
        check_position("a", 2)
