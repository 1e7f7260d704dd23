"""Unique tasks in workflows: each conflict of a member ends it, and the workflow goes on."""

import pytest

from aztask import App, RetryPolicy, chain, chord, group
from aztask.errors import TaskCancelled, TaskFailed
from aztask.message.payload import stored_in
from aztask.operate.deadletters.view import DeadLetters, Selection
from aztask.stores.records.uniques import uniques_of


class Shop:
    """An app in inline mode, whose unique task has these options."""

    def __init__(self, settings=None, **options):
        self.app = App(
            "shop",
            broker="servicebus://nowhere.invalid",
            retry=RetryPolicy(0),
            **(settings or {}),
        )
        self.runs = []
        self.broke = True
        given = {"unique": "arguments", **options}

        @self.app.task(**given)
        def charge(order):
            self.runs.append(order)
            if order == "bad" and self.broke:
                raise ValueError("no money")
            return f"charged {order}"

        @self.app.task
        def order_of(number):
            return f"order {number}"

        @self.app.task
        def book(values):
            return [type(each).__name__ if isinstance(each, Exception) else each for each in values]

        self.charge, self.order_of, self.book = charge, order_of, book

    def held(self, order, **options):
        """Another task, which holds the key of the order and waits for 60 seconds."""
        return self.charge.with_options(delay=60, **options).delay(order)

    def holders(self):
        store = uniques_of(self.app.results)
        return [each.key for each in store.due(1e11, 9)]


def test_a_member_adopts_the_result_of_the_task_that_holds_its_key():
    shop = Shop()
    with shop.app.inline() as inline:
        other = shop.held("a")
        result = chord([shop.charge.s("a"), shop.charge.s("b")], shop.book.s()).delay()
        assert shop.runs == ["b"], "the member of the held key waits in the queue"
        assert not result.ready()
        inline.advance(59)
        assert not result.ready()
        inline.advance(40)
        assert result.get(timeout=0) == ["charged a", "charged b"]
        assert other.get(timeout=0) == "charged a"
        assert shop.runs == ["b", "a"], "it ran once"
        assert shop.holders() == []


@pytest.fixture
def large(tmp_path):
    """A shop whose results are stored apart."""
    return Shop({"payloads": f"{tmp_path}/payloads", "payload_threshold": 100})


def test_a_large_result_is_copied_because_it_ends_with_its_task(large):
    name = "a" * 200
    with large.app.inline() as inline:
        other = large.held(name)
        result = group(large.charge.s(name)).delay()
        inline.advance(100)
        assert large.runs == [name]
        remove_payload(large.app, other.id)
        assert result.get(timeout=0) == [f"charged {name}"]


def test_a_member_fails_if_the_large_result_that_it_adopts_is_gone(large):
    name = "a" * 200

    @large.app.on_event
    def forget(event):
        if event.event == "succeeded" and event.task_id == other.id:
            remove_payload(large.app, other.id)

    with large.app.inline() as inline:
        other = large.held(name)
        result = group(large.charge.s(name)).delay()
        inline.advance(100)
        with pytest.raises(TaskFailed, match=f"task {other.id}: .*payload"):
            result.get(timeout=0)


def remove_payload(app, task_id):
    """Remove the payload of a task's result, as retention does."""
    stored = stored_in(app.results.get(task_id).outcome.value)
    assert stored is not None
    app.payloads.discard([stored.name])


def test_the_key_of_a_later_member_is_made_of_the_value_that_it_takes():
    shop = Shop()
    with shop.app.inline() as inline:
        shop.held("order 7")
        result = chain(shop.order_of.s(7), shop.charge.s(), shop.order_of.s()).delay()
        assert shop.runs == []
        inline.advance(100)
        assert result.get(timeout=0) == "order charged order 7"
        assert shop.runs == ["order 7"]


def test_a_member_fails_as_the_task_that_holds_its_key_and_its_replay_runs():
    shop = Shop()
    with shop.app.inline() as inline:
        shop.held("bad")
        result = chord([shop.charge.s("bad")], shop.book.s(), return_errors=True).delay()
        plain = group(shop.charge.s("bad")).delay(workflow_id="w")
        inline.advance(100)
        assert result.get(timeout=0) == ["TaskFailed"]
        with pytest.raises(TaskFailed, match=r"ValueError: task .* held its key, failed: no money"):
            plain.get(timeout=0)
        assert shop.runs == ["bad"]
        assert shop.holders() == []
        shop.broke = False
        letters = DeadLetters(shop.app, "default")
        assert letters.replay(Selection(ids=frozenset({"w.2"}))).done == 1
        inline.run()
        assert plain.get(timeout=0) == ["charged bad"]
        assert shop.runs == ["bad", "bad"]


def test_a_member_is_cancelled_with_the_task_that_holds_its_key():
    shop = Shop()
    with shop.app.inline() as inline:
        other = shop.held("a")
        result = group(shop.charge.s("a")).delay()
        assert other.cancel()
        inline.advance(100)
        with pytest.raises(TaskCancelled):
            result.get(timeout=0)
        assert result.state == "cancelled"


def test_a_member_takes_the_key_when_the_life_of_its_holder_has_ended():
    shop = Shop(unique_life=600)
    with shop.app.inline() as inline:
        other = shop.held("a")
        result = group(shop.charge.s("a")).delay()
        lose(shop.app, other.id)
        inline.advance(600)
        assert not result.ready(), "the life of the holder counts from its time"
        inline.advance(100)
        assert result.get(timeout=0) == ["charged a"]
        assert shop.holders() == []


def lose(app, task_id):
    """Remove the message of a delayed task from its queue; nothing else changes."""
    (name,) = [
        each.envelope.message_id
        for each in app.broker.peek("default", limit=9)
        if each.envelope.headers["id"] == task_id
    ]
    assert app.broker.cancel_scheduled("default", [name]) == 1


def test_drop_cancels_the_member_and_the_body_can_see_it():
    shop = Shop(on_conflict="drop")
    with shop.app.inline():
        shop.held("a")
        members = [shop.charge.s("a"), shop.charge.s("b")]
        result = chord(members, shop.book.s(), return_errors=True).delay()
        assert result.get(timeout=0) == ["TaskCancelled", "charged b"]
        result = chord(members, shop.book.s()).delay()
        assert result.state == "cancelled"


def test_raise_fails_the_member_and_a_replay_resumes_the_workflow():
    shop = Shop(on_conflict="raise")
    with shop.app.inline() as inline:
        other = shop.held("a")
        result = chord([shop.charge.s("a")], shop.book.s()).delay(workflow_id="w")
        with pytest.raises(TaskFailed, match=r"NotUnique: task shop\.charge is unique"):
            result.get(timeout=0)
        inline.advance(60)
        assert other.ready()
        letters = DeadLetters(shop.app, "default")
        assert letters.replay(Selection(ids=frozenset({"w.2"}))).done == 1
        inline.run()
        assert result.get(timeout=0) == ["charged a"]


def test_replace_cancels_a_task_that_waits():
    shop = Shop(on_conflict="replace")
    with shop.app.inline() as inline:
        other = shop.held("a")
        result = group(shop.charge.s("a")).delay()
        assert result.get(timeout=0) == ["charged a"]
        inline.advance(60)
        with pytest.raises(TaskCancelled):
            other.get(timeout=0)
        assert shop.runs == ["a"]
        assert shop.holders() == []


@pytest.mark.parametrize("options", [{"until": "started"}, {"until": 60}, {"debounce": 5}])
def test_a_member_of_a_free_key_runs(options):
    shop = Shop(**options)
    with shop.app.inline():
        assert group(shop.charge.s("a")).delay().get(timeout=0) == ["charged a"]
        held = options.get("until") == 60
        assert bool(shop.holders()) is held


def test_a_throttled_member_is_dropped():
    shop = Shop(throttle=60)
    with shop.app.inline() as inline:
        members = [shop.charge.s("a"), shop.charge.s("a")]
        result = chord(members, shop.book.s(), return_errors=True).delay()
        assert result.get(timeout=0) == ["charged a", "TaskCancelled"]
        inline.advance(61)
        result = chord(members[:1], shop.book.s()).delay()
        assert result.get(timeout=0) == ["charged a"]


def test_a_member_whose_key_cannot_be_made_fails_alone():
    shop = Shop(unique=lambda order: order.no)
    with shop.app.inline():
        members = [shop.charge.s("a"), shop.order_of.s(1)]
        result = chord(members, shop.book.s(), return_errors=True).delay()
        assert result.get(timeout=0) == ["TaskFailed", "order 1"]
