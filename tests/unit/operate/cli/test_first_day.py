"""Wrong inputs of a first day: what is typed, the line that comes back, and the exit code.

Each row is typed in a folder with the modules of `MODULES`. The line is compared from its start;
Click's own reference to ``--help`` may follow. ``{folder}`` stands for that folder.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
HEAD = "from aztask import App\n"
CLOSED = (
    "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=a;SharedAccessKey=YQ==;"
    "UseDevelopmentEmulator=true"
)
CLOSED_STORAGE = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=YQ==;"
    "QueueEndpoint=http://127.0.0.1:1/devstoreaccount1;"
)
MODULES = {
    "shop": HEAD
    + 'app = App("shop", broker="local://", results="local://")\n'
    + "@app.task\ndef resize(path: str, width: int = 100) -> str:\n    return path\n"
    + '@app.task(queue="mail")\ndef welcome(address: str) -> None: ...\n',
    "made": HEAD
    + 'app = App("shop", broker="local://", results="local://")\napp.broker.declare("default")\n',
    "misspelt": HEAD + "app = App('misspelt', brokr='local://')\n",
    "second": HEAD + "app = App('second', 'local://')\n",
    "retries": "from aztask import RetryPolicy\n"
    + HEAD
    + "app = App('retries', broker='local://', retry=RetryPolicy(retries=3))\n",
    "minute": HEAD + "app = App('shop', broker='local://', lease='1m')\n",
    "celeryish": HEAD + "app = App('shop', broker='redis://localhost:6379')\n",
    "lost": "import pandaz\n",
    "typo": "def x(:\n",
    "exits": "import sys\nsys.exit(3)\n",
    "other": HEAD + "queue_app = App('other', broker='local://')\n",
    "empty": "x = 1\n",
    "text": "app = 'shop'\n",
    "nobroker": HEAD + "app = App('shop')\n@app.task\ndef resize() -> None: ...\n",
    "noresults": HEAD + "app = App('shop', broker='local://:memory:')\n",
    "bus": HEAD + f"app = App('shop', broker={CLOSED!r}, results='local://')\n",
    "storage": HEAD + f"app = App('shop', broker={CLOSED_STORAGE!r}, results='local://')\n",
    "tables": HEAD + "app = App('shop', broker='local://:memory:', results='tables://shopstore')\n",
}

USE = "local://, servicebus://NAMESPACE, storagequeue://ACCOUNT or an Azure connection string"
NAME = "use 1 to 63 lower-case letters, digits, '.', '_' and single hyphens between them"
DURATION = "is not a duration; write 30s, 5m, 1h30m, 250ms or plain seconds"
SEND = "aztask -A shop send shop.resize"
TABLE = [
    # -- commands ------------------------------------------------------------------------------
    ("aztask wroker", "there is no command 'wroker'. Did you mean 'worker'?", 2),
    ("aztask start", "there is no command 'start'. Write: aztask worker", 2),
    ("aztask list", "there is no command 'list'. Write: aztask tasks, aztask queues or", 2),
    ("aztask version", "there is no command 'version'. Write: aztask --version", 2),
    ("aztask revoke 1", "there is no command 'revoke'. Write: aztask cancel ID", 2),
    ("aztask queues creat x", "there is no command 'creat'. Did you mean 'create'?", 2),
    ("aztask dlq rplay x", "there is no command 'rplay'. Did you mean 'replay'?", 2),
    (
        "aztask init my-shop",
        "'my-shop' cannot name a project: use lower-case letters, digits and",
        2,
    ),
    (
        "aztask init shop.py",
        "'shop.py' cannot name a project: use lower-case letters, digits and",
        2,
    ),
    # -- the app -------------------------------------------------------------------------------
    (
        "aztask worker",
        "a worker needs an app: name it with -A module:app or in AZTASK_APP",
        2,
    ),
    (
        "aztask worker shop:app",
        "Got unexpected extra argument (shop:app): name the app with -A, for example -A shop:app",
        2,
    ),
    (
        "aztask tasks",
        "aztask tasks needs an app: name it with -A module:app or in AZTASK_APP",
        2,
    ),
    ("aztask -A shp worker", "there is no module 'shp'; run aztask where it can be imported", 2),
    ("aztask -A shop.app tasks", "'shop.app' is not a module; write shop:app", 2),
    ("aztask -A shop.py worker", "'shop.py' names a file, not a module; write shop:app", 2),
    (
        "aztask -A shop/tasks tasks",
        "'shop/tasks' does not name an app; write module:attribute, for example shop.tasks:app",
        2,
    ),
    ("aztask -A shop:ap tasks", "module 'shop' has no 'ap'. Did you mean 'app'?", 2),
    ("aztask -A other tasks", "module 'other' has no 'app'. It has: queue_app.", 2),
    (
        "aztask -A empty tasks",
        "module 'empty' has no 'app'. It holds no App: name the module that makes one.",
        2,
    ),
    (
        "aztask -A __main__ worker",
        "module '__main__' has no 'app'. That is the name of the program that runs, in each "
        "process another one. Put an app that a program or a notebook defines into a module of its "
        "own, which a worker can import.",
        2,
    ),
    ("aztask -A text tasks", "'text' is a str, not an aztask.App; name the App object", 2),
    (
        "aztask -A shop:resize tasks",
        "'shop:resize' is a Task, not an aztask.App; name the App object",
        2,
    ),
    (
        "aztask -A lost tasks",
        "module 'lost' cannot be imported ({folder}/lost.py, line 1): ModuleNotFoundError: No "
        "module named 'pandaz'",
        2,
    ),
    (
        "aztask -A typo tasks",
        "module 'typo' cannot be imported: SyntaxError: invalid syntax (typo.py, line 1)",
        2,
    ),
    (
        "aztask -A exits tasks",
        "module 'exits' exits while it is imported (status 3); guard main()",
        2,
    ),
    (
        "aztask -A misspelt tasks",
        "App 'misspelt' has no option 'brokr'. Did you mean 'broker'?",
        4,
    ),
    ("aztask -A minute tasks", "lease must be seconds or a timedelta, not str; for example le", 4),
    ("aztask -A celeryish tasks", f"there is no broker of the kind 'redis'. Use {USE}.", 4),
    (
        "aztask -A second tasks",
        "App 'second' takes its options by name. Write broker='local://'.",
        4,
    ),
    (
        "aztask -A retries tasks",
        "RetryPolicy has no option 'retries'. Did you mean 'max_retries'?",
        4,
    ),
    # -- the worker ----------------------------------------------------------------------------
    (
        "aztask -A shop worker -c many",
        "Invalid value for '-c' / '--concurrency': 'many' is not a whole number",
        2,
    ),
    (
        "aztask -A shop worker -c 0",
        "Invalid value for '-c' / '--concurrency': 0 is not in the range 1<=x<=10000",
        2,
    ),
    (
        "aztask -A shop worker --concurency 4",
        re.compile("No such option:? '?--concurency'?. .*--concurrency"),
        2,
    ),
    ("aztask -A shop worker -q mail", "there is no option '-q'. Did you mean '--queues'?", 2),
    ("aztask -A shop worker -l info", "there is no option '-l'. Did you mean '--log-level'?", 2),
    (
        "aztask -A shop worker --pool prefork",
        "Invalid value for '--pool': 'prefork' is not one of 'processes', 'threads'",
        2,
    ),
    (
        "aztask -A shop worker --lease '30 seconds'",
        f"Invalid value for '--lease': '30 seconds' {DURATION}",
        2,
    ),
    (
        "aztask -A shop worker --lease 60s --max-lease 10s",
        "--max-lease (10 s) must be longer than --lease (60 s): it caps the lease",
        4,
    ),
    (
        "aztask -A shop worker -Q Mail",
        f"'Mail' cannot name a queue: {NAME}",
        4,
    ),
    ("aztask -A nobroker worker", "no broker is named: set AZTASK_BROKER, or give App(", 4),
    # -- sending -------------------------------------------------------------------------------
    ("aztask -A shop send", "Missing argument 'TASK'", 2),
    (
        "aztask -A shop send resize",
        "the app has no task 'resize'. Did you mean 'shop.resize'? See: aztask tasks",
        5,
    ),
    (SEND, "shop.resize(): missing a required argument: 'path'", 2),
    (
        f"{SEND} a.png",
        "Got unexpected extra argument (a.png): give the task's arguments as JSON, for example "
        "--args '[\"a.png\"]'",
        2,
    ),
    (
        f"{SEND} --args a.png",
        "Invalid value for '--args': 'a.png' is not valid JSON: Expecting value: line 1 column 1 "
        "(char 0); write for example '[\"a.png\", 200]', in Windows PowerShell "
        '\'[\\"a.png\\", 200]\', in cmd.exe "[\\"a.png\\", 200]"',
        2,
    ),
    (
        f"{SEND} --args '\"a.png\"'",
        "Invalid value for '--args': '\"a.png\"' is not a JSON list; write for example '[",
        2,
    ),
    (
        f"{SEND} --kwargs \"{{'path': 'a'}}\"",
        re.compile("Invalid value for '--kwargs': .* is not valid JSON: .*; write for example"),
        2,
    ),
    (f"{SEND} --args '[1, 2, 3]'", "shop.resize(): too many positional arguments", 2),
    (
        f'{SEND} --kwargs \'{{"wide": 1, "path": "a"}}\'',
        "shop.resize(): got an unexpected keyword argument 'wide'",
        2,
    ),
    (f"{SEND} --delay tomorrow", f"Invalid value for '--delay': 'tomorrow' {DURATION}", 2),
    (f"{SEND} --delay -5", f"Invalid value for '--delay': '-5' {DURATION}", 2),
    (f"{SEND} --countdown 10", "there is no option '--countdown'. Did you mean '--delay'?", 2),
    (f"{SEND} --args '[\"a\"]' --timeout 3s", "--timeout needs --wait", 2),
    (
        f"{SEND} --args '[\"a\"]' --task-id ''",
        "--task-id is empty; is a shell variable unset?",
        2,
    ),
    (
        f"{SEND} --args '[\"a\"]' --session c1",
        "queue 'default' is not configured with sessions; write app.queue('default', sessions=",
        4,
    ),
    ("aztask -A nobroker send shop.resize", "no broker is named: set AZTASK_BROKER, or give", 4),
    ("aztask send shop.resize", "no broker is named: set AZTASK_BROKER, or give App(", 4),
    # -- results, queues, dead letters ---------------------------------------------------------
    ("aztask queues", "there is no queue file .aztask/queues.db here: name the app with -A", 4),
    (
        "aztask -A noresults result",
        "no result store is configured: set AZTASK_RESULTS, for example to local://, or name an",
        4,
    ),
    (
        "aztask -A made result nosuch",
        "the result store has no task 'nosuch'; it may not have started yet",
        5,
    ),
    (
        "aztask -A shop result --state done",
        "Invalid value for '--state': 'done' is not one of 'pending', 'started', 'retrying',",
        2,
    ),
    ("aztask -A shop cancel nosuch", "no task has the id nosuch; if a message with it arrives", 5),
    ("aztask -A shop queues create Mail", f"'Mail' cannot name a queue: {NAME}", 4),
    ("aztask -A made queues delete mail", "there is no queue 'mail'. See: aztask queues", 5),
    (
        "aztask -A made queues delete defalt",
        "there is no queue 'defalt'. Did you mean 'default'?",
        5,
    ),
    ("aztask -A made control pause -Q mail", "there is no queue 'mail'. See: aztask queues", 5),
    ("aztask -A made control drain -Q mail", "there is no queue 'mail'. See: aztask queues", 5),
    ("aztask -A made control scale 2 -Q mail", "there is no queue 'mail'. See: aztask queues", 5),
    ("aztask -A shop queues create", "name the queues to create, or give --all; see aztask", 2),
    ("aztask -A shop queues create --all x", "name the queues to create, or give --all; see", 2),
    ("aztask queues create --all", "aztask queues create --all needs an app: name it with -A", 2),
    ("aztask -A shop cancel", "select tasks by ID, or by --task and --queue", 2),
    ("aztask -A shop cancel --task shop.resise --yes", "the app has no task 'shop.resise'. Did", 5),
    ("aztask -A shop queues peek", "Missing argument 'QUEUE'", 2),
    ("aztask -A made queues peek mial", "there is no queue 'mial'. See: aztask queues", 5),
    ("aztask -A made queues purge mail --yes", "there is no queue 'mail'. See: aztask queues", 5),
    ("aztask queues --watch create x", "--watch belongs after the command: aztask queues list", 2),
    ("aztask queues --watch --interval 0", "Invalid value for '--interval': '0' is not between", 2),
    (
        "aztask completion powershell",
        re.compile("Invalid value for .*: 'powershell' is not one of 'bash', 'zsh', 'fish'"),
        2,
    ),
    ("aztask -A shop dlq replay", "select dead letters: by id, --task, --reason, --signature", 2),
    ("aztask -A made dlq show 1", "there is no dead letter '1'; see: aztask dlq list", 5),
    ("aztask -A shop running --longer x", f"Invalid value for '--longer': 'x' {DURATION}", 2),
    # -- addresses -----------------------------------------------------------------------------
    (
        "AZTASK_BROKER=local aztask queues",
        "the broker is 'local', neither a URL nor a connection string; write local://",
        4,
    ),
    (
        "AZTASK_BROKER=local:/q.db aztask queues",
        "the broker is 'local:/q.db', neither a URL nor a connection string; write local:///q.db",
        4,
    ),
    (
        "AZTASK_BROKER=local://q.db aztask queues",
        "local:// takes an absolute path, not 'q.db'; write local:///absolute/path.db with three",
        4,
    ),
    (
        "AZTASK_BROKER=shop.servicebus.windows.net aztask queues",
        "the broker is a text of 27 characters, neither a URL nor a connection string; write "
        "servicebus:// before the host name",
        4,
    ),
    (
        "AZTASK_BROKER=servicebus://my_ns aztask queues",
        "'my_ns' is not a name of this service; a name has 6 to 50 letters, digits and hyphens",
        4,
    ),
    (
        "AZTASK_BROKER='Endpoint=sb://shop.servicebus.windows.net/;SharedAccessKeyName=Root' "
        "aztask queues",
        "the connection string has no SharedAccessKey; add it, or write servicebus://NAMESPACE",
        4,
    ),
    (
        "AZTASK_BROKER=tables://shopstore aztask queues",
        "tables:// is a result store, not a broker; write storagequeue://ACCOUNT",
        4,
    ),
    (
        "AZTASK_BROKER=local:// AZTASK_RESULTS=redis://x aztask result",
        "there is no result store of the kind 'redis'. Use local://, tables://ACCOUNT or a storage",
        4,
    ),
    (
        "AZTASK_BROKER=local:///proc/nowhere/q.db aztask queues",
        "there is no queue file /proc/nowhere/q.db: check the address and the working directory; ",
        4,
    ),
    (
        "AZTASK_BROKER=local:///proc/nowhere/q.db aztask send t",
        "cannot use '/proc/nowhere/q.db' as the queue file: No such file or directory; choose",
        4,
    ),
    (
        "AZTASK_BROKER=local://{folder}/shop.py aztask queues",
        "{folder}/shop.py is not an aztask queue file, or is damaged (file is not a database)",
        4,
    ),
    (
        "AZTASK_SIGNING_KEYS=short aztask -A shop tasks",
        "signing key 1 is shorter than 16 characters; make one with python -c",
        4,
    ),
    # -- services and extras -------------------------------------------------------------------
    ("aztask -A bus send t", "the app has no task 't'. See: aztask tasks", 5),
    (
        f"AZTASK_BROKER='{CLOSED}' aztask send t",
        "Service Bus does not answer for 'default': ",
        3,
    ),
    (
        "aztask -A storage queues",
        "the queue service is unreachable (no connection to 127.0.0.1:1: [Errno 111] Connection "
        "refused); try again",
        3,
    ),
    (
        "aztask -A tables result x",
        "results in Azure Tables need a package that is missing (azure.data.tables); install it "
        'with: pip install "aztask[tables]"',
        4,
    ),
    (
        "aztask -A shop worker --reload",
        '--reload needs watchfiles: pip install "aztask[reload]"',
        4,
    ),
    (
        "aztask demo nowhere",
        "Invalid value for '[PATH]': Path 'nowhere' does not exist",
        2,
    ),
    ("aztask emulator --port http", "Invalid value for '--port': 'http' is not a whole number", 2),
    (
        "aztask emulator --host 0.0.0.0",
        "listening on '0.0.0.0' admits other machines: set a shared access key",
        4,
    ),
]
IN_A_PROCESS = [0, 9, 24, 47]
"""Rows that a real process runs as well."""


@pytest.fixture
def first_day(cli, monkeypatch):
    """The folder with its modules; the packages of two extras are not installed."""
    for name, text in MODULES.items():
        cli.module(name, text)
    importlib.invalidate_caches()
    for name in ("azure.data.tables", "watchfiles"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("aztask.stores.records.tables.store", "aztask.stores.tables.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield cli
    for name in MODULES:
        sys.modules.pop(name, None)


def parsed(typed, folder):
    """(environment, arguments) of a typed command."""
    words = shlex.split(typed.replace("{folder}", str(folder)))
    start = words.index("aztask")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


def matches(line, found, folder):
    if isinstance(line, re.Pattern):
        return line.match(found) is not None
    return found.startswith(line.replace("{folder}", str(folder)))


@pytest.mark.parametrize(("typed", "line", "code"), TABLE, ids=[row[0] for row in TABLE])
def test_one_line_says_what_to_do(first_day, typed, line, code):
    environment, arguments = parsed(typed, first_day.folder)
    ended = first_day(*arguments, **environment)
    assert matches(line, ended.error, first_day.folder), ended.error
    assert (ended.code, ended.out) == (code, "")


def test_the_table_is_long_enough():
    assert len({row[0] for row in TABLE}) == len(TABLE) >= 60


READING = (
    "queues",
    "queues list",
    "queues peek default",
    "queues purge default --yes",
    "queues delete default --yes",
    "dlq list",
    "dlq show 1",
    "result",
    "result 1",
    "running",
    "workers",
    "workflow list",
    "workflow show 1",
    "control list",
    "explain 1",
    "doctor",
)


@pytest.mark.parametrize("words", READING)
@pytest.mark.parametrize("app", ["", "-A shop "])
def test_reading_creates_no_queue_file(first_day, words, app):
    if app:
        typed, place = f"aztask {app}{words}", f"{first_day.folder}/.aztask/queues.db"
    else:
        place = f"{first_day.folder}/typo/q.db"
        typed = f"AZTASK_BROKER=local://{place} AZTASK_RESULTS=local://{place} aztask {words}"
    before = {each.name for each in first_day.folder.iterdir()}
    environment, arguments = parsed(typed, first_day.folder)
    ended = first_day(*arguments, **environment)
    assert f"there is no queue file {place}" in ended.out + ended.err
    assert ended.code == (0 if app and words == "doctor" else 4)
    made = {each.name for each in first_day.folder.iterdir()} - before
    assert made <= {"__pycache__"}


@pytest.mark.parametrize("words", ["send shop.resize --args '[1]'", "worker", "doctor"])
def test_a_variable_that_the_code_overrules_is_named_once(first_day, words, caplog, monkeypatch):
    monkeypatch.setattr("aztask.operate.cli.worker._run", lambda *given, **options: False)
    variables, typed = parsed(f"AZTASK_BROKER=servicebus://shop-prod aztask -A shop {words}", "")
    first_day("-A", "shop", "queues", "create", "--all", **variables)
    ended = first_day(*typed, **variables)
    said = ended.out + ended.err
    said += "" if "has no effect" in said else caplog.text
    assert said.count("AZTASK_BROKER has no effect, because the code wins") == 1, said
    assert "broker='local://'" in said


@pytest.mark.parametrize("number", IN_A_PROCESS, ids=[TABLE[n][0] for n in IN_A_PROCESS])
def test_a_real_process_says_the_same(tmp_path, number):
    typed, line, code = TABLE[number]
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    environment, arguments = parsed(typed, tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AZTASK_")}
    ended = subprocess.run(
        [sys.executable, "-m", "aztask", *arguments],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert matches(f"aztask: error: {line}", ended.stderr, tmp_path), ended.stderr
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (code, "", 1)
