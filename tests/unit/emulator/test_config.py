"""The configuration file of Microsoft's emulator."""

from __future__ import annotations

import json

import pytest

from aztask.emulator.broker.entities import Kind
from aztask.emulator.broker.filters import CorrelationFilter, SqlFilter, TrueFilter
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
    assert [entity.path for entity in entities] == ["z", "t", "t/Subscriptions/s", "a"]
    assert entities[2].kind is Kind.SUBSCRIPTION


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, TrueFilter()),
        ({"FilterType": "Sql", "SqlFilter": {"SqlExpression": "a = 1"}}, SqlFilter("a = 1")),
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
        (document([queue(LockDurations="PT1M")]), "Did you mean|did you mean"),
        (document([queue(MaxDeliveryCount=True)]), "must be int"),
        (document([queue(RequiresSession="yes")]), "must be bool"),
        (document(topics=[subscription(FilterType="Magic")]), "Sql or Correlation"),
        (document(topics=[subscription(Action={"SqlExpression": "SET a=1"})]), "remove the Action"),
        (
            document(
                topics=[subscription(FilterType="Correlation", CorrelationFilter={"Lable": "typo"})]
            ),
            "Lable",
        ),
    ],
    ids=range(10),
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
