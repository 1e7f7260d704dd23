"""What holds for all tests: how hypothesis draws examples, that Ctrl-C ends what they start, and
which share of a long suite runs.

Profiles: ``default`` as hypothesis has it, without a deadline, for this would be a test of speed;
``ci`` draws the same examples each time; ``fuzz`` draws many more, new each time.
"""

import signal

import pytest
from hypothesis import HealthCheck, settings
from share import drawn, share_of_environment

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

# A shell's background job ignores SIGINT and SIGQUIT, nohup SIGHUP; every process that they start
# inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(ignored, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the share that `.ci/run` asks for, of what the other hooks and ``-m`` have left."""
    share = share_of_environment()
    if share is not None:
        kept = set(drawn(items, *share))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_report_header() -> str | None:
    """Which share runs."""
    share = share_of_environment()
    return None if share is None else f"one in {share[0]} tests, drawn by {share[1]}"
