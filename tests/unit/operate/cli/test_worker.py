import pytest

from aztask import App
from aztask.operate.cli.worker import banner, command, surplus
from aztask.worker.options import WorkerOptions

GIVEN = [
    (["-c", "0"], "is not in the range"),
    (["-c", "-1"], "is not in the range"),
    (["-c", "1e9"], "is not a whole number"),
    (["-c", "nan"], "is not a whole number"),
    (["-c", "9" * 30], "is not in the range"),
    (["-c", ""], "is not a whole number"),
    (["--pool", "gevent"], "is not one of 'processes', 'threads'"),
    (["--prefetch", "-1"], "is not in the range"),
    (["--max-tasks", "0"], "is not in the range"),
    (["--lease", "0"], "is not between"),
    (["--lease", "nan"], "is not a duration"),
    (["--lease", "8d"], "is not between"),
    (["--max-lease", "-1s"], "is not a duration"),
    (["--shutdown-timeout", "soon"], "is not a duration"),
    (["--log-format", "xml"], "is not one of 'plain', 'json'"),
    (["-Q", ""], "empty name"),
    (["-Q", "a,,b"], "empty name"),
    (["-Q", "a:b"], "wrong weight"),
    (["--poll-floor", "1s"], "No such option"),
    (["surplus"], "unexpected extra argument"),
    (["--supervisors", "0"], "is not in the range"),
    (["--supervisors", "65"], "is not in the range"),
    (["--supervisors", "many"], "'many' is neither a whole number nor auto"),
    (["--supervisors", "9"], "is more than --concurrency 8, which holds for all"),
    (["--supervisors", "3", "--max-tasks", "2"], "is more than --max-tasks 2"),
    (["--supervisors", "auto", "--pool", "solo"], "--pool solo cannot be combined"),
    (["--supervisors", "2", "--reload"], "--reload cannot be combined"),
]


@pytest.mark.parametrize(("given", "words"), GIVEN, ids=range(len(GIVEN)))
def test_a_wrong_option_is_one_line(cli, given, words):
    ended = cli("worker", "-A", "nosuch", *given)
    assert ended.code == 2
    assert words in ended.error


def test_an_option_from_the_environment_is_checked_too(cli):
    ended = cli("worker", "-A", "nosuch", AZTASK_WORKER_CONCURRENCY="none")
    assert ended.code == 2
    assert "AZTASK_WORKER_CONCURRENCY" in ended.error or "--concurrency" in ended.error


def test_the_defaults_are_those_of_the_worker():
    context = command.make_context("worker", [])
    own = WorkerOptions()
    for name in ("concurrency", "pool", "prefetch", "burst", "max_tasks", "shutdown_timeout"):
        assert context.params[name] == getattr(own, name), name


def test_an_app_without_tasks_is_warned_of_with_the_modules_it_imported():
    (line,) = surplus(
        App("shop", broker="local://:memory:", include=["shop.tasks"]), "shop:app", ()
    )
    assert "app shop has no tasks: it imported shop, shop.tasks;" in line
    assert "include=[...]" in line


def test_a_given_queue_that_no_task_uses_is_warned_of():
    app = App("shop", broker="local://:memory:")
    app.task(queue="images")(len)
    app.queue("slow", lease=300)
    (line,) = surplus(app, "shop:app", ("images", "slow", "default", "imagse"))
    assert "queue imagse is used by no task of app shop, which imported" in line
    assert line.endswith("Did you mean 'images'?")
    assert surplus(app, "shop:app", ()) == []


MISSPELT = """
from aztask import App
app = App("shop", broker="local://", include=["shop_images"])
"""
IMAGES = """
from misspelt_shop import app
@app.task(queue="images")
def resize(): ...
"""


def test_a_worker_does_not_create_a_misspelt_queue(cli):
    cli.module("shop_images", IMAGES)
    module = cli.module("misspelt_shop", MISSPELT)
    ended = cli("worker", "-A", module, "-Q", "imagse", "--burst")
    assert ended.code == 5
    *warnings, error = ended.err.splitlines()
    assert any("Did you mean 'images'?" in line for line in warnings)
    assert error.startswith("aztask: error: queue 'imagse' does not exist; create it with")
    assert "imagse" not in cli("queues", "-A", module).out
    assert "shop.resize" in cli("tasks", "-A", module).out, "the included module is imported"


VAULT = """
from aztask import App
app = App("shop", broker="local://", encryption_keys=["https://127.0.0.1:1/keys/shop/1f#AAAA"])
app.task(len)
"""


def test_a_worker_does_not_start_without_the_key_of_a_vault(cli):
    ended = cli("worker", "-A", cli.module("vault_shop", VAULT), "--burst")
    assert ended.code == 3
    assert ended.err.splitlines()[-1].startswith(
        "aztask: error: an encryption key is missing: the key shop/1f of 127.0.0.1:1 "
    )


SESSIONS = """
from aztask import App
app = App("shop", broker="UseDevelopmentStorage=true")
app.queue("orders", sessions=True)
app.task(queue="orders")(len)
"""


def test_a_queue_with_sessions_on_a_storage_account_is_named(cli):
    ended = cli("worker", "-A", cli.module("storage_sessions", SESSIONS), "--burst")
    assert ended.code == 4
    assert ended.err.splitlines()[-1] == (
        "aztask: error: queue 'orders' is declared with sessions=True, but Storage queues have no "
        "sessions; remove it, or use Service Bus or local://"
    )


BUS = "Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=all;SharedAccessKey=c2VjcmV0"


def test_the_banner_says_what_it_serves_from_where_and_how_without_a_secret():
    app = App("shop", broker=BUS, lease=45)
    app.task(queue="images")(len)
    app.task(queue="images")(print)
    options = WorkerOptions(queues=("images", "default"), concurrency=3, pool="threads")
    text = "\n".join(banner(app, "shop.tasks:app", "me", options))
    app.close()
    assert "c2VjcmV0" not in text
    for part in (
        "worker me: 3 threads in one process, queues images, default",
        "broker Endpoint=sb://shop.servicebus.windows.net",
        "lease 45 s",
        "app shop (shop.tasks:app), 2 tasks: shop.len, shop.print",
    ):
        assert part in text


def test_the_banner_shows_the_weights():
    app = App("shop", broker="local://:memory:")
    app.queue("orders", priorities={"high": 4})
    options = WorkerOptions(queues=("orders", "orders-high"), weights={"orders": 2})
    assert "queues orders:2, orders-high:4, broker" in banner(app, "shop:app", "w", options)[0]
    app.close()


LIMITED = """
from aztask import App
app = App("shop")
@app.task(limits=["apj"])
def call(a: int = 0) -> int:
    return a
app.limit("api", rate="10/s")
"""


@pytest.mark.parametrize(
    "given", [("worker", "--burst"), ("send", "shop.call"), ("doctor",)], ids=lambda given: given[0]
)
def test_a_limit_that_is_not_declared_ends_a_worker_a_send_and_the_doctor(cli, monkeypatch, given):
    monkeypatch.setenv("AZTASK_BROKER", cli.address)
    monkeypatch.setenv("AZTASK_RESULTS", cli.address)
    cli.make_file()
    cli.module("limitedapp", LIMITED)
    ended = cli(*given, "-A", "limitedapp:app")
    assert ended.code == 4
    (line,) = [each for each in (ended.out + ended.err).splitlines() if "no limit 'apj'" in each]
    assert "Did you mean 'api'?" in line
    assert "shop.call" in line


UNSIGNED = """
from aztask import App
app = App("shop", broker="local://", signing_keys=["a-key-that-no-attacker-knows-0123456789"],
          old_signatures=%s)
@app.handler(queue="orders", model=dict%s)
def on_order(order): ...
"""


@pytest.mark.parametrize(
    ("says", "old", "code", "text"),
    [
        ("", True, 0, "write @app.handler(..., unsigned=True) if you mean that"),
        ("", False, 4, "write @app.handler(..., unsigned=True) if you mean that"),
        (", unsigned=True", False, 0, ""),
    ],
)
def test_a_worker_with_keys_asks_whether_unsigned_messages_are_meant(cli, says, old, code, text):
    module = cli.module("unsigned_shop", UNSIGNED % (old, says))
    ended = cli("worker", "-A", module, "--burst")
    assert ended.code == code, ended.err
    assert text in ended.err
    assert ("unsigned=True" in ended.err) is bool(text)
