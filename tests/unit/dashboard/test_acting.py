"""Actions on the page: counted, asked, done once, by those who may, and in the audit."""

import re
from typing import Annotated
from urllib.parse import urlencode

import pytest
from dashboardshop import PAYLOAD, token_of

from aztask import Secret
from aztask.dashboard import acting
from aztask.errors import BrokerUnavailable
from aztask.operate.action import audit
from aztask.operate.deadletters import DeadLetters
from aztask.operate.jobrunner import JobRunner
from aztask.operate.requests import KINDS, Role
from aztask.operate.tasks import registered
from aztask.settlement import DeadLetter
from aztask.stores.events.sink import read_events

OURS = {"origin": "http://testserver"}


def dead(shop, *ids, error="no stock"):
    for task_id in ids:
        shop.app.send("shop.add", [1, 2], task_id=task_id)
    receiver = shop.app.broker.receiver("default", lease=30.0)
    found = receiver.receive(len(ids), 1.0)
    receiver.settle([(each, DeadLetter("rejected", error)) for each in found])
    receiver.close()


def letters(shop):
    return sorted(each.id for each in DeadLetters(shop.app, "default").list())


def address(action, **values):
    return f"/act?{urlencode({'action': action, **values})}"


def ask(client, action, **values):
    """The page that asks, and the count in it; None without a form."""
    answer = client.get(address(action, **values))
    found = re.search(r'name="confirmed" value="(\d+)"', answer.text)
    return answer, int(found[1]) if found else None


def confirm(client, action, count, token=None, body=None, **values):
    given = {"csrf": token or token_of(client), "confirmed": str(count), **(body or {})}
    return client.post(address(action, **values), data=given, headers=OURS)


def test_nothing_is_done_before_the_count_is_confirmed(shop):
    dead(shop, "a", "b")
    client = shop.as_("act")
    answer, count = ask(client, "replay", queue="default", all="yes")
    assert count == 2 and "replay 2 dead letters" in answer.text
    assert letters(shop) == ["a", "b"]
    without = client.post(
        address("replay", queue="default", all="yes"), data={"csrf": token_of(client)}, headers=OURS
    )
    assert without.status_code == 200 and "would" in without.text
    assert letters(shop) == ["a", "b"]
    done = confirm(client, "replay", 2, queue="default", all="yes")
    assert done.status_code == 303
    assert letters(shop) == []
    shown = client.get(done.headers["location"]).text
    assert "2 of 2 done" in shown


def test_an_action_over_many_items_is_a_job(shop, monkeypatch):
    monkeypatch.setattr(acting, "FROM_COUNT", 2)
    dead(shop, "a", "b")
    client = shop.as_("act")
    made = confirm(client, "replay", 2, queue="default", all="yes")
    assert made.status_code == 303
    assert letters(shop) == ["a", "b"], "a thread of the server does it, and none runs here"
    page = client.get(made.headers["location"]).text
    assert "0 of 2 done" in page and "waiting" in page and "Cancel" in page
    JobRunner(shop.app).work_once()
    shop.site.forget()
    assert "2 of 2 done" in client.get(made.headers["location"]).text
    (entry,) = audit(shop.app).entries
    assert (entry.by, entry.via, entry.done) == ("act", "page, as a job", 2)


def test_a_job_is_cancelled_by_those_who_may(shop, monkeypatch):
    monkeypatch.setattr(acting, "FROM_COUNT", 2)
    dead(shop, "a", "b")
    made = confirm(shop.as_("act"), "replay", 2, queue="default", all="yes")
    key = made.headers["location"].partition("id=")[2]
    assert "Cancel" not in shop.as_("read").get("/jobs").text.partition("<table>")[2]
    assert shop.as_("read").get(address("job-cancel", id=key)).status_code == 403
    client = shop.as_("act")
    answer, count = ask(client, "job-cancel", id=key)
    assert count == 1 and "cancel the job: replay 2 dead letters" in answer.text
    confirm(client, "job-cancel", 1, id=key)
    assert JobRunner(shop.app).work_once() is None
    assert "cancelled by act" in client.get("/jobs").text
    assert client.get("/jobs?id=nothing").status_code == 404


def test_more_than_was_confirmed_is_asked_again(shop):
    dead(shop, "a")
    client = shop.as_("act")
    _, count = ask(client, "purge", queue="default", all="yes")
    dead(shop, "b")
    answer = confirm(client, "purge", count, queue="default", all="yes")
    assert answer.status_code == 200 and "There are more now" in answer.text
    assert letters(shop) == ["a", "b"]


def test_who_did_what_is_in_the_audit_and_in_the_events(shop):
    dead(shop, "a")
    client = shop.as_("act")
    confirm(client, "pause", 1, queue="default")
    (entry,) = audit(shop.app).entries
    assert (entry.by, entry.via, entry.action, entry.selected, entry.done, entry.error) == (
        *("act", "page", "pause", 1, 1, ""),
    )
    assert "act" in client.get("/limits").text.split("queue default")[1]
    events = [each for each in read_events(shop.app.settings.events) if each.by]
    assert [(each.by, each.action) for each in events] == [("act", "pause")]
    assert entry.text == events[0].reason == "pause queue default"


def test_an_action_that_fails_is_in_the_audit_with_its_error(shop, monkeypatch):
    client = shop.as_("act")
    dead(shop, "a")

    def fails(*_, **__):
        raise BrokerUnavailable("the queues are unreachable")

    monkeypatch.setattr(DeadLetters, "replay", fails)
    done = confirm(client, "replay", 1, queue="default", all="yes")
    (entry,) = audit(shop.app).entries
    assert (entry.done, entry.error) == (0, "BrokerUnavailable: the queues are unreachable")
    assert "Stopped" in client.get(done.headers["location"]).text


@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_role_may_do_what_it_may_and_no_more(full, name):
    for role in Role:
        client = full.as_(role.name.lower())
        given = address(name, queue="default") if "queue" in KINDS[name].fields else address(name)
        asked = client.get(given)
        sent = client.post(given, data={"csrf": token_of(client), "confirmed": "0"}, headers=OURS)
        allowed = role >= KINDS[name].role
        assert (asked.status_code == 403) is not allowed, asked.text
        assert (sent.status_code == 403) is not allowed
        if not allowed:
            assert "Nothing was done" in asked.text and "Nothing was done" in sent.text


def test_only_those_who_may_act_see_the_ways_to_it(full):
    for path in ("/dead", "/letters?queue=default", "/queues", "/limits", "/schedules", "/running"):
        assert "/act?" not in full.as_("read").get(path).text
        assert "/act?" in full.as_("act").get(path).text, path
    assert "action=queue-purge" not in full.as_("act").get("/queues").text
    assert "action=queue-purge" in full.as_("configure").get("/queues").text


def test_each_link_of_a_page_leads_to_a_question_that_can_be_counted(full):
    client = full.as_("configure")
    seen = set()
    for path in ("/dead", "/letters?queue=default", "/queues", "/limits", "/running", "/tasks"):
        for link in re.findall(r'href="(/act\?[^"]+)"', client.get(path).text):
            answer = client.get(link.replace("&amp;", "&"))
            assert answer.status_code in (200, 404), (link, answer.text)
            seen.add(re.search(r"action=([a-z-]+)", link)[1])
    assert seen >= {"replay", "purge", "pause", "resume", "scale", "stop", "cancel", "queue-purge"}


def test_a_dead_letter_is_edited_and_replayed_with_a_new_signature(shop):
    dead(shop, "a", error="no stock")
    client = shop.as_("act")
    form = client.get("/edit?queue=default&id=a").text
    assert re.search(r'name="args"[^>]*>\[\s*1,\s*2\s*\]<', form)
    body = {"args": "[1, 40]", "kwargs": "{}"}
    asked = client.post(
        address("edit", queue="default", id="a"),
        data={"csrf": token_of(client), **body},
        headers=OURS,
    )
    assert "edited" in asked.text and letters(shop) == ["a"]
    done = confirm(client, "edit", 1, body=body, queue="default", id="a")
    assert done.status_code == 303, done.text
    assert letters(shop) == []
    receiver = shop.app.broker.receiver("default", lease=30.0)
    (found,) = receiver.receive(1, 1.0)
    message = shop.app.codec.from_envelope(found.envelope, "default")
    assert shop.app.codec.decode_arguments(message) == ((1, 40), {})
    assert (message.id, message.generation) == ("a", 1)
    receiver.close()
    assert "40" not in audit(shop.app).entries[0].text


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ("[1]", "{}", "missing a required argument"),
        ("{}", "{}", "args is a JSON list"),
        ("[1", "{}", "is no JSON"),
        ("[NaN, 1]", "{}", "is no JSON"),
    ],
)
def test_arguments_that_the_task_does_not_take_are_refused(shop, args, kwargs, why):
    dead(shop, "a")
    client = shop.as_("act")
    answer = confirm(
        client, "edit", 1, body={"args": args, "kwargs": kwargs}, queue="default", id="a"
    )
    assert why in answer.text
    assert letters(shop) == ["a"]


def test_those_who_may_not_see_arguments_may_not_edit_them(shop):
    dead(shop, "a")
    assert shop.as_("read").get("/edit?queue=default&id=a").status_code == 403
    shop.site.values_role = Role.CONFIGURE
    assert shop.as_("act").get("/edit?queue=default&id=a").status_code == 403
    assert shop.as_("configure").get("/edit?queue=default&id=a").status_code == 200


def test_a_secret_is_not_shown_for_editing(shop):
    shop.app.send("shop.add", ["Endpoint=sb://x/;SharedAccessKey=c2VjcmV0c2VjcmV0", 1], task_id="s")
    receiver = shop.app.broker.receiver("default", lease=30.0)
    (found,) = receiver.receive(1, 1.0)
    receiver.settle([(found, DeadLetter("rejected", "x"))])
    receiver.close()
    answer = shop.as_("act").get("/edit?queue=default&id=s")
    assert "c2VjcmV0" not in answer.text and "have a secret" in answer.text


def test_an_argument_that_is_marked_as_secret_is_masked_and_not_edited(shop):
    def charge(card: Annotated[str, Secret], cents: int) -> None: ...

    shop.app.task(name="shop.charge")(charge)
    shop.app.send("shop.charge", ["4111-1111", 500], task_id="s")
    waits = shop.as_("act").get("/queue?name=default").text
    assert "4111" not in waits and "****" in waits and "500" in waits
    receiver = shop.app.broker.receiver("default", lease=30.0)
    (found,) = receiver.receive(1, 1.0)
    receiver.settle([(found, DeadLetter("rejected", "x"))])
    receiver.close()
    for path in ("/letters?queue=default", "/edit?queue=default&id=s"):
        answer = shop.as_("act").get(path).text
        assert "4111" not in answer
        assert "****" in answer or "have a secret" in answer


def test_the_form_asks_for_what_an_action_needs(shop):
    client = shop.as_("configure")
    answer = client.get(address("scale"))
    assert 'name="size"' in answer.text and "(needed)" in answer.text
    assert "is a number from 1" in client.get(address("scale", size="many")).text
    assert client.get(address("nothing")).status_code == 503
    assert "takes no" in client.get(address("pause", queue="default", nothing="1")).text
    answer = confirm(client, "scale", 1, size="3")
    assert answer.status_code == 303
    assert ">3<" in client.get("/limits").text


def test_a_limit_is_changed_and_reset(shop):
    shop.app.limit("partner", rate="10/s")
    client = shop.as_("configure")
    form = client.get(address("limit", name="partner"))
    assert 'name="rate"' in form.text and "give a rate, a burst or a concurrency" in form.text
    assert "takes a text such as" in client.get(address("limit", name="partner", rate="fast")).text
    assert (
        "burst is a whole number" in client.get(address("limit", name="partner", burst="1.5")).text
    )
    assert confirm(client, "limit", 1, name="partner", rate="5/s").status_code == 303
    listed = client.get("/limits").text
    assert "5/1s, burst 1" in listed and "changed" in listed and "Reset" in listed
    assert confirm(client, "limit", 1, name="partner", reset="yes").status_code == 303
    listed = client.get("/limits").text
    assert "10/1s, burst 1" in listed and "Reset" not in listed


def test_hostile_values_go_through_the_question_unchanged_and_unharmful(full):
    client = full.as_("act")
    answer, count = ask(client, "pause", task=PAYLOAD.split("\x1b")[0])
    assert "<script>alert" not in answer.text and count is not None
    confirm(client, "pause", count, task=PAYLOAD.split("\x1b")[0])
    page = client.get("/audit").text
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert registered(full.app)


def test_the_audit_pages_by_key_and_takes_conditions(shop):
    client = shop.as_("act")
    for number in range(60):
        shop.app.broker.declare(f"q{number:02}")
        confirm(client, "pause", 1, token=token_of(client), queue=f"q{number:02}")
    first = client.get("/audit")
    assert len(re.findall(r'<th scope="row">pause queue q', first.text)) == 50
    following = re.search(r'rel="next" href="([^"]+)"', first.text)[1].replace("&amp;", "&")
    assert len(re.findall(r'<th scope="row">pause queue q', client.get(following).text)) == 10
    assert client.get("/audit?text=q07").text.count("pause queue q") == 1
    assert "pause queue" not in client.get("/audit?by=ann").text
