from aztask.results.base import RunKey, Start


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


def test_without_an_id(cli, filled):
    assert cli("cancel").code == 2
