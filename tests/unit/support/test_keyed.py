"""The HMAC with a prepared key is the one of the standard library, also around its block."""

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aztask.support.keyed import KeyedDigest


@given(st.binary(max_size=200), st.binary(max_size=300))
def test_it_is_the_hmac_of_the_standard_library(key, data):
    assert KeyedDigest(key).digest(data) == hmac.digest(key, data, "sha256")


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128])
def test_a_key_of_each_length_around_a_block(length):
    keyed = KeyedDigest(b"k" * length)
    for _ in range(2):
        assert keyed.digest(b"data") == hmac.digest(b"k" * length, b"data", "sha256")
