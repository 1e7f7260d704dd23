"""What holds for all tests: how hypothesis draws examples, that Ctrl-C ends what they start, and
which tests take long, and which share of a long suite runs.

Profiles: ``default`` as hypothesis has it, without a deadline, for this would be a test of speed;
``ci`` draws the same examples each time; ``fuzz`` draws many more, new each time.
"""

import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings
from long import MEASURED, Measure, ids
from share import drawn, share_of_environment

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

LONG = ids()

# A shell's background job ignores SIGINT and SIGQUIT, nohup SIGHUP; every process that they start
# inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)


# tox forbids byte code, because tests write modules. While tests are collected it is allowed: every
# process of every suite collects all of them, and rewriting their assertions takes longer than the
# rest.
forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish() -> None:
    """From here on what is imported may be a module that a test wrote."""
    sys.dont_write_bytecode = forbidden


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests, if a folder is given for that."""
    if folder := os.environ.get(MEASURED):
        config.pluginmanager.register(Measure(folder))


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what takes long, before ``-m`` asks."""
    if item.nodeid in LONG:
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share that `.ci/run` asks for, of what the other hooks and ``-m`` have left."""
    share = share_of_environment()
    if share is not None:
        kept = set(drawn(items, *share))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A share may be empty: of a few tests, one in 24 is often none."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and share_of_environment() is not None:
        session.exitstatus = pytest.ExitCode.OK


def pytest_report_header() -> str | None:
    """Which share runs."""
    share = share_of_environment()
    return None if share is None else f"one in {share[0]} tests, drawn by {share[1]}"
