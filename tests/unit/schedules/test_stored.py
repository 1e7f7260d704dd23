"""Heads, occurrences and claims: read as they were written, and refused when they are damaged."""

from dataclasses import replace

import msgpack
import pytest

from aztask.address.owner import NO_OWNER
from aztask.schedules.stored import (
    DUE,
    REFUSED,
    REMEMBERED,
    SENT,
    SKIPPED,
    TRIGGERED,
    WAITING,
    Made,
    Schedule,
    key_of,
    read_made,
    read_schedule,
)
from aztask.schedules.view import LIVES_SECONDS, Claim, Code, View, best, read_claim, read_view
from aztask.stores.records.damage import Damaged
from aztask.stores.records.schedules import ClaimRow, Head, KeptSchedule, Occurrence

HEAD = Schedule(
    b"template", "digest", 3, 1.0, 2.0, 3.0, "w1", 4.0, 5.0, "s@1", 6.0, 7, {"older": 8.0}
)
MADE = Made(1_800_000_000.5, "s@2027", 9.0, "schedule", DUE, "why", "w1")
CLAIM = Claim("d" * 50, 2, 10.0, 20.0, "tag")


def test_a_head_is_read_as_it_was_packed():
    assert read_schedule(HEAD.pack()) == HEAD
    plain = Schedule(b"", "", 0, 0.0, 0.0, 0.0)
    assert read_schedule(plain.pack()) == plain
    assert (HEAD.of_code, plain.of_code) == (True, False)
    assert (plain.by, plain.last_id, plain.last_at, plain.made, plain.left) == ("", "", 0.0, 0, {})
    assert msgpack.unpackb(HEAD.pack())["v"] == 1, "releases before this one look for it"


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"left": None},
        {"left": []},
        {"left": {5: 1.0}},
        {"left": {"older": 1.0, 5: 1.0}},
        {"left": {"older": "soon"}},
        {"release": -1},
        {"watermark": "soon"},
        {"digest": 5},
    ],
    ids=str,
)
def test_a_damaged_head_is_refused(change):
    found = msgpack.unpackb(HEAD.pack(), strict_map_key=False)
    with pytest.raises(Damaged):
        read_schedule(msgpack.packb({**found, **change}))


def test_a_head_that_is_no_map_is_refused():
    for value in ([1], 5, "text"):
        with pytest.raises(Damaged, match="a newer aztask may know it"):
            read_schedule(msgpack.packb(value))


def test_a_head_without_earlier_definitions_is_one_of_an_earlier_release():
    found = msgpack.unpackb(HEAD.pack())
    del found["left"]
    assert read_schedule(msgpack.packb(found)) == replace(HEAD, left={})


def test_a_head_remembers_few_definitions():
    many = {f"d{n}": float(n) for n in range(REMEMBERED + 3)}
    assert len(read_schedule(replace(HEAD, left=many).pack()).left) == REMEMBERED == 4


@pytest.mark.parametrize("state", [DUE, WAITING, SENT, SKIPPED, REFUSED])
@pytest.mark.parametrize("kind", ["schedule", "trigger", "backfill"])
def test_an_occurrence_is_read_as_it_was_packed(state, kind):
    made = replace(MADE, state=state, kind=kind)
    assert read_made(made.row) == made
    assert made.row.open == (state in ("due", "waiting"))


def test_the_words_of_an_occurrence_are_those_of_every_release():
    assert (DUE, WAITING, SENT, SKIPPED, REFUSED) == (
        "due", "waiting", "sent", "skipped", "refused",
    )  # fmt: skip


def test_keys_are_in_the_order_of_the_times():
    assert key_of(1_800_000_000.5) == "01800000000500"
    assert MADE.key == "01800000000500"
    by_hand = replace(MADE, kind=TRIGGERED, task_id="s@abcdefghijkl")
    assert by_hand.key == "01800000000500defghijkl"


@pytest.mark.parametrize(
    "change",
    [{"kind": "else"}, {"state": "else"}, {"at": 5.0}, {"made_at": None}, {"by": 5}],
    ids=str,
)
def test_a_damaged_occurrence_is_refused(change):
    found = {**msgpack.unpackb(MADE.row.data), **change}
    with pytest.raises(Damaged):
        read_made(Occurrence(MADE.key, msgpack.packb(found), True))


@pytest.mark.parametrize("value", [None, 5, [1, 2], "text"])
def test_an_occurrence_that_is_no_map_is_refused(value):
    with pytest.raises(Damaged, match="no map"):
        read_made(Occurrence(MADE.key, msgpack.packb(value), True))


# -- claims --------------------------------------------------------------------------------------


def row(values, key=CLAIM.key):
    return ClaimRow(key, msgpack.packb(values), "tag")


def test_a_claim_is_read_as_it_was_packed():
    assert read_claim(replace(CLAIM.row, tag="tag")) == CLAIM
    assert CLAIM.key == f"{'d' * 40}-2"
    newer = [CLAIM.digest, CLAIM.release, CLAIM.first_at, CLAIM.seen_at, "of a newer release"]
    assert read_claim(row(newer)) == CLAIM


@pytest.mark.parametrize(
    "values",
    [
        None,
        7,
        [],
        {"digest": "d"},
        ["d" * 50, 2, 10.0],
        ["d" * 50, "2", 10.0, 20.0],
        ["d" * 50, 2, 10.0, None],
        ["e" * 50, 2, 10.0, 20.0],
        ["d" * 50, 3, 10.0, 20.0],
    ],
    ids=str,
)
def test_a_damaged_claim_is_none(values):
    assert read_claim(row(values)) is None


def test_a_claim_lives_ten_minutes():
    assert CLAIM.lives_at(20.0 + LIVES_SECONDS)
    assert not CLAIM.lives_at(20.5 + LIVES_SECONDS)
    assert LIVES_SECONDS == 600.0


def test_claims_that_are_alike_but_for_their_digest_have_one_order_everywhere():
    other = replace(CLAIM, digest="e" * 50)
    assert best([CLAIM, other]) == best([other, CLAIM]) == other
    assert Claim("d", 1, 2.0, 3.0).tag == ""


def test_the_higher_release_counts_and_then_the_later_start():
    later = replace(CLAIM, first_at=11.0)
    higher = replace(CLAIM, release=3, first_at=1.0)
    assert best([CLAIM, later]) == later
    assert best([higher, later, CLAIM]) == higher
    assert best([]) is None


# -- views ---------------------------------------------------------------------------------------


def test_what_waits_is_counted():
    opened = (MADE, replace(MADE, state=WAITING), replace(MADE, state=WAITING))
    assert View("s", HEAD, "tag", opened).waiting == 2
    assert View("s", HEAD, "tag").waiting == 0
    assert (View("s", HEAD, "tag").mark, MADE.key) == ("", key_of(MADE.at))


def test_a_schedule_of_the_code_is_unclaimed_ten_minutes_after_its_last_claim():
    head = replace(HEAD, paused_at=None, claimed_at=0.0, digest=CLAIM.digest)
    other = replace(CLAIM, digest="another", seen_at=900.0)
    view = View("s", head, "tag", claims=(CLAIM, other))
    assert view.claimed_at == 20.0
    assert view.state_at(20.0 + LIVES_SECONDS) == "active"
    assert view.state_at(20.5 + LIVES_SECONDS) == "unclaimed"
    assert view.living(300.0) == [CLAIM, other]
    assert view.living(1000.0) == [other]
    old = replace(view, schedule=replace(head, claimed_at=500.0))
    assert old.claimed_at == 500.0, "a worker of a release without claims"


def test_a_definition_that_no_code_ever_claimed_was_claimed_at_no_time():
    for claimed_at in (None, 0.0):
        head = replace(HEAD, paused_at=None, claimed_at=claimed_at, digest=CLAIM.digest)
        assert View("s", head, "tag").claimed_at == 0.0
        assert View("s", head, "tag", claims=(CLAIM,)).claimed_at == 20.0


def test_a_schedule_that_was_made_at_run_time_needs_no_claim():
    made = View("s", replace(HEAD, paused_at=None, claimed_at=None), "tag")
    assert made.state_at(1e9) == "active"
    assert View("s", HEAD, "tag").state_at(1e9) == "paused"


def test_a_view_has_what_can_be_read(caplog):
    broken = Occurrence("x", b"\xc1", True)
    head = Head("s", HEAD.pack(), "tag")
    kept = KeptSchedule(head, (MADE.row, broken), NO_OWNER, "mark", (CLAIM.row, row(7)))
    view = read_view(kept)
    assert view == View("s", HEAD, "tag", (MADE,), NO_OWNER, "mark", (replace(CLAIM, tag="tag"),))
    assert "schedule s: occurrence x" in caplog.text
    damaged = read_view(replace(kept, head=Head("s", b"\xc1", "tag")))
    assert isinstance(damaged, Damaged)


def test_whose_a_schedule_without_an_owner_is():
    code = Code("shop", declared={"shop.a": 1, "both.b": 1}, tasks={"shop.t": 1})
    assert code.has("any", "shop.t")
    assert code.has("shop.a", "other.t")
    assert code.has("both.b", "")
    assert not code.has("both.b", "other.t"), "the app that has its task may declare it, too"
    assert not code.has("shop.c", "")
    assert code.adopts("shop.a", "shop.t", of_code=True)
    assert code.adopts("any", "shop.t", of_code=False)
    assert not code.adopts("any", "shop.t", of_code=True)
    assert not Code().has(".a", "")
    assert not Code(declared={"a.b": 1}).has("a.b", "t")
