"""The configuration file of Microsoft's emulator."""

from __future__ import annotations

import json
from itertools import permutations

import pytest

from aztask.emulator.broker.entities import EntityKind
from aztask.emulator.broker.filters import CorrelationFilter, RuleAction, SqlFilter, TrueFilter
from aztask.emulator.config import entities_of, read_config
from aztask.errors import ConfigurationError


def document(queues=(), topics=()):
    return {"UserConfig": {"Namespaces": [{"Queues": list(queues), "Topics": list(topics)}]}}


def queue(name="q", **properties):
    return {"Name": name, "Properties": properties}


def subscription(**properties):
    rule = {"Name": "r", "Properties": properties}
    return {"Name": "t", "Subscriptions": [{"Name": "s", "Rules": [rule]}]}


def test_properties_of_a_queue():
    (entity,) = entities_of(
        document(
            [
                queue(
                    LockDuration="PT30S",
                    MaxDeliveryCount=3,
                    RequiresSession=True,
                    DefaultMessageTimeToLive="P10675199DT2H48M5.4775807S",
                    RequiresDuplicateDetection=True,
                    DuplicateDetectionHistoryTimeWindow="PT20S",
                )
            ]
        )
    )
    assert (entity.lock_seconds, entity.max_deliveries, entity.sessions) == (30.0, 3, True)
    assert (entity.time_to_live, entity.duplicate_window) == (None, 20.0)


def test_targets_are_sorted_before_their_users():
    entities = entities_of(
        document([queue("a", ForwardTo="z"), queue("z")], [subscription(FilterType="True")])
    )
    assert [entity.path for entity in entities] == ["z", "t", "a", "t/Subscriptions/s"]
    assert entities[3].kind is EntityKind.SUBSCRIPTION


def test_a_chain_of_forwards_in_any_order():
    chain = [queue("a", ForwardTo="B"), queue("b", ForwardDeadLetteredMessagesTo="c"), queue("c")]
    for order in permutations(chain):
        assert [each.path for each in entities_of(document(order))] == ["c", "b", "a"]


def test_a_circle_of_forwards_is_left_to_the_service():
    circle = [queue("a", ForwardTo="b"), queue("b", ForwardTo="a"), queue("c")]
    assert [each.path for each in entities_of(document(circle))] == ["c", "a", "b"]


def test_what_is_not_known_is_ignored_with_a_warning(caplog):
    (entity,) = entities_of(document([queue(EnableBatchedOperations=True, LockDurations="PT30S")]))
    assert entity.lock_seconds != 30.0
    assert "q: 'EnableBatchedOperations' is ignored." in caplog.text
    assert "'LockDurations' is ignored. Did you mean" in caplog.text


def test_comments(tmp_path):
    path = tmp_path / "config.json"
    text = json.dumps(document([queue("a//b", ForwardTo="")]), indent=1)
    path.write_text(text.replace("[", "[ // the queues, \n /* of \n all */", 1))
    assert [each.path for each in read_config(path)] == ["a//b"]


def test_commas_at_the_end_of_a_list(tmp_path):
    path = tmp_path / "config.json"
    text = json.dumps(document([queue("a,]b")]))
    path.write_text(text.replace("}]", "} , // one more?\n ]"))
    assert [each.path for each in read_config(path)] == ["a,]b"]


PUBLISHED = """{
  "$schema": "Config-schema.json",
  "UserConfig": {
    "Namespaces": [{
      "Name": "sbemulatorns",
      "Queues": [{
        "Name": "queue.1",
        "Properties": {
          "DeadLetteringOnMessageExpiration": false, "DefaultMessageTimeToLive": "PT1H",
          "DuplicateDetectionHistoryTimeWindow": "PT20S", "ForwardDeadLetteredMessagesTo": "",
          "ForwardTo": "", "LockDuration": "PT1M", "MaxDeliveryCount": 3,
          "RequiresDuplicateDetection": false, "RequiresSession": false
        }
      }],
      "Topics": [{
        "Name": "topic.1",
        "Properties": {
          "DefaultMessageTimeToLive": "PT1H", "DuplicateDetectionHistoryTimeWindow": "PT20S",
          "RequiresDuplicateDetection": false
        },
        "Subscriptions": [{
          "Name": "subscription.1",
          "Properties": {
            "DeadLetteringOnMessageExpiration": false, "DefaultMessageTimeToLive": "PT1H",
            "LockDuration": "PT1M", "MaxDeliveryCount": 3, "ForwardDeadLetteredMessagesTo": "",
            "ForwardTo": "queue.1", "RequiresSession": false
          },
          "Rules": [
            {"Name": "all.1", "Properties": {"FilterType": "Correlation", "CorrelationFilter": {
              "ContentType": "application/text", "CorrelationId": "id1", "Label": "subject1",
              "MessageId": "msgid1", "ReplyTo": "someQueue", "ReplyToSessionId": "sessionId",
              "SessionId": "session1", "To": "xyz", "Properties": {"prop1": "value1"}}}},
            {"Name": "sql.1", "Properties": {"FilterType": "Sql",
              "SqlFilter": {"SqlExpression": "sys.MessageId = '123456' AND userProp1 = 'value1'"},
              "Action": {"SqlExpression": "SET sys.To = 'Entity'"}}}
          ]
        }]
      }]
    }],
    "Logging": {"Type": "File"}
  }
}"""
"""Every key of Microsoft's schema of the file, Config-schema.json."""


def test_every_key_of_the_schema_is_read_without_a_warning(tmp_path, caplog):
    path = tmp_path / "config.json"
    path.write_text(PUBLISHED)
    *others, subscription_ = read_config(path)
    assert [each.path for each in others] == ["queue.1", "topic.1"]
    assert subscription_.forward_to == "queue.1"
    correlated, sql = subscription_.rules
    assert len(correlated.filter.system) == 8
    assert sql.action == RuleAction("SET sys.To = 'Entity'")
    assert caplog.text == ""


def test_unknown_keys_of_every_object_are_warned_of(caplog):
    text = json.loads(PUBLISHED)

    def spoil(value):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, (dict, list)):
                spoil(each)
        if isinstance(value, dict) and "prop1" not in value and "ContentType" not in value:
            value["Tpyo"] = 1

    spoil(text)
    del text["UserConfig"]["Logging"]["Tpyo"]
    entities_of(text)
    places = [record.args[0] for record in caplog.records if record.args[1] == "Tpyo"]
    assert sorted(places) == sorted(
        [
            *("the file", "UserConfig", "the namespace", "queue.1", "queue.1", "topic.1"),
            *("topic.1", "topic.1/Subscriptions/subscription.1"),
            "topic.1/Subscriptions/subscription.1",
            *["topic.1/Subscriptions/subscription.1, rule all.1"] * 2,
            *["topic.1/Subscriptions/subscription.1, rule sql.1"] * 2,
            "topic.1/Subscriptions/subscription.1, rule sql.1, Action",
            "topic.1/Subscriptions/subscription.1, rule sql.1, SqlFilter",
        ]
    )


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, TrueFilter()),
        ({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "a = 1"}}, SqlFilter("a = 1")),
        ({"SqlFilter": {"SqlExpression": "a = 1"}}, SqlFilter("a = 1")),
        ({"CorrelationFilter": {"Label": "l"}}, CorrelationFilter({"Label": "l"}, {})),
        (
            {
                "FilterType": "Correlation",
                "CorrelationFilter": {"Label": "l", "Properties": {"k": "v"}},
            },
            CorrelationFilter({"Label": "l"}, {"k": "v"}),
        ),
    ],
)
def test_filters_of_rules(properties, expected):
    *_, entity = entities_of(document(topics=[subscription(**properties)]))
    assert [(rule.name, rule.filter) for rule in entity.rules] == [("r", expected)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([], "UserConfig"),
        ({"UserConfig": {"Namespaces": {}}}, "must be a list"),
        ({"UserConfig": {"Namespaces": [{}, {}]}}, "2 entries"),
        (document([{}]), "needs a 'Name'"),
        (
            document(topics=[subscription(FilterType="Sql", CorrelationFilter={"Label": "l"})]),
            "FilterType is Sql, not Correlation",
        ),
        (document(topics=[subscription(FilterType="Correlation")]), "fits all"),
        (document(topics=[subscription(CorrelationFilter={"Properties": {}})]), "fits all"),
        (
            document(topics=[subscription(SqlFilter={}, CorrelationFilter={})]),
            "FilterType is Sql, not Sql and Correlation",
        ),
        (document([queue(MaxDeliveryCount=True)]), "must be int"),
        (document([queue(RequiresSession="yes")]), "must be bool"),
        (document(topics=[subscription(FilterType="Magic")]), "Sql or Correlation"),
        (
            document(topics=[subscription(Action={"SqlExpression": "SET sys.Lable=1"})]),
            r"t/Subscriptions/s, rule r: action: there is no system property 'Lable'.*'Label'",
        ),
        (
            document(
                topics=[subscription(FilterType="Correlation", CorrelationFilter={"Lable": "typo"})]
            ),
            "Lable",
        ),
    ],
    ids=range(13),
)
def test_mistakes_are_explained(text, said):
    with pytest.raises(ConfigurationError, match=said):
        entities_of(text)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    for text in ("{", json.dumps(document([{}]))):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            read_config(path)
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        read_config(tmp_path / "missing.json")


def test_a_lone_surrogate_is_refused_because_it_cannot_be_stored(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"UserConfig": {"Namespaces": [{"Name": "\ud800"}]}}))
    with pytest.raises(ConfigurationError, match="surrogates not allowed"):
        read_config(file)
