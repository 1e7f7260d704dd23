"""The one source of randomness and ids: the system's, or a seeded one inside a block."""

import os
import random

from aztask.support import chance


def draws():
    items = list(range(10))
    chance.shuffle(items)
    return chance.token(), chance.uniform(1.0, 2.0), chance.share(), chance.below(100), items


def test_one_seed_draws_the_same_again():
    found = []
    for seed in (1, 1, 2):
        with chance.replaced(random.Random(seed)):
            found.append(draws())
    assert found[0] == found[1] != found[2]


def test_after_the_block_the_former_source_draws():
    with chance.replaced(random.Random(1)):
        first = chance.token()
        with chance.replaced(random.Random(1)):
            assert chance.token() == first
        assert chance.token() != first
    assert chance.token() != first


def test_draws_keep_their_bounds():
    assert len({chance.token(3) for _ in range(100)}) == 100
    assert all(len(chance.token(3)) == 6 for _ in range(10))
    assert all(0 <= chance.below(3) < 3 for _ in range(100))
    assert all(0.0 <= chance.share() < 1.0 and 1.0 <= chance.uniform(1, 2) <= 2.0 for _ in range(9))
    items = list(range(100))
    chance.shuffle(items)
    assert sorted(items) == list(range(100)) != items


def test_a_forked_child_does_not_repeat_its_parents_ids():
    """Its messages would be dropped as duplicates of the parent's."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, chance.token().encode())
        os._exit(0)
    mine = chance.token()
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert len(theirs) == 32
    assert mine != theirs
