"""How often a store looks for rows without an owner."""

import pytest

from aztask.stores.tables.rows import LOOK_SECONDS, MIXED_SECONDS, UnownedRows


class Still:
    now = 1000.0

    def monotonic(self):
        return self.now


class Table:
    def __init__(self):
        self.clock = Still()
        self.looks = 0
        self.there = False
        self.away = False
        self.rows = UnownedRows(self, "u", self.clock)

    def query(self, call, text, values, limit, select):
        assert (values["first"], values["last"], limit) == ("u-", "u.", 1)
        if self.away:
            raise ConnectionError
        self.looks += 1
        return [{}] if self.there else []


def test_without_such_rows_there_is_one_look_a_minute():
    table = Table()
    for _ in range(100):
        assert not table.rows.may_exist()
    assert table.looks == 1
    table.clock.now += LOOK_SECONDS
    assert not table.rows.may_exist()
    assert table.looks == 2


def test_a_row_is_noticed_within_a_minute_and_looked_for_until_long_after_the_last():
    table = Table()
    assert not table.rows.may_exist()
    table.there = True
    table.clock.now += LOOK_SECONDS
    assert table.rows.may_exist()
    table.there = False
    table.clock.now += MIXED_SECONDS - 1.0
    assert table.rows.may_exist()
    table.clock.now += 1.0
    assert not table.rows.may_exist()
    table.rows.seen()
    assert table.rows.may_exist()


def test_a_look_that_fails_is_repeated_at_once():
    table = Table()
    table.away = True
    for _ in range(2):
        with pytest.raises(ConnectionError):
            table.rows.may_exist()
    table.away = False
    assert not table.rows.may_exist()
    assert table.looks == 1
