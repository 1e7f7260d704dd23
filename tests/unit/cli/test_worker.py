import pytest

from aztask.cli.worker import command
from aztask.worker.options import WorkerOptions

GIVEN = [
    (["-c", "0"], "is not in the range"),
    (["-c", "-1"], "is not in the range"),
    (["-c", "1e9"], "is not a valid integer"),
    (["-c", "nan"], "is not a valid integer"),
    (["-c", "9" * 30], "is not in the range"),
    (["-c", ""], "is not a valid integer"),
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
    (["--poll-floor", "1s"], "No such option"),
    (["surplus"], "unexpected extra argument"),
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
