"""What an app says about its schedules: options, names, and clear errors."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from aztask import App, Context, chain, group
from aztask.errors import CodecError, ConfigurationError, DuplicateTask, MessageTooLarge
from aztask.message.codec import Codec
from aztask.message.envelope import Envelope
from aztask.message.message import TaskMessage
from aztask.message.signatures import SignatureRules
from aztask.queues.local.payload import envelope_of, payload_of
from aztask.schedules.rules import Rules
from aztask.schedules.schedules import Schedules
from aztask.schedules.stored import Made
from aztask.schedules.template import SPEC, Definition, read_template, template_of
from aztask.schedules.triggers import At, Cron, Every
from aztask.stores.records.damage import Damaged


@pytest.fixture
def app(tmp_path):
    address = f"local://{tmp_path}/queues.db"
    made = App("shop", broker=address, results=address)

    @made.task(queue="reports", expires=60)
    def report(region: str) -> str:
        return region

    made.report = report
    yield made
    made.close()


def test_a_wrong_schedule_is_an_error_where_it_is_written(app):
    with pytest.raises(TypeError, match="missing a required argument: 'region'"):
        app.schedule("s", app.report.s(), every=60)
    with pytest.raises(ConfigurationError, match=r"a call of a task or a workflow, such as report"):
        app.schedule("s", app.report, every=60)
    with pytest.raises(ConfigurationError, match="the workflow has no tasks"):
        app.schedule("s", group([]), every=60)
    with pytest.raises(TypeError, match="region"):
        app.schedule("s", chain(app.report.s("eu"), app.report.si()), every=60)
    with pytest.raises(ConfigurationError, match="a schedule's name is a text"):
        app.schedule("", app.report.s("eu"), every=60)
    with pytest.raises(ConfigurationError, match="release takes a whole number, not -1"):
        app.schedule("s", app.report.s("eu"), every=60, release=-1)
    app.schedule("s", app.report.s("eu"), every=60)
    with pytest.raises(DuplicateTask, match=r"two schedules have the name shop\.s"):
        app.schedule("shop.s", app.report.s("eu"), every=60)


def test_without_a_result_store_one_line_says_what_to_do():
    app = App("shop", broker="local://:memory:")
    with pytest.raises(ConfigurationError, match=r"schedules need a result store.*results="):
        app.schedules.pause("s")
    assert not app.schedules.wanted


def test_a_result_store_that_keeps_no_schedules_is_none(app):
    class Opened:
        def results(self):
            return object()

    schedules = Schedules("shop", Opened(), app.sends, app.codec, workflows=app.workflows)
    with pytest.raises(ConfigurationError, match="schedules need a result store"):
        schedules.pause("s")
    assert not schedules.wanted


def test_a_definition_is_in_the_header_of_every_release(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    envelope = envelope_of(app.schedules.view("s").schedule.template)
    assert "aztask-schedule-spec" in envelope.headers


def test_the_code_owns_its_names(app):
    app.schedule("s", app.report.s("eu"), every=60)
    with pytest.raises(DuplicateTask, match="is one of the code"):
        app.schedules.create("s", app.report.s("us"), every=60)


def test_create_replaces_what_was_made_at_run_time(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    first = app.schedules.view("s").schedule
    app.schedules.create("s", app.report.s("us"), every=60)
    second = app.schedules.view("s").schedule
    assert first.digest != second.digest
    assert first.watermark == second.watermark
    assert app.schedules.wanted


def test_to_create_the_same_again_writes_nothing(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    tag = app.schedules.view("s").tag
    app.schedules.create("s", app.report.s("eu"), every=60)
    assert app.schedules.view("s").tag == tag
    app.schedules.create("s", app.report.s("eu"), every=61)
    assert app.schedules.view("s").tag != tag


def test_a_schedule_of_the_code_is_wanted_before_any_is_stored(app):
    assert not app.schedules.wanted
    app.schedule("s", app.report.s("eu"), every=60)
    assert app.schedules.wanted


def test_a_definition_is_read_as_it_was_made(app):
    call = app.report.s("eu").with_options(delay=5, expires=30)
    app.schedules.create("s", call, every=60)
    definition = app.schedules.engine.definition(app.schedules.view("s"))
    assert definition.message.extra == {}
    assert (definition.delay, definition.expires) == (5.0, 30.0)
    assert definition.options == {"queue": "reports", "expires": 30.0}
    app.schedules.create("t", app.report.s("eu"), every=60)
    assert app.schedules.engine.definition(app.schedules.view("t")).options == {
        "queue": "reports", "expires": 60.0,
    }  # fmt: skip


def test_occurrences_have_the_session_of_their_schedule(app):
    app.queue("carts", sessions=True)
    call = app.report.s("eu").with_options(queue="carts", session="c1", ordered=False)
    app.schedules.create("s", call, every=60)
    definition = app.schedules.engine.definition(app.schedules.view("s"))
    assert definition.options == {
        "queue": "carts", "session": "c1", "ordered": False, "expires": 60.0,
    }  # fmt: skip


@pytest.mark.parametrize("headers", [None, [1], {}, {SPEC: b"\xc1"}, {SPEC: b"\x01"}], ids=str)
def test_a_definition_without_its_header_is_damaged(headers):
    data = payload_of(Envelope(b"x", headers, message_id="shop.s"))
    with pytest.raises((Damaged, CodecError)):
        read_template(Codec(), "shop.s", data)


def test_delete_says_whether_there_was_one(app):
    assert not app.schedules.delete("s")
    app.schedules.create("s", app.report.s("eu"), every=60)
    assert app.schedules.delete("s")
    assert app.schedules.view("s") is None
    assert not app.schedules.wanted


def test_names_have_1_to_200_printable_characters(app):
    assert app.schedules.full_name("s") == "shop.s"
    assert app.schedules.full_name("other.s") == "other.s"
    assert app.schedules.full_name("x" * 200) == f"shop.{'x' * 200}"
    for name in ("", "x" * 201, "a\nb", None, 5):
        with pytest.raises(ConfigurationError, match="a text of 1 to 200 printable characters"):
            app.schedules.full_name(name)


@pytest.mark.parametrize("release", [True, 1.0, "1", 10**9, None])
def test_a_release_is_a_whole_number_below_a_billion(app, release):
    with pytest.raises(ConfigurationError, match="release takes a whole number"):
        app.schedules.plan("s", app.report.s("eu"), every=60, release=release)


def test_a_plan_has_the_release_that_it_is_given(app):
    plan = app.schedules.plan
    assert plan("s", app.report.s("eu"), every=60).release == 0
    for release in (0, 1, 10**9 - 1):
        assert plan("s", app.report.s("eu"), every=60, release=release).release == release


def test_a_plan_has_the_times_of_its_options(app):
    plan, call = app.schedules.plan, app.report.s("eu")
    assert plan("s", call, cron="0 2 * * *").trigger == Cron("0 2 * * *", "UTC")
    assert plan("s", call, cron="0 2 * * *", tz="Europe/Berlin").trigger.tz == "Europe/Berlin"
    assert plan("s", call, every=timedelta(hours=1)).trigger == Every(3600.0)
    assert plan("s", call, at=datetime(2030, 1, 1, tzinfo=UTC)).trigger == At(1893456000.0)
    assert plan("s", call, every=60, jitter=5, missed="all").rules == Rules("all", jitter=5.0)
    with pytest.raises(ConfigurationError, match="Did you mean 'every'"):
        plan("s", call, evry=60)


def test_a_schedule_of_the_code_in_the_store_is_not_replaced_by_another_program(app):
    app.schedule("s", app.report.s("eu"), every=60)
    runner = app.schedules.runner("w")
    give_up_at = time.monotonic() + 20
    while app.schedules.view("s") is None and time.monotonic() < give_up_at:
        time.sleep(min(0.1, runner.turn()))
    del app.schedules.declared["shop.s"]  # as in a program that has other code
    with pytest.raises(DuplicateTask, match="is one of the code"):
        app.schedules.create("s", app.report.s("us"), every=60)


def test_what_was_made_at_run_time_names_no_worker_and_needs_no_claim(app):
    app.schedules.create("s", app.report.s("eu"), every=60, release=3)
    head = app.schedules.view("s").schedule
    assert (head.by, head.release, head.of_code, head.made) == ("", 3, False, 0)


def test_one_that_others_keep_changing_is_given_up(app, monkeypatch):
    tried = []
    monkeypatch.setattr(
        app.schedules.engine, "define", lambda *arguments, of_code: tried.append(of_code)
    )
    with pytest.raises(ConfigurationError, match=r"shop\.s is being changed by others; try again"):
        app.schedules.create("s", app.report.s("eu"), every=60)
    assert tried == [False] * 4


def test_one_that_cannot_be_read_is_deleted_and_made_again(app):
    store = app.schedules.engine.store
    assert store.commit("shop.s", b"\xc1", None) is not None
    with pytest.raises(ConfigurationError, match=r"shop\.s cannot be read .* delete it and make"):
        app.schedules.create("s", app.report.s("eu"), every=60)
    assert app.schedules.delete("s")
    app.schedules.create("s", app.report.s("eu"), every=60)
    assert app.schedules.view("s") is not None


def test_a_pause_lasts_from_its_first_time_to_its_end(app):
    assert not app.schedules.pause("s")
    assert not app.schedules.resume("s")
    app.schedules.create("s", app.report.s("eu"), every=60)
    store = app.schedules.engine.store
    made_at = app.schedules.view("s").schedule.watermark
    store.now = lambda: made_at + 100.0
    assert app.schedules.resume("s"), "it is not paused, and stays as it is"
    assert app.schedules.view("s").schedule.watermark == made_at
    assert app.schedules.pause("s")
    store.now = lambda: made_at + 200.0
    assert app.schedules.pause("s")
    assert app.schedules.view("s").schedule.paused_at == made_at + 100.0
    store.now = lambda: made_at + 300.0
    assert app.schedules.resume("s")
    head = app.schedules.view("s").schedule
    assert (head.paused_at, head.watermark, head.left) == (None, made_at + 300.0, {})


def test_a_task_that_is_triggered_is_one_more_and_says_that_a_command_made_it(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    store = app.schedules.engine.store
    store.now = lambda: 1_800_000_000.12345
    ids = [app.schedules.trigger("s") for _ in range(2)]
    assert [each[:-8] for each in ids] == ["shop.s@2027-01-15T08:00:00.123Z-"] * 2
    assert len(set(ids)) == 2
    made = app.schedules.engine.history("shop.s", 5)
    assert {(each.kind, each.by, each.at, each.why) for each in made} == {
        ("trigger", "command", 1_800_000_000.123, "")
    }
    assert {each.task_id for each in made} == set(ids)
    assert app.schedules.view("s").schedule.made == 2


def day(number, hour=0):
    return datetime(2027, 1, number, hour, tzinfo=UTC)


@pytest.fixture
def hourly(app):
    """A schedule that is due every hour, and was paused for some days."""
    app.schedules.create("s", app.report.s("eu"), every=3600)
    app.schedules.engine.store.now = lambda: day(20).timestamp()
    app.schedules.pause("s")
    app.schedules.resume("s")
    return app.schedules


def test_past_times_are_filled_once_from_the_first_to_the_last(hourly):
    assert hourly.backfill("unknown", day(1), day(2)) is None
    first = hourly.backfill("s", day(2, 3), day(2, 5))
    assert first == [f"shop.s@2027-01-02T0{hour}:00:00Z" for hour in (3, 4, 5)]
    assert hourly.backfill("s", day(2, 2), day(2, 6)) == [
        "shop.s@2027-01-02T02:00:00Z", "shop.s@2027-01-02T06:00:00Z",
    ]  # fmt: skip
    assert hourly.backfill("s", day(2, 2), day(2, 6)) == []
    made = hourly.engine.history("shop.s", 9)
    assert {(each.kind, each.by, each.state, each.why) for each in made} == {
        ("backfill", "command", "sent", "")
    }
    assert hourly.view("s").schedule.made == 5


def test_one_time_is_filled_and_a_time_to_come_is_not(hourly):
    assert hourly.backfill("s", day(3, 4), day(3, 4)) == []
    after = day(3, 4) + timedelta(seconds=0.5)
    assert hourly.backfill("s", day(3, 4), after) == ["shop.s@2027-01-03T04:00:00Z"]
    assert hourly.backfill(
        "s",
        day(3, 5) + timedelta(seconds=1),
        day(
            3,
            6,
        ),
    ) == ["shop.s@2027-01-03T06:00:00Z"]
    assert hourly.backfill("s", day(19, 23), day(25)) == [
        "shop.s@2027-01-19T23:00:00Z", "shop.s@2027-01-20T00:00:00Z",
    ]  # fmt: skip
    assert hourly.backfill("s", day(21), day(22)) == []
    assert hourly.backfill("s", day(3), day(2)) == []


def test_more_than_one_transaction_takes_are_filled(hourly):
    found = hourly.backfill("s", day(4), day(12))
    assert len(found) == len(set(found)) == 8 * 24 + 1
    assert hourly.view("s").schedule.made == 8 * 24 + 1
    assert hourly.view("s").open == ()


def test_what_waits_in_the_store_is_not_sent_by_a_backfill_of_other_times(hourly):
    engine = hourly.engine
    at = day(19, 3).timestamp()
    other = Made(at, "shop.s@other", at)
    assert engine.transact("shop.s", lambda view: (view.schedule, [other])) is not None
    assert hourly.backfill("s", day(5), day(5, 1)) == [
        "shop.s@2027-01-05T00:00:00Z", "shop.s@2027-01-05T01:00:00Z",
    ]  # fmt: skip
    assert hourly.trigger("s") != "shop.s@other"
    assert hourly.view("s").open == (other,)


def test_a_time_that_is_refused_is_not_among_those_that_were_filled(hourly, app, monkeypatch):
    send, sent = app.sends.send_occurrence, []

    def refuse_the_second(*arguments):
        sent.append(1)
        if len(sent) == 2:
            raise MessageTooLarge("it is too large")
        send(*arguments)

    monkeypatch.setattr(app.sends, "send_occurrence", refuse_the_second)
    assert len(hourly.backfill("s", day(6), day(6, 2))) == 2
    states = sorted(each.state for each in hourly.engine.history("shop.s", 9))
    assert states == ["refused", "sent", "sent"]


@pytest.mark.parametrize(("start", "end"), [("start", 0), (0, "end")])
def test_times_of_a_backfill_have_a_time_zone(hourly, start, end):
    given = [datetime(2027, 1, 1) if each else day(1) for each in (start, end)]
    with pytest.raises(ConfigurationError, match=f"^{start or end}"):
        hourly.backfill("s", *given)


def test_a_definition_belongs_to_the_schedule_of_its_name(app):
    app.schedules.create("s", app.report.s("eu"), every=60)
    data = app.schedules.view("s").schedule.template
    assert read_template(app.codec, "shop.s", data).name == "shop.s"
    with pytest.raises(Damaged, match=r"its definition is that of schedule shop\.s"):
        read_template(app.codec, "shop.t", data)


@pytest.mark.parametrize(("size", "fits"), [(46_000, True), (47_500, False), (51_000, False)])
def test_a_head_has_room_for_48_kib_with_2_kib_beside_the_definition(app, size, fits):
    codec = Codec()
    message = TaskMessage("shop.s", "shop.report", "reports", b"x" * size)
    definition = Definition(message, Every(60.0), Rules())
    if fits:
        assert len(template_of(codec, definition)) <= 46 * 1024
    else:
        with pytest.raises(MessageTooLarge, match="has room for 47104"):
            template_of(codec, definition)


def test_a_signed_definition_does_not_age(app):
    """A schedule may be years old; a message on the wire may not."""
    definition = Definition(
        TaskMessage("shop.s", "shop.report", "reports", b""), Every(60.0), Rules(), 2.0, 3.0
    )
    assert (definition.delay, Definition(definition.message, Every(1.0), Rules()).delay) == (
        2.0,
        0.0,
    )
    now = [1e9]
    rules = SignatureRules(True, lambda queue: 10.0, 1.0, lambda: now[0])
    codec = Codec(signing_keys=[b"k" * 32], signatures=rules)
    data = template_of(codec, definition)
    now[0] += 1e8
    found = read_template(codec, "shop.s", data)
    assert (found.delay, found.expires, found.trigger) == (2.0, 3.0, Every(60.0))


def test_arguments_that_are_too_long_are_refused(app):
    with pytest.raises(MessageTooLarge, match=r"shop\.s: its arguments take .* bytes"):
        app.schedules.create("s", app.report.s("x" * 60_000), every=60)


def test_an_occurrence_is_a_task_like_any_other(app):
    call = app.report.s("eu").with_options(expires=30)
    app.schedules.create("s", call, every=60)
    task_id = app.schedules.trigger("s")
    (peeked,) = app.broker.peek("reports", limit=1)
    message = app.codec.from_envelope(peeked.envelope, "reports")
    assert (message.id, message.task) == (task_id, "shop.report")
    assert app.codec.decode_arguments(message) == (("eu",), {})
    assert message.expires is not None
    context = Context.for_testing()
    context.message = message
    assert context.schedule == "shop.s"
    assert abs(context.scheduled_at.timestamp() - peeked.enqueued_at) < 5
    assert app.result(task_id).state == "pending"


@pytest.mark.parametrize("value", [None, "soon", True, -1.0, float("nan"), 1e18])
def test_a_wrong_header_is_no_time(value):
    context = Context.for_testing()
    extra = {"aztask-scheduled-at": value, "aztask-schedule": 5}
    context.message = TaskMessage("id", "task", "queue", b"", extra=extra)
    assert (context.scheduled_at, context.schedule) == (None, None)


def test_headers_of_hooks_come_beside_ours(app):
    @app.around_send
    def tag(sending):
        sending.headers["tenant"] = "acme"
        yield

    app.schedules.create("s", app.report.s("eu"), every=60)
    app.schedules.trigger("s")
    (peeked,) = app.broker.peek("reports", limit=1)
    assert peeked.envelope.headers["tenant"] == "acme"
    assert peeked.envelope.headers["aztask-schedule"] == "shop.s"


def test_an_occurrence_that_was_sent_writes_an_event(app):
    events = []
    app.on_event(events.append)
    app.schedules.create("s", app.report.s("eu"), every=60)
    task_id = app.schedules.trigger("s")
    assert [event.event for event in events] == ["enqueued", "occurrence_sent"]
    sent = events[1]
    assert (sent.task_id, sent.task, sent.queue) == (task_id, "shop.report", "reports")
    assert sent.reason == "schedule shop.s"
    assert 0.0 <= sent.wait_seconds < 60.0
    assert sent.ts > 0.0


def test_an_occurrence_that_cannot_be_sent_writes_an_event(app, monkeypatch):
    events = []
    app.on_event(events.append)
    app.schedules.create("s", app.report.s("eu"), every=60)
    view = app.schedules.view("s")

    def refuse(*arguments):
        raise MessageTooLarge("it is too large")

    monkeypatch.setattr(app.sends, "send_occurrence", refuse)
    with pytest.raises(ConfigurationError, match="its task was not sent: it is too large"):
        app.schedules.trigger("s")
    (event,) = events
    assert event.event == "occurrence_skipped"
    assert event.reason == "schedule shop.s: it is too large"
    assert view is not None
