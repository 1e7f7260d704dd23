"""What Python's json takes beside JSON is refused, and nothing else."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.errors import DecodeError
from aztask.message.jsonencoding import check_json_values

DIGITS = b"9" * 400


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (b"1e999", "the number 1e999 is too large"),
        (b"-1E+400", "the number -1E+400 is too large"),
        (b"1" + DIGITS + b".5", "the number 19999"),
        (DIGITS[:300] + b"e10", "the number 99999"),
        (b"1e0000309", "the number 1e0000309 is too large"),
        (b"NaN", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
    ],
)
@pytest.mark.parametrize("body", [b"[[%s], {}, {}]", b'[[], {"a": {"b": [1, %s]}}, {}]'])
def test_a_number_that_is_infinite_or_none_is_refused(number, shown, body):
    with pytest.raises(DecodeError, match=r"^the arguments are not JSON: ") as failure:
        check_json_values(body % number, DecodeError, "the arguments")
    assert shown in str(failure.value)


@pytest.mark.parametrize(
    "body",
    [b"[1e308]", b"[1e-999]", b"[" + DIGITS + b"]", b'["1e999", "NaN"]', b'["a1e999"]', b"[1.5e3]"],
)
def test_what_is_json_passes(body):
    check_json_values(body, DecodeError, "the arguments")


numbers = st.from_regex(
    r"-?(0|[1-9][0-9]{0,120})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,4})?", fullmatch=True
)


@given(st.lists(numbers, max_size=4))
def test_no_infinite_number_gets_through(texts):
    body = f"[{', '.join(texts)}]".encode()
    infinite = any(isinstance(n, float) and math.isinf(n) for n in json.loads(body))
    try:
        check_json_values(body, DecodeError, "the value")
    except DecodeError:
        assert infinite
    else:
        assert not infinite
