import pytest

from aztask.errors import ConfigurationError
from aztask.operate.watch.rules import KINDS, WatchRule, read_rules

HOOK = '[webhooks.oncall]\nform = "teams"\nurl = "env:WATCH_TEST_URL"\n'
RULE = '[[rules]]\nname = "late"\nwhen = "backlog"\nabove = 10\n'
URL = "https://example.com/services/T0/verysecrettoken"


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.setenv("WATCH_TEST_URL", URL)

    def reading(text):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return read_rules(path)

    return reading


def test_a_whole_file_is_read(read, tmp_path):
    (tmp_path / "secret").write_text("https://beats.example.com/abcdefgh\n")
    found = read(
        f'every = "1m"\npage = "https://ops.example.com/"\nheartbeat = "file:{tmp_path}/secret"\n'
        f"{HOOK}{RULE}"
        '[[rules]]\nname = "old"\nwhen = "oldest"\nabove = "15m"\nqueue = ["a", "mail-*"]\n'
        'for = "5m"\nto = "oncall"\n'
    )
    assert (found.every, found.page) == (60.0, "https://ops.example.com")
    assert found.heartbeat.reveal() == "https://beats.example.com/abcdefgh"
    assert found.webhooks["oncall"].url.reveal() == URL
    assert list(found.rules) == [
        WatchRule("late", "backlog", ("*",), 10.0, 0.0, ("oncall",)),
        WatchRule("old", "oldest", ("a", "mail-*"), 900.0, 300.0, ("oncall",)),
    ]


def test_names_are_patterns_of_the_shell(read):
    rule = WatchRule("r", "backlog", ("orders", "mail-*"), 0.0, 0.0, ())
    assert [rule.covers(each) for each in ("orders", "mail-eu", "orders-eu")] == [True, True, False]
    assert rule.exact is None
    assert WatchRule("r", "backlog", ("orders",), 0.0, 0.0, ()).exact == ("orders",)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_rule_can_be_written(read, kind):
    above = {"count": "above = 1", "duration": 'above = "1m"', "": ""}[KINDS[kind].above]
    text = f'[[rules]]\nname = "x"\nwhen = "{kind}"\n{KINDS[kind].names} = "a"\n{above}\n'
    assert read(HOOK + text).rules[0].names == ("a",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("every", "not valid TOML"),
        (RULE, "names no webhook"),
        (HOOK, "has no rule"),
        (HOOK + "rules = 5", "webhooks.oncall has no setting 'rules'"),
        ("rules = 5\n" + HOOK, "has no rule"),
        ("rules = [5]\n" + HOOK, "each of \\[\\[rules\\]\\] is a table"),
        ("webhooks = 1\n" + RULE, "webhooks is a table"),
        ('evry = "1m"\n' + HOOK + RULE, "no setting 'evry'. Did you mean"),
        ('every = "often"\n' + HOOK + RULE, "every: 'often' is not a duration"),
        ('every = "10ms"\n' + HOOK + RULE, "at least 1s"),
        ("every = true\n" + HOOK + RULE, "every is a text"),
        ('page = "ops.example.com"\n' + HOOK + RULE, "page is the address"),
        (HOOK.replace("teams", "irc") + RULE, "form is one of json, slack, teams"),
        ('[webhooks.a]\nform = "json"\n' + RULE, "needs url"),
        (HOOK + RULE + RULE, "two rules have the name 'late'"),
        (HOOK + RULE.replace("backlog", "backlogs"), "when is one of .* Did you mean 'backlog'"),
        (HOOK + RULE.replace("late", ""), "a rule needs a name"),
        (HOOK + RULE.replace("above = 10", ""), "needs a limit, such as above = 1000"),
        (HOOK + RULE.replace("10", '"10"'), "above is a number of messages"),
        (HOOK + RULE.replace("10", "true"), "above is a number of messages"),
        (HOOK + RULE.replace("10", "-1"), "above is a number of messages"),
        (HOOK + RULE + "queu = 'a'\n", "no setting 'queu'. Did you mean 'queue'"),
        (HOOK + RULE + "queue = []\n", "queue is a name or a list"),
        (HOOK + RULE + "queue = [1]\n", "queue is a name or a list"),
        (HOOK + RULE + "to = 'oncal'\n", "no webhook 'oncal'. Did you mean 'oncall'"),
        (HOOK + RULE + "worker = 'a'\n", "no setting 'worker'"),
    ],
)
def test_what_is_wrong_is_named(read, text, why):
    with pytest.raises(ConfigurationError, match=f"rules.toml.*{why}"):
        read(text)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://example.com/verysecrettoken", "is no address"),
        ("https:///verysecrettoken", "is no address"),
        ("verysecrettoken", "is no address"),
        ("https://example.com/very secrettoken", "is no address"),
        ("https://example.com/verysecrettoken\u00e9", "is no address"),
        ("https://example.com:x/verysecrettoken", "is no address"),
        ("https://[1/verysecrettoken", "is no address"),
        ("http://example.com/verysecrettoken", "shows the secret to the network"),
        ("", "WATCH_TEST_URL' is not set"),
    ],
)
def test_an_address_that_cannot_be_is_refused_and_not_shown(read, monkeypatch, url, why):
    monkeypatch.setenv("WATCH_TEST_URL", url)
    with pytest.raises(ConfigurationError, match=why) as caught:
        read(HOOK + RULE)
    assert "verysecrettoken" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/hook", "http://localhost:1/hook"])
def test_this_machine_needs_no_tls(read, monkeypatch, url):
    monkeypatch.setenv("WATCH_TEST_URL", url)
    assert read(HOOK + RULE).webhooks["oncall"].url.reveal() == url


def test_an_address_in_the_file_is_refused_and_not_shown(read):
    with pytest.raises(ConfigurationError, match="the address itself is a secret") as caught:
        read(HOOK.replace("env:WATCH_TEST_URL", URL) + RULE)
    assert "verysecrettoken" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(read, tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_rules(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match="/missing cannot be read"):
        read(HOOK.replace("env:WATCH_TEST_URL", f"file:{tmp_path}/missing") + RULE)


def test_the_example_is_a_file_of_rules(monkeypatch, request):
    for name in ("TEAMS_WEBHOOK", "SLACK_WEBHOOK", "WATCH_HEARTBEAT"):
        monkeypatch.setenv(name, URL)
    found = read_rules(request.config.rootpath / "examples" / "watch" / "rules.toml")
    assert {each.when for each in found.rules} == KINDS.keys()
    assert {each.form for each in found.webhooks.values()} == {"teams", "slack"}
