"""Topics, subscriptions and their filters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage
from azure.servicebus.management import CorrelationRuleFilter, SqlRuleAction, SqlRuleFilter

WAIT = 5


@pytest.fixture(scope="module")
def admin(bus):
    with bus.administration_client() as admin:
        yield admin


def texts(client, topic, subscription, count):
    with client.get_subscription_receiver(topic, subscription) as receiver:
        got = receiver.receive_messages(count, max_wait_time=2)
        for message in got:
            receiver.complete_message(message)
        return [str(message) for message in got]


def test_filters_choose_the_subscriptions(client, admin):
    admin.create_topic("news")
    names = ("all", "sql", "correlated", "none")
    for name in names:
        admin.create_subscription("news", name)
    for name in ("sql", "correlated", "none"):
        admin.delete_rule("news", name, "$Default")
    admin.create_rule(
        "news",
        "sql",
        "big",
        filter=SqlRuleFilter("size > @limit AND sys.Label LIKE 'a%'", {"@limit": 10}),
    )
    matching = CorrelationRuleFilter(label="b", properties={"size": 5})
    admin.create_rule("news", "correlated", "exact", filter=matching)
    with client.get_topic_sender("news") as sender:
        sender.send_messages(
            [
                ServiceBusMessage("1", subject="ab", application_properties={"size": 11}),
                ServiceBusMessage("2", subject="b", application_properties={"size": 5}),
                ServiceBusMessage("3", subject="ab", application_properties={"size": 10}),
            ]
        )
    with ThreadPoolExecutor() as pool:
        got = pool.map(lambda name: texts(client, "news", name, 3), names)
        assert list(got) == [["1", "2", "3"], ["1"], ["2"], []]
    runtime = admin.get_subscription_runtime_properties("news", "all")
    assert runtime.active_message_count == 0
    assert admin.get_topic_runtime_properties("news").subscription_count == 4


def test_rules_are_kept_as_they_were_given(admin):
    admin.create_topic("rules")
    admin.create_subscription("rules", "s")
    given = CorrelationRuleFilter(
        correlation_id="c",
        message_id="m",
        to="t",
        reply_to="r",
        label="l",
        session_id="s",
        reply_to_session_id="rs",
        content_type="ct",
        properties={"a": "x", "n": 5, "b": True},
    )
    admin.create_rule("rules", "s", "one", filter=given)
    got = admin.get_rule("rules", "s", "one").filter
    assert vars(got) == vars(given)
    rule = admin.get_rule("rules", "s", "one")
    rule.filter = SqlRuleFilter("a = 'b'")
    admin.update_rule("rules", "s", rule)
    assert admin.get_rule("rules", "s", "one").filter.sql_expression == "a = 'b'"
    assert [one.name for one in admin.list_rules("rules", "s")] == ["$Default", "one"]
    action = SqlRuleAction("SET a = @p", {"@p": 1})
    admin.create_rule("rules", "s", "three", action=action)
    kept = admin.get_rule("rules", "s", "three").action
    assert (kept.sql_expression, kept.parameters) == (action.sql_expression, action.parameters)
    admin.delete_rule("rules", "s", "three")
    with pytest.raises(HttpResponseError, match="action: SET or REMOVE"):
        admin.create_rule("rules", "s", "two", action=SqlRuleAction("a = 1"))
    with pytest.raises(HttpResponseError, match="filter"):
        admin.create_rule("rules", "s", "two", filter=SqlRuleFilter("a = = b"))
    with pytest.raises(ResourceExistsError):
        admin.create_rule("rules", "s", "one", filter=given)
    with pytest.raises(ResourceNotFoundError):
        admin.get_rule("rules", "s", "none")


def test_filters_compare_times(client, admin):
    """Clients of the service use dates and durations in filters; messages carry timestamps."""
    admin.create_topic("times")
    admin.create_subscription("times", "due")
    admin.delete_rule("times", "due", "$Default")
    moment, span = datetime(2030, 7, 5, 11, 12, 13), timedelta(days=1, hours=2, minutes=3)
    kept = {"moment": moment, "count": 2**30, "flag": False}
    admin.create_rule("times", "due", "exact", filter=CorrelationRuleFilter(properties=kept))
    spans = {"span": span}
    admin.create_rule("times", "due", "span", filter=CorrelationRuleFilter(properties=spans))
    later = SqlRuleFilter("moment > @moment", {"@moment": moment})
    admin.create_rule("times", "due", "later", filter=later)
    assert admin.get_rule("times", "due", "exact").filter.properties == kept
    assert admin.get_rule("times", "due", "span").filter.properties == spans
    assert admin.get_rule("times", "due", "later").filter.parameters == {"@moment": moment}
    at = moment.replace(tzinfo=UTC)
    with client.get_topic_sender("times") as sender:
        sender.send_messages(
            [
                ServiceBusMessage("exact", application_properties={**kept, "moment": at}),
                ServiceBusMessage("other", application_properties={"moment": at}),
                ServiceBusMessage(
                    "later", application_properties={"moment": at + timedelta(seconds=1)}
                ),
            ]
        )
    assert texts(client, "times", "due", 3) == ["exact", "later"]


def test_actions_change_the_copies_of_a_subscription(client, admin):
    admin.create_topic("acting")
    admin.create_subscription("acting", "s")
    admin.create_rule(
        "acting",
        "s",
        "cheap",
        filter=SqlRuleFilter("price < 10"),
        action=SqlRuleAction("SET sys.Label = 'cheap'; SET price = price * 2; REMOVE secret"),
    )
    sent = {"price": 4, "secret": "x"}
    with client.get_topic_sender("acting") as sender:
        sender.send_messages(ServiceBusMessage("1", application_properties=sent))
    with client.get_subscription_receiver("acting", "s") as receiver:
        plain, acted = receiver.receive_messages(2, max_wait_time=WAIT)
        for message in (plain, acted):
            receiver.complete_message(message)
    assert plain.subject is None
    assert plain.application_properties == {b"price": 4, b"secret": b"x"}
    assert acted.subject == "cheap"
    assert acted.application_properties == {b"price": 8, b"RuleName": b"cheap"}


def test_filters_of_a_topic_are_counted(admin):
    admin.create_topic("counted-filters")
    admin.create_subscription("counted-filters", "one")
    admin.create_rule("counted-filters", "one", "sql", filter=SqlRuleFilter("1=1"))
    admin.create_rule("counted-filters", "one", "equal", filter=CorrelationRuleFilter(label="a"))
    runtime = admin.get_topic_runtime_properties("counted-filters")
    assert (runtime.sql_filter_count, runtime.correlation_filter_count) == (2, 1)
