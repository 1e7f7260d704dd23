import json
import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from threading import Event

import hooks
import pytest

from aztask import App
from aztask.errors import BrokerUnavailable, ConfigurationError
from aztask.limits.breakers import Breakers, OpenBreaker
from aztask.operate import deadletters, queues
from aztask.operate.deadletters import Selection, actions
from aztask.operate.ledger import WATCH, ledger_of
from aztask.operate.watch import conditions, watcher
from aztask.operate.watch.rules import KINDS, RuleFile, WatchRule, Webhook
from aztask.operate.watch.watcher import NextRow, Phase, Record, step_of, watcher_of
from aztask.settlement import DeadLetter
from aztask.stores.records.base import WorkerRecord
from aztask.support.display import Secret

ATTACK = """<!channel> <script>alert()</script> [x](//evil) *b* @here \x1b[31m"""


# -- the table of steps ------------------------------------------------------------------------

SEEN = Record("r", "h", "s", "", "text", "/", Phase.WAITS, since=100.0, changed=100.0)
FRESH = replace(SEEN, text="now", since=200.0, changed=200.0)
BEGINS = replace(FRESH, phase=Phase.BEGINS, after=200.0 + watcher.CLAIM_SECONDS)


def at(phase, **fields):
    return replace(SEEN, phase=phase, **fields)


@pytest.mark.parametrize(
    ("seen", "holds", "hold", "step"),
    [
        (None, False, 0, None),
        (None, True, 0, NextRow(BEGINS, True)),
        (None, True, 5, NextRow(FRESH)),
        (at(Phase.WAITS), False, 5, NextRow(None)),
        (at(Phase.WAITS), True, 101, None),
        (at(Phase.WAITS), True, 100, NextRow(replace(BEGINS, since=100.0), True)),
        (at(Phase.WAITS, after=201.0, tries=1), True, 0, None),
        (at(Phase.WAITS, tries=1), True, 0, NextRow(replace(BEGINS, since=100.0, tries=1), True)),
        (at(Phase.BEGINS, after=201.0), True, 0, None),
        (at(Phase.BEGINS, after=201.0), False, 0, None),
        (at(Phase.BEGINS, after=200.0), True, 0, NextRow(replace(BEGINS, since=100.0), True)),
        (at(Phase.BEGINS, after=200.0), False, 0, "ends"),
        (at(Phase.SENT), True, 0, None),
        (at(Phase.SENT, gone=150.0), True, 9, NextRow(at(Phase.SENT, changed=200.0))),
        (at(Phase.SENT), False, 9, NextRow(at(Phase.SENT, changed=200.0, gone=200.0))),
        (at(Phase.SENT, gone=195.0), False, 9, None),
        (at(Phase.SENT, gone=191.0), False, 9, "ends"),
        (at(Phase.SENT), False, 0, "ends"),
        (at(Phase.SENT, after=201.0), False, 0, None),
        (at(Phase.ENDS, after=201.0), True, 0, None),
        (at(Phase.ENDS, after=200.0), True, 0, "ends"),
        (at(Phase.ENDED), False, 0, None),
        (at(Phase.ENDED), True, 0, NextRow(BEGINS, True)),
        (at(Phase.ENDED), True, 5, NextRow(FRESH)),
    ],
)
def test_each_row_takes_the_step_of_the_table(seen, holds, hold, step):
    found = step_of(seen, FRESH if holds else None, hold, 200.0, 199.0)
    if step == "ends":
        assert found.sends
        assert found.after.phase is Phase.ENDS
        assert found.after.text == "text", "the end names what began"
        assert found.after.after == 200.0 + watcher.CLAIM_SECONDS
    else:
        assert found == step


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("holds", [True, False])
def test_a_look_that_is_older_than_the_row_decides_nothing(phase, holds):
    assert step_of(at(phase), FRESH if holds else None, 0, 200.0, 99.0) is None


def test_rows_that_last_are_confirmed_and_those_that_ended_are_removed():
    day = 100.0 + watcher.CONFIRMED_SECONDS
    assert step_of(at(Phase.SENT), FRESH, 0, day, day).after.changed == day
    hour = 100.0 + watcher.ENDED_SECONDS
    assert step_of(at(Phase.ENDED), None, 0, hour, hour) == NextRow(None)


def test_pauses_after_failures_grow_up_to_a_limit():
    row, pauses = BEGINS, []
    for _ in range(12):
        row = replace(row.refused(0.0), phase=Phase.BEGINS)
        pauses.append(row.after)
    assert pauses[:3] == [15.0, 30.0, 60.0]
    assert pauses[-1] == watcher.LONGEST_PAUSE


# -- rules of every kind -----------------------------------------------------------------------


class Watch:
    """An app, a server for webhooks, and watchers of one rule."""

    def __init__(self, folder, hook, stack):
        self.hook = hook
        place = f"local://{folder}/queues.db"
        self.app = App("shop", broker=place, results=place)
        stack.callback(self.app.close)

        @self.app.task
        def add(left, right):
            return left + right

        self.app.broker.declare("default")

    def file(self, when="backlog", *, form="json", above=0.0, hold=0.0, names=("*",), **fields):
        hook = Webhook("oncall", form, Secret(self.hook.url))
        rule = WatchRule("rule", when, names, above, hold, ("oncall",))
        options = {"every": 1.0, "page": "https://ops.example.com", "heartbeat": None, **fields}
        return RuleFile([rule], {"oncall": hook}, **options)

    def watcher(self, *given, **named):
        return watcher_of(self.app, self.file(*given, **named))

    def dead(self, *ids, why="no stock"):
        for task_id in ids:
            self.app.send("shop.add", [1, 2], task_id=task_id)
        receiver = self.app.broker.receiver("default", lease=30.0)
        receiver.settle([(e, DeadLetter("rejected", why)) for e in receiver.receive(9, 1.0)])
        receiver.close()

    def rows(self):
        return ledger_of(self.app.results).page(WATCH, 100)


@pytest.fixture
def watch(tmp_path):
    with ExitStack() as stack:
        yield Watch(tmp_path, stack.enter_context(hooks.serving()), stack)


def backlog(watch):
    watch.app.send("shop.add", [1, 2])
    yield "backlog", "1 message waits in queue default, more than 0", "/queue?name=default"
    queues.purge(watch.app, "default").act()


def oldest(watch):
    watch.app.send("shop.add", [1, 2])
    time.sleep(0.01)
    yield "oldest", "a message in queue default waits since 0s, longer than 0s", "/queue?name="
    queues.purge(watch.app, "default").act()


def failures(watch):
    watch.dead("a", "b")
    text = "2 dead letters of shop.add in queue default: rejected"
    yield "failures", text, "/letters?queue=default&task=shop.add&reason=rejected"
    actions.purge(watch.app, ["default"], Selection(everything=True)).act()


def schedule(watch):
    app = watch.app
    app.schedule("once", app.tasks["shop.add"].s(1, 2), at=datetime(2026, 1, 2, tzinfo=UTC))
    yield "schedule", "schedule shop.once missed its time", "/schedule?name=shop.once"
    app.schedules.declared.clear()


def worker(watch):
    now = time.time()
    record = WorkerRecord("w-1", now - 900, now - 600, ("default",), 2, 7)
    watch.app.results.heartbeat(record)
    yield "worker", "worker w-1 is silent: it was killed", "/workers?name=w-1"
    watch.app.results.heartbeat(replace(record, seen_at=time.time()))


def breaker(watch):
    breakers, now = Breakers(watch.app.results.controls), time.time()
    breakers.open(OpenBreaker("shop.add", now, now + 60.0, "w", "6 of 10 failed"))
    yield "breaker", "the circuit breaker of shop.add in shop is open: 6 of 10 failed", "/limits"
    breakers.close(["shop.add"])


CASES = [backlog, oldest, failures, schedule, worker, breaker]


@pytest.mark.parametrize("case", CASES)
def test_it_is_sent_once_and_once_at_its_end_whatever_is_restarted(watch, case):
    first = watch.watcher(case.__name__)
    assert first.turn().sent == 0
    story = case(watch)
    kind, text, path = next(story)
    watchers = [watch.watcher(kind), watch.watcher(kind), first]
    assert [each.turn().sent for each in watchers] == [1, 0, 0]
    (message,) = watch.hook.bodies
    (notice,) = message["notices"]
    assert (notice["state"], notice["rule"], notice["when"]) == ("began", "rule", kind)
    assert notice["text"].startswith(text)
    assert notice["link"].startswith(f"https://ops.example.com{path}")
    next(story, None)
    watchers = [first, watch.watcher(kind)]
    assert [each.turn().sent for each in watchers] == [1, 0]
    assert watch.hook.lines() == [("began", "rule"), ("ended", "rule")]


def test_the_cases_are_all_kinds():
    assert {case.__name__ for case in CASES} == KINDS.keys()


def test_a_new_group_of_failures_is_sent_and_a_known_one_that_grows_is_not(watch):
    watch.dead("a")
    watching = watch.watcher("failures")
    assert watching.turn().sent == 1
    watch.dead("b")
    assert watching.turn().sent == 0
    watch.dead("c", why="no money")
    assert watching.turn().sent == 1
    assert "no money" in watch.hook.bodies[-1]["notices"][0]["text"]


def test_dead_letters_are_read_again_only_when_their_count_has_changed(watch, monkeypatch):
    watch.dead("a")
    read = []
    groups = deadletters.DeadLetters.groups
    monkeypatch.setattr(
        deadletters.DeadLetters, "groups", lambda *given: read.append(1) or groups(*given)
    )
    watching = watch.watcher("failures")
    for _ in range(3):
        watching.turn()
    assert len(read) == 1
    monkeypatch.setattr(conditions, "LETTERS_SECONDS", -1.0)
    watching.turn()
    assert len(read) == 2


def test_a_rule_holds_for_a_time_before_it_is_sent(watch):
    watch.app.send("shop.add", [1, 2])
    watching = watch.watcher(hold=0.3)
    assert watching.turn().sent == 0
    time.sleep(0.35)
    assert watching.turn().sent == 1
    queues.purge(watch.app, "default").act()
    assert watching.turn().sent == 0
    watch.app.send("shop.add", [1, 2])
    time.sleep(0.35)
    assert watching.turn().sent == 0, "it came back before its end was sent"
    assert watch.hook.lines() == [("began", "rule")]


def test_what_ends_before_it_was_sent_is_not_sent(watch):
    watch.app.send("shop.add", [1, 2])
    watching = watch.watcher(hold=60.0)
    watching.turn()
    assert len(watch.rows()) == 1
    queues.purge(watch.app, "default").act()
    watching.turn()
    assert watch.rows() == []
    assert watch.hook.bodies == []


# -- what fails ----------------------------------------------------------------------------------


def test_a_webhook_that_refuses_is_tried_again(watch, monkeypatch):
    monkeypatch.setattr(watcher, "FIRST_PAUSE", 0.2)
    watch.app.send("shop.add", [1, 2])
    watch.hook.status = 500
    watching = watch.watcher()
    turn = watching.turn()
    assert (turn.sent, turn.problems) == (0, ["webhook oncall: the server answered 500"])
    assert watching.turn().problems == [], "not before the pause has passed"
    watch.hook.status = 202
    time.sleep(0.25)
    assert watching.turn().sent == 1
    assert watching.turn().sent == 0


def test_a_redirect_is_not_followed(watch):
    watch.app.send("shop.add", [1, 2])
    with hooks.serving() as other:
        watch.hook.status, watch.hook.location = 307, other.url
        turn = watch.watcher().turn()
        assert turn.problems == ["webhook oncall: the server answered 307"]
        assert (other.bodies, other.gets) == ([], [])


def test_a_watcher_that_dies_between_claim_and_note_is_replaced(watch, monkeypatch):
    monkeypatch.setattr(watcher, "CLAIM_SECONDS", 0.3)
    monkeypatch.setattr(watcher, "TIMEOUT", 0.0)
    watch.app.send("shop.add", [1, 2])
    dying = watch.watcher()
    with monkeypatch.context() as dead:
        dead.setattr(watcher, "post", _die)
        with pytest.raises(KeyboardInterrupt):
            dying.turn()
    other = watch.watcher()
    assert other.turn().sent == 0, "the claim holds"
    time.sleep(0.35)
    assert other.turn().sent == 1


def _die(*given):
    raise KeyboardInterrupt


def test_a_queue_that_cannot_be_read_ends_nothing(watch, monkeypatch):
    watch.app.send("shop.add", [1, 2])
    watching = watch.watcher(names=("default",))
    assert watching.turn().sent == 1
    stats = type(watch.app.broker).stats
    monkeypatch.setattr(type(watch.app.broker), "stats", _unreachable)
    turn = watching.turn()
    assert (turn.sent, turn.problems) == (0, ["rule rule: no answer"])
    monkeypatch.setattr(type(watch.app.broker), "stats", stats)
    assert watching.turn().sent == 0
    assert watch.hook.lines() == [("began", "rule")]


def _unreachable(self, queue):
    raise BrokerUnavailable("no answer")


def test_a_queue_that_does_not_exist_is_a_problem_if_its_name_is_written_in_full(watch):
    assert watch.watcher(names=("ordrs", "default")).turn().problems
    assert watch.watcher(names=("ordrs*", "default")).turn().problems == []


def test_damaged_rows_stop_nothing(watch):
    watch.app.send("shop.add", [1, 2])
    watching = watch.watcher()
    watching.turn()
    (row,) = watch.rows()
    ledger = ledger_of(watch.app.results)
    written = row.values["data"]
    since = written.index(b'"since":') + len(b'"since":')
    until = written.index(b",", since)
    times = [written[:since] + each + written[until:] for each in (b"1e300", b"NaN", b"9" * 20)]
    for number, data in enumerate([b"\xff", b"[]", b'{"v":1,"rule":5}', b'{"v":1}', *times]):
        (row,) = watch.rows()
        ledger.write(WATCH, row.place.key, data, row)
        assert watching.turn().sent == 1, data
        assert len(watch.hook.bodies) == number + 2


def test_rows_of_rules_that_no_file_has_are_removed_after_a_month(watch, monkeypatch):
    watch.app.send("shop.add", [1, 2])
    watch.watcher().turn()
    other = watch.file(above=9.0)
    other = replace(other, rules=[replace(other.rules[0], name="other")])
    watcher_of(watch.app, other).turn()
    assert len(watch.rows()) == 1
    monkeypatch.setattr(watcher, "OLD_SECONDS", 0.0)
    watcher_of(watch.app, other).turn()
    assert watch.rows() == []


def test_the_heartbeat_is_asked_for_only_after_a_complete_look(watch):
    beats = Secret(f"{watch.hook.url}/beat")
    watch.watcher(heartbeat=beats).turn()
    assert watch.hook.gets == ["/services/T000/B000/verysecret/beat"]
    watch.watcher(names=("missing",), heartbeat=beats).turn()
    assert len(watch.hook.gets) == 1
    watch.app.send("shop.add", [1, 2])
    watch.hook.status = 500
    watch.watcher(heartbeat=beats).turn()
    assert len(watch.hook.gets) == 1


def test_an_app_without_a_result_store_is_refused(watch):
    with pytest.raises(ConfigurationError, match="no result store"):
        watcher_of(App("shop", broker=watch.app.address), watch.file())


def test_problems_are_logged_once_and_when_they_are_gone(watch, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    watching, stopping = watch.watcher(names=("default",)), Event()
    turns = iter([_unreachable, _unreachable, type(watch.app.broker).stats])

    def wait(seconds):
        following = next(turns, None)
        if following is None:
            stopping.set()
        else:
            monkeypatch.setattr(type(watch.app.broker), "stats", following)

    stopping.wait = wait
    watching.run(stopping)
    texts = [each.message for each in caplog.records if each.name == "aztask.watch"]
    assert texts == ["rule rule: no answer; trying again in 1 s", "1 part no longer fail"]


def test_a_store_that_does_not_answer_is_asked_again(watch, caplog, monkeypatch):
    watching, stopping = watch.watcher(), Event()
    monkeypatch.setattr(watching, "turn", lambda: _unreachable(None, ""))
    stopping.wait = lambda seconds: stopping.set()
    watching.run(stopping)
    assert "nothing was sent: no answer; trying again in 1 s" in caplog.text


# -- secrets and attacks -------------------------------------------------------------------------


def test_the_address_of_a_webhook_is_shown_nowhere(watch, caplog):
    caplog.set_level(logging.DEBUG)
    watch.app.send("shop.add", [1, 2])
    breakers, now = Breakers(watch.app.results.controls), time.time()
    why = f"no answer of {watch.hook.url}"
    breakers.open(OpenBreaker("shop.add", now, now + 60.0, "w", why))
    watching = watch.watcher("breaker")
    watching.turn()
    watch.hook.status = 500
    breakers.open(OpenBreaker("shop.other", now, now + 60.0, "w", why))
    problems = watching.turn().problems
    gone = watch.file()
    closed = Webhook("oncall", "json", Secret("http://127.0.0.1:9/verysecret"))
    watch.app.send("shop.add", [1, 2])
    problems += watcher_of(watch.app, replace(gone, webhooks={"oncall": closed})).turn().problems
    assert len(problems) == 2
    rows = b"".join(row.values["data"] for row in watch.rows())
    everything = f"{problems} {caplog.text} {rows!r} {watch.hook.bodies}"
    assert "verysecret" not in everything
    assert "****" in rows.decode()


@pytest.mark.parametrize("form", ["slack", "teams", "json"])
def test_a_payload_is_text_in_every_form(watch, form):
    watch.dead("a", why=ATTACK)
    watch.watcher("failures", form=form).turn()
    (body,) = watch.hook.bodies
    text = json.dumps(body, ensure_ascii=False)
    assert "\x1b" not in text
    shown = ATTACK.split("\x1b", maxsplit=1)[0].strip()
    for kind, part in _texts(body):
        if shown in part:
            assert kind in ("plain_text", "TextRun", "plain"), (kind, part)
            break
    else:
        pytest.fail(f"it is not shown: {text}")
    assert all("<!channel>" not in part for kind, part in _texts(body) if kind == "mrkdwn")


def _texts(value, kind="plain"):
    """(what a client makes of it, the text) of every text in a message."""
    if isinstance(value, dict):
        own = value.get("type", kind)
        for name, each in value.items():
            top = "mrkdwn" if name == "text" and "blocks" in value else own
            yield from _texts(each, top)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, kind)
    elif isinstance(value, str):
        yield kind, value


def test_slack_and_teams_get_what_they_take(watch):
    watch.app.send("shop.add", [1, 2])
    for form in ("slack", "teams"):
        file = watch.file(form=form)
        file = replace(file, rules=[replace(file.rules[0], name=form)])
        watcher_of(watch.app, file).turn()
    slack, teams = watch.hook.bodies
    assert slack["text"] == "aztask, shop: 1 began"
    kinds = [each["type"] for each in slack["blocks"]]
    assert kinds == ["section", "section", "context"]
    link = "<https://ops.example.com/queue?name=default|Open>"
    assert slack["blocks"][2]["elements"] == [{"type": "mrkdwn", "text": link}]
    (attachment,) = teams["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert [each["type"] for each in card["body"]] == ["RichTextBlock"] * 2
    opens = card["body"][1]["inlines"][1]["selectAction"]
    assert opens["url"] == "https://ops.example.com/queue?name=default"


@pytest.mark.parametrize("form", ["slack", "teams"])
def test_many_notices_are_one_message(watch, form):
    for number in range(30):
        watch.dead(f"t{number}", why=f"why {chr(97 + number % 26)}{number // 26 * 'x'}")
    assert watch.watcher("failures", form=form).turn().sent == 30
    assert len(watch.hook.bodies) == 1
    text = json.dumps(watch.hook.bodies[0])
    assert "30 began" in text
    assert "and 10 more" in text


# -- the command -----------------------------------------------------------------------------------

FILE = """
[webhooks.oncall]
url = "env:WATCH_TEST_URL"
[[rules]]
name = "late"
when = "backlog"
above = 0
[[rules]]
name = "gone"
when = "backlog"
above = 0
queue = "gone"
"""


@pytest.fixture
def command(cli, monkeypatch):
    with hooks.serving() as hook:
        monkeypatch.setenv("WATCH_TEST_URL", hook.url)
        monkeypatch.setenv("AZTASK_BROKER", cli.address)
        monkeypatch.setenv("AZTASK_RESULTS", cli.address)
        app = cli.app()
        app.broker.declare("default")
        (cli.folder / "rules.toml").write_text(FILE)
        cli.hook, cli.shop = hook, app
        yield cli


def test_check_shows_what_holds_and_sends_nothing(command):
    command.shop.send("shop.add", [1, 2])
    ended = command("watch", "--rule", "rules.toml", "--check")
    assert ended.code == 0
    assert "1 message waits in queue default" in ended.out
    assert "unreadable" in ended.out
    assert command.hook.bodies == []


def test_once_sends_and_says_what_failed(command):
    command.shop.send("shop.add", [1, 2])
    ended = command("watch", "--rule", "rules.toml", "--once")
    assert ended.code == 1
    assert "1 sent" in ended.err
    assert "rule gone: " in ended.err
    command.shop.broker.declare("gone")
    ended = command("watch", "--rule", "rules.toml", "--once")
    assert (ended.code, command.hook.lines()) == (0, [("began", "late")])


def test_a_wrong_file_is_an_error_of_the_configuration(command):
    (command.folder / "rules.toml").write_text("rules = 1")
    ended = command("watch", "--rule", "rules.toml", "--once")
    assert ended.code == 4
    assert "rules.toml: " in ended.err
