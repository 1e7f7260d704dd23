import time

from aztask.stores.records.base import RunKey, RunningTask, Start, WorkerRecord


def test_a_task_that_waits(cli, filled):
    ended = cli("cancel", "waits")
    assert (ended.code, ended.out) == (0, "waits is cancelled\n")
    assert filled.result("waits").state == "cancelled"


def test_a_task_that_has_ended(cli, filled):
    ended = cli("cancel", "good", "waits", "bad")
    assert ended.code == 1
    assert ended.out == "waits is cancelled\n"
    assert ended.error == "not cancelled, since already ended: good, bad"


def test_a_task_that_runs(cli, filled):
    filled.results.start([Start(RunKey("runs"), "t", "q", 1, "me", "w", 1e9)])
    assert "runs now and continues to its end" in cli("cancel", "runs").out
    assert filled.results.to_stop(["runs"]) == []
    assert "will be stopped" in cli("cancel", "--running", "runs").out
    assert filled.results.to_stop(["runs"]) == ["runs"]


def test_without_a_selection_or_with_two(cli, filled):
    assert cli("cancel").error.startswith("select tasks by ID, or by --task and --queue")
    for option in (["--task", "t"], ["--queue", "q"]):
        ended = cli("cancel", "waits", *option)
        assert ended.code == 2
        assert ended.error.startswith("an ID and --task or --queue exclude each other")


def test_a_dry_run_cancels_nothing(cli, filled):
    assert cli("cancel", "waits", "--dry-run").out == "would cancel waits\n"
    assert filled.result("waits").state == "pending"


def test_by_task_what_runs_is_stopped_only_when_asked_for(cli, filled):
    now = time.time()
    filled.results.start([Start(RunKey("runs"), "shop.add", "mail", 1, "me", "w", now)])
    task = RunningTask("runs", "shop.add", "mail", now)
    filled.results.heartbeat(WorkerRecord("w", now, now, ("mail",), 1, 0, tasks=(task,)))
    select = ("cancel", "--task", "shop.add", "--yes")
    assert cli(*select, "--dry-run").out == "would cancel 1 task (1 shop.add in default)\n"
    assert cli(*select, "--running").out == "cancelled 2 tasks\n"
    assert filled.results.to_stop(["runs"]) == ["runs"]
    ended = cli(*select)
    assert (ended.code, ended.out) == (0, "cancelled 0 tasks\n")
    assert ended.err == "aztask: 1 task had ended already\n"


def test_a_misspelt_task_of_the_app(cli, filled):
    cli.module(
        "cancel_shop",
        "from aztask import App\n"
        f"app = App('shop', broker={cli.address!r}, results={cli.address!r})\n"
        "@app.task\ndef add(a, b): ...\n",
    )
    ended = cli("-A", "cancel_shop", "cancel", "--task", "shop.ad", "--yes")
    assert ended.code == 5
    assert ended.error == (
        "the app has no task 'shop.ad'. Did you mean 'shop.add'? See: aztask tasks"
    )
