from hypothesis import given
from hypothesis import strategies as st

from aztask.operate.deadletters.letters import Positions

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(NUMBERS | st.text(max_size=3)), NUMBERS)
def test_it_is_a_set(given_positions, other):
    positions, expected = Positions(given_positions), set(given_positions)
    assert len(positions) == len(expected)
    assert set(positions) == expected
    assert all(each in positions for each in expected)
    assert (other in positions) == (other in expected)


def test_numbers_come_in_ascending_order_and_texts_after():
    assert list(Positions(["b", 3, 1, 3, "a", 2])) == [1, 2, 3, "a", "b"]


def test_a_generator_of_a_million_takes_eight_bytes_each():
    positions = Positions(iter(range(0, 2_000_000, 2)))
    assert len(positions) == 1_000_000
    assert (1_999_998 in positions, 1_999_999 in positions) == (True, False)
    assert positions._numbers.itemsize * len(positions) == 8_000_000
