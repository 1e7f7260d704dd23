"""The engine of unique tasks: who holds a key, until when, and what housekeeping makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from still import Still

from aztask.address.owner import NO_OWNER, Owner
from aztask.errors import BrokerUnavailable, ForeignId, QueueNotFound
from aztask.message.codec import Codec
from aztask.message.message import TaskMessage
from aztask.queues.engine import Database
from aztask.settlement import Complete
from aztask.stores.records.base import Outcome, RunKey, RunRecord, Start, State
from aztask.stores.records.damage import Damaged
from aztask.stores.records.local.store import LocalResults
from aztask.uniqueness.engine import (
    UNIQUE,
    Blocked,
    KeyClaim,
    Postponed,
    Taken,
    UniqueEngine,
    read_claim,
    split,
)
from aztask.uniqueness.rules import UniqueRules, task_of

START = 1_800_000_000.0
DAY = 86400.0
KEY = "shop.ship:abc"
SHOP = Owner("servicebus://shop.servicebus.windows.net", "shop")
FINISHED = UniqueRules(None, "finished", 0.0, "return", DAY)
STARTED = replace(FINISHED, until="started")
TIMED = UniqueRules(None, "", 60.0, "drop", 60.0)
QUIET = UniqueRules(lambda order: order, "quiet", 5.0, "return", 30.0)


class Site:
    """An engine over a real store, with a clock, and a broker that keeps what is sent."""

    def __init__(self, owner: Owner = SHOP, path: str = ":memory:") -> None:
        self.clock = Still(START)
        self.database = Database(path)
        self.results = LocalResults(self.database, owner=owner, clock=self.clock)  # type: ignore[arg-type]
        self.store = self.results.uniques
        self.sent: list[tuple[str, str, float]] = []
        self.codec = Codec()
        self.engine = UniqueEngine(
            self.results, self.store, self.codec, lambda: self, ("shop.ship",)
        )

    def send(self, queue: str, envelopes: Any) -> None:
        for each in envelopes:
            message = self.codec.from_envelope(each, queue)
            self.sent.append((queue, message.id, each.delay))

    @property
    def claim(self) -> KeyClaim | None:
        """What the key's holder says; None if the key is free."""
        holder = self.store.read(KEY)
        return None if holder is None else read_claim(holder.data)

    def record(self, task_id: str, state: State, *, generation: int = 0) -> None:
        """Note how far a task is, as workers do."""
        key = RunKey(task_id, generation)
        if state is State.STARTED:
            self.results.start([Start(key, "shop.ship", "jobs", 1, "o", "w", self.clock.now)])
        elif state.final:
            outcome = Outcome(state, Complete(), at=self.clock.now)
            self.results.bury([RunRecord(key, "shop.ship", "jobs", state, outcome=outcome)])

    def take(self, task_id: str, rules: UniqueRules = FINISHED, **options: Any) -> Taken | Blocked:
        given = {"delay": 0.0, **options}
        return self.engine.take(rules, KEY, message(task_id), **given)


def message(task_id: str, until: str = "finished", *, generation: int = 0) -> TaskMessage:
    extra = {UNIQUE: f"{until}:{KEY}"} if until else {}
    return TaskMessage(task_id, "shop.ship", "jobs", b"\x90", generation=generation, extra=extra)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    with closing(made.database):
        yield made


def taken(answer: Taken | Blocked) -> Taken:
    assert isinstance(answer, Taken)
    return answer


def blocked(answer: Taken | Blocked) -> Blocked:
    assert isinstance(answer, Blocked)
    return answer


# -- taking a key ----------------------------------------------------------------------------------


def test_a_key_is_held_by_the_first_with_its_message_until_that_is_sent(site: Site) -> None:
    one = taken(site.take("one"))
    claim = site.claim
    assert claim == one.claim
    assert claim is not None
    assert (claim.task_id, claim.generation, claim.until) == ("one", 0, "finished")
    assert (claim.taken_at, claim.ends_at, claim.due_at) == (START, START + DAY, START)
    assert (claim.queue, claim.sent, claim.closing) == ("jobs", False, False)
    (holder,) = site.store.due(START + 10.5, 9)
    assert holder.due == START + 10.0, "housekeeping sends it then"
    assert blocked(site.take("two")).claim == claim
    site.engine.confirm(one)
    claim = site.claim
    assert claim is not None
    assert (claim.queue, claim.payload, claim.sent) == ("", b"", True)
    assert site.store.due(START + DAY, 9) == []
    (holder,) = site.store.due(START + DAY + 1, 9)
    assert holder.due == START + DAY
    assert site.sent == [], "the sender does that itself"


def test_a_delay_makes_the_life_longer(site: Site) -> None:
    claim = taken(site.take("one", delay=100.0)).claim
    assert (claim.due_at, claim.ends_at) == (START + 100.0, START + 100.0 + DAY)
    site.clock.now += 10.0
    assert site.engine.repair() == 0
    site.clock.now += 1.0
    assert site.engine.repair() == 1
    assert site.sent == [("jobs", "one", 89.0)], "what is left of its delay"


@pytest.mark.parametrize(("passed", "free"), [(DAY - 1, False), (DAY, True)])
def test_a_key_is_free_when_the_life_of_its_holder_has_ended(
    site: Site, passed: float, free: bool
) -> None:
    site.engine.confirm(taken(site.take("one")))
    site.clock.now += passed
    assert isinstance(site.take("two"), Taken) == free


@pytest.mark.parametrize(
    ("rules", "state", "free"),
    [
        (FINISHED, State.PENDING, False),
        (FINISHED, State.STARTED, False),
        (FINISHED, State.FAILED, True),
        (STARTED, State.PENDING, False),
        (STARTED, State.STARTED, True),
        (STARTED, State.SUCCEEDED, True),
        (TIMED, State.SUCCEEDED, False),
    ],
    ids=str,
)
def test_a_task_holds_its_key_as_long_as_its_rule_says(
    site: Site, rules: UniqueRules, state: State, free: bool
) -> None:
    site.engine.confirm(taken(site.take("one", rules)))
    assert isinstance(site.take("two", rules), Blocked), "its task may be in the queue"
    site.record("one", state)
    assert isinstance(site.take("three", rules), Taken) == free


def test_a_damaged_holder_holds_nothing(site: Site) -> None:
    site.store.write(KEY, b"\xc1", START + DAY, None)
    assert isinstance(site.take("one"), Taken)
    assert site.engine.retake(message("two")) == "one"


def test_a_key_that_is_freed_while_another_one_takes_it_is_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tries = site.store.write, []

    def slower(*arguments: Any) -> Any:
        tries.append(arguments)
        return None if len(tries) == 1 else write(*arguments)

    monkeypatch.setattr(site.store, "write", slower)
    assert isinstance(site.take("one"), Taken)
    assert len(tries) == 2


def test_an_empty_key_is_taken_without_asking(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    read = site.store.read
    monkeypatch.setattr(site.store, "read", lambda key: (asked.append(key), read(key))[1])
    assert isinstance(site.take("one"), Taken)
    assert asked == []
    assert isinstance(site.take("two"), Blocked)
    assert asked == [KEY]


def test_a_holder_without_an_owner_stands_in_the_way_and_is_replaced_once_it_has_ended(
    tmp_path: Any,
) -> None:
    before = Site(NO_OWNER, str(tmp_path / "results.db"))
    site = Site(SHOP, str(tmp_path / "results.db"))
    with closing(before.database), closing(site.database):
        before.engine.confirm(taken(before.take("old")))
        assert blocked(site.take("one")).claim.task_id == "old"
        before.record("old", State.SUCCEEDED)
        site.clock.now += DAY
        assert isinstance(site.take("one"), Taken)
        assert before.claim is None
        holder = site.store.read(KEY)
        assert holder is not None
        assert holder.owner == SHOP.of_broker


def test_the_task_of_another_broker_stands_in_no_way(site: Site, monkeypatch: Any) -> None:
    one = taken(site.take("one"))

    def foreign(task_id: str) -> Any:
        raise ForeignId(f"task {task_id} is another broker's")

    monkeypatch.setattr(site.results, "get", foreign)
    assert not site.engine.waits(one.claim)
    assert isinstance(site.take("two"), Taken)


# -- members of workflows --------------------------------------------------------------------------


def test_a_member_takes_its_key_when_it_is_received_and_keeps_it_when_it_comes_again(
    site: Site,
) -> None:
    one = taken(site.engine.admit(FINISHED, KEY, message("one")))
    assert (one.claim.sent, one.claim.ends_at) == (True, START + DAY)
    (holder,) = site.store.due(START + DAY + 1, 9)
    assert holder.due == START + DAY
    again = site.engine.admit(FINISHED, KEY, message("one"))
    assert isinstance(again, Taken)
    assert again.claim == one.claim
    assert blocked(site.engine.admit(FINISHED, KEY, message("two"))).claim.task_id == "one"


# -- replacing -------------------------------------------------------------------------------------


def test_a_task_waits_until_its_first_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = taken(site.take("one")).claim
    assert site.engine.waits(claim), "it may be in its queue"
    site.record("one", State.STARTED)
    assert not site.engine.waits(claim)
    record = site.results.get("one")
    assert record is not None
    for state, starts, waits in (
        (State.PENDING, 0, True),
        (State.PENDING, 1, False),
        (State.STARTED, 0, False),
        (State.SUCCEEDED, 0, False),
    ):
        found = replace(record, state=state, starts=starts)
        monkeypatch.setattr(site.results, "get", lambda task_id, found=found: found)
        assert site.engine.waits(claim) == waits


def state_of(site: Site, task_id: str) -> State | None:
    record = site.results.get(task_id)
    return None if record is None else record.state


def test_of_several_that_replace_one_task_the_last_one_stays(site: Site) -> None:
    site.take("one")
    first = blocked(site.take("two"))
    between: list[str] = []

    def take(over: Blocked) -> Taken | Blocked:
        if not between:  # another caller comes first
            between.append(taken(site.take("two", over=first)).claim.task_id)
        return site.take("three", over=over)

    answer = taken(site.engine.replace(first, take))
    assert site.claim == answer.claim
    assert answer.claim.task_id == "three"
    assert state_of(site, "two") is State.CANCELLED
    assert state_of(site, "one") is None, "the other caller cancels that one"


def test_one_that_runs_is_not_replaced(site: Site) -> None:
    site.take("one")
    first = blocked(site.take("two"))
    site.record("one", State.STARTED)
    tried: list[Blocked] = []

    def take(over: Blocked) -> Blocked:
        tried.append(over)
        return over

    assert site.engine.replace(first, take) is first
    assert tried == []


def test_a_replacement_that_is_always_too_late_gives_up(site: Site) -> None:
    site.take("one")
    first = blocked(site.take("two"))
    tried: list[Blocked] = []

    def too_late(over: Blocked) -> Blocked:
        tried.append(over)
        return first

    assert site.engine.replace(first, too_late) is first
    assert len(tried) == 100


# -- freeing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "at_start", "at_end"),
    [("finished", False, True), ("started", True, True), ("", False, False), ("x", False, False)],
)
def test_a_key_is_freed_at_the_start_or_at_the_end(
    site: Site, until: str, at_start: bool, at_end: bool
) -> None:
    for method, frees in ((site.engine.started, at_start), (site.engine.ended, at_end)):
        if site.claim is None:
            site.take("one")
        method(message("one", until))
        assert (site.claim is None) == frees


def test_only_the_task_that_holds_a_key_frees_it(site: Site) -> None:
    site.engine.ended(message("one"))  # the key is free already
    site.take("one")
    for other in (message("two"), message("one", generation=1)):
        site.engine.ended(other)
        assert site.claim is not None
    site.engine.ended(message("one"))
    assert site.claim is None
    site.store.write(KEY, b"\xc1", START, None)
    site.engine.ended(message("one"))
    assert site.store.read(KEY) is not None, "a damaged holder is left to housekeeping"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("started:shop.ship:abc", ("started", "shop.ship:abc")),
        ("finished:k", ("finished", "k")),
        ("finished:", ("", "")),
        ("quiet:k", ("", "")),
        ("finished", ("", "")),
        ("", ("", "")),
        (5, ("", "")),
        (None, ("", "")),
    ],
    ids=str,
)
def test_the_header_says_until_when_and_which_key(text: Any, expected: tuple[str, str]) -> None:
    extra = {} if text is None else {"aztask-unique": text}
    assert split(TaskMessage("one", "shop.ship", "jobs", b"", extra=extra)) == expected


def test_a_key_names_its_task(site: Site) -> None:
    assert task_of("shop.ship:abc") == "shop.ship"
    assert task_of("a:b:abc") == "a:b", "names of tasks may have colons"


def test_a_key_that_was_taken_in_vain_is_given_up(
    site: Site, caplog: Any, monkeypatch: Any
) -> None:
    one = taken(site.take("one"))
    site.engine.give_up(one)
    assert site.claim is None
    two = taken(site.take("two"))

    def unreachable(holder: Any) -> Any:
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(site.store, "release", unreachable)
    site.engine.give_up(two)
    assert "two stays taken, housekeeping sends it" in caplog.text


# -- senders that died -----------------------------------------------------------------------------


@pytest.mark.parametrize(("passed", "sent"), [(9.75, False), (10.0, True)])
def test_a_caller_sends_the_message_of_a_sender_that_has_been_silent_for_ten_seconds(
    site: Site, passed: float, sent: bool
) -> None:
    site.take("one")
    site.clock.now += passed
    site.engine.complete(blocked(site.take("two")))
    assert site.sent == ([("jobs", "one", 0.0)] if sent else [])
    claim = site.claim
    assert claim is not None
    assert claim.sent == sent


def test_a_message_that_was_sent_is_not_sent_again(site: Site) -> None:
    site.engine.confirm(taken(site.take("one")))
    site.clock.now += 100.0
    site.engine.complete(blocked(site.take("two")))
    assert site.engine.repair() == 0
    assert site.sent == []


def test_housekeeping_sends_what_is_left_and_frees_what_has_ended(site: Site) -> None:
    for number in range(3):
        site.engine.take(FINISHED, f"shop.ship:{number}", message(f"t{number}"), 0.0)
    site.clock.now += 10.5
    assert site.engine.repair() == 3
    assert sorted(each[1] for each in site.sent) == ["t0", "t1", "t2"]
    assert site.engine.repair() == 0
    site.clock.now += DAY
    assert site.engine.repair() == 3
    assert site.store.due(1e11, 9) == []
    assert len(site.sent) == 3


@pytest.mark.parametrize(("before_its_end", "sent"), [(1.0, 1), (0.0, 0)])
def test_a_message_whose_life_has_ended_is_not_sent_any_more(
    site: Site, before_its_end: float, sent: int
) -> None:
    site.take("one")
    site.clock.now += DAY - before_its_end
    assert site.engine.repair() == 1
    assert len(site.sent) == sent
    assert (site.claim is None) == (not sent)


def test_a_sent_holder_that_is_due_early_is_freed(site: Site) -> None:
    """Its time comes only when its life has ended, by the clock of the store."""
    one = taken(site.take("one"))
    claim = replace(one.claim, queue="", payload=b"")
    site.store.write(KEY, claim.pack(), START - 1.0, one.holder)
    assert site.engine.repair() == 1
    assert site.claim is None
    assert site.sent == []


def test_a_message_that_cannot_be_sent_waits_for_a_minute(site: Site, caplog: Any) -> None:
    site.take("one")
    site.clock.now += 10.5

    def fail(queue: str, envelopes: Any) -> None:
        raise QueueNotFound("queue jobs does not exist")

    send, site.send = site.send, fail  # type: ignore[method-assign]
    assert site.engine.repair() == 0
    assert "queue jobs does not exist; it is tried again" in caplog.text
    site.send = send  # type: ignore[method-assign]
    site.clock.now += 59.75
    assert site.engine.repair() == 0
    site.clock.now += 0.5
    assert site.engine.repair() == 1
    assert [each[1] for each in site.sent] == ["one"]


def test_a_holder_with_the_message_of_another_task_is_not_sent(site: Site, caplog: Any) -> None:
    one = taken(site.take("one"))
    for claim in (replace(one.claim, task_id="two"), replace(one.claim, generation=3)):
        holder = site.store.read(KEY)
        site.store.write(KEY, claim.pack(), START, holder)
        site.clock.now += 1.0
        site.engine.repair()
        assert site.claim is None, "its key is free"
    assert site.sent == []
    assert caplog.text.count("its message is that of task one") == 2


def test_a_message_that_waited_for_long_in_the_store_is_sent(site: Site) -> None:
    """Its signature may be older than one on the wire."""
    site.take("one")
    asked = []
    read = site.codec.from_envelope

    def noted(envelope: Any, queue: str, **options: Any) -> Any:
        asked.append(options)
        return read(envelope, queue, **options)

    site.codec.from_envelope = noted  # type: ignore[method-assign]
    site.clock.now += 11.0
    site.engine.repair()
    assert asked[0] == {"stored": "unique task one, generation 0"}


def test_holders_without_an_owner_are_repaired_by_those_who_declare_their_task(
    tmp_path: Any,
) -> None:
    before = Site(NO_OWNER, str(tmp_path / "results.db"))
    site = Site(SHOP, str(tmp_path / "results.db"))
    with closing(before.database), closing(site.database):
        before.take("old")
        before.engine.take(FINISHED, "other.task:abc", message("other"), 0.0)
        site.clock.now += 11.0
        assert site.engine.repair() == 1
        assert [each[1] for each in site.sent] == ["old"]


# -- replays ---------------------------------------------------------------------------------------


def test_a_replay_takes_its_key_for_as_long_as_before(site: Site) -> None:
    assert site.engine.retake(message("one", "")) == ""
    assert site.claim is None
    assert site.engine.retake(message("one", generation=1)) == ""
    claim = site.claim
    assert claim is not None
    assert (claim.task_id, claim.generation, claim.until) == ("one", 1, "finished")
    assert (claim.taken_at, claim.ends_at, claim.sent) == (START, START + DAY, True)
    site.clock.now += 5.0
    assert site.engine.retake(message("two")) == "one"
    assert site.engine.retake(message("one", generation=2)) == "", "it is in its own way"
    site.record("one", State.SUCCEEDED, generation=2)
    assert site.engine.retake(message("two")) == ""


@pytest.mark.parametrize(("life", "expected"), [(30.0, 60.0), (1000.0, 1000.0)])
def test_a_replay_has_the_life_of_the_holder_before_it_and_a_minute_at_least(
    site: Site, life: float, expected: float
) -> None:
    site.take("one", replace(FINISHED, life=life))
    site.clock.now += 2000.0
    assert site.engine.retake(message("two")) == ""
    claim = site.claim
    assert claim is not None
    assert claim.ends_at - claim.taken_at == expected
    (holder,) = site.store.due(1e11, 9)
    assert holder.due == claim.ends_at


@pytest.mark.parametrize(
    ("state", "passed", "free"),
    [
        (State.SUCCEEDED, 60.0, False),
        (State.SUCCEEDED, 60.5, True),
        (State.STARTED, 60.5, False),
    ],
)
def test_a_replay_that_was_never_sent_holds_its_key_for_a_minute_behind_the_last_end(
    site: Site, state: State, passed: float, free: bool
) -> None:
    site.record("one", state)
    assert site.engine.retake(message("one", generation=1)) == ""
    site.clock.now += passed
    assert isinstance(site.take("two"), Taken) == free


# -- debounced tasks -------------------------------------------------------------------------------


def postpone(site: Site, name: str, *, delay: float = 0.0) -> Postponed:
    def make(task_id: str | None) -> TaskMessage:
        return message(task_id or name, "")

    return site.engine.postpone(QUIET, KEY, make, delay)


def test_the_calls_of_one_quiet_time_are_one_task(site: Site) -> None:
    assert postpone(site, "one") == Postponed("one")
    claim = site.claim
    assert claim is not None
    assert (claim.until, claim.generation, claim.queue) == ("quiet", 0, "jobs")
    assert (claim.taken_at, claim.ends_at, claim.due_at) == (START, START + 30.0, START)
    (holder,) = site.store.due(1e11, 9)
    assert holder.due == START + 5.0
    site.clock.now += 4.0
    assert postpone(site, "two").task_id == "one"
    claim = site.claim
    assert claim is not None
    assert (claim.taken_at, claim.ends_at) == (START, START + 30.0), "its life goes on"
    (holder,) = site.store.due(1e11, 9)
    assert holder.due == START + 9.0
    site.clock.now += 23.0
    postpone(site, "three")
    (holder,) = site.store.due(1e11, 9)
    assert holder.due == START + 30.0, "at the end of its life at the latest"
    site.clock.now = START + 30.5
    assert site.engine.repair() == 1
    assert site.sent == [("jobs", "one", 0.0)]
    assert site.claim is None


def test_a_debounced_call_with_a_delay_is_sent_with_what_is_left_of_it(site: Site) -> None:
    postpone(site, "one", delay=100.0)
    site.clock.now += 5.5
    assert site.engine.repair() == 1
    assert site.sent == [("jobs", "one", 94.5)]


def test_a_call_that_comes_while_the_one_before_it_is_sent_is_another_task(site: Site) -> None:
    postpone(site, "one")
    holder, claim = site.store.read(KEY), site.claim
    assert claim is not None
    site.store.write(KEY, replace(claim, closing=True).pack(), START + 10.0, holder)
    site.clock.now += 1.0
    assert postpone(site, "two") == Postponed("two")
    assert [each[1] for each in site.sent] == ["one"], "or it would be lost"
    claim = site.claim
    assert claim is not None
    assert (claim.task_id, claim.taken_at, claim.closing) == ("two", START + 1.0, False)


def test_a_damaged_holder_is_replaced_by_the_next_call(site: Site) -> None:
    site.store.write(KEY, b"\xc1", START + DAY, None)
    assert postpone(site, "one").task_id == "one"
    assert site.claim is not None


def test_a_debounced_message_says_that_it_is_being_sent_for_ten_seconds(
    site: Site, monkeypatch: Any
) -> None:
    postpone(site, "one")
    site.clock.now += 5.5
    seen = []

    def look(queue: str, envelopes: Any) -> None:
        (holder,) = site.store.due(1e11, 9)
        seen.append((read_claim(holder.data).closing, holder.due - site.clock.now))

    monkeypatch.setattr(site, "send", look)
    assert site.engine.repair() == 1
    assert seen == [(True, 10.0)]


def test_of_two_workers_one_sends_a_debounced_message(site: Site, monkeypatch: Any) -> None:
    postpone(site, "one")
    site.clock.now += 5.5
    due = site.store.due(1e11, 9)
    assert site.engine.repair() == 1
    postpone(site, "two")
    monkeypatch.setattr(site.store, "due", lambda before, limit: due)  # as a slower one read it
    assert site.engine.repair() == 0
    assert [each[1] for each in site.sent] == ["one"]
    assert site.claim is not None


def test_a_key_that_others_never_stop_changing_is_an_outage(site: Site, monkeypatch: Any) -> None:
    tries = []
    monkeypatch.setattr(site.store, "write", lambda *arguments: tries.append(1))
    with pytest.raises(BrokerUnavailable, match=r"keep changing shop\.ship:abc; try again"):
        postpone(site, "one")
    assert len(tries) == 64


# -- holders as bytes ------------------------------------------------------------------------------

CLAIM = KeyClaim("one", 2, "finished", 5.0, 6.0, "jobs", b"payload", 7.0, True)


def test_a_holder_is_read_as_it_was_packed() -> None:
    assert read_claim(CLAIM.pack()) == CLAIM
    plain = KeyClaim("one", 0, "", 1.0, 2.0)
    assert read_claim(plain.pack()) == plain
    assert (plain.queue, plain.payload, plain.due_at, plain.closing) == ("", b"", 0.0, False)
    assert (plain.sent, CLAIM.sent) == (True, False)
    assert msgpack.unpackb(CLAIM.pack())["v"] == 1, "workers of every release look for it"


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": None},
        {"task_id": 5},
        {"generation": -1},
        {"until": None},
        {"taken_at": "soon"},
        {"ends_at": None},
        {"queue": 5},
        {"payload": "text"},
        {"due_at": None},
        {"closing": 1},
    ],
    ids=str,
)
def test_a_damaged_holder_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        read_claim(msgpack.packb({**msgpack.unpackb(CLAIM.pack()), **change}))


@pytest.mark.parametrize("value", [None, 5, [1], "text"], ids=str)
def test_a_holder_that_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(Damaged, match="a newer aztask may know it"):
        read_claim(msgpack.packb(value))


def test_a_holder_without_a_message_has_an_empty_one() -> None:
    found = read_claim(msgpack.packb({**msgpack.unpackb(CLAIM.pack()), "payload": None}))
    assert (found.payload, found.sent) == (b"", True)
