"""Settings are checked when they are made: each wrong one is a line that names it."""

import re
from datetime import timedelta

import pytest

from aztask import config
from aztask.config import QueueSettings, Settings, environment_options, read_environment
from aztask.errors import ConfigurationError
from aztask.support.display import Secret

KEY = "a-signing-key-that-no-error-shows"


def test_the_defaults_are_the_documented_ones():
    settings = Settings()
    assert (settings.lease_seconds, settings.max_lease_seconds) == (60.0, 3600.0)
    assert settings.renew_at == 0.7
    assert settings.max_deliveries == 10
    assert settings.unknown_task_grace_seconds == 300.0
    assert settings.serializer == "msgpack"
    assert settings.accept == ("msgpack", "json")
    assert settings.default_queue == "default"
    assert settings == Settings.from_options({})


def test_options_may_leave_out_the_unit_and_take_timedeltas():
    settings = Settings.from_options(
        {
            "lease": timedelta(minutes=2),
            "max_lease_seconds": 7200,
            "unknown_task_grace": 0,
            "signing_keys": [KEY],
            "accept": ["json"],
            "serializer": "json",
        }
    )
    assert settings.lease_seconds == 120.0
    assert settings.max_lease_seconds == 7200.0
    assert settings.signing_keys == (Secret(KEY),)
    assert settings.accept == ("json",)
    assert KEY not in repr(settings)


NUMBERS = [float("nan"), float("inf"), -1, True, "60", 10**5000, 0]


@pytest.mark.parametrize("value", NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize("name", ["lease", "max_lease", "poll_ceiling"])
def test_durations_that_make_no_sense_are_refused_by_name(name, value):
    for make in (Settings.from_options, lambda options: QueueSettings.from_options("q", options)):
        if make is Settings.from_options or name != "poll_ceiling":
            with pytest.raises(ConfigurationError, match=f"{name} ") as raised:
                make({name: value})
            assert "_seconds" not in str(raised.value), "no option of App has this name"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"leas": 5}, r"no option 'leas'. Did you mean 'lease'\?"),
        ({"lease": 5, "lease_seconds": 6}, "twice"),
        ({"colour\x1b": 1}, r"no option 'colour\\x1b'"),
        ({"lease": 60, "max_lease": 60}, r"max_lease \(60 s\) must be longer than lease "),
        ({"lease": 8 * 86400, "max_lease": 9 * 86400}, "7 days"),
        ({"renew_at": 0.9}, r"renew_at is 0.9; .* 0.05 to 0.85, or 1 for no renewals"),
        ({"renew_from": 0.5}, r"no option 'renew_from'"),
        ({"renew_at": float("nan")}, "renew_at is nan"),
        ({"renew_at": "0.7"}, "renew_at is a part of the lease"),
        ({"renew_at": True}, "renew_at is a part of the lease"),
        ({"renew_at": 0.04}, "renew_at is 0.04"),
        ({"max_deliveries": 0}, "1 to 1,000,000"),
        ({"max_deliveries": -(2**63)}, "1 to 1,000,000"),
        ({"max_deliveries": 10**5000}, "more than 38 digits"),
        ({"max_deliveries": 2.5}, "whole number"),
        ({"max_deliveries": True}, "whole number"),
        ({"serializer": "pickle"}, "'pickle' is not a serializer"),
        ({"serializer": "msgpak"}, "Did you mean 'msgpack'"),
        ({"accept": ["json", "yaml"]}, "'yaml' is not a serializer"),
        ({"accept": "json"}, "list of serializers"),
        ({"accept": []}, "list of serializers"),
        ({"signing_keys": KEY}, r"write \[key\]"),
        ({"signing_keys": [KEY, "short-secret"]}, "signing key 2 is shorter than 16"),
        ({"signing_keys": [KEY.encode()]}, "signing key 1 is not text"),
        ({"id_key": "short-secret"}, "id_key is shorter than 16"),
        ({"id_key": KEY.encode()}, "id_key is not text"),
        ({"old_signatures": 1}, "old_signatures is True or False"),
        ({"celery_may_send": "pay"}, "celery_may_send is a list of names, not 'pay'"),
        ({"celery_may_send": [""]}, "celery_may_send"),
        ({"signature_max_age": -1}, "signature_max_age"),
        ({"default_queue": ""}, "default_queue"),
        ({"default_queue": 5}, "default_queue"),
        ({"events": 5}, "path of a directory"),
        ({"events": "a\0b"}, r"path of a directory, not 'a\\x00b'"),
        ({"events_container": "blob://shop/events"}, "needs a directory"),
        ({"events": "e", "events_container": "events"}, "has no account"),
        ({"events": "e", "events_account": "AccountName=shop;AccountKey=x"}, "name the container"),
        ({"events_keep": 1}, "True or False"),
        ({"events_max_bytes": 0}, "events_max_bytes is 0; give 1 to"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(options, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        Settings.from_options(options)
    assert str(caught.value).isprintable()
    assert KEY not in str(caught.value)
    assert "short-secret" not in str(caught.value)


def test_a_queue_overrides_the_app_and_leaves_the_rest():
    queue = QueueSettings.from_options("slow", {"lease": 300, "max_deliveries": 3})
    settings = queue.over(Settings(max_lease_seconds=1800.0))
    assert (settings.lease_seconds, settings.max_lease_seconds) == (300.0, 1800.0)
    assert settings.max_deliveries == 3
    assert QueueSettings("plain").over(Settings()) == Settings()


def test_a_queues_lease_longer_than_the_limit_for_renewals_is_refused():
    """The limit must be longer than the lease, whether both are the queue's or one is the app's."""
    with pytest.raises(ConfigurationError, match="must be longer"):
        QueueSettings.from_options("slow", {"lease": 300, "max_lease": 200})
    with pytest.raises(ConfigurationError, match="must be longer"):
        QueueSettings.from_options("slow", {"lease": 5000}).over(Settings())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("q", {"max_leas": 1}, "the queue 'q' has no option 'max_leas'. Did you mean 'max_lease'"),
        ("q", {"name": "x"}, "no option 'name'"),
        ("", {}, "a queue's name"),
        (None, {}, "a queue's name"),
        ("q", {"sessions": 1}, "True or False"),
        ("q", {"duplicate_window": -1}, "duplicate_window "),
    ],
)
def test_a_wrong_queue_setting_is_named(name, options, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        QueueSettings.from_options(name, options)


def test_the_environment_says_where_events_go(tmp_path):
    key = tmp_path / "account"
    key.write_text("UseDevelopmentStorage=true\n")
    options = environment_options(
        {
            "AZTASK_EVENTS": "there",
            "AZTASK_EVENTS_CONTAINER": "events/shop",
            "AZTASK_EVENTS_ACCOUNT_FILE": str(key),
        }
    )
    settings = Settings.from_options(options)
    assert settings.events == "there"
    assert str(settings.events_target) == "blob://devstoreaccount1/events/shop"
    assert "UseDevelopmentStorage" not in repr(settings)
    assert environment_options({}) == {}


def test_keys_come_from_the_environment_or_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}-new\n{KEY}\n")
    options = environment_options(
        {"AZTASK_SIGNING_KEYS_FILE": str(file), "AZTASK_ID_KEY": f"{KEY}-id"}
    )
    settings = Settings.from_options(options)
    assert settings.signing_keys == (Secret(f"{KEY}-new"), Secret(KEY))
    assert settings.id_key == Secret(f"{KEY}-id")
    assert KEY not in repr(settings)
    one = Settings.from_options(environment_options({"AZTASK_SIGNING_KEYS": KEY}))
    assert one.signing_keys == (Secret(KEY),)


@pytest.mark.parametrize("content", ["", "\n", " \n "])
def test_an_empty_file_of_keys_does_not_switch_signing_off(tmp_path, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match="holds no key"):
        environment_options({"AZTASK_SIGNING_KEYS_FILE": str(file)})


def test_the_environment_gives_a_value_or_a_file(tmp_path):
    file = tmp_path / "broker"
    file.write_text("local:///a.db\n")
    assert read_environment("AZTASK_BROKER", {}) is None
    assert read_environment("AZTASK_BROKER", {"AZTASK_BROKER": ""}) is None
    assert read_environment("AZTASK_BROKER", {"AZTASK_BROKER": "local://"}) == "local://"
    assert read_environment("AZTASK_BROKER", {"AZTASK_BROKER_FILE": str(file)}) == "local:///a.db"


def test_an_environment_that_cannot_be_used_is_said(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, words in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "binary", "UTF-8"),
    ]:
        with pytest.raises(ConfigurationError, match=f"X_FILE names cannot be read: .*{words}"):
            read_environment("X", {"X_FILE": str(path)})
    with pytest.raises(ConfigurationError, match="both set"):
        read_environment("X", {"X": "a", "X_FILE": "b"})


def test_everything_that_is_offered_is_there():
    assert all(hasattr(config, name) for name in config.__all__)
