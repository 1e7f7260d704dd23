"""A muted group is out of the way until it changes, on the page and for watchers."""

import hooks
import pytest
from dashboardshop import full, shop, token_of

from aztask.errors import ConfigurationError, NotFound
from aztask.operate import requests
from aztask.operate.deadletters.actions import groups
from aztask.operate.deadletters.mutes import mutes
from aztask.operate.ledger import MUTES, ledger_of
from aztask.operate.watch.rules import RuleFile, WatchRule, Webhook
from aztask.operate.watch.watcher import watcher_of
from aztask.settlement import DeadLetter
from aztask.support.display import Secret

__all__ = ["full", "shop"]
OURS = {"origin": "http://testserver"}


def dead(app, *ids, why="no stock"):
    for task_id in ids:
        app.send("shop.add", [1, 2], task_id=task_id)
    receiver = app.broker.receiver("default", lease=30.0)
    receiver.settle([(e, DeadLetter("rejected", why)) for e in receiver.receive(9, 1.0)])
    receiver.close()


def group(app):
    (found,) = groups(app, ["default"]).groups
    return found


def values(app):
    _, found = group(app)
    return {
        "queue": "default",
        "task": found.task,
        "reason": found.reason,
        "error": found.signature,
    }


def test_a_mute_holds_until_the_group_has_more(shop):
    dead(shop.app, "a", "b")
    action = requests.prepare(shop.app, "mute", values(shop.app))
    assert (action.count, str(action)) == (1, "mute no stock of shop.add in default")
    action.act(by="ann")
    assert mutes(shop.app).of(*group(shop.app)).by == "ann"
    requests.prepare(shop.app, "purge", {"queue": "default", "ids": "a"}).act()
    assert mutes(shop.app).of(*group(shop.app)) is not None, "fewer is no news"
    dead(shop.app, "c")
    assert mutes(shop.app).of(*group(shop.app)) is None, "a new one is"


def test_it_is_unmuted(shop):
    dead(shop.app, "a")
    requests.prepare(shop.app, "mute", values(shop.app)).act()
    action = requests.prepare(shop.app, "unmute", values(shop.app))
    assert action.count == 1
    action.act()
    assert mutes(shop.app).of(*group(shop.app)) is None
    assert requests.prepare(shop.app, "unmute", values(shop.app)).count == 0


def test_a_group_that_does_not_exist_is_not_muted(shop):
    dead(shop.app, "a")
    with pytest.raises(NotFound, match="no such group"):
        requests.prepare(shop.app, "mute", {**values(shop.app), "error": "other"})


@pytest.mark.parametrize("data", [b"\xff", b'{"v":1}', b'{"v":1,"count":"1"}'])
def test_a_damaged_mute_hides_nothing(shop, data):
    dead(shop.app, "a")
    requests.prepare(shop.app, "mute", values(shop.app)).act()
    ledger = ledger_of(shop.app.results)
    (row,) = ledger.page(MUTES, 10)
    ledger.write(MUTES, row.place.key, data, row)
    assert mutes(shop.app).of(*group(shop.app)) is None


def test_a_watcher_sends_no_muted_group_and_sends_it_again_when_it_changes(shop):
    dead(shop.app, "a")
    with hooks.serving() as hook:
        rule = WatchRule("new", "failures", ("default",), 0.0, 0.0, ("oncall",))
        webhooks = {"oncall": Webhook("oncall", "json", Secret(hook.url))}
        watcher = watcher_of(shop.app, RuleFile([rule], webhooks, 1.0, "", None))
        assert watcher.turn().sent == 1
        requests.prepare(shop.app, "mute", values(shop.app)).act()
        watcher.turn()
        assert hook.lines() == [("began", "new"), ("ended", "new")]
        watcher.turn()
        dead(shop.app, "b")
        watcher.turn()
        assert hook.lines()[2:] == [("began", "new")]


def test_the_page_lists_muted_groups_last(shop):
    dead(shop.app, "a", "b")
    muted = values(shop.app)
    dead(shop.app, "c", why="no money")
    requests.prepare(shop.app, "mute", muted).act(by="<b>ann</b>")
    page = shop.as_("act").get("/dead").text
    assert page.index("no money") < page.index("no stock")
    assert "muted by &lt;b&gt;ann&lt;/b&gt; until it changes" in page
    assert page.count(">Unmute<") == 1 and page.count(">Mute<") == 1


def test_a_signal_is_sent_from_the_page(shop):
    shop.app.send("shop.add", [1, 2], task_id="t")
    shop.app.results.expect([])
    client = shop.as_("act")
    asked = client.get("/act?action=signal&id=t&name=approved&value=7")
    assert "send signal approved to task t" in asked.text
    given = {"csrf": token_of(client), "confirmed": "1"}
    done = client.post("/act?action=signal&id=t&name=approved&value=7", data=given, headers=OURS)
    assert done.status_code == 303, done.text
    (found,) = shop.app.sends.signals.store.read("t").signals
    assert found.name == "approved"
    with pytest.raises(ConfigurationError, match="value is no JSON"):
        requests.prepare(shop.app, "signal", {"id": "t", "name": "a", "value": "{"})
