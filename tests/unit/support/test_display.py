"""Anything at all becomes one short printable line."""

from hypothesis import given
from hypothesis import strategies as st

from aztask.support.display import (
    LINE_LIMIT,
    PART_LIMIT,
    one_line,
    plural,
    safe_str,
    short_repr,
    traceback_of,
)


class Hostile:
    def __repr__(self):
        raise RuntimeError("no repr today")


@given(st.text() | st.recursive(st.integers() | st.text(), st.lists))
def test_every_value_is_one_short_printable_line(value):
    for size in (10, 10_000):
        text = short_repr(value, size)
        assert text.isprintable()
        assert len(text) <= LINE_LIMIT


def test_small_values_are_shown_in_full():
    assert short_repr(("a.png", 200), 12) == "('a.png', 200)"


def test_a_repr_that_raises_is_named():
    assert short_repr(Hostile(), 1) == "<Hostile: its repr raised RuntimeError>"


def test_an_integer_too_long_for_text_does_not_raise():
    assert "ValueError" in short_repr(10**5000, 1)


def test_control_characters_do_not_reach_a_terminal():
    assert one_line("a\x1b[31mred\nline\ud800") == "a?[31mred line?"
    assert one_line("x" * 1000, 10) == "xxxxxxx..."


class Exiting(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


def test_a_text_that_ends_the_program_is_named():
    text, trace = safe_str(Exiting()), traceback_of(Exiting())  # pytest would call its __repr__
    assert text == "<Exiting: its text raised SystemExit>"
    assert "Exiting: <exception str() failed>" in trace


def test_a_traceback_keeps_its_frames_and_causes_beside_a_text_of_50_mb():
    try:
        try:
            raise ValueError("x" * 50_000_000)
        except ValueError as cause:
            raise KeyError("why") from cause
    except KeyError as error:
        text = traceback_of(error)
    assert len(text) < PART_LIMIT + 2_000
    assert text.startswith("Traceback (most recent call last):\n")
    assert "test_display.py" in text
    assert "xxx...\n" in text
    assert text.endswith("KeyError: 'why'")


def test_plural():
    assert plural(1, "queue") == "1 queue"
    assert plural(2500, "queue") == "2,500 queues"
