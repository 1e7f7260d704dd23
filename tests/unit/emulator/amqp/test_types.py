"""Python types for AMQP types."""

from __future__ import annotations

from aztask.emulator.amqp.encode import Described, Symbol, Timestamp, undescribed


def test_undescribed():
    assert undescribed(Described("a", Described(5, "x"))) == "x"


def test_symbols_and_timestamps_equal_plain_values():
    assert Symbol("a") == "a"
    assert {Symbol("a"): 1}["a"] == 1
    assert Timestamp(5) == 5
